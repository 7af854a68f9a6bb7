"""Transfer the KV of a conversation from its former owner to its new owner. Belongs to the event loop.

    the old owner                                        the new owner
    KvSource.parts                                   KvReceiver.pull, before the turn's SubmitTurn
      engine: ExportKv ─> KvExported ─ header ─>       the same identity?
                                     ─ parts ─>        the same tokens? ─> engine: ImportKv ─> Answer

`pull` fetches the KV that the old owner still has, if a transfer is faster than computing
(transfer_times.py). A pull is best effort: it raises nothing, and the turn computes the missing KV.

**Wrong KV is never adopted.** Each side has an identity: which model and code computed its KV, and how the KV
is stored (launch/kv_compatibility.py, and the fingerprint of model, tokenizer and template). The receiver
refuses KV of any other identity. Each part has a digest of its tokens, which the receiver compares with its
own log. Each chunk has a CRC, which the engine checks. The receiver tells the engine of the import before it
reads the log. So if the conversation changes after that, the engine ends the import (engine/hand_over.py).

**No turn waits longer than computing would take.** The deadline of the whole pull is the predicted time to
compute the KV. A part that is already on its way to the engine at the deadline is still adopted.

**Bounds.** A part has at most PART_BYTES, or one chunk. The source exports for at most EXPORTS_MAX daemons at
once and holds two parts for each. The receiver holds two parts between network and engine.
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
RUNNING_TURN_SECONDS_MAX = 5.0  # to wait until a turn that was just interrupted has left the engine
POLL_SECONDS = 0.02
ALWAYS_FETCH_SECONDS = 60.0  # the deadline if KV is always fetched


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
    tokens: int = 0  # tokens whose KV was adopted
    why_no_more: str = ""  # for people; "": everything wanted was adopted
    num_bytes: int = 0
    seconds: float = 0.0


def identity_of(daemon: Daemon) -> dict[str, str]:
    """Return the identity of this daemon's KV. Raises Unavailable if its engine does not transfer KV."""
    ready = daemon.engine.ready
    if ready is None or not ready.kv_compatibility:
        reason = ready.kv_refusal if ready is not None else "the model is loading"
        raise Unavailable(f"this engine does not transfer KV: {reason or 'its KV has no identity'}")
    return {**ready.kv_compatibility, "fingerprint": daemon.texts.fingerprint}


