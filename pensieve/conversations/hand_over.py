"""Transfer the KV of a conversation from the daemon that had it to its new owner.

    the old owner                                        the new owner
    KvSource.parts                                   KvReceiver.pull, before the turn's SubmitTurn
      engine: ExportKv ─> KvExported ─ header ─>       the same identity?
                                     ─ parts ─>        the same tokens? ─> engine: ImportKv ─> Answer

`pull` brings the KV that the old owner still has, if a transfer is faster than computing (transfer_times.py).
It is best effort: it raises nothing, and the turn computes what is missing.

**Wrong KV is never adopted.** Both sides name what has computed their KV and how it is stored
(launch/kv_identity.py, and the fingerprint of model, tokenizer and template). Any difference is refused. Each
part has a digest of its tokens, which is compared with our own log, and a CRC for each chunk, which the
engine checks. The log is read after the engine was told of the import, so a later change of the conversation
ends the import in the engine (engine/hand_over.py).

**No turn waits longer than computing would take.** That prediction is the deadline of the whole pull. A part
that is on its way to the engine by then is still adopted.

**Bounds.** A part has PART_BYTES, or one chunk. The source exports for EXPORTS_MAX daemons at once, two parts
of each. The receiver has two parts between network and engine.

Both classes belong to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

from pensieve.conversations.daemon import Daemon
from pensieve.conversations.engine_client import Ready
from pensieve.conversations.live_turn import LiveTurn, cache_key
from pensieve.conversations.transfer_times import TransferTimes, WantedKv, gain_of
from pensieve.engine.hand_over import NO_PAGES, RUNS, digest_of
from pensieve.engine.messages import TOKEN_BYTES, ExportKv, ImportKv, KvExported, OpenImport
from pensieve.errors import NotFound, PensieveError, Unavailable, whole_line

log = logging.getLogger("pensieve")
PART_BYTES = 2 << 20
EXPORTS_MAX = 2
RUNS_SECONDS_MAX = 5.0  # for a turn that was interrupted a moment ago to have left the engine
LOOK_SECONDS = 0.02
ALWAYS_SECONDS = 60.0  # the deadline where nothing is weighed


class KvHeader(NamedTuple):
    identity: Mapping[str, str]


class KvPart(NamedTuple):
    first_chunk: int
    slots: tuple[int, ...]
    crcs: tuple[int, ...]
    num_tokens: int
    digest: str
    body: bytes


Parts = AsyncGenerator[KvHeader | KvPart, None]
Fetch = Callable[[str, str, str, int], Parts]  # address, tenant, conversation_id, number of tokens


class PullResult(NamedTuple):
    tokens: int = 0  # whose KV was adopted
    why_no_more: str = ""  # for people; "": all that was wanted is here
    num_bytes: int = 0
    seconds: float = 0.0


def identity_of(daemon: Daemon) -> dict[str, str]:
    """Unavailable where this daemon's engine hands no KV over."""
    ready = daemon.engine.ready
    if ready is None or not ready.kv_identity:
        why = ready.kv_refusal if ready is not None else "the model is loading"
        raise Unavailable(f"this engine hands no KV over: {why or 'it has none'}")
    return {**ready.kv_identity, "fingerprint": daemon.texts.fingerprint}


