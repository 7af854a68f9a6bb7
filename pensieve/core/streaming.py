"""Which turns stream their contexts from the host, because the device has no room for them.

Only attention needs KV on the device, so tokens of more turns than fit may share an iteration: what is read
once for all of them, the weights, is the largest part of it while few turns generate.  A streamed turn brings
its pages' copies into every iteration.  So it pays as long as another turn adds less to an iteration than its
share of it:

    (n + 1) / seconds(with it) > n / seconds(without)         seconds = max(computing, copying)

where n turns run, and `auto` streams a turn that waits for pages while that holds by GAIN, and while all that
generate meet the objective for the time between tokens, if there is one (`--tbt`; a background turn gets what
the others leave free, so it limits nothing).  `on` streams whatever it can, `off` nothing.

**Measured.**  How well copies hide behind computing depends on the machine: on a CPU the copier takes time of
the cores that compute.  So iterations with and without streamed turns have a factor each, the median of
measured over predicted seconds of the last few.  As soon as the streamed ones deliver fewer tokens a second
than the resident turns alone are predicted to, streaming stops, for RETRY_AFTER iterations.

**Back to the device.**  When nobody waits any more, and pages are available, the largest streamed turn that
fits gives up its place and is admitted again, with pages of the device (`who_returns`), one an iteration.
For the smallest, idle pages are made available ahead.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from pensieve.core.cache_config import CacheConfig
from pensieve.core.fair_queue import FairQueue
from pensieve.core.iteration_draft import IterationDraft
from pensieve.core.lacking import Lacking
from pensieve.core.prefill_order import may_join, next_waiting
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import Turn

GAIN = 1.05
NUM_KEPT = 7
RETRY_AFTER = 256
TRIES_MAX = 8  # turns that are looked at in vain, in one plan


class _Planned(NamedTuple):
    at: float
    predicted: float  # 0: nothing is learned from it
    is_streamed: bool


class _Load(NamedTuple):
    """What an iteration holds in which all of some turns generate."""

    num_turns: int
    num_positions: int
    num_pages: int  # that are copied

    def with_turn(self, turn: Turn, num_pages: int) -> _Load:
        return _Load(
            self.num_turns + 1, self.num_positions + len(turn.tokens), self.num_pages + num_pages
        )


class Streaming:
    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        possible = cache.staging_pages > 0 and cache.host_pages > 0
        self.mode = config.stream if possible else "off"
        self._size, self._pages_max = cache.chunk_tokens, cache.staging_pages
        self._device_pages, self._reserve_pages = cache.device_pages, cache.reserve_pages
        self._config, self._tbt = config, config.tbt_seconds
        self._factors: dict[bool, deque[float]] = {  # of iterations with and without streamed turns
            each: deque(maxlen=NUM_KEPT) for each in (True, False)
        }
        self._uncommitted: deque[_Planned] = deque()
        self._committed_at = float("-inf")
        self._paused = 0  # so many iterations without
        self.required_pages = 0  # for one that could return
        self.lacked = False  # somebody lacked pages in the last plan

    # -- who begins, who stops --

    def who_may(
        self,
        suspended: Iterable[Turn],
        queued: FairQueue,
        running: Collection[Turn],
        draft: IterationDraft,
        background: bool,
        has_place: Callable[[Turn, Collection[Turn]], bool],
        room_beside: Callable[[Collection[Turn]], Callable[[Turn], tuple[int, int]]],
    ) -> Iterator[Turn]:
        """Of the turns that wait, those for which it pays, one after the other; each may begin to run.

        One that fits the device beside these, as soon as idle pages are copied out, waits for that.
        """
        if self.mode == "off" or self._paused:
            return
        started = [turn for turn in running if turn.is_prefill and not turn.ahead]
        tried: list[Turn] = []

        def may_come(turn: Turn) -> bool:
            return turn.is_background == background and not turn.warm and may_join(turn, started)

        def waiting() -> Iterator[Turn]:
            yield from filter(may_come, list(suspended))
            while (turn := next_waiting((), queued, may_come, tried)) is not None:
                yield turn

        load, pages_for = self._load_of(running), room_beside(running)
        for turn in waiting():
            if len(tried) >= TRIES_MAX or not draft.has_room():
                return
            if not has_place(turn, running):
                return
            num_pages, pages_left = pages_for(turn)
            if num_pages + self._reserve_pages > pages_left and self._pays(turn, load):
                yield turn
            if turn.streamed:
                load = load.with_turn(turn, num_pages)
            else:
                tried.append(turn)

    def saw(self, lacking: Lacking) -> None:
        """Of interactive turns, then of background turns: who lacks pages in this plan."""
        self.lacked = bool(lacking.turns) or (lacking.background and self.lacked)

    def who_stops(self, running: Collection[Turn]) -> list[Turn]:
        """Streamed turns, if it does not pay."""
        if self._paused:
            self._paused -= 1
            return []
        streamed = [turn for turn in running if turn.streamed]
        if not streamed or self.mode == "on" or not all(self._factors.values()):
            return []
        resident, whole = self._load_of(running, but=streamed), self._load_of(running)
        if not resident.num_turns:
            return []
        alone = resident.num_turns / self._seconds(resident)
        if whole.num_turns / self._seconds(whole) >= alone:
            return []
        self._paused = RETRY_AFTER
        return streamed

    def who_returns(self, running: Collection[Turn], num_available: int) -> Turn | None:
        """A streamed turn for which the device has room."""
        sizes = {turn: len(turn.chunks) for turn in running if turn.streamed}
        if self.lacked or not sizes:
            return None
        spare = self._reserve_pages + 1
        fitting = [turn for turn, size in sizes.items() if size + spare <= num_available]
        if not fitting:
            held = sum(len(turn.chunks) for turn in running if not turn.streamed)
            required = min(sizes.values()) + spare
            self.required_pages = required if held + required <= self._device_pages else 0
        return max(fitting, key=sizes.__getitem__, default=None)

    def _pays(self, turn: Turn, load: _Load) -> bool:
        """Beside such a load."""
        num_pages = -(-len(turn.tokens) // self._size)
        if num_pages > self._pages_max:
            return False
        if self.mode == "on":
            return True
        whole = load.with_turn(turn, num_pages)
        before, after = self._seconds(load), self._seconds(whole)
        if self._tbt and not turn.is_background and after > self._tbt:
            return False
        return whole.num_turns * before > GAIN * load.num_turns * after or not load.num_turns

    def _load_of(self, running: Iterable[Turn], but: Collection[Turn] = ()) -> _Load:
        count = positions = pages = 0
        for turn in running:
            if not (turn.warm or turn.ahead or turn in but):
                count += 1
                positions += len(turn.tokens)
                pages += len(turn.chunks) if turn.streamed else 0
        return _Load(count, positions, pages)

    def _seconds(self, load: _Load) -> float:
        """Of an iteration, as far as it is known."""
        config, (count, positions, pages) = self._config, load
        if not count:
            return 0.0
        seconds = config.cost.pass_seconds(count, positions, positions, count)
        factors = self._factors[False]
        if pages:
            num_groups = -(-pages // self._pages_max)
            seconds = max(seconds + config.group_seconds * num_groups, config.copy_seconds * pages)
            factors = self._factors[True] or factors
        return seconds * (statistics.median(factors) if factors else 1.0)

    # -- what is measured --

    def planned(self, draft: IterationDraft, now: float) -> None:
        learns = draft.num_tokens == draft.num_decodes and not draft.num_background
        predicted = draft.predicted() if learns else 0.0
        self._uncommitted.append(_Planned(now, predicted, bool(draft.streamed)))

    def committed(self, now: float) -> None:
        planned = self._uncommitted.popleft()
        seconds, self._committed_at = now - max(planned.at, self._committed_at), now
        if planned.predicted:
            self._factors[planned.is_streamed].append(seconds / planned.predicted)