class KvSource:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._exports = asyncio.Semaphore(EXPORTS_MAX)
        self.num_parts = 0

    async def parts(self, tenant: str, conversation_id: str, num_tokens: int) -> Parts:
        """Yield the header, then parts with the KV that this daemon has of these tokens.

        The parts come in reverse order, the end of the conversation first.
        """
        yield KvHeader(identity_of(self._daemon))
        key = cache_key(tenant, conversation_id)
        async with self._exports:
            exported = await self._export_first(key, num_tokens)
            while exported.slots or exported.next_before:
                next_part = None
                if exported.next_before:  # read the next part while this part is sent
                    next_part = asyncio.ensure_future(
                        self._export(key, num_tokens, exported.next_before)
                    )
                try:
                    if exported.slots:
                        self.num_parts += 1
                        yield KvPart(*(getattr(exported, name) for name in KvPart._fields))
                    if next_part is None:
                        return
                    exported = await next_part
                finally:
                    if next_part is not None:
                        next_part.cancel()

    async def _export_first(self, key: str, num_tokens: int) -> KvExported:
        """Export the first part. Waits for a turn that is being interrupted."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RUNNING_TURN_SECONDS_MAX
        while True:
            exported = await self._export(key, num_tokens, 0)
            if exported.refusal == NO_PAGES:
                raise Unavailable("this engine does not transfer KV")
            if exported.refusal != RUNS:
                return exported
            if loop.time() >= deadline:
                raise Unavailable("a turn of the conversation still runs here")
            await asyncio.sleep(POLL_SECONDS)

    async def _export(self, key: str, num_tokens: int, before_chunk: int) -> KvExported:
        return await self._daemon.engine.export(
            lambda query_id: ExportKv(query_id, key, num_tokens, before_chunk, PART_BYTES)
        )


class _TransferStopped(Exception):
    """Raised with the reason to stop a transfer."""


@dataclass
class _KvTransfer:
    address: str
    key: str  # the conversation's `cache_key`
    tokens: array[int]  # the log
    wanted: WantedKv
    ready: Ready
    first_at: float | None = None  # when the header came
    latency: float = 0.0  # from the request to the header
    latest_at: float = 0.0  # when the latest part came
    num_bytes: int = 0
    adopted: int = 0  # tokens
    has_begun: bool = False  # the engine knows the log


class KvReceiver:
    def __init__(self, daemon: Daemon, fetch: Fetch, *, always: bool = False) -> None:
        """`always`: fetch KV even if computing it is predicted to be faster."""
        self.times = TransferTimes()
        # pulls begun, tokens adopted, bytes received
        self.num_pulls = self.num_tokens = self.num_bytes = 0
        self._daemon, self._fetch, self._always = daemon, fetch, always
        self._loop = asyncio.get_running_loop()

    async def turn_begun(self, live: LiveTurn) -> None:
        """Fetch the KV of a conversation that another daemon owned until now, if computing takes longer."""
        store, key = self._daemon.store, (live.tenant, live.conversation_id)
        address = store.kv_sources.pop(key, "")
        if address:
            await self.pull(address, *key)

    async def pull(self, address: str, tenant: str, conversation_id: str) -> PullResult:
        """Fetch the KV of a conversation from the daemon at this address, until computing the rest is faster.

        Call this after this daemon has become the conversation's owner and has told its engine to forget the
        conversation, and before the SubmitTurn of the next turn.
        """
        began, transfer = self._loop.time(), None
        try:
            identity = identity_of(self._daemon)
            transfer = await self._prepare(address, tenant, conversation_id)
            seconds = ALWAYS_FETCH_SECONDS if self._always else transfer.wanted.seconds
            async with asyncio.timeout(seconds):
                await self._run(transfer, identity, tenant, conversation_id)
            reason = ""
        except TimeoutError:
            reason = "it took as long as computing would"
        except _TransferStopped as stop:
            reason = str(stop)
        except PensieveError as error:
            reason = whole_line(error)
        except Exception as error:  # a bug, or invalid data from the other daemon
            log.exception("KV of a conversation could not be fetched")
            reason = whole_line(error)
        return self._record_end(transfer, reason, self._loop.time() - began)

    async def _prepare(self, address: str, tenant: str, conversation_id: str) -> _KvTransfer:
        daemon, ready = self._daemon, self._daemon.engine.ready
        key = cache_key(tenant, conversation_id)
        assert ready is not None  # `identity_of` has checked that
        daemon.engine.put(OpenImport(key))  # before the log is read; see the module's docstring
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

        num_tokens = max(len(tokens) - 1, 0)  # the next turn computes the last token's KV
        token_bytes = ready.page_bytes // ready.chunk_tokens
        wanted = WantedKv(num_tokens, token_bytes, compute_seconds)
        if not num_tokens:
            raise _TransferStopped("there is no history")
        now = self._loop.time()
        if not self._always and not self.times.is_worth(address, wanted, PART_BYTES, now):
            raise _TransferStopped("computing it is faster")
        return _KvTransfer(address, key, tokens, wanted, ready)

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
            transfer.key,
            part.first_chunk,
            part.slots,
            part.crcs,
            len(log_bytes) // TOKEN_BYTES,
            log_bytes + part.body,
        )
        answer = await self._daemon.engine.query(
            lambda query_id: replace(message, query_id=query_id)
        )
        figures = answer.figures
        transfer.adopted += int(figures["tokens"])
        transfer.has_begun |= figures["chunks"] > 0
        if figures["chunks"] + figures["damaged"] < len(part.slots):
            raise _TransferStopped("the host tier is full, or the conversation is in use")

    def _check_worth(self, part: KvPart, transfer: _KvTransfer) -> None:
        """Stop the transfer if the next part is not worth its time, at the speed measured so far."""
        stop = part.first_chunk * transfer.ready.chunk_tokens
        if self._always or not stop or transfer.first_at is None:
            return
        seconds = transfer.latest_at - transfer.first_at
        rate = transfer.num_bytes / seconds if seconds > 0 else float("inf")
        start = max(stop - max(PART_BYTES // transfer.wanted.token_bytes, 1), 0)
        if gain_of(transfer.wanted, start, stop, rate) <= 0:
            raise _TransferStopped("computing the rest is faster")

    def _record_end(self, transfer: _KvTransfer | None, reason: str, seconds: float) -> PullResult:
        pulled = PullResult(why_no_more=reason, seconds=seconds)
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
            pulled = PullResult(transfer.adopted, reason, transfer.num_bytes, seconds)
        log.info("fetched the KV of %d tokens (%s)", pulled.tokens, reason or "all")
        return pulled


def _check_identity(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            raise _TransferStopped(
                f"the engines differ in {name}: {theirs.get(name)!r} there, {ours.get(name)!r} here"
            )


def _check_part(part: KvPart, transfer: _KvTransfer) -> None:
    """Check that a part is well-formed and belongs to our log. The engine checks its bytes."""
    if transfer.first_at is None:
        raise _TransferStopped("a part came before the header")
    size, slots = transfer.ready.chunk_tokens, part.slots
    if not slots or len(slots) != len(part.crcs) or part.first_chunk < 0:
        raise _TransferStopped("a part is malformed")
    stop = (part.first_chunk + len(slots) - 1) * size + slots[-1]
    if not all(0 < each <= size for each in slots) or stop != part.num_tokens:
        raise _TransferStopped("a part is malformed")
    if len(part.body) != sum(slots) * transfer.wanted.token_bytes:
        raise _TransferStopped("the length of a part does not match its chunks")
    tokens = transfer.tokens
    if stop > len(tokens) or digest_of(tokens[:stop]) != part.digest:
        raise _TransferStopped("the other daemon has KV of other tokens")
