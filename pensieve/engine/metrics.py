"""Figures of an engine, by name: counts of its work (`Metrics`), and times of its turns (`TurnTimes`).

    gap           from a token of a reply to the next token, including suspensions
    first token   from a turn's SubmitTurn to its first token
    stall         a gap longer than STALL_RATIO times the median gap of the latest five minutes, and longer
                  than the objective if there is one
    suspension    from the suspension of a turn until the turn runs again or ends; counted when it is over
    error         |predicted time - real time| / real time of an iteration; the latest ERRORS_KEPT are kept

All figures except stalls and errors cover the latest five minutes (distributions.py). Times are taken in the
engine when an outcome is committed, so the times of pipe, service and network do not count.

Times are cheap to record. Nearly all turns that get a token in an iteration also got their previous tokens in
one iteration. So they have the same gap. A token costs one dictionary lookup. Each distinct gap is added to a
histogram once, which costs a logarithm. Suspended turns are checked in each iteration; usually there are
none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from pensieve.core.iteration import Iteration, Outcome, SampledToken
from pensieve.core.scheduler import Scheduler
from pensieve.core.turn import FinishReason, TurnState
from pensieve.engine.distributions import Histogram, RecentShare, RecentTimes
from pensieve.engine.messages import EngineEvent, EngineMessage, SubmitTurn, TurnEnded

ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
TURNS_WAITING = ("queued", "suspended")  # names in the figures, after `turns_`
STALL_RATIO = 5
MEDIAN_SECONDS = 1.0  # between two updates of the median gap
ERRORS_KEPT = 512


class Metrics:
    """An observer that counts the engine's work."""

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._scheduler = scheduler
        self._started_at = now
        # Returns further figures, for example figures of the executor.
        self.more: Callable[[], dict[str, float]] = dict
        self._by_finish = dict.fromkeys(FinishReason, 0)
        self._new_tokens = 0
        self._device_tokens = 0
        self._shared_tokens = 0
        self._host_tokens = 0
        self._recomputed_tokens = 0
        self._output_tokens = 0
        self._slots_out = 0
        self._slots_in = 0
        self._slots_copied = 0
        self._num_computed = 0  # tokens, up to the last planned iteration
        self._iteration_tokens = Histogram(ITERATION_TOKENS)

    # -- Observer --

    def received(self, message: EngineMessage, now: float) -> None:
        return

    def planned(self, iteration: Iteration | None, now: float) -> None:
        if iteration is None:
            return
        self._slots_out += sum(copy.num_slots for copy in iteration.swap_outs)
        self._slots_in += sum(copy.num_slots for copy in iteration.swap_ins)
        self._slots_copied += sum(copy.num_slots for copy in iteration.copies)
        previous, self._num_computed = self._num_computed, self._scheduler.counters.tokens
        if self._num_computed > previous:  # an iteration may have only copies
            self._iteration_tokens.add(self._num_computed - previous)

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        return

    def published(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, TurnEnded):
                self._by_finish[event.finish] += 1
                usage = event.usage
                self._new_tokens += usage.new_tokens
                self._device_tokens += usage.device_tokens
                self._shared_tokens += usage.shared_tokens
                self._host_tokens += usage.host_tokens
                self._recomputed_tokens += usage.recomputed_tokens
                self._output_tokens += usage.output_tokens

    # -- reading --

    def figures(self, now: float) -> dict[str, float]:
        scheduler, cache = self._scheduler, self._scheduler.cache
        counters, cache_counters = scheduler.counters, cache.counters
        seconds = max(now - self._started_at, 1e-9)
        figures: dict[str, float] = {
            "seconds": seconds,
            "device_pages": cache.device.num_pages,
            "device_pages_free": cache.device.num_empty,
            "device_pages_clean": cache.tiers.num_reclaimable,
            "host_pages": cache.host.num_pages,
            "host_pages_free": cache.host.num_empty,
            "conversations_cached": len(cache.conversations),
            "turns_running": len(scheduler.running),
            "turns_suspended": len(scheduler.suspended),
            "turns_queued": len(scheduler.queued),
            "new_tokens": self._new_tokens,
            "device_tokens": self._device_tokens,
            "shared_tokens": self._shared_tokens,
            "host_tokens": self._host_tokens,
            "recomputed_tokens": self._recomputed_tokens,
            "output_tokens": self._output_tokens,
            "tokens_swapped_out": self._slots_out,
            "tokens_swapped_in": self._slots_in,
            "tokens_copied_on_write": self._slots_copied,
            "iterations": counters.iterations,
            "iterations_per_second": counters.iterations / seconds,
            "tokens_computed": counters.tokens,
            "tokens_per_iteration": counters.tokens / max(counters.iterations, 1),
            "tokens_computed_again": counters.recomputed_tokens,
            "tokens_idle": counters.idle_tokens,
            "ranges_repaired_at_once_max": counters.repaired_ranges_max,
            "suspensions": counters.suspensions,
            "resumptions": counters.resumptions,
            "preemptions": counters.preemptions,
            "turns_streamed": sum(turn.streamed for turn in scheduler.running.values()),
            "streamed": counters.streamed,
            "returned_to_device": counters.returned,
            "rows_padded": 0,
            "tenant_tokens.": 0,  # of turns without a tenant
            "chunks_swapped_out": cache_counters.swapped_out,
            "chunks_swapped_in": cache_counters.swapped_in,
            "chunks_reclaimed": cache_counters.reclaimed,
            "chunks_found_before_reclaim": cache_counters.reclaim_hits,
            "chunks_dropped": cache_counters.dropped,
            "chunks_marked_to_drop": cache_counters.marked_to_drop,
            "chunks_copied_on_write": cache_counters.copied_on_write,
            "chunks_discarded": cache_counters.discarded,
            "chunks_damaged": cache_counters.damaged,
            "chunks_adopted": cache_counters.adopted,
        }
        for reason, count in self._by_finish.items():
            figures[f"turns_{reason.value}"] = count
        figures |= self._iteration_tokens.figures("iteration_tokens")
        for share, num_tokens in scheduler.queued.tokens_by_share.items():
            figures[f"tenant_tokens.{share}"] = num_tokens
        figures |= self.more()
        padded = figures["rows_padded"]
        idle = counters.idle_tokens + padded
        figures["idle_share"] = idle / max(counters.tokens + padded, 1)
        return figures


