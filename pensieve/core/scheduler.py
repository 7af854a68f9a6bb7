"""Decide what runs next: fill one iteration under a token budget.

Start reading with `Scheduler.plan`. It fills an iteration step by step. The methods for these steps follow
`plan` in the same order. As long as tokens, seconds and pages last, an iteration takes

1. **decodes**: one token of each generating turn;
2. **prefills** that have begun, and waiting turns. Their number of tokens is limited, so that they delay the
   decodes only a little (time_budget.py). The share (usually a tenant) that has used least goes first. Within
   a share, the shortest prefill goes first (fair_queue.py). An admitted turn adds its swap-ins to the
   iteration. Its holes (chunks whose KV was dropped) are recomputed like a prompt;
3. **streamed turns**: turns for which the device has no room may run with their KV on the host;
4. **background turns** of batch jobs, planned by the same three steps in the remaining room;
5. **swap-outs**, which make pages available for turns that lack them, and some pages in advance.

Prefills, recomputed holes and decodes are all slices of a turn (iteration_builder.py).

Before an iteration is filled, running turns may be preempted for the next turn (preemption.py). A generating
turn may need a page when none is available. If idle pages are being copied out, the turn waits one iteration.
Otherwise a running turn is suspended (`turn_to_suspend`). The suspended turn keeps its tokens. Its chunks
stay cached until another turn takes their pages.

Features plug in at named points and are not created while they are off:

    streaming.py         `streaming`       if turns may stream: admits, stops and returns streamed turns
    background_room.py   `background`      from the first background turn on: limits the tokens of step 4
    pipeline_stages.py   `micro_batches`   with pipeline stages: chooses the decodes of an iteration

**States.** The scheduler moves turns between these collections:

    queued      waiting for their first iteration (fair_queue.py)
    running     holding device or host pages; in order of admission
    suspended   without pages, after they have run; in `resume_order`

**Uncommitted iterations.** `plan` may be called while an iteration is uncommitted. With pipeline stages, one
iteration per stage may be uncommitted. An uncommitted iteration will sample tokens that `plan` does not know
yet. `plan` counts these tokens (`pending_tokens`), and the executor inserts them. If a sampled token ends its
turn, the turn's next slice is wasted and counted in `idle_tokens`.

A turn that ends or is suspended keeps its pages while it has an uncommitted slice. During this time the turn
is *releasing*: it is still in `running`, but does not count as a running turn. A rewind or an eviction of its
conversation waits until the pages are released (`_pending_cuts`, `_pending_evictions`). A rewind cuts the
conversation's log at once, because no turn may use the tokens after the cut.

**Liveness.** The next turn is admitted as soon as the pages for its whole context are available. Only a
bounded number of other turns is admitted before it (fair_queue.py, `BlockedTurns`). Every idle page can
become available (eviction.py), and running turns end. No turn is preempted for ever. Between two preemptions,
either its reply has advanced, or its level has risen (preemption.py).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from pensieve.core.audit import TurnsByState, audit_turns
from pensieve.core.background_room import NUM_KEPT, BackgroundRoom
from pensieve.core.cache import KVCache
from pensieve.core.fair_queue import (
    FairQueue,
    oldest_prefill,
    resume_order,
)
from pensieve.core.iteration import Iteration, Outcome, SampledToken, SwapOut, TurnStart
from pensieve.core.iteration_builder import TILE_EVERY, IterationBuilder
from pensieve.core.pipeline_stages import MicroBatches
from pensieve.core.preemption import Preemption, turn_to_suspend
from pensieve.core.prefix_tree import Chunk
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.streaming import Streaming
from pensieve.core.tiers import PageReservation, Shortage
from pensieve.core.time_budget import TimeBudget
from pensieve.core.turn import QUEUE_ORDER, Ended, FinishReason, Turn, TurnState

PASSES_MAX = 8  # turns that may be admitted before a turn that does not fit
BLOCKED_MAX = 4  # once this many turns do not fit, a plan admits no more


class Scheduler:
    def __init__(self, cache: KVCache, config: SchedulerConfig) -> None:
        self.cache = cache
        self.config = config
        self.counters = SchedulerCounters()
        self.running: dict[int, Turn] = {}
        self.suspended: deque[Turn] = deque()
        self.queued = FairQueue(config.batch_tokens_max, config.first_come)
        self._turns: dict[int, Turn] = {}  # turns that have not finished, or still hold pages
        self._releasing: dict[int, Turn] = {}
        self._num_background = 0
        self._size = cache.config.chunk_tokens
        self._ended: list[Ended] = []  # cancelled and warmed turns; `commit` does not report them
        self._started: list[TurnStart] = []  # turns that have started since the last iteration
        self._forgotten: list[int] = []  # turns that have ended since the last iteration
        self._disturbed: list[Turn] = []  # streamed turns whose chunks were discarded
        self._pending_cuts: dict[str, int] = {}  # by conversation: number of tokens to keep
        self._pending_evictions: dict[
            str, bool
        ] = {}  # by conversation: whether to move to the host
        self._uncommitted: deque[tuple[Iteration, IterationBuilder]] = deque()
        self._committed_at = self._interactive_at = float("-inf")
        self._decode_ratios = deque[float](maxlen=NUM_KEPT)  # see `_learn`
        self._num_arrivals = self._index = 0
        self.time_budget = TimeBudget(config)
        has_room_for = self.time_budget.has_room_for
        self.preemption = Preemption(cache, self.queued, has_room_for, config.time_share)
        # Features, None while they are off.
        self.streaming = (
            Streaming(config, cache, has_room_for) if may_stream(cache, config) else None
        )
        self.background: BackgroundRoom | None = None
        self.micro_batches = MicroBatches(config) if config.stages > 1 else None

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def turns(self) -> list[Turn]:
        """Return every turn that has not finished."""
        return [turn for turn in self._turns.values() if turn.finish is None]

    def turn(self, attempt_id: int) -> Turn | None:
        """Return a turn that has not finished, or has not given up its pages yet."""
        return self._turns.get(attempt_id)

    def turn_of(self, conversation_id: str) -> Turn | None:
        """Return the conversation's turn that has not finished."""
        return next(
            (turn for turn in self.turns() if turn.conversation_id == conversation_id), None
        )

    def drain_ended(self) -> list[Ended]:
        """Return the cancelled and warmed turns that have ended. `commit` does not report them."""
        ended, self._ended = self._ended, []
        return ended

    # -- turns and conversations change --

    def submit(self, turn: Turn, now: float) -> None:
        assert turn.attempt_id not in self._turns, f"turn {turn.attempt_id} was submitted twice"
        assert turn.warm or turn.prompt_end > turn.history_tokens, "a turn adds at least one token"
        assert turn.prompt_end == len(turn.tokens)
        self._num_arrivals += 1
        self.cache.find(turn, now)
        turn.enqueue(self._num_arrivals)
        turn.usage.submitted_at = now
        self._turns[turn.attempt_id] = turn
        self.queued.add(turn)
        if turn.is_background:
            self._num_background += 1
            if self.background is None:
                self.background = BackgroundRoom(self._decode_ratios)

    def cancel(self, attempt_id: int, log_tokens: int, now: float) -> None:
        """End a turn. Its conversation keeps the KV of the first `log_tokens` positions."""
        if (turn := self._turns.get(attempt_id)) is None or turn.finish is not None:
            return
        turn.log_tokens = log_tokens
        self._finish(turn, FinishReason.CANCELLED, now)

    def rewind(self, conversation_id: str, num_tokens: int, now: float) -> None:
        """Cut a conversation. If its last turn has an uncommitted slice, the cut waits for the commit."""
        conversation = self.cache.conversations.get(conversation_id)
        if conversation is None or conversation.attempt_id is None:
            self.cache.rewind(conversation_id, num_tokens, now)
            return
        assert conversation.attempt_id in self._releasing, "a running turn is cancelled first"
        cut = self._pending_cuts.get(conversation_id, num_tokens)
        self._pending_cuts[conversation_id] = min(cut, num_tokens)
        conversation.log = conversation.log[:num_tokens]
        if conversation.identities is not None:
            conversation.identities = conversation.identities.beginning(num_tokens)

    def delete(self, conversation_id: str, now: float) -> None:
        if (turn := self.turn_of(conversation_id)) is not None:
            self.cancel(turn.attempt_id, 0, now)
        self.rewind(conversation_id, 0, now)

    def evict(self, conversation_id: str, to_host: bool, now: float) -> int:
        """Evict the KV of a conversation without a running turn; return the number of chunks.

        If the last turn has an uncommitted slice, the eviction happens after the slice's commit.
        """
        conversation = self.cache.conversations.get(conversation_id)
        if conversation is not None and conversation.attempt_id in self._releasing:
            self._pending_evictions[conversation_id] = to_host
            return sum(chunk.resident for chunk in conversation.chunks())
        evict = self.cache.move_to_host if to_host else self.cache.evict
        return evict(conversation_id, now)

    # -- plan --

    def plan(self, now: float, extra_pages: int = 0) -> Iteration | None:
        """Return the next iteration, or None if there is nothing to do.

        `extra_pages`: number of pages that should become available in addition to those that turns lack.
        """
        builder = IterationBuilder(self.config, self._size, self._index % TILE_EVERY == 0)
        self.cache.settle(now)
        # Preempt running turns.
        self._preempt(now)
        self._stop_streaming(builder, now)
        changes, available = self._num_changes(), self.cache.available
        # Fill the iteration.
        prefills = self._plan_decodes(builder, now)
        self.time_budget.limit(builder, prefills, self.queued.num_prompt_tokens, now)
        blocked = BlockedTurns(self.cache)
        self._plan_prefills(builder, prefills, blocked, now)
        self._plan_streamed(builder, blocked, now)
        self._plan_background(builder, blocked, now)
        self._end_warmed(now)
        # Make pages available for the turns that lack pages.
        swap_outs = self._plan_swap_outs(builder, extra_pages, now)
        if builder.is_empty and not swap_outs:
            if self._uncommitted:
                return None
            if not self.cache.tiers.swaps:
                if not self._turns:
                    return None
                changed = self._num_changes() != changes or self.cache.available > available
                assert changed, "turns wait, but nothing that they wait for can happen"
                # Idle pages became available at once. Some may hold the waiting turn's own KV and so do not
                # help it. Plan again with more pages.
                return self.plan(now, 2 * extra_pages + 1)
        return self._launch(builder, swap_outs, now)

    def _preempt(self, now: float) -> None:
        """Suspend running turns if the next turn is entitled to their places."""
        if self.preemption.is_impossible(self.suspended):
            return
        running = self._turns_with_place()
        started = [turn for turn in running if turn.is_prefill]

        def may_claim(turn: Turn) -> bool:
            is_claim = not (turn.warm or turn.is_background)
            return is_claim and self.queued.precedes_prefills(turn, started)

        first = self.queued.next_turn(self.suspended, may_claim)
        for victim in self.preemption.victims(first, running):
            claimant = self.preemption.claimant
            assert claimant is not None
            self._num_arrivals += 1
            self.counters.preemptions += 1
            victim.give_way(claimant, self._num_arrivals)
            self._suspend(victim, now)

    def _stop_streaming(self, builder: IterationBuilder, now: float) -> None:
        """Suspend the streamed turns that must stop, or one streamed turn that fits the device again."""
        if (streaming := self.streaming) is None:
            return
        running = self._turns_with_place()
        for turn in streaming.turns_to_stop(running, self._has_interactive):
            self._suspend(turn, now)
        streaming.required_pages = 0
        if self._releasing or self._turns_wait():
            return
        returning = streaming.turn_to_return(running, self.cache.available)
        if returning is not None:
            self.counters.returned += 1
            self._suspend(returning, now, counted=False)
        builder.require_pages(streaming.required_pages)

    def _plan_decodes(
        self, builder: IterationBuilder, now: float, background: bool = False
    ) -> list[Turn]:
        """Take a token of each generating turn; return the prefills that have begun."""
        size, prefills = self._size, list[Turn]()
        # Highest level and oldest turn first. If a page is missing, the turn to suspend is usually later in
        # this order.
        running = sorted(self.running.values(), key=QUEUE_ORDER)
        if self.micro_batches is not None:
            with_place = [turn for turn in running if self._has_place(turn)]
            running = self.micro_batches.choose(running, with_place, builder, background)
        releasing, has_background = self._releasing, self._num_background > 0
        for turn in running:
            # Inlines `_has_place` and `Turn.is_prefill`, because this loop visits every generating turn.
            if turn.state is not TurnState.RUNNING or turn.attempt_id in releasing:
                continue
            if has_background and turn.is_background != background:
                continue
            num_tokens = len(turn.tokens) + turn.pending_tokens
            if turn.warm or turn.frontier < num_tokens - 1:
                # Only a turn that has generated before, and lost its KV to a failure, may need a page.
                if num_tokens > len(turn.chunks) * size and not self._extend(turn, now):
                    builder.require_pages(1)
                    continue
                prefills.append(turn)
            elif builder.num_tokens_left and not (turn.pending_tokens and turn.ends_at(num_tokens)):
                if num_tokens > len(turn.chunks) * size:
                    if not self._extend(turn, now):
                        builder.require_pages(1)
                        continue
                    turn.discard_if_failed[turn.chunks[-1]] = None
                builder.decode(turn, num_tokens)
        return prefills

    def _extend(self, turn: Turn, now: float) -> bool:
        """Take a page for the turn's next chunk, and suspend a running turn if there is none.

        Return False if this turn has to wait, or is the turn that was suspended.
        """
        while not self.cache.extend(turn, now):
            if turn.streamed:
                self._suspend(turn, now)
                return False
            if self.cache.eviction.relief_expected(now) or self._releasing:
                return False
            victim = turn_to_suspend([each for each in self.running.values() if not each.streamed])
            self._suspend(victim, now)
            if victim is turn or victim.attempt_id in self._releasing:
                return False
        return True

    def _plan_prefills(
        self, builder: IterationBuilder, started: list[Turn], blocked: BlockedTurns, now: float
    ) -> None:
        """Take tokens of prefills that have begun, and admit waiting turns."""
        used, order = self.queued.used, self.queued.prefill_order
        while builder.has_room():
            started = [each for each in started if self._has_place(each)]
            first = min(started, key=lambda each: (used(each), order(each)), default=None)
            turn = self._next_to_admit(started, builder, blocked)
            if first is not None and (turn is None or used(turn) > used(first)):
                oldest = oldest_prefill(first, started)
                started.remove(first)
                if builder.has_room(oldest):
                    self.queued.charge(first.share, builder.fill(first, oldest))
                continue
            if turn is None:
                break
            if blocked.defer(turn):
                continue
            admission = self._admit(turn, now, builder.filled_before)
            if isinstance(admission, PageReservation):
                blocked.count_pass()
                builder.admit(admission)
                self.queued.charge(turn.share, builder.fill(turn, oldest_prefill(turn, started)))
            elif admission is not None and turn.warm:
                self._finish(turn, FinishReason.WARMED, now)  # best effort
            else:
                blocked.add(turn, admission, turn is self.preemption.claimant)
        builder.require_pages(blocked.required_pages)

    def _next_to_admit(
        self, started: Collection[Turn], builder: IterationBuilder, blocked: BlockedTurns
    ) -> Turn | None:
        """Return the next waiting turn, if the iteration has room for it.

        The turn must go before all begun prefills of its share. The claimant, for which other turns were
        preempted, is always next.
        """
        background, claimant = blocked.background, self.preemption.claimant
        if not blocked.may_admit or (claimant is not None and background):
            return None

        def may_run(turn: Turn) -> bool:
            return (
                turn.is_background == background
                and self.queued.precedes_prefills(turn, started)
                and builder.has_room(oldest_prefill(turn, started))
            )

        turn = claimant or self.queued.next_turn(self.suspended, may_run, blocked.turns)
        if turn is None or self.time_budget.has_room_for(turn, self.running.values()):
            return turn
        return None

    def _admit(
        self, turn: Turn, now: float, filled_before: dict[Chunk, int], streamed: bool = False
    ) -> PageReservation | Shortage | None:
        """Admit a turn, or return its shortage of pages; None: it must wait for a commit."""
        conversation = self.cache.conversations.get(turn.conversation_id)
        if conversation is not None and conversation.attempt_id is not None:
            return None  # the conversation's previous turn has an uncommitted slice
        reserve = self.cache.config.reserve_pages if self.running else 0
        if turn is self.preemption.claimant:
            reserve = 0  # the claimant gets the pages of its victims
        if turn.warm:
            reserve = self.cache.config.swap_out_mark_pages
        if turn.is_background and self.streaming is not None:
            reserve += self.streaming.required_pages
        admission: PageReservation | Shortage | None
        if streamed:
            admission = self.cache.begin_streamed(turn, now, filled_before)
        else:
            admission = self.cache.begin(turn, now, reserve, filled_before)
        if not isinstance(admission, PageReservation):
            return admission
        self.counters.streamed += streamed
        if turn.state is not TurnState.QUEUED:
            self.counters.resumptions += 1
            self.suspended.remove(turn)
        else:
            self.queued.admit(turn)
            options = turn.options
            self._started.append(
                TurnStart(
                    *(turn.attempt_id, turn.tokens[:], options.sampling),
                    *(options.constraint, options.continues_text),
                )
            )
            turn.set_usage(admission.device_tokens, admission.host_tokens, now)
        self.preemption.began(turn)
        turn.moved_back, turn.outputs_before = False, turn.num_output_tokens
        turn.move_to(TurnState.RUNNING)
        self.running[turn.attempt_id] = turn
        if admission.copied is not None:
            # If a turn that uses the source chunk fails, the copy is discarded, even if the source is kept
            # because other conversations hold it.
            source, target = admission.copied
            for other in self._turns.values():
                if source in other.discard_if_failed or other.has_chunk(source):
                    other.discard_if_failed[target] = None
        return admission

    def _plan_streamed(self, builder: IterationBuilder, blocked: BlockedTurns, now: float) -> None:
        """Admit turns for which the device has no room, as long as streaming their contexts pays."""
        if (streaming := self.streaming) is None:
            return
        if blocked.background and self._has_interactive:
            return
        streaming.lacked = bool(blocked.turns)
        if not blocked.turns or self.preemption.claimant is not None:
            return
        waiting = self.suspended, self.queued
        running = self.running.values()
        for turn in streaming.turns_to_admit(*waiting, running, builder, blocked.background):
            admission = self._admit(turn, now, builder.filled_before, streamed=True)
            if isinstance(admission, PageReservation):
                self.queued.charge(turn.share, builder.fill(turn))

    def _plan_background(
        self, builder: IterationBuilder, interactive: BlockedTurns, now: float
    ) -> None:
        """Fill the remaining room with background turns. Admit none while an interactive turn lacks pages."""
        if self._has_interactive:
            self._interactive_at = now
        if not self._num_background:
            return
        assert self.background is not None
        self.background.limit(builder, now - self._interactive_at)
        prefills = self._plan_decodes(builder, now, background=True)
        blocked = BlockedTurns(self.cache, background=True, may_admit=not interactive.turns)
        self._plan_prefills(builder, prefills, blocked, now)
        self._plan_streamed(builder, blocked, now)

    def _end_warmed(self, now: float) -> None:
        """End the turns that only warm the cache, once their contexts are computed."""
        for turn in list(self.running.values()):
            if turn.warm and not turn.num_uncommitted and turn.frontier >= len(turn.tokens):
                self.cache.register(turn)
                self._finish(turn, FinishReason.WARMED, now)

    def _plan_swap_outs(
        self, builder: IterationBuilder, extra_pages: int, now: float
    ) -> list[SwapOut]:
        """Copy idle pages to the host.

        Plan no copies if the iteration has swap-ins or page copies, because these may use the same pages.
        """
        if builder.swap_ins or builder.copies:
            return []
        required_pages = builder.required_pages + extra_pages
        return self.cache.plan_swap_outs(now, required_pages, builder.filled_before)

    def _launch(self, builder: IterationBuilder, swap_outs: list[SwapOut], now: float) -> Iteration:
        """Make the builder's iteration, which is uncommitted from now on."""
        self._index += 1
        builder.planned_at = now
        builder.predicted_seconds = self.time_budget.planned(builder, now)
        if self.background is not None:
            self.background.planned(builder)
        if builder.streamed:
            assert self.streaming is not None
            self.streaming.arrange(builder)
        iteration = builder.iteration(self._index, swap_outs, self._started, self._forgotten)
        self._started.clear()
        self._forgotten.clear()
        self._uncommitted.append((iteration, builder))
        counters = self.counters
        counters.iterations += 1
        counters.tokens += builder.num_tokens
        counters.recomputed_tokens += builder.num_recomputed
        counters.repaired_ranges_max = max(counters.repaired_ranges_max, builder.num_ranges_max)
        return iteration

    # Used by `plan`:

    def _num_changes(self) -> tuple[int, ...]:
        """Return counts that planning may change. If they have changed, another attempt may succeed."""
        counters = self.counters
        return len(self._ended), counters.suspensions, self.cache.counters.damaged

    def _has_place(self, turn: Turn) -> bool:
        """Whether a turn runs and is not releasing its pages."""
        return turn.state is TurnState.RUNNING and turn.attempt_id not in self._releasing

    def _turns_with_place(self) -> list[Turn]:
        return [turn for turn in self.running.values() if self._has_place(turn)]

    @property
    def _has_interactive(self) -> bool:
        """Whether there are interactive turns."""
        return len(self._turns) > self._num_background

    def _turns_wait(self) -> bool:
        """Whether a turn waits. If there are interactive turns, background turns do not count."""
        if not self._has_interactive:
            return bool(self.suspended) or len(self.queued) > 0
        any_suspended = any(not turn.is_background for turn in self.suspended)
        return any_suspended or self.queued.num_prompt_tokens > 0

    # -- commit --

    def commit(
        self, iteration: Iteration, outcome: Outcome, now: float
    ) -> list[SampledToken | Ended]:
        """Apply the outcome of the oldest uncommitted iteration.

        Return sampled tokens and ends of turns, in the order in which they are sent.
        """
        oldest, builder = self._uncommitted.popleft()
        assert oldest is iteration, "iterations are committed in order"
        self._learn(builder, now)
        self.cache.release_sources(builder.sources, now)
        for copy_id in outcome.finished_copies:
            self.cache.finish_copy(copy_id, now)
        news: list[SampledToken | Ended] = []
        for turn in builder.turns:
            turn.num_uncommitted -= 1
        for failure in outcome.failures:
            turn = self._turns[failure.attempt_id]
            if failure.spoils_kv:  # even if the turn was cancelled in the meantime
                self._discard(turn, now)
            if turn.finish is None:
                turn.log_tokens = turn.history_tokens
                self._finish(turn, FinishReason.FAILED, now)
                self.counters.failed += 1
                news.append(Ended(turn, FinishReason.FAILED, failure.reason))
        for turn, chunk, generation in builder.completed:
            turn.completed.append((chunk, generation))
        num_sampled: dict[str, int] = {}  # by share
        for sample in outcome.samples:
            turn = self._turns[sample.attempt_id]
            turn.pending_tokens -= 1
            if turn.completed:
                self.cache.register(turn)
            if turn.finish is not None:  # the turn ended while this token was computed
                self.counters.idle_tokens += 1
                continue
            turn.tokens.append(sample.token_id)
            num_sampled[turn.share] = num_sampled.get(turn.share, 0) + 1
            usage = turn.usage
            usage.output_tokens += 1
            if usage.first_token_at is None:
                usage.first_token_at = now
            news.append(sample)
            if sample.repeats:
                finish = FinishReason.REPETITION
            elif sample.stopped:
                finish = FinishReason.STOP
            elif turn.ends_at(len(turn.tokens)):
                finish = FinishReason.LENGTH
            else:
                continue
            self._finish(turn, finish, now)
            news.append(Ended(turn, finish))
        for share, num_tokens in num_sampled.items():
            self.queued.charge(share, num_tokens)
        while self._disturbed:
            if self._has_place(turn := self._disturbed.pop()):
                self._suspend(turn, now)
        for turn in list(self._releasing.values()):
            if not turn.num_uncommitted:
                del self._releasing[turn.attempt_id]
                self._release(turn, now)
        return news

    def _learn(self, builder: IterationBuilder, now: float) -> None:
        """Learn from the time that the iteration took."""
        seconds, self._committed_at = now - max(builder.planned_at, self._committed_at), now
        self.time_budget.committed(builder, now)
        if self.background is not None:
            self.background.committed(builder, seconds)
        if builder.only_decodes:
            if builder.predicted_without:  # `BackgroundRoom` compares with these ratios
                self._decode_ratios.append(seconds / builder.predicted_without)
            if self.streaming is not None:
                self.streaming.committed(builder, seconds)

    def _discard(self, turn: Turn, now: float) -> None:
        """Drop the chunks that the turn has computed, and copies of them, for every turn that uses them."""
        for chunk in self.cache.discard(turn, now):
            for other in self.running.values():
                if other.has_chunk(chunk):
                    other.frontier = min(other.frontier, chunk.index * self._size)
                    if other.streamed and other is not turn:
                        self._disturbed.append(other)

    # -- turns give up their pages --

    def _suspend(self, turn: Turn, now: float, counted: bool = True) -> None:
        self.counters.suspensions += counted
        turn.usage.suspensions += counted
        if turn.warm:
            self._finish(turn, FinishReason.WARMED, now)
        elif turn.num_uncommitted:
            self._releasing[turn.attempt_id] = turn
        else:
            self._release(turn, now)

    def _finish(self, turn: Turn, reason: FinishReason, now: float) -> None:
        """End the turn; its pages are released when it has no uncommitted slice."""
        turn.finish = reason
        turn.usage.finished_at = now
        self.counters.finished += 1
        if reason in (FinishReason.CANCELLED, FinishReason.WARMED):  # `commit` reports neither
            self._ended.append(Ended(turn, reason))
        if turn.usage.admitted_at is not None:
            self._forgotten.append(turn.attempt_id)
        if turn.num_uncommitted:
            self._releasing[turn.attempt_id] = turn
        else:
            self._releasing.pop(turn.attempt_id, None)
            self._release(turn, now)

    def _release(self, turn: Turn, now: float) -> None:
        """Give up the pages of a turn that is suspended or has ended."""
        former_state = turn.state
        if former_state is TurnState.RUNNING:
            del self.running[turn.attempt_id]
            keep = len(turn.tokens) + 1 if turn.log_tokens is None else turn.log_tokens
            turn.computed_to = max(turn.computed_to, turn.frontier)
            away_seconds = turn.options.away_seconds if turn.finish is not None else 0.0
            self.cache.end(turn, now, keep, away_seconds)
        turn.frontier = 0
        self.preemption.ended(turn)
        if turn.finish is None:
            turn.move_to(TurnState.SUSPENDED)
            insort(self.suspended, turn, key=resume_order)
            return
        if former_state is TurnState.SUSPENDED:
            self.suspended.remove(turn)
        elif former_state is TurnState.QUEUED:
            self.queued.remove(turn)
        turn.move_to(TurnState.FINISHED)
        self.queued.end(turn)
        turn.discard_if_failed.clear()
        del self._turns[turn.attempt_id]
        self._num_background -= turn.is_background
        if former_state is not TurnState.RUNNING and turn.log_tokens is not None:
            # A turn that was never admitted computed nothing. If the cache has KV after that turn's history,
            # the KV is from a turn that was not recorded. Discard it: the log may now continue differently.
            admitted = turn.usage.admitted_at is not None
            if turn.is_temporary and admitted:
                self.cache.keep_found(turn, now)
            else:
                kept = turn.log_tokens if admitted else turn.history_tokens
                self.rewind(turn.conversation_id, min(turn.log_tokens, kept), now)
        self._carry_out_pending(turn.conversation_id, now)

    def _carry_out_pending(self, conversation_id: str, now: float) -> None:
        """Carry out a pending cut or eviction, if no turn holds the conversation's pages any more."""
        conversation = self.cache.conversations.get(conversation_id)
        if conversation is not None and conversation.attempt_id is not None:
            return
        if (cut := self._pending_cuts.pop(conversation_id, None)) is not None:
            self.cache.rewind(conversation_id, cut, now)
        if (to_host := self._pending_evictions.pop(conversation_id, None)) is not None:
            self.evict(conversation_id, to_host, now)

    def check(self, now: float) -> None:
        """Check every invariant of the cache, of the turns and of their places."""
        self.cache.check(now)
        self.queued.check(len(self._turns))
        sets = self.running, self.suspended, self.queued, self._releasing
        audit_turns(TurnsByState(self._turns, *sets), self.cache.conversations, self._size)
        self.preemption.check(self.running)
        for _, builder in self._uncommitted:
            for turn, chunk, generation in builder.completed:
                assert chunk.identity is None or chunk.generation != generation, (
                    f"{chunk} is found before turn {turn.attempt_id} has computed it"
                )


