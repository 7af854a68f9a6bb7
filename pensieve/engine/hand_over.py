"""Transfer the KV of a conversation from one engine to another, in parts. This module has both sides.

    the source      ExportKv ──> KvExported                  reads pages, changes nothing
    the receiver    OpenImport, then ImportKv ──> Answer     adopts chunks (core/adoption.py)

**The last chunks first.** They cost most to recompute, and they are usable if the transfer stops early. An
`ExportKv` says before which chunk the part ends. The answer says the same for the next part, so the source
keeps no state between two parts.

**Exported chunks.** The conversation must have no running turn. Its chunks are exported as far as its log
reaches and a tier has KV. A chunk is read from the host if the host copy is complete, otherwise from the
device. If a running turn of another conversation holds the chunk, only a complete host copy is read, because
that turn may still fail. A part has at most `num_bytes_max` bytes, or one chunk if a chunk is larger.

**Wrong KV is never adopted.** Each chunk is sent with its CRC, which is checked before the core gets the
message (`verified`). A chunk with a wrong CRC counts as missing. Each part has a digest of all tokens up to
the end of the part. The receiving service compares the digest with its own log before it forwards the part
(conversations/hand_over.py). Before it reads this log, it sends `OpenImport`, which opens an import. Every
message that could change or use the conversation closes the import. A part is not adopted if its import is
not open, or if the chunks adopted before were evicted.

The time of `verified` is proportional to the number of bytes. It needs no state, so the thread that reads the
pipe calls it. Its result is a field of the message. So the journal contains the result, and a replay adopts
the same chunks.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pensieve.core.adoption import Adopted, Adoption, KvPlace
from pensieve.core.cache import KVCache
from pensieve.core.prefix_tree import Chunk
from pensieve.engine.messages import (
    TOKEN_BYTES,
    Answer,
    DeleteConversation,
    EngineMessage,
    ExportKv,
    ForkConversation,
    ImportKv,
    KvExported,
    OpenImport,
    RewindConversation,
    SubmitTurn,
)
from pensieve.engine.ports import KvPages

IMPORTS_MAX = 256  # open at once; beyond this number, the oldest import is closed
DIGEST_BYTES = 16
NOT_HERE, RUNS, NO_PAGES = "NOT_HERE", "RUNS", "NO_PAGES"  # why nothing is exported


def digest_of(tokens: array[int]) -> str:
    """Return the digest by which both sides check that their KV belongs to the same tokens."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=DIGEST_BYTES).hexdigest()


def verified(message: ImportKv, slot_bytes: int) -> ImportKv:
    """Return the message with the indexes of its damaged chunks. Thread-safe."""
    body = memoryview(message.body)[message.num_log_tokens * TOKEN_BYTES :]
    if len(message.crcs) != len(message.slots) or len(body) != sum(message.slots) * slot_bytes:
        return replace(message, damaged=tuple(range(len(message.slots))), is_verified=True)
    pieces = _pieces(body, message.slots, slot_bytes)
    damaged = tuple(
        index
        for index, (piece, crc) in enumerate(zip(pieces, message.crcs, strict=True))
        if zlib.crc32(piece) != crc
    )
    return replace(message, damaged=damaged, is_verified=True)


