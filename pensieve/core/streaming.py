"""Choose turns that stream their contexts from the host, because the device has no room for them.

Only attention needs KV on the device, so an iteration may have more turns than fit on the device. The weights
are read once for all turns. While few turns generate, reading the weights takes most of the iteration. A
streamed turn adds the copies of its pages to every iteration. So streaming pays as long as another turn
raises n / seconds. Here n is the number of running turns, and `seconds` is the time of an iteration, which
`StreamCost` learns.

The first streamed turn adds a fixed cost, so waiting turns are considered together. The setting `auto` takes
them in order and streams the number of turns that is predicted to deliver the most tokens per second. This
rate must be at least GAIN times the current rate, and the objective for the time between tokens (`--tbt`)
must be met. The setting `on` streams every turn that can be streamed. With `off`, this module is not used.

Background turns stream only while there is no interactive turn. Beside interactive turns, they get only a few
percent of an iteration (background_room.py), and the copies may take longer. So they stop streaming and wait
for device pages.

If a turn will fit on the device after idle pages are copied out, it waits for these pages instead.

Streaming pauses if, after TRIED_FOR iterations, the resident turns alone are predicted to deliver clearly
more tokens per second (by the factor GAIN) than all turns together. Each pause is twice as long as the
previous pause, up to PAUSE_MAX iterations.

**Back to the device.** When no turn waits and pages are available, the largest streamed turn that fits is
suspended and admitted again with device pages (`turn_to_return`), one turn per iteration. If no streamed turn
fits, idle pages are made available for the smallest streamed turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from pensieve.core.cache import KVCache
from pensieve.core.fair_queue import FairQueue
from pensieve.core.iteration_builder import IterationBuilder
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.stream_groups import StreamGroups
from pensieve.core.turn import QUEUE_ORDER, Turn

GAIN = 1.05
TRIED_FOR = 16
PAUSE_MIN, PAUSE_MAX = 64, 1024
LOOKED_AT_MAX = 32  # waiting turns considered in one plan
FADING = 0.97  # each observation multiplies the weights of earlier observations by this
PULL = 1.5  # weight of the configured factors, as a number of observations of a term
NEVER_SEEN = 1e-12  # weight of the configured factor of a term without observations
CONFIGURED = (1.0, 0.0, 1.0, 1.0)


class Streaming:
    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        has_room_for: Callable[[Turn, Collection[Turn]], bool],
    ) -> None:
        """`has_room_for`: whether a turn may run beside others."""
        self._room_beside, self._has_room_for = cache.room_beside, has_room_for
        sizes = cache.config
        self._always = config.stream == "on"
        self._groups = StreamGroups(sizes, config, cache.path_of)
        self._size, self._pages_max = sizes.chunk_tokens, sizes.staging_pages
        self._device_pages, self._reserve_pages = sizes.device_pages, sizes.reserve_pages
        self._tbt = config.tbt_seconds
        self.cost = StreamCost(config, sizes.staging_pages)
        self._paused = 0  # iterations left of this pause
        self._pause = PAUSE_MIN  # iterations of the next pause
        self._num_streamed = 0  # iterations since streaming began
        self.required_pages = 0  # pages for a streamed turn that could return to the device
        self.lacked = False  # a turn lacked pages in the last plan

    # -- which turns begin, stop and return --

    def turns_to_admit(
        self,
        suspended: Iterable[Turn],
        queued: FairQueue,
        running: Collection[Turn],
        builder: IterationBuilder,
        background: bool,
    ) -> Iterator[Turn]:
        """Yield the waiting turns for which streaming pays.

        The caller may admit each turn before it asks for the next one.
        """
        if self._paused:
            return
        started = [turn for turn in running if turn.is_prefill]
        tried: list[Turn] = []

        def may_stream(turn: Turn) -> bool:
            is_of_kind = turn.is_background == background and not turn.warm
            return is_of_kind and queued.precedes_prefills(turn, started)

        pages_for, claimed = self._room_beside(running), self._reserve_pages
        chosen: list[Turn] = []
        while len(tried) < LOOKED_AT_MAX:
            untried = (turn for turn in suspended if turn not in tried)
            if (turn := queued.next_turn(untried, may_stream, tried)) is None:
                break
            tried.append(turn)
            num_pages, pages_left = pages_for(turn)
            if num_pages + claimed <= pages_left:
                claimed += num_pages  # the turn waits until idle pages are copied out
            elif num_pages <= self._pages_max:
                chosen.append(turn)
        # Turns that wait only for pages keep their places.
        kept = [turn for turn in tried if turn not in chosen]
        for turn in chosen[: self._num_to_admit(chosen, running)]:
            if not (builder.has_room() and self._has_room_for(turn, [*running, *kept])):
                return
            yield turn

    def _num_to_admit(self, turns: Sequence[Turn], running: Iterable[Turn]) -> int:
        """Return how many of these turns, in order, deliver the most tokens per second."""
        if self._always:
            return len(turns)
        load = load_of(running)
        best, count = GAIN * self._rate(load), 0
        for number, turn in enumerate(turns, 1):
            load = load.with_turn(len(turn.tokens), -(-len(turn.tokens) // self._size))
            if self._tbt and not turn.is_background and self.cost.seconds(load) > self._tbt:
                break
            if (rate := self._rate(load)) > best:
                best, count = rate, number
        return count

    def _rate(self, load: StreamLoad) -> float:
        seconds = self.cost.seconds(load)
        return load.num_turns / seconds if seconds else 0.0

    def turns_to_stop(self, running: Collection[Turn], beside_interactive: bool) -> list[Turn]:
        """Return the streamed turns that must stop.

        If streaming does not pay, all turns must stop. If the objective is missed, one turn must stop. If
        there are interactive turns (`beside_interactive`), all background turns must stop.
        """
        stops = self._pause_if_unprofitable(running)
        if self._tbt and self.cost.seconds(load_of(running)) > self._tbt:
            streamed = [turn for turn in running if turn.streamed]
            stops += sorted(streamed, key=QUEUE_ORDER)[-1:]  # one turn per iteration
        if beside_interactive:
            stops += [turn for turn in running if turn.is_background and turn.streamed]
        return list(dict.fromkeys(stops))

    def _pause_if_unprofitable(self, running: Collection[Turn]) -> list[Turn]:
        """Begin a pause and return all streamed turns, if streaming does not pay."""
        if self._paused:
            self._paused -= 1
            return []
        streamed = [turn for turn in running if turn.streamed]
        self._num_streamed = self._num_streamed + 1 if streamed else 0
        if self._num_streamed < TRIED_FOR or self._always:
            return []
        if self._num_streamed > self._pause:
            self._pause = PAUSE_MIN  # streaming has paid
        resident = load_of(turn for turn in running if not turn.streamed)
        if GAIN * self._rate(load_of(running)) >= self._rate(resident):
            return []
        self._paused, self._pause = self._pause, min(2 * self._pause, PAUSE_MAX)
        self._num_streamed = 0
        return streamed

    def turn_to_return(self, running: Collection[Turn], num_available: int) -> Turn | None:
        """Return the largest streamed turn for which the device has room."""
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

    # -- iterations --

    def arrange(self, builder: IterationBuilder) -> None:
        """Put slices of streamed turns after the others, in groups."""
        slices, builder.groups = self._groups.arrange(
            builder.slices, builder.streamed, builder.filled_before
        )
        builder.slices = list(slices)

    def committed(self, builder: IterationBuilder, seconds: float) -> None:
        """Learn from the time of an iteration with only decodes of interactive turns."""
        self.cost.learn(
            StreamLoad(builder.num_decodes, builder.work.keys, builder.num_staged), seconds
        )


def load_of(running: Iterable[Turn]) -> StreamLoad:
    load = StreamLoad(0, 0, 0)
    for turn in running:
        if not turn.warm:
            load = load.with_turn(len(turn.tokens), len(turn.chunks) if turn.streamed else 0)
    return load


class StreamLoad(NamedTuple):
    """The load of an iteration in which turns generate."""

    num_turns: int
    num_positions: int
    num_pages: int  # pages of streamed turns

    def with_turn(self, num_tokens: int, num_pages: int = 0) -> StreamLoad:
        return StreamLoad(
            self.num_turns + 1, self.num_positions + num_tokens, self.num_pages + num_pages
        )


class StreamCost:
    """Learn the time of iterations with and without streamed turns.

    The prediction of cost.py is often wrong: costs may be estimates, rows cost more in a large batch, and the
    overlap of copies and computing depends on the machine. So the seconds of an iteration with only decodes
    are modelled as

        a · predicted + b · rows + c · groups + d · copies

    Each term is in seconds by the configured costs (a pass, its dense part per token, `group_seconds`,
    `copy_seconds`). The factors a to d are fitted to the last iterations by least squares of the relative
    error. Old iterations fade. Before any measurement, the factors are 1, 0, 1, 1. A regularization of weight
    PULL draws them towards these values. No factor is negative. A single late iteration changes little: its
    relative error is below 1, and it weighs less than the regularization.
    """

    def __init__(self, config: SchedulerConfig, pages_max: int) -> None:
        """`pages_max`: the maximum number of pages in a group."""
        self._config, self._pages_max = config, max(pages_max, 1)
        size = len(CONFIGURED)
        # Sums of products of two terms, over the seconds squared.
        self._products = [[0.0] * size for _ in range(size)]
        self._sums = [0.0] * size
        self._counts = [0.0] * size  # observations of each term
        self._factors: Sequence[float] | None = CONFIGURED  # None: to be fitted

    def seconds(self, load: StreamLoad) -> float:
        if self._factors is None:
            self._factors = self._fit()
        terms = self._terms(load)
        return sum(factor * term for factor, term in zip(self._factors, terms, strict=True))

    def learn(self, load: StreamLoad, seconds: float) -> None:
        """Learn the time of an iteration with this load."""
        if seconds <= 0.0 or not load.num_turns:
            return
        shares = [term / seconds for term in self._terms(load)]
        for row, own in zip(self._products, shares, strict=True):
            for column, other in enumerate(shares):
                row[column] = FADING * row[column] + own * other
        self._sums = [FADING * known + own for known, own in zip(self._sums, shares, strict=True)]
        self._counts = [
            FADING * known + (own > 0.0) for known, own in zip(self._counts, shares, strict=True)
        ]
        self._factors = None

    def _terms(self, load: StreamLoad) -> tuple[float, float, float, float]:
        config, (count, positions, pages) = self._config, load
        cost = config.cost
        return (
            cost.pass_seconds(count, positions, positions, count),
            cost.dense_seconds_per_token * count,
            config.group_seconds * -(-pages // self._pages_max),
            config.copy_seconds * pages,
        )

    def _fit(self) -> list[float]:
        """Fit the factors. Terms whose factor would be negative are left out, the lowest first."""
        products, used = self._products, list(range(len(CONFIGURED)))
        pulls = [PULL * products[i][i] / max(self._counts[i], 1.0) + NEVER_SEEN for i in used]
        factors = [0.0] * len(CONFIGURED)
        while used:
            found = solve(
                [[products[i][j] + (pulls[i] if i == j else 0.0) for j in used] for i in used],
                [self._sums[i] + pulls[i] * CONFIGURED[i] for i in used],
            )
            lowest = min(range(len(used)), key=found.__getitem__)
            if found[lowest] >= 0.0:
                for i, factor in zip(used, found, strict=True):
                    factors[i] = factor
                break
            del used[lowest]
        return factors


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve a system whose matrix is symmetric and positive definite, by elimination."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for j in range(i, size + 1):
                below[j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
