"""What runs next: one unified batch per iteration, filled under a token budget.

The order of filling: every turn that is generating (one token each), then prefills: those that have begun,
the shortest first (prefill_order.py), suspended turns that resume, and new turns, which come in the order
of the queue.  Between shares, what each has used decides (fair_queue.py).  A prefill, a recomputed hole and
a decode are the same thing, slices of a turn (iteration_draft.py).  Beside turns that generate, prefills
get as many tokens as do not hold those up for long (time_budget.py).  Background turns, of batch jobs, come
behind all others and have what these leave free (background_room.py).

Suspension.  Before anything is planned, running turns may have to give their places to the turn that is next
(preemption.py).  A generating turn that needs a page when none is available waits one iteration if idle pages
are being copied out anyway; otherwise a running turn gives up its pages (`who_is_suspended`).  It keeps
every token and each chunk whose page nobody takes meanwhile, and resumes before new turns of its level.
So does one whose prompt was computed ahead of its place (prefill_ahead.py).

`plan` may be called while one iteration is uncommitted.  A token that it will sample is then planned
for as if it were known (`pending_tokens`; the executor resolves it); if the turn turns out finished,
that slice was computed for nothing and is counted in `idle_tokens`.  With pipeline stages one for each may be
uncommitted (micro_batches.py).  A turn with an uncommitted slice keeps its pages: cancelling, suspending and
finishing release them when the last such slice is committed.  Until then the turn is in `_releasing`, and
a rewind or an eviction of its conversation waits.

Turns that find no room on the device may run with their KV on the host (streaming.py, streamed_pages.py).

Liveness: the turn that is next is admitted as soon as the pages for its whole context are available,
a bounded number of others comes before it (fair_queue.py), every idle page can become available
(eviction.py), and running turns end; one that is preempted has advanced, or rises (preemption.py).
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from pensieve.core.background_room import BackgroundRoom
from pensieve.core.cache import KVCache
from pensieve.core.cache_values import Admission, Shortage
from pensieve.core.iteration import Iteration, Outcome, SampledToken, SwapOut
from pensieve.core.iteration_draft import TILE_EVERY, IterationDraft
from pensieve.core.lacking import Lacking
from pensieve.core.micro_batches import MicroBatches
from pensieve.core.pending_edits import PendingEdits
from pensieve.core.preemption import Preemption, who_is_suspended
from pensieve.core.prefill_ahead import PrefillAhead
from pensieve.core.prefill_order import earlier, prefill_order, resume_order
from pensieve.core.prefix_tree import Chunk
from pensieve.core.scheduled_turns import ScheduledTurns, start_of
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.stream_groups import StreamGroups
from pensieve.core.streaming import Streaming
from pensieve.core.time_budget import TimeBudget
from pensieve.core.turn import QUEUE_ORDER, Ended, FinishReason, Turn, TurnState
from pensieve.core.waiting import Waiting


class Scheduler(ScheduledTurns):
    def __init__(self, cache: KVCache, config: SchedulerConfig) -> None:
        super().__init__(cache, config.batch_tokens_max)
        self.config = config
        self._uncommitted: deque[tuple[Iteration, IterationDraft]] = deque()
        self._time_budget = TimeBudget(config)
        has_place = self._time_budget.has_place
        self.preemption = Preemption(cache, self.queued, has_place, config.time_share)
        self._ahead = PrefillAhead(
            config.prefill_ahead, has_place, self.running, self.suspended, self.queued
        )
        self._waiting = Waiting(
            self.suspended, self.queued, self.running, self.preemption, self._ahead, has_place
        )
        self._room = BackgroundRoom()
        self.streaming = Streaming(config, cache.config)
        self._groups = StreamGroups(cache.config, config, cache.path_of)
        self._edits = PendingEdits(cache)
        self._micro_batches = MicroBatches(config, self._keeps_place)
        self._num_arrivals = self._index = 0

    # -- what happens to a scheduler --

    def submit(self, turn: Turn, now: float) -> None:
        assert turn.turn_id not in self._turns, f"turn {turn.turn_id} was submitted twice"
        assert turn.warm or turn.prompt_end > turn.history_tokens, (
            "a turn brings at least one token"
        )
        assert turn.prompt_end == len(turn.tokens)
        self._num_arrivals += 1
        turn.enqueue(self._num_arrivals)
        turn.usage.submitted_at = now
        self._turns[turn.turn_id] = turn
        self._num_background += turn.is_background
        self.queued.add(turn)

    def cancel(self, turn_id: int, keep_tokens: int, now: float) -> None:
        """End a turn; its conversation keeps the KV of the first `keep_tokens` positions."""
        if (turn := self._turns.get(turn_id)) is None or turn.finish is not None:
            return
        turn.keep_tokens = keep_tokens
        self._finish(turn, FinishReason.CANCELLED, now)

    def rewind(self, conversation_id: str, num_tokens: int, now: float) -> None:
        """Cut a conversation; one whose last turn has an uncommitted slice is cut after it."""
        conversation = self.cache.conversations.get(conversation_id)
        if conversation is not None and conversation.turn_id is not None:
            assert conversation.turn_id in self._releasing, "a running turn is cancelled first"
        self._edits.rewind(conversation_id, num_tokens, now)

    def delete(self, conversation_id: str, now: float) -> None:
        if (turn := self.turn_of(conversation_id)) is not None:
            self.cancel(turn.turn_id, 0, now)
        self.rewind(conversation_id, 0, now)

    def evict(self, conversation_id: str, to_host: bool, now: float) -> int:
        """Evict a resting conversation's KV, also after an uncommitted slice; how many chunks go, as yet."""
        conversation = self.cache.conversations.get(conversation_id)
        waits = conversation is not None and conversation.turn_id in self._releasing
        return self._edits.evict(conversation_id, to_host, now, waits)

    def plan(self, now: float, extra_pages: int = 0) -> Iteration | None:
        """The next iteration, or None when there is nothing to do; `extra_pages` are asked for beside."""
        self._preempt(now)
        for turn in self._ahead.give_places(self._keeps_place):
            self.preemption.moved(turn)
        required_pages = self._stop_streaming(now)
        before, available = self._changes(), self.cache.available
        draft = IterationDraft(self.config, self._size)
        draft.holds_back = self._index % TILE_EVERY == 0
        num_pages, prefills = self._plan_running(draft, now)
        self._time_budget.limit(draft, prefills, self.queued.num_prompt_tokens, now)
        lacking = Lacking(self.cache)
        for_prefills = self._plan_prefills(draft, prefills, lacking, now)
        for_background = self._plan_background(draft, lacking, now)
        self._end_complete(now)
        moves = draft.swap_ins or draft.copies  # no swap-out beside them: it may be of their pages
        required_pages = max(required_pages, num_pages, for_prefills, for_background) + extra_pages
        swap_outs: list[SwapOut] = []
        if not moves:
            swap_outs = self.cache.plan_swap_outs(now, required_pages, draft.filled_before)
        if not (draft.slices or draft.copies or draft.swap_ins or swap_outs):
            moving = self.cache.swap_ins_in_flight + self.cache.swap_outs_in_flight
            waiting = self.running or self.suspended or self.queued
            if not moving and not self._uncommitted and waiting:
                changed = self._changes() != before or self.cache.available > available
                assert changed, "turns wait for nothing"
                # Pages became available without a copy; but some may be of the turn that lacks them.
                return self.plan(now, 2 * extra_pages + 1)
            if self._uncommitted or not moving:
                return None
        return self._launched(draft, swap_outs, now)

    def check(self, now: float) -> None:
        """Recompute every invariant of the cache, its turns and their places."""
        super().check(now)
        self.preemption.check(self.running)

    def _stop_streaming(self, now: float) -> int:
        """Where it does not pay, or the device has room again; how many pages should become available."""
        running = [turn for turn in self.running.values() if self._keeps_place(turn)]
        for turn in self.streaming.who_stops(running, self._has_interactive):
            self._suspend(turn, now)
        self.streaming.required_pages = 0
        if self._releasing or self._somebody_waits():
            return 0
        if (first := self.streaming.who_returns(running, self.cache.available)) is not None:
            self.counters.returned += 1
            self._suspend(first, now, counted=False)
        return self.streaming.required_pages

    def _plan_streamed(self, draft: IterationDraft, lacking: Lacking, now: float) -> None:
        """Turns that find no room on the device, as far as it pays to stream their contexts."""
        if lacking.background and self._has_interactive:
            return
        self.streaming.saw(lacking)
        if not lacking.turns or self.preemption.claimant is not None:
            return
        turns = self.suspended, self.queued, self.running.values()
        bounds = self._time_budget.has_place, self.cache.streamed.room_beside
        for turn in self.streaming.who_may(*turns, draft, lacking.background, *bounds):
            found = self._admit(turn, now, draft.filled_before, streamed=True)
            if isinstance(found, Admission):
                self.queued.charge(turn, draft.fill(turn))

    def _plan_background(self, draft: IterationDraft, lacking: Lacking, now: float) -> int:
        """Background turns in what is left; none is admitted while an interactive turn lacks pages."""
        if self._has_interactive:
            self._room.saw_interactive(now)
        if not self._num_background:
            return 0
        self._room.limit(draft, now)
        required_pages, prefills = self._plan_running(draft, now, background=True)
        lacking = Lacking(self.cache, background=True, may_admit=not lacking.turns)
        return max(required_pages, self._plan_prefills(draft, prefills, lacking, now))

    def _plan_running(
        self, draft: IterationDraft, now: float, background: bool = False
    ) -> tuple[int, list[Turn]]:
        """Decodes; how many pages have to become available for one of them, and the started prefills."""
        required_pages, size = 0, self._size
        prefills: list[Turn] = []
        # The highest level and the oldest first: as a rule whoever is suspended for a page comes later.
        ordered = sorted(self.running.values(), key=QUEUE_ORDER)
        for turn in self._micro_batches.chosen(ordered, draft, background):
            if turn.is_background != background or not self._keeps_place(turn):
                continue
            num_tokens = len(turn.tokens) + turn.pending_tokens
            if turn.warm or turn.frontier < num_tokens - 1:  # `Turn.is_prefill`
                # Only one that generated already, and lost its KV to a failure, may need a page.
                if num_tokens > len(turn.chunks) * size and not self._extend(turn, now):
                    required_pages = 1
                    continue
                prefills.append(turn)
            elif turn.ahead:
                continue  # it is computed as far as it may be
            elif draft.num_tokens_left and not (turn.pending_tokens and turn.ends_at(num_tokens)):
                if num_tokens > len(turn.chunks) * size:
                    if not self._extend(turn, now):
                        required_pages = 1
                        continue
                    turn.written[turn.chunks[-1]] = None
                draft.decode(turn, num_tokens)
        return required_pages, prefills

    def _plan_prefills(
        self, draft: IterationDraft, started: list[Turn], lacking: Lacking, now: float
    ) -> int:
        """Started ones and turns that wait; how many pages the first of these that does not fit requires."""
        used = self.queued.used
        while draft.has_room():
            started = [each for each in started if self._keeps_place(each)]
            first = min(started, key=lambda each: (used(each), prefill_order(each)), default=None)
            turn, ahead = self._waiting.next(started, draft, lacking)
            if first is not None and (turn is None or used(turn) > used(first)):
                held_for = earlier(first, started)
                started.remove(first)
                if draft.has_room(held_for):
                    self.queued.charge(first, draft.fill(first, held_for))
                continue
            if turn is None:
                break
            if lacking.puts_aside(turn):
                continue
            turn.ahead = ahead
            admission = self._admit(turn, now, draft.filled_before)
            if isinstance(admission, Admission):
                lacking.passed()
                draft.admit(admission)
                self.queued.charge(turn, draft.fill(turn, earlier(turn, started)))
            elif admission is not None and turn.warm:
                self._finish(turn, FinishReason.WARMED, now)  # best effort
            elif turn.ahead:
                turn.ahead, lacking.may_admit = False, False  # best effort, too
            else:
                lacking.add(turn, admission, turn is self.preemption.claimant)
        self._plan_streamed(draft, lacking, now)
        return lacking.required_pages

    def _preempt(self, now: float) -> None:
        """Turns that run give way to the one that is next, if it is entitled to their places."""
        if self.preemption.is_out_of_question(self.suspended):
            return
        running = [turn for turn in self.running.values() if self._keeps_place(turn)]
        started = [turn for turn in running if turn.is_prefill]
        first = self._waiting.who_may_preempt(started)
        for victim in self.preemption.who_gives_way(first, running):
            claimant = self.preemption.claimant
            assert claimant is not None
            self._num_arrivals += 1
            if not victim.ahead:  # else it had no place
                self.counters.preemptions += 1
                victim.give_way(claimant, self._num_arrivals)
            self._suspend(victim, now)

    def _launched(self, draft: IterationDraft, swap_outs: list[SwapOut], now: float) -> Iteration:
        self._index += 1
        draft.predicted_seconds = self._time_budget.planned(draft, now)
        self._room.planned(draft, now)
        self.streaming.planned(draft, now)
        news = self._started, self._forgotten
        iteration = draft.iteration(self._index, swap_outs, *news, self._groups)
        self._started.clear()
        self._forgotten.clear()
        self._uncommitted.append((iteration, draft))
        self.counters.planned(draft)
        return iteration

    def commit(
        self, iteration: Iteration, outcome: Outcome, now: float
    ) -> list[SampledToken | Ended]:
        """Take in what the executor answered to the oldest uncommitted iteration.

        Tokens of turns that go on or end with them, and ends, in the order in which they are to be sent.
        """
        oldest, draft = self._uncommitted.popleft()
        assert oldest is iteration, "iterations are committed in order"
        self._time_budget.committed(now)
        self._room.committed(now)
        self.streaming.committed(now)
        self.cache.release_sources(draft.sources, now)
        for copy_id in outcome.finished_copies:
            self.cache.finish_copy(copy_id, now)
        news: list[SampledToken | Ended] = []
        for turn in draft.turns:
            turn.num_uncommitted -= 1
        for failure in outcome.failures:
            turn = self._turns[failure.turn_id]
            self._discard(turn, now)  # also when it was cancelled meanwhile
            if turn.finish is None:
                turn.keep_tokens = turn.history_tokens
                self._finish(turn, FinishReason.FAILED, now)
                self.counters.failed += 1
                news.append(Ended(turn, FinishReason.FAILED, failure.reason))
        for sample in outcome.samples:
            turn = self._turns[sample.turn_id]
            turn.pending_tokens -= 1
            if turn.finish is not None:  # it ended while this was computed
                self.counters.idle_tokens += 1
                continue
            turn.tokens.append(sample.token_id)
            turn.usage.output_tokens += 1
            self.queued.charge(turn, 1)
            if turn.usage.first_token_at is None:
                turn.usage.first_token_at = now
            at_length = FinishReason.LENGTH if turn.ends_at(len(turn.tokens)) else None
            finish = FinishReason.STOP if sample.stopped else at_length
            news.append(sample)
            if finish is not None:
                self._finish(turn, finish, now)
                news.append(Ended(turn, finish))
        while self._disturbed:
            if self._keeps_place(turn := self._disturbed.pop()):
                self._suspend(turn, now)
        for turn in list(self._releasing.values()):
            if not turn.num_uncommitted:
                del self._releasing[turn.turn_id]
                self._release(turn, now)
        return news

    def _end_complete(self, now: float) -> None:
        """A warm ends when its context is complete, a turn that runs ahead is ready with its prompt."""
        for turn in [each for each in self.running.values() if not each.num_uncommitted]:
            if turn.warm and turn.frontier >= len(turn.tokens):
                self._finish(turn, FinishReason.WARMED, now)
            elif turn.is_computed_ahead:
                self._release(turn, now)

    # -- taking and giving pages --

    def _admit(
        self, turn: Turn, now: float, filled_before: dict[Chunk, int], streamed: bool = False
    ) -> Admission | Shortage | None:
        """Admitted, or what has to become available first; None: wait for a commit."""
        conversation = self.cache.conversations.get(turn.conversation_id)
        if conversation is not None and conversation.turn_id is not None:
            return None  # the turn before it has an uncommitted slice
        reserve = self.cache.config.reserve_pages if self.running else 0
        if turn is self.preemption.claimant:
            reserve = 0  # the pages of those that gave way are on their way to it
        if turn.warm or turn.ahead:
            reserve = self.cache.config.swap_out_mark_pages
        if turn.is_background:
            reserve += self.streaming.required_pages
        found: Admission | Shortage | None
        if streamed:
            found = self.cache.begin_streamed(turn, now, filled_before)
        else:
            found = self.cache.begin(turn, now, reserve, filled_before)
        if not isinstance(found, Admission):
            return found
        self.counters.streamed += streamed
        if turn.state is not TurnState.QUEUED:
            self.counters.resumptions += turn.state is TurnState.SUSPENDED
            self.suspended.remove(turn)
        else:
            self.queued.admit(turn)
            self._started.append(start_of(turn))
            turn.first_admitted(found.device_tokens, found.host_tokens, now)
        self.preemption.began(turn)
        turn.moved_back, turn.outputs_before = False, turn.num_output_tokens
        turn.move_to(TurnState.RUNNING)
        self.running[turn.turn_id] = turn
        self._trust_copy(found)
        return found

    def _extend(self, turn: Turn, now: float) -> bool:
        """A page for the turn's next chunk; may suspend the last turn in queue order for it."""
        while not self.cache.extend(turn, now):
            if turn.streamed:
                self._suspend(turn, now)
                return False
            if self.cache.relief_expected(now) or self._releasing:
                return False
            victim = who_is_suspended([each for each in self.running.values() if not each.streamed])
            self._suspend(victim, now)
            if victim is turn or victim.turn_id in self._releasing:
                return False
        return True

    def _suspend(self, turn: Turn, now: float, counted: bool = True) -> None:
        counted = counted and not turn.ahead
        self.counters.suspensions += counted
        turn.usage.suspensions += counted
        if turn.warm:
            self._finish(turn, FinishReason.WARMED, now)
        elif turn.num_uncommitted:
            self._releasing[turn.turn_id] = turn
        else:
            self._release(turn, now)

    def _finish(self, turn: Turn, reason: FinishReason, now: float) -> None:
        """End the turn; its pages are released when no slice of it is uncommitted."""
        turn.finish = reason
        turn.usage.finished_at = now
        self.counters.finished += 1
        if reason in (FinishReason.CANCELLED, FinishReason.WARMED):  # of which no outcome tells
            self._ended.append(Ended(turn, reason))
        if turn.usage.admitted_at is not None:
            self._forgotten.append(turn.turn_id)
        if turn.num_uncommitted:
            self._releasing[turn.turn_id] = turn
        else:
            self._releasing.pop(turn.turn_id, None)
            self._release(turn, now)

    def _release(self, turn: Turn, now: float) -> None:
        """Give up the turn's pages: it is suspended, or it has ended."""
        was, rests = turn.state, TurnState.SUSPENDED
        if was is TurnState.RUNNING:
            if turn.is_computed_ahead and turn.finish is None:
                rests = TurnState.READY
                self.counters.readied += 1
            del self.running[turn.turn_id]
            keep = len(turn.tokens) + 1 if turn.keep_tokens is None else turn.keep_tokens
            turn.computed_to = max(turn.computed_to, turn.frontier)
            away_seconds = turn.options.away_seconds if turn.finish is not None else 0.0
            self.cache.end(turn, now, keep, away_seconds)
        turn.frontier, turn.ahead = 0, False
        self.preemption.ended(turn)
        if turn.finish is None:
            turn.move_to(rests)
            insort(self.suspended, turn, key=resume_order)
            return
        if was in (TurnState.SUSPENDED, TurnState.READY):
            self.suspended.remove(turn)
        elif was is TurnState.QUEUED:
            self.queued.remove(turn)
        turn.move_to(TurnState.FINISHED)
        self.queued.end(turn)
        turn.written.clear()
        del self._turns[turn.turn_id]
        self._num_background -= turn.is_background
        if was is not TurnState.RUNNING and turn.keep_tokens is not None:
            # One that was never admitted has computed nothing: what KV there is behind its history
            # belongs to a turn that is in no log, and its own prompt may join the log now.
            admitted = turn.usage.admitted_at is not None
            known = turn.keep_tokens if admitted else turn.history_tokens
            self.rewind(turn.conversation_id, min(turn.keep_tokens, known), now)
        self._edits.carry_out(turn.conversation_id, now)
