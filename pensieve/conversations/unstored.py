"""Run turns that leave nothing on disk: a prompt of token ids, and a reply for its readers only.

    prompt ──> checked ──> LiveTurn ──> the engine ──> its readers
                                │
                                └─ ended: its KV is idle in the engine, for prompts with the same beginning

An unstored turn belongs to no conversation. The engine knows it by a key that no client can use
(`unstored_key`). For the rest of the service it is a `LiveTurn` like any other, with these differences:

* It is never stored.
* Its SubmitTurn has all of its tokens, so the engine never asks for its log.
* It has no request_id, so a retry gets another turn.
* Its id is a negative number made from a salted hash of the prompt. So if a prompt kills the engine, it is
  recognised when it is sent again (`Suspects`).

**Cached prefixes** are found by digests of whole chunks (`UnstoredPrefixes`). If a prompt begins with all
registered chunks of an idle turn, the new turn continues under the key of the idle turn, whose KV is cut
after these chunks. If the prompt begins with only some of the chunks, or if their turn still runs, the new
turn begins as a fork. A prompt's chunks are registered when its first token arrives. A reply's chunks are
registered when the turn has ended. If a turn was given up, has failed or is no longer needed, its chunks are
forgotten, and the engine deletes its KV. In the SubmitTurn, the history ends one token after the shared
chunks, because a history's last token never counts as having KV (core/turn.py).

Everything belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

from pensieve.conversations.admission import Admission
from pensieve.conversations.engine_client import EngineClient
from pensieve.conversations.followers import TurnFollowers
from pensieve.conversations.history import PROMPT_TAIL_TOKENS, UNNUMBERED
from pensieve.conversations.live_turn import LiveTurn
from pensieve.conversations.turn_events import TurnEvents
from pensieve.conversations.turns import Turns
from pensieve.core.turn import TurnOptions
from pensieve.engine.messages import DeleteConversation, RewindConversation, SubmitTurn
from pensieve.errors import ContextFull, InvalidArgument

ID_BITS = 62
CHUNKS_MAX = 1 << 18  # maximum number of registered chunks; the engine's page count also limits it


class _Running(NamedTuple):
    key: str  # in the engine
    chain: ChunkDigests  # of the prompt


class UnstoredTurns:
    def __init__(
        self,
        turns: Turns,
        followers: TurnFollowers,
        loop: asyncio.AbstractEventLoop,
        engine: EngineClient,
        admission: Admission,
        events: TurnEvents,
    ) -> None:
        self._turns, self._followers, self._loop = turns, followers, loop
        self._engine, self._admission, self._events = engine, admission, events
        self._running: dict[int, _Running] = {}  # by number
        self._keys: set[str] = set()  # of running turns
        self._prefixes, self._chunk_tokens = UnstoredPrefixes(0), 1

    def engine_started(self, num_pages: int, chunk_tokens: int) -> None:
        """Forget all chunks: the new engine has no KV."""
        self._prefixes = UnstoredPrefixes(min(num_pages, CHUNKS_MAX))
        self._chunk_tokens = chunk_tokens

    def begin(self, prompt: array[int], options: TurnOptions, tenant: str, seed: int) -> LiveTurn:
        """Begin a turn of a `checked` prompt; `seed` applies if the options have none."""
        sampling = replace(options.sampling, seed=options.sampling.seed or seed)
        submit = SubmitTurn(
            UNNUMBERED, "", prompt.tobytes(), 0, replace(options, sampling=sampling)
        )
        chain = ChunkDigests(tenant, self._chunk_tokens)
        chain.extend(prompt)
        submit = self._with_cached_prefix(submit, chain, len(prompt))
        named, prompt_end = (self._id(prompt, tenant), tenant), prompt[-PROMPT_TAIL_TOKENS:]
        now = self._loop.time()
        weight = self._admission.weight_of(tenant, now)
        live, submit = self._turns.new_unstored(*named, submit, prompt_end, now, weight)
        live.accepted_at = now
        self._admission.prompts.submitted(live)
        self._turns.check_suspect(live)
        self._engine.put(submit)
        self._turns.add(live)
        if not self._running:
            self._events.first_token.subscribe(self._prompt_computed)
            self._events.ended.subscribe(self._ended)
        self._running[live.number] = _Running(submit.conversation_id, chain)
        self._keys.add(submit.conversation_id)
        self._followers.start_grace(live)  # until its first reader comes
        return live

    def _prompt_computed(self, live: LiveTurn) -> None:
        if (running := self._running.get(live.number)) is not None:
            self._register(running)

    def _ended(self, live: LiveTurn, now: float) -> None:
        running = self._running.pop(live.number, None)
        if running is None:
            return
        if not self._running:
            self._events.first_token.unsubscribe(self._prompt_computed)
            self._events.ended.unsubscribe(self._ended)
        if live.failure is None and live.num_tokens:
            reply = live.token_ids[: live.num_tokens]
            running.chain.extend(array("I", reply[:-1]))  # the last token has no KV
            self._register(running)
        else:
            self._prefixes.forget(running.key)
        self._keys.discard(running.key)
        if running.key not in self._prefixes:
            self._engine.tell(DeleteConversation(running.key))

    def _with_cached_prefix(
        self, submit: SubmitTurn, chain: ChunkDigests, num_tokens: int
    ) -> SubmitTurn:
        """Begin the turn with KV that the engine may have. At least one token must be computed."""
        most = (num_tokens - 1) // self._chunk_tokens
        found = self._prefixes.find(chain.digests[:most])
        if found is None:
            return submit
        shared = found.num_chunks * self._chunk_tokens
        submit = replace(submit, history_tokens=min(shared + 1, num_tokens - 1))
        if found.is_whole and found.holder not in self._keys:
            self._engine.tell(RewindConversation(found.holder, shared))
            return replace(submit, conversation_id=found.holder)
        return replace(submit, prefix_of=found.holder, prefix_tokens=shared)

    def _register(self, running: _Running) -> None:
        for key in self._prefixes.register(running.key, running.chain.digests):
            if key not in self._keys:
                self._engine.tell(DeleteConversation(key))

    def _id(self, prompt: array[int], tenant: str) -> int:
        turn_id = -1 - hash((tenant, prompt.tobytes())) % (1 << ID_BITS)
        while self._turns.of_turn(turn_id) is not None:
            turn_id -= 1
        return turn_id


def checked(
    prompt: Sequence[int], options: TurnOptions, vocab_size: int, context_max: int
) -> array[int]:
    """Check a prompt and its options against the model, and return the prompt's tokens."""
    if (problem := options.sampling.problem(vocab_size)) is not None:
        raise InvalidArgument(f"sampling.{problem[0]}", problem[1])
    if not len(prompt):
        raise InvalidArgument("prompt", "must not be empty")
    if len(prompt) >= context_max:
        raise ContextFull(len(prompt) + 1, context_max)
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidArgument("prompt", f"token ids must lie in 0..{vocab_size - 1}")
    return array("I", prompt)