class TurnTimes:
    """An observer that measures the times of turns."""

    def __init__(self, scheduler: Scheduler, ttft_seconds: float = 0.0) -> None:
        self._scheduler = scheduler
        self._tbt, self._ttft = scheduler.config.tbt_seconds, ttft_seconds
        self._gaps = RecentTimes(self._tbt or math.inf)
        self._first_tokens = RecentTimes(self._ttft or math.inf)
        self._suspensions = RecentTimes()
        self._budget = RecentShare()
        self._errors = PredictionErrors()
        self._num_stalls = 0
        self._median, self._median_due = 0.0, -math.inf
        self._received_at: dict[int, float] = {}  # turns without a token
        self._token_at: dict[int, float] = {}  # time of each turn's latest token
        self._background: set[int] = set()  # turns of jobs
        self._suspended_at: dict[int, float] = {}
        self._num_tokens = 0  # computed, up to the last planned iteration
        self._planned: deque[tuple[float, float]] = deque()  # uncommitted: (planned at, prediction)
        self._committed_at = -math.inf

    # -- Observer --

    def received(self, message: EngineMessage, now: float) -> None:
        if not isinstance(message, SubmitTurn) or message.warm:
            return
        if message.options.background:  # no client waits for its tokens
            self._background.add(message.attempt_id)
        else:
            self._received_at[message.attempt_id] = now

    def planned(self, iteration: Iteration | None, now: float) -> None:
        scheduler = self._scheduler
        if scheduler.suspended or self._suspended_at:
            self._update_suspensions(now)
        if iteration is not None:
            self._planned.append((now, iteration.predicted_seconds))
            num_tokens, previous = scheduler.counters.tokens, self._num_tokens
            if num_tokens > previous:
                self._budget.add(num_tokens - previous, scheduler.config.batch_tokens_max, now)
                self._num_tokens = num_tokens

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        planned_at, predicted = self._planned.popleft()
        measured = now - max(planned_at, self._committed_at)
        self._committed_at = now
        self._errors.add(predicted, measured)

    def published(self, events: Sequence[EngineEvent]) -> None:
        """Record tokens.

        Tokens are published right after `committed`, so the time of that call counts as their time.
        """
        now, token_at = self._committed_at, self._token_at
        num_since: dict[float, int] = {}  # number of gaps, by the time of the previous token
        for event in events:
            if isinstance(event, SampledToken):
                attempt_id = event.attempt_id
                if attempt_id in self._background:
                    continue
                previous_at = token_at.get(attempt_id)
                token_at[attempt_id] = now
                if previous_at is not None:
                    num_since[previous_at] = num_since.get(previous_at, 0) + 1
                elif (received_at := self._received_at.pop(attempt_id, None)) is not None:
                    self._first_tokens.add(now - received_at, now)
            elif isinstance(event, TurnEnded):
                self._received_at.pop(event.attempt_id, None)
                self._background.discard(event.attempt_id)
                token_at.pop(event.attempt_id, None)
        for previous_at, count in num_since.items():
            self._add_gap(now - previous_at, count, now)

    # -- reading --

    def figures(self, now: float) -> dict[str, float]:
        gaps, first, suspended = (
            each.spread(now) for each in (self._gaps, self._first_tokens, self._suspensions)
        )
        p50, p90 = self._errors.quantiles(0.5, 0.9)
        figures = {
            "tbt_count": gaps.count,
            "tbt_p50_seconds": gaps.p50,
            "tbt_p99_seconds": gaps.p99,
            "ttft_count": first.count,
            "ttft_p50_seconds": first.p50,
            "ttft_p99_seconds": first.p99,
            "stalls": self._num_stalls,
            "suspended_count": suspended.count,
            "suspended_p50_seconds": suspended.p50,
            "suspended_p99_seconds": suspended.p99,
            "iterations_predicted": len(self._errors),
            "iteration_error_p50": p50,
            "iteration_error_p90": p90,
            "token_budget_used": self._budget.share(now),
        }
        if self._tbt:
            figures["tbt_objective_seconds"] = self._tbt
            figures["tbt_attained"] = self._gaps.attained(now)
        if self._ttft:
            figures["ttft_objective_seconds"] = self._ttft
            figures["ttft_attained"] = self._first_tokens.attained(now)
        return figures

    # -- inside --

    def _add_gap(self, seconds: float, count: int, now: float) -> None:
        if now >= self._median_due:
            self._median, self._median_due = self._gaps.spread(now).p50, now + MEDIAN_SECONDS
        if self._median and seconds > max(STALL_RATIO * self._median, self._tbt):
            self._num_stalls += count
        self._gaps.add(seconds, now, count)

    def _update_suspensions(self, now: float) -> None:
        for turn in self._scheduler.suspended:
            if turn.state is TurnState.SUSPENDED and not turn.is_background:
                self._suspended_at.setdefault(turn.attempt_id, now)
        for attempt_id, since in list(self._suspended_at.items()):
            found = self._scheduler.turn(attempt_id)
            if found is None or found.state is not TurnState.SUSPENDED:
                self._suspensions.add(now - since, now)
                del self._suspended_at[attempt_id]


class PredictionErrors:
    """Relative errors of the predicted times of the latest iterations."""

    def __init__(self, num_kept: int = ERRORS_KEPT) -> None:
        self._errors: deque[float] = deque(maxlen=num_kept)

    def __len__(self) -> int:
        return len(self._errors)

    def add(self, predicted: float, measured: float) -> None:
        """Add an iteration, unless it had no prediction or took no time."""
        if predicted and measured > 0.0:
            self._errors.append(abs(predicted - measured) / measured)

    def quantiles(self, *shares: float) -> list[float]:
        """Return quantiles of the errors; zeros if there are no errors."""
        errors = sorted(self._errors) or [0.0]
        return [errors[max(math.ceil(share * len(errors)) - 1, 0)] for share in shares]
