"""Hands the KV of a conversation over from one engine to another, a part at a time; both sides of it.

    the engine that had it     ExportKv ──> KvExported      reads pages, changes nothing
    the engine that gets it    OpenImport, then ImportKv ──> Answer      adopts chunks (core/adoption.py)

**From the end.**  The last chunks come first: they cost most to recompute, and whatever has arrived when a
transfer stops is of use.  An `ExportKv` names the chunk before which to go on, and the answer the next such
chunk, so the source remembers nothing between two parts.

**What may be exported.**  A conversation that rests, as far as its log goes and KV of it is in a tier.  A
page on the host is read where it lies, one that is only on the device from there; one that a running turn of
another conversation holds, too, only from the host, since what runs may still fail.  A part is at most
`num_bytes_max` long, but for one chunk that is longer.

**Why nothing wrong is adopted.**  Each chunk travels with its CRC, and is compared before the core sees the
message (`verified`): one that differs counts as missing.  Each part carries a digest of the very tokens
whose KV it ends with, and the service compares it with its own log before it passes the part on
(conversations/hand_over.py).  An import is open from `OpenImport` on, which is sent before the service reads
that log, and every message that could change the conversation or use it closes it.  A part for one that is
not open, or whose chunks were evicted meanwhile, is not adopted.

`verified` is the only work that grows with the bytes and needs no state: the thread that reads the pipe does
it.  Its result is a field of the message, so a journal has it and a replay adopts the same chunks.
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

IMPORTS_MAX = 256  # that are open; the oldest is closed for the next
DIGEST_BYTES = 16
NOT_HERE, RUNS, NO_PAGES = "NOT_HERE", "RUNS", "NO_PAGES"  # why nothing is exported


def digest_of(tokens: array[int]) -> str:
    """What two sides compare to see that their KV belongs to the same tokens."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=DIGEST_BYTES).hexdigest()


def verified(message: ImportKv, slot_bytes: int) -> ImportKv:
    """The same, with the chunks named that are not what was sent; any thread may do it."""
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
    """The bytes of each chunk."""
    start = 0
    for num_slots in slots:
        stop = start + num_slots * slot_bytes
        yield body[start:stop]
        start = stop


class HandOver:
    """Belongs to the engine's thread, but for `verified`."""

    def __init__(self, cache: KVCache, pages: KvPages | None) -> None:
        """Without `pages` nothing is exported, and of what comes nothing is written."""
        self._cache, self._pages, self._adoption = cache, pages, Adoption(cache)
        self.imports = OrderedDict[str, bool]()  # that are open: whether a part has come

    # -- the engine that had it --

    def export(self, message: ExportKv) -> KvExported:
        query_id = message.query_id
        conversation = self._cache.conversations.get(message.conversation_id)
        if self._pages is None or conversation is None:
            return KvExported(query_id, NO_PAGES if self._pages is None else NOT_HERE)
        if conversation.turn_id is not None:
            return KvExported(query_id, RUNS)
        size = self._cache.config.chunk_tokens
        num_tokens = min(message.num_tokens, conversation.num_tokens, len(conversation.log))
        stop = -(-num_tokens // size)
        if message.before_chunk:
            stop = min(stop, message.before_chunk)
        chunks = conversation.chunks()[:stop]
        bytes_max = message.num_bytes_max
        places: list[KvPlace] = []  # from the last one on
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
        """What is in these places, but for what lies before a page that has changed since it was copied."""
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

    # -- the engine that gets it --

    @property
    def slot_bytes(self) -> int:
        """Of KV of one token; 0: there is none."""
        return self._pages.slot_bytes if self._pages is not None else 0

    def open(self, message: OpenImport, is_busy: bool) -> None:
        """Unless a turn of it runs or waits, or there is KV of it."""
        conversation_id = message.conversation_id
        if is_busy or conversation_id in self._cache.conversations:
            return
        self.imports[conversation_id] = False
        while len(self.imports) > IMPORTS_MAX:
            self.imports.popitem(last=False)

    def close_import(self, message: EngineMessage) -> None:
        """Close the import of a conversation that the message uses, or makes another one."""
        match message:
            case SubmitTurn() | RewindConversation() | DeleteConversation():
                self.imports.pop(message.conversation_id, None)
            case ForkConversation():
                self.imports.pop(message.target_id, None)

    def take_in(self, message: ImportKv, now: float) -> Answer:
        """How many chunks of it were adopted, with how many tokens, and how many were damaged."""
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
    """Where KV of so many of its leading slots lies, or of as many as there are; None: nowhere."""
    if chunk.host_page is not None and chunk.host_filled:
        num_slots = min(chunk.host_filled, num_used)
        if chunk.device_page is None or num_slots == min(chunk.filled, num_used):
            return KvPlace(True, chunk.host_page, num_slots)
    is_final = chunk.branch is not None and not chunk.branch.num_running
    if chunk.device_page is not None and chunk.filled and is_final and not chunk.swapping_in:
        return KvPlace(False, chunk.device_page, min(chunk.filled, num_used))
    return None