DIGEST_BYTES = 16


class ChunkDigests:
    """The digests of the whole chunks of a growing sequence."""

    def __init__(self, tenant: str, chunk_tokens: int) -> None:
        self.digests: list[bytes] = []
        self._size = chunk_tokens
        self._latest = _digest(tenant.encode())
        self._rest = array("I")  # tokens after the last whole chunk

    def extend(self, tokens: array[int]) -> None:
        rest, size = self._rest + tokens, self._size
        num_whole = len(rest) // size * size
        for start in range(0, num_whole, size):
            self._latest = _digest(self._latest + rest[start : start + size].tobytes())
            self.digests.append(self._latest)
        self._rest = rest[num_whole:]


class SharedChunks(NamedTuple):
    holder: str  # key of the turn that has their KV
    num_chunks: int
    is_whole: bool  # the holder has no further chunks


class UnstoredPrefixes:
    """Find the turn that has KV of the first chunks of a prompt.

    Each digest is mapped to its holder: the latest turn that has computed this chunk and all chunks before
    it. If later turns have become the holders of all digests of a turn, that turn is no longer needed. If
    there are more digests than `chunks_max`, the holder that was registered first is forgotten.
    """

    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self._holder: dict[bytes, str] = {}  # by digest
        self._digests: OrderedDict[str, set[bytes]] = OrderedDict()  # by holder, the latest last
        self._lengths: dict[str, int] = {}  # by holder: its chunks, shared ones included

    def __contains__(self, holder: str) -> bool:
        return holder in self._digests

    def find(self, digests: Sequence[bytes]) -> SharedChunks | None:
        num_chunks = 0
        while num_chunks < len(digests) and digests[num_chunks] in self._holder:
            num_chunks += 1
        if not num_chunks:
            return None
        holder = self._holder[digests[num_chunks - 1]]
        return SharedChunks(holder, num_chunks, self._lengths[holder] == num_chunks)

    def register(self, holder: str, digests: Sequence[bytes]) -> list[str]:
        """Register a holder's chunks; return the holders that are no longer needed (perhaps this one)."""
        if not digests:
            return []
        left: dict[str, None] = {}
        own = self._digests.setdefault(holder, set())
        self._digests.move_to_end(holder)
        self._lengths[holder] = len(digests)
        for digest in digests:
            before = self._holder.get(digest, holder)
            if before != holder:
                self._digests[before].discard(digest)
                left[before] = None
            self._holder[digest] = holder
            own.add(digest)
        gone = [each for each in left if not self._digests[each]]
        for each in gone:
            self.forget(each)
        while len(self._holder) > self._chunks_max:
            first = next(iter(self._digests))
            self.forget(first)
            gone.append(first)
        return gone

    def forget(self, holder: str) -> None:
        """Remove a holder and its digests."""
        self._lengths.pop(holder, None)
        for digest in self._digests.pop(holder, ()):
            del self._holder[digest]

    def check(self) -> None:
        pairs = {(digest, holder) for holder, own in self._digests.items() for digest in own}
        assert pairs == set(self._holder.items())
        assert all(self._digests.values()), "a holder holds nothing"
        assert self._lengths.keys() == self._digests.keys()
        assert len(self._holder) <= self._chunks_max


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
