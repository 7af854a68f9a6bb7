"""How often each iteration of a profile is timed, within a time for all of them.

1. Each once, the cheap ones first: that warms up, and tells what is dear.  When half of the time is over, the
   dearest are left out.
2. Again and again, all of them in a new order each time, so that whatever else the machine does for a while
   is spread over them.  Cheap ones run a few times in a row, the first time untimed: a server's iterations
   follow others like them.

The lower quartile of a point's times counts, of up to four the least: what else a machine does only adds
to them, and may last for longer than half of them.  How far they lie apart tells that it did something else.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from pensieve.bench.profile_points import Point

CHEAP_SECONDS = 0.06  # of iterations that run a few times in a row
IN_A_ROW = 3
ROUNDS = (2, 9)  # at least and at most
QUICK_ROUNDS = (1, 3)
FIRST_SHARE = 0.5  # of the time, for the first pass


class Times(Protocol):
    def seconds(self, point: Point) -> float: ...


class Measured(NamedTuple):
    point: Point
    seconds: float  # lower quartile
    times: int
    spread: float  # from the least to the most over `seconds`, without a tenth at both ends


def measured(
    driver: Times,
    points: Sequence[Point],
    seconds_max: float,
    rounds: tuple[int, int],
    done: Callable[[float], None] = lambda share: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Measured]:
    """In the order of the points, without those that are left out; `done` is told how far it is."""
    began, draw = clock(), random.Random(0)
    first: dict[Point, float] = {}
    for point in sorted(points, key=_dearness):
        if first and clock() - began > FIRST_SHARE * seconds_max:
            break
        first[point] = driver.seconds(point)
        done(min((clock() - began) / seconds_max, 1.0))
    times: dict[Point, list[float]] = {point: [] for point in first}
    order = list(first)
    for turn in range(rounds[1]):
        draw.shuffle(order)
        for point in order:
            if turn >= rounds[0] and clock() - began > seconds_max:
                break
            if first[point] < CHEAP_SECONDS:
                driver.seconds(point)
                times[point] += [driver.seconds(point) for _ in range(IN_A_ROW)]
            else:
                times[point].append(driver.seconds(point))
            done(min((clock() - began) / seconds_max, 1.0))
    return [_of(point, times[point]) for point in points if times.get(point)]


def _of(point: Point, times: Sequence[float]) -> Measured:
    ordered, tenth = sorted(times), len(times) // 10
    seconds = ordered[(len(times) - 1) // 4]
    return Measured(point, seconds, len(times), (ordered[-1 - tenth] - ordered[tenth]) / seconds)


def _dearness(point: Point) -> float:
    work = point.work
    return 1000 * work.tokens + work.pairs + work.keys
