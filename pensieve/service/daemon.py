"""The service process behind its sockets: conversations, their readers, and the engine process.

Three places run code, and each owns its state:

    the loop           streams and their wake-ups, the pipe to the engine, tokens of live turns
    the store thread   every transaction: beginnings, ends, forks, deletions (one at a time)
    the text pool      tokenising long drafts; touches nothing shared

A turn that has begun belongs to nobody in particular: its tokens gather in its `LiveTurn`, and any
number of readers follow from the first one on.  When the last reader leaves before the end, the turn
has `grace_seconds` in which somebody may attach again with the same request_id; then it is
interrupted and leaves no trace.  So a broken connection costs a client nothing, and a client that
went away for good costs the others five seconds of one turn.

A reader takes what there is whenever it can be written to; slow ones get larger pieces, and what is
undelivered is bounded by the reply itself.  One that cannot be written to for `stall_seconds`, or is
`undelivered_tokens_max` behind, is cancelled.

Admission is decided before anything is read or written: draining, no engine, too many turns, or a
deadline that the present queue would miss.  Refusing is the cheapest thing the daemon does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pensieve import gc_pause
from pensieve.core.iteration import SampledToken
from pensieve.core.sampling import Sampling
from pensieve.core.turn import FinishReason
from pensieve.engine.messages import Answer, CheckIntegrity, Event, GetStats, LogNeeded, TurnEnded
from pensieve.engine.messages import Message as EngineMessage
from pensieve.errors import (
    DeadlineExceeded,
    PensieveError,
    QueueFull,
    StaleRevision,
    Unavailable,
)
from pensieve.service.conversations import Conversations
from pensieve.service.engine_client import EngineProcess
from pensieve.service.limits import Allowance, Limits
from pensieve.service.live_turn import Ask, LiveTurn
from pensieve.store.conversation_store import ConversationStore
from pensieve.text import ChatTemplate

log = logging.getLogger("pensieve")
T = TypeVar("T")
SWEEP_SECONDS = 1.0
LATE_SECONDS = 1.0  # of the loop, that are worth a warning


@dataclass(frozen=True)
class DaemonConfig:
    turns_max: int = 1024  # begun and not ended, queued ones included
    grace_seconds: float = 5.0
    stall_seconds: float = 40.0
    undelivered_tokens_max: int = 16_384
    answer_seconds: float = 30.0
    text_threads: int = 2
    short_characters: int = (
        4_096  # tokenised where the turn begins: a hop between threads takes longer
    )


@dataclass(eq=False)
class Reader:
    """Somebody who follows a turn."""

    live: LiveTurn
    wake: asyncio.Event
    task: asyncio.Task[Any] | None
    num_sent: int = 0
    writing_since: float | None = None


class Daemon:
    def __init__(
        self,
        store: ConversationStore,
        template: ChatTemplate,
        fingerprint: str,
        defaults: Sampling,
        written: dict[str, str],
        folder: Path,
        program: tuple[str, ...],
        config: DaemonConfig | None = None,
        report: Callable[[str], None] = lambda line: None,
        limits: Mapping[str, Limits] | None = None,
        wall_clock: Callable[[], float] = time.time,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self.config = config or DaemonConfig()
        self.store = store
        self._loop = asyncio.get_running_loop()  # also the clock, but for what is written down
        self.started_at = self._loop.time()
        self.draining = False
        self.history_problems: tuple[str, ...] = ()
        self.on_serving: Callable[[bool], None] = lambda serving: None
        self.engine = EngineProcess(
            written,
            folder,
            program,
            on_events=self._on_events,
            on_down=self._on_down,
            on_up=self._on_up,
            report=report,
        )
        self._template = template
        self._fingerprint = fingerprint
        self._defaults = defaults
        self._report = report
        self._conversations: Conversations | None = None
        self._wall_clock = wall_clock
        self._random_bits = random_bits
        self._store_thread = ThreadPoolExecutor(1, "store")
        self._text_pool = ThreadPoolExecutor(self.config.text_threads, "text")
        self._readers: dict[int, list[Reader]] = {}  # by turn number
        self._graces: dict[int, asyncio.TimerHandle] = {}
        self._queries: dict[int, asyncio.Future[Answer]] = {}
        self._num_queries = 0
        self._num_arriving = 0
        self._queue_seconds = 0.0  # of recent turns, while there is a queue
        self._tasks: set[asyncio.Task[Any]] = set()
        self._hurried = False
        self._allowances = {
            tenant: Allowance(each, self.started_at) for tenant, each in (limits or {}).items()
        }

    async def start(self) -> None:
        """Until the first engine is ready; then turns may come."""
        ready = await self.engine.start()
        self._conversations = Conversations(
            self.store,
            self._template,
            self.engine,
            context_max=ready.context_max,
            vocab_size=ready.vocab_size,
            fingerprint=self._fingerprint,
            defaults=self._defaults,
            report=self._report,
            wall_clock=self._wall_clock,
            random_bits=self._random_bits,
            on_end=self._on_end,
        )
        gc_pause.freeze()
        self._spawn(self._sweep())
        self.on_serving(self.serving)

    @property
    def conversations(self) -> Conversations:
        if self._conversations is None:
            raise Unavailable("the model is loading; try again in a moment")
        return self._conversations

    @property
    def serving(self) -> bool:
        """Whether new turns are taken; a damaged history is not written to by newcomers."""
        ready = self.engine.serving and self._conversations is not None
        return ready and not self.draining and not self.history_problems

    async def in_store(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Run in the store's thread, to its end even if the caller is cancelled."""
        return await self._loop.run_in_executor(
            self._store_thread, lambda: function(*arguments, **named)
        )

    # -- turns --

    async def begin(self, ask: Ask, seconds_left: float | None = None) -> LiveTurn:
        """A turn of a conversation, begun now or known by its request_id."""
        self._admit(ask.tenant, seconds_left)
        self._num_arriving += 1
        beginning = self._loop.create_task(self._begin(ask))
        beginning.add_done_callback(self._arrived)
        # Whoever asked may leave meanwhile; the turn is then one without readers.
        return await asyncio.shield(beginning)

    def _admit(self, tenant: str, seconds_left: float | None) -> None:
        if self.draining:
            raise Unavailable("the daemon is shutting down")
        if not self.engine.serving:
            raise Unavailable("the engine is starting again; try again in a moment")
        num_turns = self.conversations.num_live + self._num_arriving
        if num_turns >= self.config.turns_max:
            raise QueueFull(f"{num_turns} turns are waiting or running; try again later")
        if (allowance := self._allowances.get(tenant)) is not None:
            own = sum(live.tenant == tenant for live in self.conversations.all_live())
            allowance.admit(own, self._loop.time())
        if seconds_left is not None and self._queue_seconds > seconds_left:
            raise DeadlineExceeded(
                f"turns wait {self._queue_seconds:.1f} s at present; the deadline is in {seconds_left:.1f} s"
            )

    def _arrived(self, beginning: asyncio.Task[LiveTurn]) -> None:
        self._num_arriving -= 1
        if beginning.cancelled() or beginning.exception() is not None:
            return
        live = beginning.result()
        if live.finish is None and not self._readers.get(live.number):
            self._start_grace(live)

    async def _begin(self, ask: Ask) -> LiveTurn:
        conversations = self.conversations
        if ask.num_characters <= self.config.short_characters:
            return await self.in_store(conversations.say, ask)
        while True:
            drafted = await self.in_store(conversations.draft, ask)
            if isinstance(drafted, LiveTurn):
                return drafted
            prompt = await self._loop.run_in_executor(self._text_pool, drafted.prompt)
            try:
                return await self.in_store(conversations.begin, drafted, prompt)
            except StaleRevision:
                if ask.expected_revision is not None:
                    raise
                # Another turn or rewind came between; look again.

    async def follow(self, live: LiveTurn, write: Callable[[int, int], Awaitable[None]]) -> None:
        """Have `write` deliver tokens [start, stop) of a turn, from the first on, until it has ended."""
        reader = Reader(live, asyncio.Event(), asyncio.current_task())
        self._readers.setdefault(live.number, []).append(reader)
        if (grace := self._graces.pop(live.number, None)) is not None:
            grace.cancel()
        try:
            while True:
                reader.wake.clear()
                finish, num_tokens = live.finish, live.num_tokens
                if reader.num_sent < num_tokens:
                    reader.writing_since = self._loop.time()
                    await write(reader.num_sent, num_tokens)
                    reader.writing_since = None
                    reader.num_sent = num_tokens
                elif finish is not None:
                    break
                else:
                    await reader.wake.wait()
        finally:
            readers = self._readers[live.number]
            readers.remove(reader)
            if not readers:
                del self._readers[live.number]
                if live.finish is None:
                    self._start_grace(live)
        if live.failure is not None:
            raise live.failure

    def cancel(self, live: LiveTurn) -> None:
        self.conversations.cancel(live)

    async def delete(self, conversation_id: str, tenant: str) -> None:
        await self.in_store(self.conversations.delete, conversation_id, tenant=tenant)

    # -- events --

    def _on_events(self, events: list[Event]) -> None:
        conversations = self._conversations
        if conversations is None:
            return
        touched = set()
        for event in events:
            if isinstance(event, SampledToken):
                if conversations.deliver(event) is not None:
                    touched.add(event.turn_id)
            elif isinstance(event, TurnEnded):
                live = conversations.live(event.turn_id)
                if live is not None:
                    self._spawn(self._settle(live, event))
            elif isinstance(event, LogNeeded):
                self._spawn(self.in_store(conversations.provide_log, event))
            else:
                query = self._queries.pop(event.query_id, None)
                if query is not None and not query.done():
                    query.set_result(event)
        for number in touched:
            self._wake(number)

    async def _settle(self, live: LiveTurn, ended: TurnEnded) -> None:
        try:
            await self.in_store(self.conversations.settle, live, ended)
        except PensieveError as error:
            log.error("a turn could not be stored: %s", error, extra=_ids(live))
            live.failure, live.finish = error, FinishReason.FAILED
            self._wake(live.number)
        if (allowance := self._allowances.get(live.tenant)) is not None:
            spent = live.figures.get("new_tokens", 0) + live.figures.get("output_tokens", 0)
            allowance.spend(spent, self._loop.time())
        waited = live.figures.get("queue_seconds", 0.0)
        self._queue_seconds += (waited - self._queue_seconds) / 8

    def _on_down(self, reason: str) -> None:
        log.error("the engine is gone: %s", reason)
        self.on_serving(False)
        self._queue_seconds = 0.0
        failure = Unavailable("the engine has stopped and is starting again; say it again")
        for live in self.conversations.all_live():
            self._spawn(self._fail(live, failure))
        for query in self._queries.values():
            if not query.done():
                query.set_exception(failure)
        self._queries.clear()

    async def _fail(self, live: LiveTurn, failure: PensieveError) -> None:
        try:
            await self.in_store(self.conversations.fail, live, failure)
        except PensieveError as error:
            log.error("a turn could not be marked interrupted: %s", error, extra=_ids(live))
            live.failure, live.finish = failure, FinishReason.FAILED
            self._wake(live.number)

    def _on_up(self) -> None:
        self.conversations.engine_restarted(self._wall_clock())
        self.on_serving(self.serving)

    def _on_end(self, live: LiveTurn) -> None:
        """In the store's thread."""
        self._loop.call_soon_threadsafe(self._wake, live.number)

    def _wake(self, number: int) -> None:
        for reader in self._readers.get(number, ()):
            reader.wake.set()

    # -- readers that are gone or stalled --

    def _start_grace(self, live: LiveTurn) -> None:
        self._graces[live.number] = self._loop.call_later(
            self.config.grace_seconds, lambda: self._spawn(self._give_up(live))
        )

    async def _give_up(self, live: LiveTurn) -> None:
        self._graces.pop(live.number, None)
        if live.finish is None and not self._readers.get(live.number):
            log.info("a turn lost its reader", extra=_ids(live))
            with contextlib.suppress(PensieveError):
                await self.in_store(self.conversations.interrupt, live.turn_id)

    async def _sweep(self) -> None:
        rested, before = False, self._loop.time()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            late = self._loop.time() - before - SWEEP_SECONDS
            if late > LATE_SECONDS:
                log.warning("the service stood still for %.1f s: every stream waited", late)
            before = self._loop.time()
            idle = not (self.conversations.num_live or self._num_arriving)
            if idle and not rested:
                gc_pause.collect()
            rested = idle
            now, config = self._loop.time(), self.config
            for reader in [each for readers in self._readers.values() for each in readers]:
                if reader.writing_since is None:
                    continue
                behind = reader.live.num_tokens - reader.num_sent
                stalled = now - reader.writing_since
                if stalled > config.stall_seconds or behind > config.undelivered_tokens_max:
                    log.warning(
                        "a reader is %d tokens behind and took nothing for %.0f s",
                        behind,
                        stalled,
                        extra=_ids(reader.live),
                    )
                    if reader.task is not None:
                        reader.task.cancel()

    # -- questions to the engine --

    async def stats(self) -> Answer:
        return await self.ask(GetStats)

    async def check(self) -> list[str]:
        """What is wrong in cache, scheduler and history; nothing, as a rule."""
        answer = await self.ask(CheckIntegrity)
        return [*answer.problems, *(await asyncio.to_thread(self.store.verify))]

    async def ask(self, kind: Callable[[int], EngineMessage]) -> Answer:
        """Put the message made for a query's number, and wait for its answer."""
        self._num_queries += 1
        number = self._num_queries
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._queries[number] = future
        try:
            self.engine.put(kind(number))
            return await asyncio.wait_for(future, self.config.answer_seconds)
        except TimeoutError:
            raise Unavailable("the engine does not answer") from None
        finally:
            self._queries.pop(number, None)

    # -- the end --

    async def drain(self, seconds: float) -> None:
        """Take no new turn; until the running ones have ended, or have been interrupted."""
        self.draining = True
        self.on_serving(False)
        if self._conversations is None:
            return
        deadline = self._loop.time() + seconds
        while (self.conversations.num_live or self._num_arriving) and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
            if self._hurried:
                break
        late = self.conversations.all_live()
        failure = Unavailable("the daemon is shutting down; say it again when it is back")
        await asyncio.gather(*(self._fail(live, failure) for live in late))

    def hurry(self) -> None:
        """Wait for no turn any more."""
        self._hurried = True

    def check_history(self, report: Callable[[str], None]) -> None:
        """After an unclean stop: SQLite's own check, beside the serving."""

        async def check() -> None:
            try:
                problems = await asyncio.to_thread(self.store.integrity_check)
            except PensieveError as error:  # the next start tries again
                log.error("the history could not be checked: %s", error)
                return
            self.history_problems = tuple(problems)
            if problems:
                log.error("the history is damaged: %s", problems[0])
                self.on_serving(self.serving)
            else:
                report("the history is sound")

        self._spawn(check())

    async def close(self) -> None:
        await self.engine.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for grace in self._graces.values():
            grace.cancel()
        self._text_pool.shutdown(cancel_futures=True)
        await asyncio.to_thread(self._store_thread.shutdown)
        self.store.close()

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the daemon failed", exc_info=error)


def _ids(live: LiveTurn) -> dict[str, str]:
    """What a log line says it is about; never what was said."""
    ids = {"turn_id": str(live.turn_id), "conversation_id": live.conversation_id}
    return ids | ({"tenant": live.tenant} if live.tenant else {})
