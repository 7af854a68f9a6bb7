"""What runs next: one unified batch per iteration, filled under a token budget.

The order of filling: every turn that is generating (one token each), then started prefills, then
suspended turns that come back, then new turns, each in the order of their places: first come first
served, but for priorities (`Turn.arrive`).  A prefill, a recomputed
hole and a decode are the same thing, slices of a turn; a turn's work is always spent from its lowest
missing position upward, so when a slice is launched every position before its end is on the device,
on its way there in this iteration, or in a slice of this iteration.

A missing chunk that several turns share is computed by whichever is planned first: planning a slice
raises `chunk.filled`, and the others find it done.

Suspension.  A generating turn that needs a page when none is available waits one iteration if idle
pages are being copied out anyway; otherwise the running turn with the last place (warms first) gives
its pages up.  It keeps every token and every chunk that nobody takes meanwhile, and resumes ahead of the
queue.

`plan` may be called while one iteration is uncommitted.  A token that it will sample is then planned
for as if it were known (`pending_tokens`; the executor resolves it); if the turn turns out finished,
that slice was computed for nothing and is counted in `idle_tokens`.  A turn with an uncommitted slice
keeps its pages: cancelling, suspending and finishing take effect when the last such slice is committed.

Liveness: the head of the queue is admitted as soon as the pages for its whole context are available,
a bounded number of later ones overtakes it, every idle page can become available (cache.py), and
running turns end.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from pensieve.core.cache import Admission, KVCache
from pensieve.core.iteration import (
    Iteration,
    Outcome,
    PageCopy,
    SampledToken,
    Slice,
    SwapIn,
    TurnStart,
)
from pensieve.core.prefix_tree import Chunk
from pensieve.core.turn import FinishReason, Turn, TurnState

PLACE = attrgetter("place")


@dataclass(frozen=True)
class SchedulerConfig:
    batch_tokens_max: int = 512  # tokens of one iteration
    turns_max: int = 256  # running at once

    def __post_init__(self) -> None:
        if self.batch_tokens_max < 1 or self.turns_max < 1:
            raise ValueError("batch_tokens_max and turns_max are at least 1")


@dataclass
class SchedulerCounters:
    iterations: int = 0
    tokens: int = 0  # positions computed
    recomputed_tokens: int = 0  # of them, positions whose KV had been there before
    repaired_ranges_max: int = 0  # most disconnected slices of one turn in one iteration
    suspensions: int = 0
    resumptions: int = 0
    idle_tokens: int = 0  # computed for a turn that had already finished
    finished: int = 0
    failed: int = 0


class Progress(NamedTuple):
    """Something a turn's reader is told: a token, the end, or both."""

    turn: Turn
    token: SampledToken | None
    finish: FinishReason | None
    failure: str | None = None


class _Uncommitted(NamedTuple):
    iteration: Iteration
    turns: list[Turn]  # with a slice in it, each once
    sources: list[Chunk]  # of its page copies


