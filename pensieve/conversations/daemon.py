"""The daemon: everything in the service process between its sockets and the engine process.

    start    the engine process loads the model; then turns may begin
    serve    clients' calls go to `Conversations`, operators' queries to the engine
    down     the engine died: its turns fail, and another engine process starts. A turn that kills several
             engine processes in succession is not retried for ever (`turns.Suspects`)
    drain    no new turns; running turns end or are interrupted
    close    stop the engine, wait for tasks that must not be cut off (`Threads.run_to_end`), then close the
             backup and the history

A turn is admitted or refused before it is tokenized or stored (admission.py). Other parts of the process
subscribe to `Daemon.events`. A `Daemon` belongs to the event loop; threads.py says what runs in other
threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from pensieve import gc_pause
from pensieve.conversations.admission import Admission, DaemonLoad
from pensieve.conversations.arriving import ArrivingTurns
from pensieve.conversations.backing_up import BackupWriter
from pensieve.conversations.cancelling import CancelRequest, CancelResult, cancel_turn
from pensieve.conversations.conversations import Conversations
from pensieve.conversations.daemon_config import DaemonConfig, Sources
from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.engine_client import GONE, EngineClient, EngineProgram, Patience
from pensieve.conversations.followers import ids_of
from pensieve.conversations.heads import check_salt
from pensieve.conversations.history import History, Texts
from pensieve.conversations.housekeeping import (
    Damage,
    Eraser,
    FullDisk,
    Scrubber,
    start_expiring,
    start_forgetting,
)
from pensieve.conversations.live_turn import LiveTurn
from pensieve.conversations.meter import Meter
from pensieve.conversations.ownership import Claims, StaleConversations
from pensieve.conversations.threads import Threads, in_new_thread
from pensieve.conversations.turn_events import TurnEvents
from pensieve.conversations.turns import BACKGROUND_ATTEMPT_ID_MIN
from pensieve.conversations.unstored import check_prompt
from pensieve.core.turn import TurnOptions
from pensieve.engine import messages as engine_messages
from pensieve.errors import Loading, PensieveError, Unavailable
from pensieve.guard.limits import Allowance, Limits
from pensieve.sampling import Sampling
from pensieve.store.conversation_store import ConversationStore

log = logging.getLogger("pensieve")
turn_log = logging.getLogger("pensieve.turns")  # separate, so that it can be silenced alone
LOG_TOKENS = ("new_tokens", "device_tokens", "host_tokens", "recomputed_tokens", "output_tokens")
LOG_SECONDS = ("queue_seconds", "first_token_seconds", "total_seconds")
SWEEP_SECONDS = 1.0
STALL_LOGGED_SECONDS = 1.0  # a longer stall of the event loop is logged
CALL_TOKENS = 1  # charged for each call that changes the history, if tokens are limited
LOADING = "the model is loading; retry in a few seconds"


class Daemon:
    def __init__(
        self,
        store: ConversationStore,
        texts: Texts,
        program: EngineProgram,
        config: DaemonConfig | None = None,
        report: Callable[[str], None] = lambda line: None,
        sources: Sources | None = None,
    ) -> None:
        self.config = config or DaemonConfig()
        self.store = store
        self._loop = asyncio.get_running_loop()  # also the clock; stored times are wall-clock times
        self.started_at = self._loop.time()
        self.draining = False
        self.refusals = Counter[str]()  # calls that ended with an error, by the error's reason
        self.meter = Meter()
        self.events = events = TurnEvents()
        events.engine_events.subscribe(self._on_events)
        events.engine_down.subscribe(self._on_down)
        events.engine_up.subscribe(self._on_up)
        events.admitted.subscribe(self._on_admitted)
        events.first_token.subscribe(self._on_first_token)
        events.ended.subscribe(_log_turn)
        events.ended.subscribe(self.meter.turn_ended)
        events.refused.subscribe(self.meter.refused)
        store.figures.watch(on_commit=self.meter.commits.add)
        self.engine = EngineClient(
            program,
            events,
            patience=Patience(self.config.heartbeat_seconds, self.config.iteration_seconds_max),
            report=report,
            answer_seconds=self.config.answer_seconds,
        )
        self.threads = Threads(self._loop, self.config.text_threads, events.failed, store.num_lanes)
        # None if no other daemon shares the history.
        self.claims = Claims(store, self.threads) if store.is_shared else None
        self.damage = Damage(store, self.threads, self._publish_serving)
        self.full_disk = FullDisk(store, self.threads, self._publish_serving)
        self.reader = store.reader()  # for the read thread, also while the model is loading
        self._erasing = Eraser(store.erasure, self.threads)
        self.backing_up: BackupWriter | None = None
        if self.config.backup is not None and store.database_path is not None:
            self.backing_up = BackupWriter(
                store, store.database_path, self.config.backup, self.threads
            )
        self.scrubbing = Scrubber(
            store.scrub(),
            self.threads,
            self.config.scrub_seconds,
            lambda: store.erasure.pending or not store.is_housekeeper,
            self.damage.record,
        )
        self.admission = Admission(
            self.config.live_turns_max,
            self.config.limits,
            self.started_at,
            self.config.ttft_seconds,
        )
        self.arriving = ArrivingTurns()  # also while the model is loading
        self.texts = texts
        self._report = report
        self._sources = sources or Sources()
        self._history: History | None = None
        self._conversations: Conversations | None = None
        self.hurried = False

    # -- the start --

    async def start(self) -> None:
        """Start the engine and return when turns may begin."""
        ready, store = await self.engine.start(), self.store
        history = self._history = History(
            self.store,
            self.texts,
            context_max=ready.context_max,
            vocab_size=ready.vocab_size,
            random_bits=self._sources.random_bits,
            report=self._report,
        )
        history.limit_storage(self.admission.allowances.storage)
        conversations = self._conversations = Conversations(
            history,
            self.threads,
            self.engine,
            self.admission,
            self.events,
            self.arriving,
            self.config,
            self._sources,
        )
        if store.is_shared:
            StaleConversations(store, history, conversations, self.threads, self.engine)
        if self.config.keep_warm_seconds:
            conversations.prefixes.keep_warm(
                self.config.keep_warm_seconds, lambda: self.draining or bool(self.damage.problems)
            )
        gc_pause.freeze()
        self.threads.spawn(self._sweep(conversations))
        if self.backing_up is not None:
            self.backing_up.start()
        self.scrubbing.start()
        start_forgetting(
            store,
            self.threads,
            self._sources.wall_clock,
            request_seconds=self.config.request_keep_seconds,
            chain_seconds=self.config.chain_keep_seconds,
        )
        start_expiring(
            self.reader,
            self.threads,
            lambda name, tenant, seen: self.writable.delete(name, tenant, unchanged=seen),
            *(self._sources.wall_clock, self.config.conversation_keep_seconds),
        )
        self.events.engine_up()

    @property
    def conversations(self) -> Conversations:
        if self._conversations is None:
            raise Loading(LOADING)
        return self._conversations

    @property
    def writable(self) -> Conversations:
        """Return `conversations` to a caller that will change the history.

        Raises StoreCorrupt if the history is damaged.
        """
        if self.damage.problems and (damage := self.damage.refusal) is not None:
            raise damage
        return self.conversations

    def charged_to(self, tenant: str) -> Conversations:
        """Return `conversations` for a change that this tenant pays for, and charge for the call.

        Raises the errors of `writable`. Also raises if the disk is full or the tenant has used up its tokens.
        """
        conversations = self.writable
        if self.full_disk.is_full and (full := self.full_disk.refusal) is not None:
            raise full
        if (debt := self.allowance(tenant).in_debt(self._loop.time())) is not None:
            raise debt
        self.admission.charge(tenant, CALL_TOKENS, self._loop.time())
        return conversations

    @property
    def context_max(self) -> int:
        if self._conversations is None or self.engine.ready is None:
            raise Loading(LOADING)
        return self.engine.ready.context_max

    @property
    def defaults(self) -> Sampling:
        """Return the defaults of the sampling parameters."""
        if self._conversations is None:
            raise Loading(LOADING)
        return self.texts.defaults

    @property
    def loading(self) -> bool:
        """Whether the first engine process since the daemon's start is not ready yet."""
        return self._conversations is None

    @property
    def serving(self) -> bool:
        ready = self.engine.serving and not self.loading
        return ready and not self.draining and self.store_refusal is None

    @property
    def store_refusal(self) -> PensieveError | None:
        """The error for new turns if the history is damaged or its disk is full, otherwise None."""
        if not self.damage.problems and not self.full_disk.is_full:
            return None
        return self.damage.refusal or self.full_disk.refusal

    @property
    def num_turns(self) -> int:
        """Turns in flight, or about to begin."""
        if self._conversations is None:
            return 0
        return self._conversations.turns.num_live + self._conversations.arriving.num_turns

    # -- turns --

    async def begin(self, request: TurnRequest, seconds_left: float | None = None) -> LiveTurn:
        """Begin a turn if admission allows it. A retry gets the first request's turn in any case."""
        conversations = self.conversations
        await conversations.arriving.until_begun(
            request.tenant, request.conversation_id, request.request_id
        )
        if (live := conversations.find_live_retried(request)) is not None:
            return live
        names = request.tenant, request.conversation_id
        refusal = self.refusal(*names, request.options.priority, seconds_left)
        if refusal is None:
            return await conversations.begin(request)
        if (live := await conversations.find_turn_of_retry(request)) is not None:
            return live
        self.events.refused(refusal)
        raise refusal

    async def begin_unstored(
        self,
        prompt: Sequence[int],
        options: TurnOptions,
        tenant: str = "",
        cache_salt: str = "",
    ) -> LiveTurn:
        """Begin a turn that leaves nothing on disk, if admission allows it (unstored.py)."""

        def check_admission() -> None:
            load, now = self._load(tenant, priority=options.priority), self._loop.time()
            if (refusal := self.admission.refusal(tenant, load, None, now)) is not None:
                raise refusal

        check_admission()
        root = await self.conversations.root_of(tenant, cache_salt)
        unstored, ready = self.conversations.unstored, self.engine.ready
        check_admission()
        assert ready is not None  # `self.conversations` has checked that
        tokens = check_prompt(prompt, options, ready.vocab_size, ready.context_max)
        return unstored.begin(tokens, options, tenant, root, self._sources.random_bits(63) + 1)

    def refusal(
        self, tenant: str, conversation_id: str, priority: int, seconds_left: float | None
    ) -> PensieveError | None:
        """Return the error for a turn of this tenant that may not begin now, or None if it may."""
        load, now = self._load(tenant, conversation_id, priority), self._loop.time()
        return self.store_refusal or self.admission.refusal(tenant, load, seconds_left, now)

    async def warm(self, conversation_id: str, tenant: str = "", cache_salt: str = "") -> None:
        """Bring a conversation's KV to the device, if its tenant may have another turn now."""
        check_salt(cache_salt)
        # If the tokenizer has changed, a warm tokenizes the history again and stores the new tokens.
        if (damage := self.damage.refusal) is not None:
            raise damage
        load, now = self._load(tenant, conversation_id), self._loop.time()
        if (exceeded := self.admission.exceeded(tenant, load, now)) is not None:
            self.events.refused(exceeded)
            raise exceeded
        self.admission.charge(tenant, CALL_TOKENS, now)
        await self.conversations.warming.warm(conversation_id, tenant, cache_salt)

    @property
    def wait_seconds(self) -> float:
        """The seconds that a new turn would wait until the engine starts on its prompt."""
        return self.admission.wait_seconds(self._load(), self._loop.time())

    def _load(self, tenant: str = "", conversation_id: str = "", priority: int = 0) -> DaemonLoad:
        conversations, admission, now = self.conversations, self.admission, self._loop.time()
        turns, arriving = conversations.turns, conversations.arriving
        return DaemonLoad(
            *(self.draining, self.engine.serving),
            self.num_turns + turns.num_warms,
            turns.num_of_tenant(tenant, conversation_id) + arriving.num_of_tenant(tenant),
            lambda: admission.ahead(
                turns.without_token(), arriving.requests(), tenant, priority, now
            ),
            turns.waiting_since,
            arriving.num_characters[tenant],
        )

    async def cancel_turn(self, cancel: CancelRequest) -> CancelResult:
        """End a turn because its client asks for that, and return how it ended."""
        return await cancel_turn(self._conversations, self.reader, self.threads, cancel)

    def _on_admitted(self, live: LiveTurn, missing_tokens: int) -> None:
        now, is_only = self._loop.time(), self.conversations.turns.num_awaiting_first_token == 1
        self.admission.turn_admitted(live.begun_at, now)
        self.admission.prompts.admitted(live, missing_tokens, now, is_only)

    def _on_first_token(self, live: LiveTurn) -> None:
        self.admission.prompts.ended(live, self._loop.time())

    # -- tenants --

    def allowance(self, tenant: str) -> Allowance:
        return self.admission.allowances.of(tenant, self._loop.time())

    def num_turns_of(self, tenant: str) -> int:
        """Return the number of the tenant's turns (in flight or about to begin) and warms."""
        return self._load(tenant).num_turns_of_tenant if self._conversations is not None else 0

    def use_limits(self, limits: Mapping[str, Limits]) -> None:
        """Replace the limits of the tenants."""
        self.admission.allowances.change(limits, self._loop.time())
        self.threads.spawn(self._limit_storage())

    async def _limit_storage(self) -> None:
        if self._history is not None:
            storage = self.admission.allowances.storage
            await self.threads.in_store("", self._history.limit_storage, storage)

    # -- the engine --

    def _on_events(self, events: list[engine_messages.EngineTurnEvent]) -> None:
        if self._conversations is not None:
            self.meter.engine_events(events, self._conversations.turns.of_attempt)
            self._conversations.take(
                [event for event in events if event.attempt_id < BACKGROUND_ATTEMPT_ID_MIN]
            )

    def _on_down(self, reason: str) -> None:
        log.error("the engine is gone: %s", reason)
        self.events.serving(False)
        self.admission.engine_lost()
        self.conversations.ends.engine_lost(Unavailable(GONE))

    def _on_up(self) -> None:
        ready = self.engine.ready
        assert ready is not None
        self.admission.engine_started(ready.cost)
        self.conversations.turns.engine_started(self._sources.wall_clock())
        self.conversations.prefixes.warm_soon()
        self._publish_serving()

    def _publish_serving(self) -> None:
        self.events.serving(self.serving)

    async def stats(self) -> engine_messages.Answer:
        return await self.engine.query(engine_messages.GetStats)

    async def check(self) -> list[str]:
        """Check cache, scheduler and history, and return the problems found."""
        answer = await self.engine.query(engine_messages.CheckIntegrity)
        return [*answer.problems, *(await in_new_thread(self.store.verify))]

    async def _sweep(self, conversations: Conversations) -> None:
        """Once a second: cancel stalled followers, run due erasures, collect garbage if no turn runs."""
        has_collected, swept_at = False, self._loop.time()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            stall_seconds = self._loop.time() - swept_at - SWEEP_SECONDS
            if stall_seconds > STALL_LOGGED_SECONDS:
                log.warning("the event loop stalled for %.1f s; every stream waited", stall_seconds)
            swept_at = self._loop.time()
            is_idle = not self.num_turns
            if is_idle and not has_collected:
                gc_pause.collect()
            has_collected = is_idle
            conversations.followers.cancel_stalled()
            if self.store.erasure.due:
                self._erasing.start()

    # -- the end --

    async def drain(self, seconds: float) -> None:
        """Take no new turns; return when the running turns have ended or were interrupted.

        After `seconds`, or when `hurry` is called, the turns that still run are interrupted.
        """
        self.draining = True
        self.events.serving(False)
        self.events.draining()
        if self._conversations is None:
            return
        deadline = self._loop.time() + seconds
        while self.num_turns and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
            if self.hurried:
                break
        failure = Unavailable("the daemon is shutting down; retry when it is back")
        await self._conversations.ends.give_up_all(failure)

    def hurry(self) -> None:
        """End the drain at once."""
        self.hurried = True

    async def close(self) -> None:
        await self.events.closing()
        await self.engine.stop()
        await self.threads.end_tasks()
        if self.backing_up is not None:
            await self.backing_up.close()
        if self._conversations is not None:
            self._conversations.followers.close()
        await self.threads.close()
        self.reader.close()
        self.store.close()


def _log_turn(live: LiveTurn, now: float) -> None:
    """Log a turn that has ended: ids, counts and times, but no text.

    If the engine did not end the turn, only the tokens of the reply and the total time are known.
    """
    if not turn_log.isEnabledFor(logging.INFO):
        return
    known = live.figures or {
        "output_tokens": live.num_tokens,
        "total_seconds": now - live.accepted_at,
    }
    figures: dict[str, str | float] = {"finish": live.finish.value if live.finish else ""}
    if live.failure is not None:
        figures["reason"] = live.failure.reason
    figures |= {name: known[name] for name in LOG_TOKENS if name in known}
    figures |= {name: round(known[name], 4) for name in LOG_SECONDS if name in known}
    turn_log.info("turn ended", extra={**ids_of(live), "figures": figures})