def _pieces(body: memoryview, slots: Sequence[int], slot_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes of each chunk."""
    start = 0
    for num_slots in slots:
        stop = start + num_slots * slot_bytes
        yield body[start:stop]
        start = stop


class HandOver:
    """Belongs to the engine's main thread."""

    def __init__(self, cache: KVCache, pages: KvPages | None) -> None:
        """Without `pages`, nothing is exported, and imported bytes are not written."""
        self._cache, self._pages, self._adoption = cache, pages, Adoption(cache)
        self.imports = OrderedDict[str, bool]()  # open imports: whether a part was adopted

    # -- the source --

    def export(self, message: ExportKv) -> KvExported:
        query_id = message.query_id
        conversation = self._cache.conversations.get(message.conversation_id)
        if self._pages is None or conversation is None:
            return KvExported(query_id, NO_PAGES if self._pages is None else NOT_HERE)
        if conversation.attempt_id is not None:
            return KvExported(query_id, RUNS)
        size = self._cache.config.chunk_tokens
        num_tokens = min(message.num_tokens, conversation.num_tokens, len(conversation.log))
        stop = -(-num_tokens // size)
        if message.before_chunk:
            stop = min(stop, message.before_chunk)
        chunks = conversation.chunks()[:stop]
        bytes_max = message.num_bytes_max
        places: list[KvPlace] = []  # the last chunk first
        num_bytes = 0
        while chunks:
            used = min(size, num_tokens - chunks[-1].index * size)
            place = _place_of(chunks[-1], used)
            if place is None:
                if places:
                    break
                chunks.pop()
                continue
            num_bytes += place.num_slots * self._pages.slot_bytes
            if places and num_bytes > bytes_max:
                break
            places.append(place)
            chunks.pop()
        if not places:
            return KvExported(query_id)
        places.reverse()
        return self._read(query_id, len(chunks), places, conversation.log)

    def _read(
        self, query_id: int, first_chunk: int, places: list[KvPlace], log: array[int]
    ) -> KvExported:
        """Read these places. If a host page is damaged, keep only the chunks after it."""
        assert self._pages is not None
        size, slot_bytes = self._cache.config.chunk_tokens, self._pages.slot_bytes
        body = memoryview(self._pages.read(places))
        slots = [place.num_slots for place in places]
        pieces = list(_pieces(body, slots, slot_bytes))
        crcs = [zlib.crc32(piece) for piece in pieces]
        first = 0
        for index, (place, crc) in enumerate(zip(places, crcs, strict=True)):
            if not self._pages.is_intact(place, crc):
                first = index + 1
        num_tokens = (first_chunk + len(slots) - 1) * size + slots[-1]
        return KvExported(
            query_id,
            "",
            first_chunk + first,
            tuple(slots[first:]),
            tuple(crcs[first:]),
            num_tokens,
            digest_of(log[:num_tokens]),
            first_chunk + max(first - 1, 0),
            bytes(body[sum(slots[:first]) * slot_bytes :]),
        )

    # -- the receiver --

    @property
    def slot_bytes(self) -> int:
        """Bytes of the KV of one token; 0 without pages."""
        return self._pages.slot_bytes if self._pages is not None else 0

    def open(self, message: OpenImport, is_busy: bool) -> None:
        """Open an import, unless a turn of the conversation runs or waits, or the cache has KV of it."""
        conversation_id = message.conversation_id
        if is_busy or conversation_id in self._cache.conversations:
            return
        self.imports[conversation_id] = False
        while len(self.imports) > IMPORTS_MAX:
            self.imports.popitem(last=False)

    def close_import(self, message: EngineMessage) -> None:
        """Close the import of a conversation that the message uses or changes."""
        match message:
            case SubmitTurn() | RewindConversation() | DeleteConversation():
                self.imports.pop(message.conversation_id, None)
            case ForkConversation():
                self.imports.pop(message.target_id, None)

    def take_in(self, message: ImportKv, now: float) -> Answer:
        """Adopt a part; answer with the numbers of adopted chunks, their tokens, and damaged chunks."""
        adopted = self._adopt(message, now)
        figures: dict[str, float] = {
            "chunks": len(adopted),
            "tokens": sum(each.num_slots for each in adopted),
            "damaged": len(message.damaged),
        }
        return Answer(message.query_id, figures=figures)

    def _adopt(self, message: ImportKv, now: float) -> list[Adopted]:
        conversation_id, cache = message.conversation_id, self._cache
        has_begun = self.imports.get(conversation_id)
        if has_begun is None or has_begun != (conversation_id in cache.conversations):
            self.imports.pop(conversation_id, None)
            return []
        damaged = set(message.damaged)
        slots = [0 if index in damaged else each for index, each in enumerate(message.slots)]
        while slots and not slots[-1]:
            slots.pop()
        if not slots:
            return []
        log = array("I")
        log.frombytes(message.body[: message.num_log_tokens * TOKEN_BYTES])
        size, last = cache.config.chunk_tokens, message.first_chunk + len(slots) - 1
        if max(slots) > size or (not has_begun and last * size + slots[-1] > len(log)):
            return []
        adopted = self._adoption.adopt(conversation_id, log, message.first_chunk, slots, now)
        self.imports[conversation_id] = conversation_id in cache.conversations
        if self._pages is not None:
            body = memoryview(message.body)[message.num_log_tokens * TOKEN_BYTES :]
            pieces = list(_pieces(body, message.slots, self._pages.slot_bytes))
            for index, page, num_slots in adopted:
                at = index - message.first_chunk
                self._pages.write(page, num_slots, pieces[at], message.crcs[at])
        return adopted


def _place_of(chunk: Chunk, num_used: int) -> KvPlace | None:
    """Return the best place of a chunk's first `num_used` slots; None if no KV can be exported."""
    if chunk.host_page is not None and chunk.host_filled:
        num_slots = min(chunk.host_filled, num_used)
        if chunk.device_page is None or num_slots == min(chunk.filled, num_used):
            return KvPlace(True, chunk.host_page, num_slots)
    is_final = chunk.branch is not None and not chunk.branch.num_running
    if chunk.device_page is not None and chunk.filled and is_final and not chunk.swapping_in:
        return KvPlace(False, chunk.device_page, min(chunk.filled, num_used))
    return None
