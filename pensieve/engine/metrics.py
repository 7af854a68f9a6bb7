"""Counts what the engine has done, as figures by name (an observer)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import nlargest, nsmallest

from pensieve.core.cache import KVCache
from pensieve.core.iteration import Iteration, Outcome
from pensieve.core.scheduler import Scheduler
from pensieve.core.turn import FinishReason
from pensieve.engine.histogram import Histogram
from pensieve.engine.messages import Event, Message, TurnEnded

ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
TURNS_WAITING = ("queued", "suspended")  # in the figures, behind `turns_`


class Metrics:
    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._scheduler = scheduler
        self._started_at = now
        self.more: Callable[[], dict[str, float]] = dict  # figures of what else there is
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
        self._num_computed = 0  # tokens, up to the last iteration that was planned
        self._iteration_tokens = Histogram(ITERATION_TOKENS)

    # -- Observer --

    def received(self, message: Message, now: float) -> None:
        return

    def planned(self, iteration: Iteration | None, now: float) -> None:
        if iteration is None:
            return
        self._slots_out += sum(copy.num_slots for copy in iteration.swap_outs)
        self._slots_in += sum(copy.num_slots for copy in iteration.swap_ins)
        self._slots_copied += sum(copy.num_slots for copy in iteration.copies)
        before, self._num_computed = self._num_computed, self._scheduler.counters.tokens
        if self._num_computed > before:  # else it only copies
            self._iteration_tokens.add(self._num_computed - before)

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        return

    def published(self, events: Sequence[Event]) -> None:
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
        counters, moves = scheduler.counters, cache.counters
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
            "tenant_tokens.": 0,  # of no tenant
            "chunks_swapped_out": moves.swapped_out,
            "chunks_swapped_in": moves.swapped_in,
            "chunks_reclaimed": moves.reclaimed,
            "chunks_found_before_reclaim": moves.reclaim_hits,
            "chunks_dropped": moves.dropped,
            "chunks_marked_to_drop": moves.marked_to_drop,
            "chunks_copied_on_write": moves.copied_on_write,
            "chunks_discarded": moves.discarded,
            "chunks_damaged": moves.damaged,
            "chunks_adopted": moves.adopted,
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


def cached(
    cache: KVCache, limit: int, least_valuable: bool, now: float
) -> tuple[tuple[str | float, ...], ...]:
    """A row for each conversation: id, device, host and dropped tokens, idle seconds, value, running.

    Visits every cached chunk, so it is for an operator's query and not for every second.
    """
    rows: list[tuple[str | float, ...]] = []
    size = cache.config.chunk_tokens
    for conversation in cache.conversations.values():
        tokens = {"device": 0, "device+host": 0, "host": 0, "dropped": 0}
        for chunk in conversation.chunks():
            tokens[chunk.location] += chunk.filled if chunk.resident else size
        on_device = tokens["device"] + tokens["device+host"]
        running = conversation.turn_id is not None
        idle = 0.0 if running else now - conversation.idle_since
        value = cache.retention_value(conversation, now)
        rows.append(
            (
                conversation.conversation_id,
                on_device,
                tokens["host"],
                tokens["dropped"],
                idle,
                math.inf if value is None else value,
                float(running),
            )
        )
    if least_valuable:
        found = nsmallest(limit, rows, key=lambda row: row[5])
    else:
        found = nlargest(limit, rows, key=lambda row: float(row[1]) + float(row[2]))
    return tuple(found)


def usage(cache: KVCache, conversation_id: str, now: float) -> dict[str, float]:
    """Whether a turn of a cached conversation runs, or else since when none does; nothing of another."""
    conversation = cache.conversations.get(conversation_id)
    if conversation is None:
        return {}
    if conversation.turn_id is not None:
        return {"running": 1.0}
    return {"idle_seconds": now - conversation.idle_since}
