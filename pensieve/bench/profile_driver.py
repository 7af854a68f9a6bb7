"""Run synthetic iterations on an executor, only to time them.

The executor and its memory are like those of an engine. They get only what an engine would send: started
turns, slices on scattered pages, and copies between the tiers. The values of the KV do not change the time,
except that products with denormal numbers are slow. So a few pages are computed from random tokens and copied
to all others. Slices of one iteration never share a page.

Turns start once, with token logs as long as the longest context. So a slice can be at any position, and the
same slice can run repeatedly.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pensieve.bench.profile_points import IterationLimits, ProfilePoint, longest
from pensieve.core.iteration import Iteration, PageCopy, Slice, SwapIn, SwapOut, TurnStart
from pensieve.engine.ports import Executor
from pensieve.errors import PensieveError
from pensieve.sampling import Sampling

PIECES_MAX = 8  # prompt slices in one iteration
COMPUTED_PAGES = 8
COPIED_PAGES = 64
CHEAP_SECONDS = 0.06  # faster iterations run several times in a row
IN_A_ROW = 3
ROUNDS = (2, 9)  # minimum and maximum
QUICK_ROUNDS = (1, 3)
FIRST_SHARE = 0.5  # part of the time for the first pass


class CopyTimes(NamedTuple):
    """Seconds to copy `pages` pages in each direction."""

    pages: int
    inward: float
    outward: float
    both: float  # both directions at once
    alone: float  # an iteration of generating turns
    beside: float  # the same iteration, waiting for pages that are swapped in


class Driver:
    """Runs synthetic iterations of `points` on an executor, and times them."""

    def __init__(
        self,
        executor: Executor,
        limits: IterationLimits,
        vocab_size: int,
        points: Sequence[ProfilePoint],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor, self._limits, self.clock = executor, limits, clock
        draw = random.Random(0)
        num_pages = max([*map(limits.pages_of, points), min(COMPUTED_PAGES, limits.pages)])
        self._pages = draw.sample(range(num_pages), num_pages)
        length = max(longest(points), COMPUTED_PAGES * limits.chunk_tokens)
        tokens = array("I", (draw.randrange(vocab_size) for _ in range(length)))
        self._tokens, self._index, self._copy_id = tokens, 0, 0
        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=1 << 30)
        turns = range(1, limits.turns + PIECES_MAX + 1)
        self._started = tuple(TurnStart(attempt_id, tokens, sampling) for attempt_id in turns)
        self._known_slices: dict[ProfilePoint, tuple[Slice, ...]] = {}
        self._fill()

    def seconds(self, point: ProfilePoint) -> float:
        """Run the iteration once; return its time."""
        return self._run(self._slices(point))

    def copies(self, point: ProfilePoint, host_pages: int, repeats: int) -> list[CopyTimes]:
        """Time copies in each direction and in both at once, and swap-ins during the iteration of `point`."""
        slices = self._slices(point)
        busy = {page for each in slices for page in each.page_table}
        free = [page for page in self._pages if page not in busy]
        count = min(COPIED_PAGES, host_pages // 2, len(free) // 2)
        if count < 1:
            return []
        inward = tuple(zip(range(count), free, strict=False))
        outward = tuple(zip(range(count, 2 * count), free[count:], strict=False))
        self._move((), inward)  # so that these host pages have contents
        return [
            CopyTimes(
                count,
                self._move(inward, ()),
                self._move((), outward),
                self._move(inward, outward),
                self._run(slices),
                self._run_with_swap_ins(slices, inward),
            )
            for _ in range(repeats)
        ]

    def _fill(self) -> None:
        size = self._limits.chunk_tokens
        num_computed = min(COMPUTED_PAGES, len(self._pages), self._limits.context // size) or 1
        table, piece_tokens = array("i", self._pages[:num_computed]), self._limits.tokens
        stop = min(num_computed * size, self._limits.context)
        for start in range(0, stop, piece_tokens):
            end = min(start + piece_tokens, stop)
            self._run((Slice(1, start, end, self._tokens[start:end], table),))
        while num_computed < len(self._pages):
            pairs = zip(self._pages[:num_computed], self._pages[num_computed:], strict=False)
            copies = tuple(PageCopy(source, target, size) for source, target in pairs)
            self._run((), copies)
            num_computed += len(copies)

    def _slices(self, point: ProfilePoint) -> tuple[Slice, ...]:
        if point not in self._known_slices:
            slices, first_page, num_pieces = list[Slice](), 0, 0
            for start, stop in point.spans:
                is_decode = stop - start == 1
                num_pieces += not is_decode
                attempt_id = self._limits.turns + num_pieces
                if is_decode:
                    attempt_id = len(slices) - num_pieces + 1
                num_pages = -(-stop // self._limits.chunk_tokens)
                table = array("i", self._pages[first_page : first_page + num_pages])
                first_page += num_pages
                slices.append(
                    Slice(attempt_id, start, stop, self._tokens[start:stop], table, is_decode)
                )
            self._known_slices[point] = tuple(slices)
        return self._known_slices[point]

    def _run(self, slices: tuple[Slice, ...], copies: tuple[PageCopy, ...] = ()) -> float:
        return self._run_timed(self._iteration(slices, copies=copies))[0]

    def _move(self, inward: Sequence[tuple[int, int]], outward: Sequence[tuple[int, int]]) -> float:
        """Copy pairs of a host page and a device page; return the time until all have arrived."""
        began = self.clock()
        missing = len(inward) + len(outward)
        missing -= self._run_timed(self._iteration((), inward, outward))[1]
        while missing:
            missing -= self._run_timed(self._iteration(()))[1]
        return self.clock() - began

    def _run_with_swap_ins(
        self, slices: tuple[Slice, ...], inward: Sequence[tuple[int, int]]
    ) -> float:
        """Run an iteration that waits for swap-ins; return its time."""
        seconds, arrived = self._run_timed(self._iteration(slices, inward))
        while arrived < len(inward):
            arrived += self._run_timed(self._iteration(()))[1]
        return seconds

    def _iteration(
        self,
        slices: tuple[Slice, ...],
        inward: Sequence[tuple[int, int]] = (),
        outward: Sequence[tuple[int, int]] = (),
        copies: tuple[PageCopy, ...] = (),
    ) -> Iteration:
        size, first_id = self._limits.chunk_tokens, self._copy_id
        self._copy_id += len(inward) + len(outward)
        swap_ins = tuple(
            SwapIn(first_id + i, host, at, size) for i, (host, at) in enumerate(inward)
        )
        swap_outs = tuple(
            SwapOut(first_id + i, at, host, size)
            for i, (host, at) in enumerate(outward, len(inward))
        )
        started, self._started = self._started, ()
        self._index += 1
        return Iteration(self._index, slices, copies, swap_ins, swap_outs, started)

    def _run_timed(self, iteration: Iteration) -> tuple[float, int]:
        """Run the iteration; return its time and the number of finished copies."""
        began = self.clock()
        self._executor.launch(iteration)
        outcome = self._executor.collect()
        seconds = self.clock() - began
        if outcome.failures:
            raise PensieveError(outcome.failures[0].message)
        return seconds, len(outcome.finished_copies)


class Measured(NamedTuple):
    point: ProfilePoint
    seconds: float  # lower quartile
    times: int
    spread: float  # range of the times, without the lowest and highest tenth, divided by `seconds`


def measure_points(
    driver: Driver,
    points: Sequence[ProfilePoint],
    seconds_max: float,
    rounds: tuple[int, int],
    on_progress: Callable[[float], None] = lambda share: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Measured]:
    """Time each iteration repeatedly, within `seconds_max` for all iterations.

    1. Run each point once, the cheapest first, to warm up and to learn its cost. When half of the time is
       over, leave out the remaining, most expensive points.
    2. Repeat all points in a new random order each round, so that a disturbance on the machine is spread over
       them. Run cheap points several times in a row, the first time untimed: in a server, similar iterations
       follow each other.

    The result of a point is the lower quartile of its times, or the minimum if it has at most four times. It
    is not the median, because other work on the machine only adds to the times, and can affect more than half
    of them. The spread shows such work.

    Returns the measured points in their order, without those left out. `on_progress` gets the share of the
    time that is over, 0 to 1.
    """
    began, draw = clock(), random.Random(0)
    first: dict[ProfilePoint, float] = {}
    for point in sorted(points, key=_estimated_cost):
        if first and clock() - began > FIRST_SHARE * seconds_max:
            break
        first[point] = driver.seconds(point)
        on_progress(min((clock() - began) / seconds_max, 1.0))
    times: dict[ProfilePoint, list[float]] = {point: [] for point in first}
    order = list(first)
    for round_number in range(rounds[1]):
        draw.shuffle(order)
        for point in order:
            if round_number >= rounds[0] and clock() - began > seconds_max:
                break
            if first[point] < CHEAP_SECONDS:
                driver.seconds(point)
                times[point] += [driver.seconds(point) for _ in range(IN_A_ROW)]
            else:
                times[point].append(driver.seconds(point))
            on_progress(min((clock() - began) / seconds_max, 1.0))
    return [_measured_point(point, times[point]) for point in points if times.get(point)]


def _measured_point(point: ProfilePoint, times: Sequence[float]) -> Measured:
    ordered, tenth = sorted(times), len(times) // 10
    seconds = ordered[(len(times) - 1) // 4]
    return Measured(point, seconds, len(times), (ordered[-1 - tenth] - ordered[tenth]) / seconds)


def _estimated_cost(point: ProfilePoint) -> float:
    work = point.work
    return 1000 * work.tokens + work.pairs + work.keys