class Scheduler:
    def __init__(self, cache: KVCache, config: SchedulerConfig) -> None:
        self.cache = cache
        self.config = config
        self.counters = SchedulerCounters()
        self.running: dict[int, Turn] = {}  # in order of admission
        self.suspended: deque[Turn] = deque()
        self.queued: deque[Turn] = deque()
        self._turns: dict[int, Turn] = {}  # every turn that has not ended
        self._leaving: dict[int, Turn] = {}  # ended or to be suspended, with uncommitted slices
        self._uncommitted: deque[_Uncommitted] = deque()
        self._ended: list[Progress] = []  # ends that no outcome brings
        self._started: list[TurnStart] = []  # since the last iteration
        self._forgotten: list[int] = []  # turns that have ended since the last iteration
        self._cuts: dict[str, int] = {}  # rewinds that wait for an uncommitted slice
        self._evictions: dict[str, bool] = {}  # evictions that do, and whether to the host
        self._num_arrivals = 0
        self._index = 0
        self._size = cache.config.chunk_tokens

    # -- what happens to a scheduler --

    def submit(self, turn: Turn, now: float) -> None:
        assert turn.turn_id not in self._turns, f"turn {turn.turn_id} was submitted twice"
        assert turn.warm or turn.prompt_end > turn.history_tokens, (
            "a turn brings at least one token"
        )
        assert turn.prompt_end == len(turn.tokens)
        self._num_arrivals += 1
        turn.arrive(self._num_arrivals)
        turn.usage.submitted_at = now
        self._turns[turn.turn_id] = turn
        insort(self.queued, turn, key=PLACE)

    def cancel(self, turn_id: int, keep_tokens: int, now: float) -> None:
        """End a turn; its conversation keeps the KV of the first `keep_tokens` positions."""
        turn = self._turns.get(turn_id)
        if turn is None or turn.finish is not None:
            return
        turn.keep_tokens = keep_tokens
        self._finish(turn, FinishReason.CANCELLED, now)
        self._ended.append(Progress(turn, None, FinishReason.CANCELLED))

    def rewind(self, conversation_id: str, num_tokens: int, now: float) -> None:
        """Cut a conversation; one whose last turn has an uncommitted slice is cut after it."""
        conversation = self.cache.conversations.get(conversation_id)
        if conversation is not None and conversation.turn_id is not None:
            assert conversation.turn_id in self._leaving, "a running turn is cancelled first"
            cut = self._cuts.get(conversation_id, num_tokens)
            self._cuts[conversation_id] = min(cut, num_tokens)
        else:
            self.cache.rewind(conversation_id, num_tokens, now)

    def delete(self, conversation_id: str, now: float) -> None:
        turn = self.turn_of(conversation_id)
        if turn is not None:
            self.cancel(turn.turn_id, 0, now)
        self.rewind(conversation_id, 0, now)

    def evict(self, conversation_id: str, to_host: bool, now: float) -> int:
        """Give up a resting conversation's KV; one whose last turn has an uncommitted slice, after it.

        How many chunks go, as far as it is known now.
        """
        conversation = self.cache.conversations.get(conversation_id)
        if conversation is not None and conversation.turn_id in self._leaving:
            self._evictions[conversation_id] = to_host
            return sum(chunk.resident for chunk in conversation.chunks())
        leave = self.cache.move_to_host if to_host else self.cache.evict
        return leave(conversation_id, now)

    def plan(self, now: float) -> Iteration | None:
        """The next iteration, or None when there is nothing to do."""
        budget = self.config.batch_tokens_max
        slices: list[Slice] = []
        copies: list[PageCopy] = []
        swap_ins: list[SwapIn] = []
        sources: list[Chunk] = []
        before: dict[Chunk, int] = {}
        required_pages = 0

        turns: list[Turn] = []  # with a slice in this iteration
        prefills: list[Turn] = []
        size, leaving = self._size, self._leaving
        # Oldest first: whoever is suspended for a page has no slice in this iteration yet.
        for turn in sorted(self.running.values(), key=PLACE):
            if turn.state is not TurnState.RUNNING or turn.turn_id in leaving:
                continue
            num_tokens = len(turn.tokens) + turn.pending_tokens
            if turn.frontier < num_tokens - 1 or turn.warm:
                # Only one that generated already, and lost its KV to a failure, may need a page.
                if num_tokens > len(turn.chunks) * size and not self._extend(turn, now):
                    required_pages = 1
                    continue
                prefills.append(turn)
            elif budget and not (turn.pending_tokens and turn.ends_at(num_tokens)):
                if num_tokens > len(turn.chunks) * size:
                    if not self._extend(turn, now):
                        required_pages = 1
                        continue
                    turn.written[turn.chunks[-1]] = None
                turn.chunks[-1].filled += 1
                turn.frontier = num_tokens
                turn.in_flight += 1
                turn.pending_tokens += 1
                turns.append(turn)
                slices.append(self._slice(turn, num_tokens - 1, num_tokens, True))
                budget -= 1
        for turn in prefills:
            if budget and turn.state is TurnState.RUNNING and turn.turn_id not in leaving:
                budget -= self._fill(turn, budget, slices, turns, before)

        while budget and (self.suspended or self.queued) and self._room():
            queue = self.suspended or self.queued
            turn = queue[0]
            found = self._admit(turn, now, before)
            if found is None:
                break
            if isinstance(found, int) and turn.warm:
                self._finish(turn, FinishReason.WARMED, now)  # best effort
                self._ended.append(Progress(turn, None, FinishReason.WARMED))
                continue
            if isinstance(found, int):
                required_pages = max(required_pages, found)
                break
            queue.popleft()
            copies += found.copies
            swap_ins += found.swap_ins
            sources += found.sources
            budget -= self._fill(turn, budget, slices, turns, before)
        num_ended = len(self._ended)
        self._retire_warms(now)
        available = self.cache.available
        swap_outs = [] if swap_ins else self.cache.plan_swap_outs(now, required_pages)
        if not (slices or copies or swap_ins or swap_outs):
            moving = self.cache.swap_ins_in_flight + self.cache.swap_outs_in_flight
            waiting = self.running or self.suspended or self.queued
            if not moving and not self._uncommitted and waiting:
                changed = self.cache.available > available or len(self._ended) > num_ended
                assert changed, "turns wait for nothing"
                return self.plan(now)  # pages became available without a copy
            if self._uncommitted or not moving:
                return None
        self._index += 1
        iteration = Iteration(
            self._index,
            tuple(slices),
            tuple(copies),
            tuple(swap_ins),
            tuple(swap_outs),
            tuple(self._started),
            tuple(self._forgotten),
        )
        self._started.clear()
        self._forgotten.clear()
        self._uncommitted.append(_Uncommitted(iteration, turns, sources))
        self.counters.iterations += 1
        self.counters.tokens += self.config.batch_tokens_max - budget
        return iteration

    def commit(self, iteration: Iteration, outcome: Outcome, now: float) -> list[Progress]:
        """Take in what the executor answered to the oldest uncommitted iteration."""
        oldest = self._uncommitted.popleft()
        assert oldest.iteration is iteration, "iterations are committed in order"
        self.cache.release_sources(oldest.sources, now)
        for copy_id in outcome.finished_copies:
            self.cache.finish_copy(copy_id, now)
        progress: list[Progress] = []
        for turn in oldest.turns:
            turn.in_flight -= 1
        for failure in outcome.failures:
            turn = self._turns[failure.turn_id]
            self._discard(turn, now)  # also when it was cancelled meanwhile
            if turn.finish is None:
                turn.keep_tokens = turn.history_tokens
                self._finish(turn, FinishReason.FAILED, now)
                self.counters.failed += 1
                progress.append(Progress(turn, None, FinishReason.FAILED, failure.reason))
        for sample in outcome.samples:
            turn = self._turns[sample.turn_id]
            turn.pending_tokens -= 1
            if turn.finish is not None:  # it ended while this was computed
                self.counters.idle_tokens += 1
                continue
            turn.tokens.append(sample.token_id)
            turn.usage.output_tokens += 1
            if turn.usage.first_token_at is None:
                turn.usage.first_token_at = now
            finish = None
            if sample.stopped:
                finish = FinishReason.STOP
            elif turn.ends_at(len(turn.tokens)):
                finish = FinishReason.LENGTH
            if finish is not None:
                self._finish(turn, finish, now)
            progress.append(Progress(turn, sample, finish))
        for turn in list(self._leaving.values()):
            if not turn.in_flight:
                del self._leaving[turn.turn_id]
                self._release(turn, now)
        return progress

    def drain_ended(self) -> list[Progress]:
        """Turns that ended without an outcome: cancelled, or warmed."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def turns(self) -> list[Turn]:
        """Every turn that has not had its last word."""
        return [turn for turn in self._turns.values() if turn.finish is None]

    def turn(self, turn_id: int) -> Turn | None:
        """A turn that has not given up its pages."""
        return self._turns.get(turn_id)

    def turn_of(self, conversation_id: str) -> Turn | None:
        """The conversation's turn that has not had its last word."""
        for turn in self._turns.values():
            if turn.conversation_id == conversation_id and turn.finish is None:
                return turn
        return None

    # -- filling --

    def _slice(self, turn: Turn, start: int, stop: int, needs_token: bool = False) -> Slice:
        return Slice(
            turn.turn_id,
            start,
            stop,
            turn.tokens[start:stop],
            turn.page_table[: -(-stop // self._size)],
            needs_token,
            needs_token and turn.ends_at(stop + 1),
        )

    def _fill(
        self,
        turn: Turn,
        budget: int,
        slices: list[Slice],
        turns: list[Turn],
        before: dict[Chunk, int],
    ) -> int:
        """Slices for the turn's missing positions, lowest first; how many tokens they take."""
        size, end = self._size, len(turn.tokens) + turn.pending_tokens
        position, left, num_ranges = turn.frontier, budget, 0
        start = None  # of the run of missing positions being gathered
        while position < end and left:
            chunk = turn.chunks[position // size]
            base = chunk.index * size
            limit = min(size, end - base)
            missing = base + chunk.filled
            if chunk.filled >= limit:
                if start is not None:
                    slices.append(self._slice(turn, start, position))
                    start = None
                position = base + limit
                continue
            if start is not None and missing > position:
                slices.append(self._slice(turn, start, position))
                start = None
            position = max(position, missing)
            if start is None:
                start = position
                num_ranges += 1
            taken = min(base + limit - position, left)
            before.setdefault(chunk, chunk.filled)
            turn.written[chunk] = None
            chunk.filled += taken
            if position < turn.computed_to:
                self.counters.recomputed_tokens += (
                    min(position + taken, turn.computed_to) - position
                )
            position += taken
            left -= taken
        if start is not None:
            needs_token = position == end and not turn.warm
            slices.append(self._slice(turn, start, position, needs_token))
            turn.pending_tokens += needs_token
        if left < budget:
            turn.in_flight += 1
            turns.append(turn)
        turn.frontier = position
        self.counters.repaired_ranges_max = max(self.counters.repaired_ranges_max, num_ranges)
        return budget - left

    def _retire_warms(self, now: float) -> None:
        """A warm ends when its context is complete."""
        for turn in [turn for turn in self.running.values() if turn.warm]:
            if turn.frontier >= len(turn.tokens) and not turn.in_flight:
                self._finish(turn, FinishReason.WARMED, now)
                self._ended.append(Progress(turn, None, FinishReason.WARMED))

    # -- taking and giving pages --

    def _room(self) -> bool:
        return len(self.running) < min(self.config.turns_max, self.config.batch_tokens_max)

    def _admit(self, turn: Turn, now: float, before: dict[Chunk, int]) -> Admission | int | None:
        """Admitted, or how many pages have to become available first; None: wait for a commit."""
        conversation = self.cache.conversations.get(turn.conversation_id)
        if conversation is not None and conversation.turn_id is not None:
            return None  # the turn before it has an uncommitted slice
        reserve = self.cache.config.reserve_pages if self.running else 0
        if turn.warm:
            reserve = self.cache.config.swap_out_mark_pages
        found = self.cache.begin(turn, now, reserve, before)
        if not isinstance(found, Admission):
            return found.required_pages
        resumed = turn.state is TurnState.SUSPENDED
        turn.move_to(TurnState.RUNNING)
        if resumed:
            self.counters.resumptions += 1
        else:
            self._started.append(TurnStart(turn.turn_id, turn.tokens[:], turn.options.sampling))
            turn.usage.admitted_at = now
            history_kv = max(turn.history_tokens - 1, 0)
            turn.computed_to = history_kv
            found_tokens = found.device_tokens + found.host_tokens
            turn.usage = replace(
                turn.usage,
                device_tokens=found.device_tokens,
                host_tokens=found.host_tokens,
                recomputed_tokens=history_kv - found_tokens,
                new_tokens=turn.prompt_end - history_kv,
            )
        self.running[turn.turn_id] = turn
        if found.copied is not None:  # the copy is trusted as far as what it copies
            source, target = found.copied
            for writer in self._turns.values():
                if source in writer.written:
                    writer.written[target] = None
        return found

    def _extend(self, turn: Turn, now: float) -> bool:
        """A page for the turn's next chunk; may suspend the turn with the last place for it."""
        while not self.cache.extend(turn, now):
            if self.cache.relief_expected(now) or self._leaving:
                return False
            victim = max(self.running.values(), key=lambda each: (each.warm, each.place))
            self._suspend(victim, now)
            if victim is turn or victim.turn_id in self._leaving:
                return False
        return True

    def _suspend(self, turn: Turn, now: float) -> None:
        self.counters.suspensions += 1
        turn.usage.suspensions += 1
        if turn.warm:
            self._finish(turn, FinishReason.WARMED, now)
            self._ended.append(Progress(turn, None, FinishReason.WARMED))
        elif turn.in_flight:
            self._leaving[turn.turn_id] = turn
        else:
            self._release(turn, now)

    def _finish(self, turn: Turn, reason: FinishReason, now: float) -> None:
        """The turn's last word; its pages follow when no slice of it is uncommitted."""
        turn.finish = reason
        turn.usage.finished_at = now
        self.counters.finished += 1
        if turn.usage.admitted_at is not None:
            self._forgotten.append(turn.turn_id)
        if turn.in_flight:
            self._leaving[turn.turn_id] = turn
        else:
            self._leaving.pop(turn.turn_id, None)
            self._release(turn, now)

    def _release(self, turn: Turn, now: float) -> None:
        """Give up the turn's pages: it is suspended, or it has ended."""
        was = turn.state
        if was is TurnState.RUNNING:
            del self.running[turn.turn_id]
            keep = len(turn.tokens) + 1 if turn.keep_tokens is None else turn.keep_tokens
            turn.computed_to = max(turn.computed_to, turn.frontier)
            away_seconds = turn.options.away_seconds if turn.finish is not None else 0.0
            self.cache.end(turn, now, keep, away_seconds)
        turn.frontier = 0
        if turn.finish is None:
            turn.move_to(TurnState.SUSPENDED)
            insort(self.suspended, turn, key=PLACE)
            return
        if was is TurnState.SUSPENDED:
            self.suspended.remove(turn)
        elif was is TurnState.QUEUED:
            self.queued.remove(turn)
        turn.move_to(TurnState.FINISHED)
        turn.written.clear()
        del self._turns[turn.turn_id]
        if was is not TurnState.RUNNING and turn.keep_tokens is not None:
            # One that was never admitted has computed nothing: what KV there is behind its history
            # belongs to a turn that is in no log, and its own prompt may join the log now.
            admitted = turn.usage.admitted_at is not None
            known = turn.keep_tokens if admitted else turn.history_tokens
            self.rewind(turn.conversation_id, min(turn.keep_tokens, known), now)
        conversation = self.cache.conversations.get(turn.conversation_id)
        if conversation is not None and conversation.turn_id is not None:
            return  # a turn that was still queued, and the one before it is leaving
        if (cut := self._cuts.pop(turn.conversation_id, None)) is not None:
            self.cache.rewind(turn.conversation_id, cut, now)
        if (to_host := self._evictions.pop(turn.conversation_id, None)) is not None:
            self.evict(turn.conversation_id, to_host, now)

    def _discard(self, turn: Turn, now: float) -> None:
        for chunk in self.cache.discard(turn, now):
            for other in self.running.values():
                if chunk.index < len(other.chunks) and other.chunks[chunk.index] is chunk:
                    other.frontier = min(other.frontier, chunk.index * self._size)

    # -- the audit --

    def check(self, now: float) -> None:
        self.cache.check(now)
        for state, turns in (
            (TurnState.RUNNING, list(self.running.values())),
            (TurnState.SUSPENDED, list(self.suspended)),
            (TurnState.QUEUED, list(self.queued)),
        ):
            for turn in turns:
                assert turn.state is state, f"turn {turn.turn_id} is {turn.state}, not {state}"
                assert self._turns.get(turn.turn_id) is turn, f"turn {turn.turn_id} is unknown"
        assert len(self._turns) == len(self.running) + len(self.suspended) + len(self.queued)
        assert set(self._leaving) <= set(self.running), "a turn leaves that does not run"
        for turn in self.running.values():
            conversation = self.cache.conversations[turn.conversation_id]
            assert conversation.turn_id == turn.turn_id, f"{conversation} does not know its turn"
            held = conversation.chunks()
            assert turn.chunks == held, f"turn {turn.turn_id} and its conversation disagree"
            pages = [chunk.device_page for chunk in held]
            assert turn.page_table.tolist() == pages, "a page moved"
            position = 0
            for chunk in turn.chunks:
                end = min((chunk.index + 1) * self._size, turn.frontier)
                assert chunk.index * self._size + chunk.filled >= end, (
                    f"turn {turn.turn_id} believes that {chunk} is filled up to {turn.frontier}"
                )
                position = end
            assert turn.frontier <= position or not turn.chunks
        running_ids = {turn.turn_id for turn in self.running.values()}
        for conversation in self.cache.conversations.values():
            assert conversation.turn_id is None or conversation.turn_id in running_ids
            if conversation.turn_id is None:
                known = len(conversation.log)
                assert known >= conversation.num_tokens, f"{conversation} has a log of {known}"


def tokens_of(ids: Iterable[int]) -> array[int]:
    """Token ids as a turn keeps them (packed uint32)."""
    return array("I", ids)