def may_stream(cache: KVCache, config: SchedulerConfig) -> bool:
    """Whether turns may run with their KV on the host."""
    return config.stream != "off" and cache.config.can_stream and config.stages == 1


@dataclass
class SchedulerCounters:
    """Counts since the scheduler was created."""

    iterations: int = 0
    tokens: int = 0  # computed positions
    recomputed_tokens: int = 0  # computed positions that had KV before
    repaired_ranges_max: int = 0  # maximum number of separate slices of one turn in an iteration
    suspensions: int = 0
    resumptions: int = 0
    streamed: int = 0  # admissions of turns whose KV stays on the host
    returned: int = 0  # streamed turns that returned to the device
    preemptions: int = 0  # suspensions in favour of the next turn
    idle_tokens: int = 0  # computed for a turn that had already finished
    finished: int = 0
    failed: int = 0


class BlockedTurns:
    """The next turns of one plan that do not fit into memory. Decides whether other turns may pass them.

    A short message after a long history may need most of the device, and must wait until running turns have
    ended. A later turn that fits may pass it if the later turn is new and needs no swap-in. A swap-in would
    delay the blocked turn, because the blocked turn waits for swap-outs, and an iteration with swap-ins has
    no swap-outs. Suspended turns and the claimant are never passed.
    """

    def __init__(self, cache: KVCache, background: bool = False, may_admit: bool = True) -> None:
        self._cache = cache
        self.background = background  # whether background turns are being planned
        self.turns: list[Turn] = []
        self.required_pages = 0  # pages that the first blocked turn needs
        self.may_admit = may_admit  # whether any turn may still be admitted

    def add(self, turn: Turn, shortage: Shortage | None, is_claimant: bool) -> None:
        """Add a turn that does not fit. If `shortage` is None, the turn waits for a commit."""
        if not self.turns and shortage is not None:
            self.required_pages = shortage.required_pages
        self.turns.append(turn)
        may_be_passed = turn.state is TurnState.QUEUED and not is_claimant and shortage is not None
        self.may_admit = may_be_passed and self._may_pass()

    def defer(self, turn: Turn) -> bool:
        """Add a turn that needs a swap-in, if other turns are blocked; return whether it was added."""
        if not self.turns or not self._cache.needs_swap_in(turn):
            return False
        self.turns.append(turn)
        self.may_admit = turn.state is TurnState.QUEUED and self._may_pass()
        return True

    def count_pass(self) -> None:
        """Count that another turn was admitted before the blocked turns."""
        for turn in self.turns:
            turn.num_passed += 1
        self.may_admit = self._may_pass()

    def _may_pass(self) -> bool:
        return len(self.turns) < BLOCKED_MAX and all(
            turn.num_passed < PASSES_MAX for turn in self.turns
        )