class KvSource:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._exports = asyncio.Semaphore(EXPORTS_MAX)
        self.num_parts = 0

    async def parts(self, tenant: str, conversation_id: str, num_tokens: int) -> Parts:
        """The header, and what there is of these tokens' KV, from its end on."""
        yield KvHeader(identity_of(self._daemon))
        key = cache_key(tenant, conversation_id)
        async with self._exports:
            exported = await self._first(key, num_tokens)
            while exported.slots or exported.next_before:
                following = None
                if exported.next_before:  # read while this one is sent
                    following = asyncio.ensure_future(
                        self._export(key, num_tokens, exported.next_before)
                    )
                try:
                    if exported.slots:
                        self.num_parts += 1
                        yield KvPart(*(getattr(exported, name) for name in KvPart._fields))
                    if following is None:
                        return
                    exported = await following
                finally:
                    if following is not None:
                        following.cancel()

    async def _first(self, key: str, num_tokens: int) -> KvExported:
        """Where a turn is being interrupted, it is waited for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RUNS_SECONDS_MAX
        while True:
            exported = await self._export(key, num_tokens, 0)
            if exported.refusal == NO_PAGES:
                raise Unavailable("this engine hands no KV over")
            if exported.refusal != RUNS:
                return exported
            if loop.time() >= deadline:
                raise Unavailable("a turn of the conversation still runs here")
            await asyncio.sleep(LOOK_SECONDS)

    async def _export(self, key: str, num_tokens: int, before_chunk: int) -> KvExported:
        return await self._daemon.engine.export(
            lambda query_id: ExportKv(query_id, key, num_tokens, before_chunk, PART_BYTES)
        )


class _TransferStopped(Exception):
    """No more is taken; why."""


@dataclass
class _KvTransfer:
    address: str
    conversation_id: str  # as the engine knows it
    tokens: array[int]  # the log
    wanted: WantedKv
    ready: Ready
    began: float
    first_at: float | None = None  # when the header was there
    latency: float = 0.0  # until then
    latest_at: float = 0.0  # when the latest part was
    num_bytes: int = 0
    adopted: int = 0  # tokens
    has_begun: bool = False  # the engine knows the log


class KvReceiver:
    def __init__(self, daemon: Daemon, fetch: Fetch, *, always: bool = False) -> None:
        """`always`: whatever is predicted, KV is fetched."""
        self.times = TransferTimes()
        self.num_pulls = self.num_tokens = self.num_bytes = 0  # adopted, and received
        self._daemon, self._fetch, self._always = daemon, fetch, always
        self._loop = asyncio.get_running_loop()

    async def turn_begun(self, live: LiveTurn) -> None:
        """Bring KV of a conversation that another daemon had until now, if computing it takes longer."""
        store, named = self._daemon.store, (live.tenant, live.conversation_id)
        address = store.came_from.pop(named, "")
        if address:
            await self.pull(address, *named)

    async def pull(self, address: str, tenant: str, conversation_id: str) -> PullResult:
        """Bring KV of a conversation from the daemon at this address, as far as that is sooner.

        To be called after this daemon has become the conversation's owner and its engine was told to forget
        what it had of it, and before the SubmitTurn of its next turn is put.
        """
        began, transfer = self._loop.time(), None
        try:
            identity = identity_of(self._daemon)
            transfer = await self._prepared(address, tenant, conversation_id, began)
            seconds = ALWAYS_SECONDS if self._always else transfer.wanted.seconds
            async with asyncio.timeout(seconds):
                await self._run(transfer, identity, tenant, conversation_id)
            why = ""
        except TimeoutError:
            why = "it took as long as computing would"
        except _TransferStopped as stop:
            why = str(stop)
        except PensieveError as error:
            why = whole_line(error)
        except Exception as error:  # a fault of ours, or nonsense from the other side
            log.exception("KV of a conversation could not be pulled")
            why = whole_line(error)
        return self._ended(transfer, why, self._loop.time() - began)

    async def _prepared(
        self, address: str, tenant: str, conversation_id: str, began: float
    ) -> _KvTransfer:
        daemon, ready, key = (
            self._daemon,
            self._daemon.engine.ready,
            cache_key(tenant, conversation_id),
        )
        assert ready is not None  # it has an identity
        daemon.engine.put(OpenImport(key))  # first: see above
        try:
            tokens = await daemon.threads.in_store(
                tenant, daemon.store.log, conversation_id, tenant=tenant, lane=conversation_id
            )
        except NotFound:
            raise _TransferStopped("the conversation is not in the store") from None
        prompts = daemon.admission.prompts
        cost, pace = prompts.cost, prompts.pace.ratio or 1.0

        def compute_seconds(start: int, stop: int) -> float:
            return pace * cost.piece_seconds(start, stop) if cost is not None else 0.0

        num_tokens = max(len(tokens) - 1, 0)  # that of the last one comes with the next turn
        token_bytes = ready.page_bytes // ready.chunk_tokens
        wanted = WantedKv(num_tokens, token_bytes, compute_seconds)
        if not num_tokens:
            raise _TransferStopped("there is no history")
        now = self._loop.time()
        if not self._always and not self.times.is_worth(address, wanted, PART_BYTES, now):
            raise _TransferStopped("computing it is sooner")
        return _KvTransfer(address, key, tokens, wanted, ready, began)

    async def _run(
        self, transfer: _KvTransfer, identity: Mapping[str, str], tenant: str, conversation_id: str
    ) -> None:
        self.num_pulls += 1
        began = self._loop.time()
        fetched = self._fetch(transfer.address, tenant, conversation_id, transfer.wanted.num_tokens)
        adopting: asyncio.Task[None] | None = None  # the part before the latest one
        try:
            async with aclosing(fetched) as parts:
                async for each in parts:
                    now = self._loop.time()
                    if isinstance(each, KvHeader):
                        _check_identity(each.identity, identity)
                        transfer.first_at = transfer.latest_at = now
                        transfer.latency = now - began
                        continue
                    _check_part(each, transfer)
                    transfer.num_bytes += len(each.body)
                    transfer.latest_at = now
                    if adopting is not None:
                        await adopting
                    adopting = asyncio.ensure_future(self._adopt(each, transfer))
                    self._check_worth(each, transfer)
        except asyncio.CancelledError:
            if adopting is not None:
                adopting.cancel()
            raise
        except BaseException:
            if adopting is not None:
                await asyncio.wait({adopting})
                adopting.cancelled() or adopting.exception()
            raise
        if adopting is not None:
            await adopting
        if transfer.adopted < transfer.wanted.num_tokens:
            raise _TransferStopped("the other daemon had no more")

    async def _adopt(self, part: KvPart, transfer: _KvTransfer) -> None:
        log_bytes = b"" if transfer.has_begun else transfer.tokens.tobytes()
        message = ImportKv(
            0,
            transfer.conversation_id,
            part.first_chunk,
            part.slots,
            part.crcs,
            len(log_bytes) // TOKEN_BYTES,
            log_bytes + part.body,
        )
        answer = await self._daemon.engine.query(
            lambda query_id: replace(message, query_id=query_id)
        )
        of = answer.figures
        transfer.adopted += int(of["tokens"])
        transfer.has_begun |= of["chunks"] > 0
        if of["chunks"] + of["damaged"] < len(part.slots):
            raise _TransferStopped(
                "the host tier has no room for more of it, or the conversation is in use"
            )

    def _check_worth(self, part: KvPart, transfer: _KvTransfer) -> None:
        """Whether the next part is worth its time, at the speed of this transfer."""
        stop = part.first_chunk * transfer.ready.chunk_tokens
        if self._always or not stop or transfer.first_at is None:
            return
        seconds = transfer.latest_at - transfer.first_at
        rate = transfer.num_bytes / seconds if seconds > 0 else float("inf")
        start = max(stop - max(PART_BYTES // transfer.wanted.token_bytes, 1), 0)
        if gain_of(transfer.wanted, start, stop, rate) <= 0:
            raise _TransferStopped("computing the rest is sooner")

    def _ended(self, transfer: _KvTransfer | None, why: str, seconds: float) -> PullResult:
        pulled = PullResult(why_no_more=why, seconds=seconds)
        if transfer is not None:
            if transfer.first_at is not None:
                self.times.learn(
                    transfer.address,
                    transfer.latency,
                    transfer.num_bytes,
                    transfer.latest_at - transfer.first_at,
                    self._loop.time(),
                )
            self.num_tokens += transfer.adopted
            self.num_bytes += transfer.num_bytes
            pulled = PullResult(transfer.adopted, why, transfer.num_bytes, seconds)
        log.info("KV of %d tokens was pulled (%s)", pulled.tokens, why or "all")
        return pulled


def _check_identity(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            raise _TransferStopped(
                f"the engines differ in {name}: {theirs.get(name)!r} there, {ours.get(name)!r} here"
            )


def _check_part(part: KvPart, transfer: _KvTransfer) -> None:
    """It fits our log; its bytes are the engine's to check."""
    if transfer.first_at is None:
        raise _TransferStopped("a part came before the header")
    size, slots = transfer.ready.chunk_tokens, part.slots
    if not slots or len(slots) != len(part.crcs) or part.first_chunk < 0:
        raise _TransferStopped("a part that is none")
    stop = (part.first_chunk + len(slots) - 1) * size + slots[-1]
    if not all(0 < each <= size for each in slots) or stop != part.num_tokens:
        raise _TransferStopped("a part that is none")
    if len(part.body) != sum(slots) * transfer.wanted.token_bytes:
        raise _TransferStopped("a part of another length than its chunks have")
    tokens = transfer.tokens
    if stop > len(tokens) or digest_of(tokens[:stop]) != part.digest:
        raise _TransferStopped("the other daemon has KV of other tokens")
