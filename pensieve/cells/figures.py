"""The figures of BatchMaker on the simulator, as rows: the paper's number, ours, and a verdict.

Cells take the times that the paper prints for a V100, and the lengths follow the quantiles that it prints.
A few costs are not printed. Each of them is fitted to one number, whose row has the verdict "fitted".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from statistics import median
from typing import NamedTuple

from pensieve.cells.baselines import GraphBatching, Merging, NodeByNode, Padding
from pensieve.cells.graph import CellType, Graph, Tree, chain, tree
from pensieve.cells.simulation import (
    Arrival,
    Costs,
    Run,
    simulate_cellular,
    simulate_graph_batching,
)

SEEDS = (0, 1, 2)
CLOSE = 0.15  # a number is reproduced if it differs by at most this share
LATENCY_MAX = 0.5  # seconds: the paper's plots end at about this 90th percentile
MEDIAN_LOG, SIGMA, LENGTH_MAX = 2.933, 0.7, 330  # log-normal lengths: mean 24, and 99 % below 100
LSTM_STEP = ((64, 185e-6), (256, 470e-6), (512, 784e-6))  # batch size and seconds
GATHER, GATHER_ROW = 58e-6, 0.115e-6  # a step of 64 takes 250 µs with it, one of 512 901 µs
DECODER = 3.0  # times of an LSTM: decoding is 75 % of the computation
LEAF, INNER = 2.0, 3.35  # times of an LSTM: in proportion to 3 and 5 gates, and 2.68 (fitted)
DYNET_MERGE, FOLD_MERGE = 7e-6, 29e-6  # seconds for a node (fitted)


class Row(NamedTuple):
    name: str
    paper: float | None
    ours: float  # the median over the seeds
    verdict: str  # reproduced, same shape, not reproduced, or fitted
    reason: str


def judge(name: str, paper: float | None, ours: Sequence[float], shape: bool, reason: str) -> Row:
    """Compare with the paper. `shape` says whether the paper's order holds with every seed."""
    middle = median(ours)
    close = paper is not None and abs(middle - paper) <= CLOSE * paper
    verdict = "reproduced" if close else "same shape"
    return Row(name, paper, middle, verdict if shape else "not reproduced", reason)


def below(low: Sequence[float], high: Sequence[float]) -> bool:
    return all(each < other for each, other in zip(low, high, strict=True))


LSTM, LSTM_64 = CellType("lstm", 0, 512), CellType("lstm", 0, 64)
ENCODER, ENCODER_256 = CellType("encoder", 0, 512), CellType("encoder", 0, 256)
DECODER_256 = CellType("decoder", 1, 256)
LEAF_64, INNER_64 = CellType("leaf", 0, 64), CellType("inner", 1, 64)
TIMES = {LSTM: 1.0, LSTM_64: 1.0, ENCODER: 1.0, ENCODER_256: 1.0}
TIMES |= {DECODER_256: DECODER, LEAF_64: LEAF, INNER_64: INNER}
POINTS = {cell: [(size, part * each) for size, part in LSTM_STEP] for cell, each in TIMES.items()}
COSTS = Costs(POINTS, GATHER, GATHER_ROW)

Draw = Callable[[random.Random], Graph]
Simulate = Callable[[list[Arrival]], Run]


def cellular(*cells: CellType, workers: int = 1) -> Simulate:
    return lambda arrivals: simulate_cellular(arrivals, cells, COSTS, workers)


def graphs(policy: Callable[[], GraphBatching], merge: float = 0.0, workers: int = 1) -> Simulate:
    costs = Costs(POINTS, merge_node=merge)
    return lambda arrivals: simulate_graph_batching(arrivals, policy(), costs, workers)


class Load(NamedTuple):
    """Requests with Poisson arrivals, for some simulated seconds, with each seed."""

    draw: Draw
    seconds: float
    seeds: Sequence[int]

    def runs(self, simulate: Simulate, rate: float) -> list[Run]:
        return [simulate(list(self._arrivals(rate, seed))) for seed in self.seeds]

    def p90_ms(self, simulate: Simulate, rate: float) -> list[float]:
        return [1e3 * run.latency() for run in self.runs(simulate, rate)]

    def peak(self, simulate: Simulate, *rates: float) -> list[float]:
        """Return the highest throughput at these rates with a 90th percentile below LATENCY_MAX."""
        runs = zip(*(self.runs(simulate, rate) for rate in rates), strict=True)
        return [
            max(run.throughput() * (run.latency() < LATENCY_MAX) for run in seed) for seed in runs
        ]

    def _arrivals(self, rate: float, seed: int) -> Iterator[Arrival]:
        rng, now = random.Random(seed), 0.0
        while (now := now + rng.expovariate(rate)) < self.seconds:
            yield Arrival(now, self.draw(rng))


@cache
def chain_of(*stages: tuple[CellType, int]) -> Graph:
    return chain(*((cell, [()] * count) for cell, count in stages))


def length(rng: random.Random) -> int:
    return min(LENGTH_MAX, max(1, round(rng.lognormvariate(MEDIAN_LOG, SIGMA))))


def sentences(cell: CellType) -> Draw:
    return lambda rng: chain_of((cell, length(rng)))


def sentence_pairs(encoder: CellType) -> Draw:
    def draw(rng: random.Random) -> Graph:
        source = length(rng)
        return chain_of((encoder, source), (DECODER_256, round(source * rng.uniform(0.8, 1.2))))

    return draw


def random_tree(rng: random.Random, leaves: int) -> Tree:
    if leaves == 1:
        return rng.randrange(1000)
    left = rng.randrange(1, leaves)
    return random_tree(rng, left), random_tree(rng, leaves - left)


@cache
def _parsed(number: int) -> Graph:
    rng = random.Random(number)
    return tree(LEAF_64, INNER_64, random_tree(rng, max(2, round(rng.gauss(19, 9)))))


def parse_tree(rng: random.Random) -> Graph:
    return _parsed(rng.randrange(300))


def tree_policies() -> tuple[Simulate, Simulate, Simulate]:
    """Return cellular batching, DyNet and TensorFlow Fold."""
    ours = cellular(LEAF_64, INNER_64)
    return ours, graphs(Merging, DYNET_MERGE), graphs(Merging, FOLD_MERGE)


def complete_tree(depth: int) -> Tree:
    return (complete_tree(depth - 1), complete_tree(depth - 1)) if depth else 0


def figure_2_5(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """Eight requests, a time unit for each cell, batches of four: exact, whatever the seeds.

    The text gives the first four lengths and tasks. Of the others it says only that the longest is 7.
    """
    cell = CellType("cell", 0, batch_max=4, batch_min=4)
    lengths = zip((0, 0, 0, 0, 1.5, 2.5, 2.5, 4.5), (2, 3, 3, 5, 5, 7, 3, 1), strict=True)
    arrivals = [Arrival(at, chain_of((cell, count))) for at, count in lengths]
    costs = Costs({cell: [(4, 1.0)]})
    run = simulate_cellular(arrivals, [cell], costs)
    ours, graph = run.finished, simulate_graph_batching(arrivals, Merging(4), costs).finished
    members = [[row.request + 1 for row in task.rows if row] for _, task in run.tasks[:4]]
    same = members == [[1, 2, 3, 4], [1, 2, 3, 4], [2, 3, 4, 5], [4, 5, 6, 7]]
    told = "the first four tasks have the paper's members"
    return [
        judge("graph batching: end of 1 to 4", 5, graph[:4], len({*graph[:4]}) == 1, "one batch"),
        judge("graph batching: end of 5 to 8", 12, graph[4:], len({*graph[4:]}) == 1, "one batch"),
        judge("cellular: end of 1", 2, ours[:1], same, told),
        judge("cellular: end of 2 and 3", 3, ours[1:3], same, told),
        judge("cellular: end of the last", None, [max(ours)], max(ours) < 12, "before 12"),
    ]


def figure_2_7(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """LSTM: the 90th percentile of the latency, and the peak throughput."""
    short, long = Load(sentences(LSTM), 0.6, seeds), Load(sentences(LSTM), 1.5, seeds)
    ours, turns, full = cellular(LSTM), graphs(Padding), graphs(partial(Padding, full_first=True))
    low, padded, least = short.p90_ms(ours, 5e3), long.p90_ms(turns, 5e3), long.p90_ms(turns, 100)
    most, turns_most = short.peak(ours, 26e3), long.peak(turns, 2e3, 4e3, 6e3, 8e3)
    full_most = long.peak(full, 16e3, 20e3, 22e3, 24e3)
    short = Load(sentences(LSTM_64), 0.6, seeds)
    low_64, most_64 = short.p90_ms(cellular(LSTM_64), 5e3), short.peak(cellular(LSTM_64), 14e3)
    why = "the few long requests hold up the others"
    between = "the paper is between this and strict turns"
    return [
        judge("cellular: P90 at 5K/s (ms)", 12, low, below(low, padded), "below padding"),
        judge("padding: P90 at 5K/s (ms)", None, padded, below(low, padded), "above cellular"),
        judge("padding: least P90 (ms)", 25, least, below(low, least), "above cellular"),
        judge("cellular: peak (1/s)", 20e3, most, below(full_most, most), "above padding"),
        judge("padding: peak (1/s)", 16e3, turns_most, below(turns_most, most), why),
        judge("padding, full first: peak", 16e3, full_most, below(full_most, most), between),
        judge("batch 64: P90 at 5K/s (ms)", None, low_64, below(low_64, padded), "as with 512"),
        judge("batch 64: peak (1/s)", None, most_64, below(most_64, most), "below 512"),
    ]


def figure_2_8(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """Padding by the width of its buckets: latency at a low load, and peak. Full buckets go first."""
    load, widths = Load(sentences(LSTM), 1.5, seeds), (1, 10, 40)
    policies = [graphs(partial(Padding, width, full_first=True)) for width in widths]
    low = [load.p90_ms(each, 1e3) for each in policies]
    busy = Load(sentences(LSTM), 2.5, seeds)
    most = [[run.throughput() for run in busy.runs(each, 28e3)] for each in policies]
    sooner, more = (below(c, b) and below(b, a) for a, b, c in (low, most))
    rows = []
    for width, latency, rate in zip(widths, low, most, strict=True):
        rows.append(
            judge(f"width {width}: P90 at 1K/s (ms)", None, latency, sooner, "wide: sooner")
        )
        rows.append(
            judge(f"width {width}: overload (1/s)", None, rate, more, "narrow: less padding")
        )
    return rows


def figure_2_9(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """LSTM at 5,000 requests/s: the 99th percentile of queueing. A step takes 0.25 ms."""
    load, why = Load(sentences(LSTM), 0.6, seeds), "a request waits for at most 5 tasks"
    ours = [1e3 * run.queueing() for run in load.runs(cellular(LSTM), 5e3)]
    padded = [1e3 * run.queueing() for run in load.runs(graphs(Padding), 5e3)]
    steps = [each / 0.25 for each in ours]
    return [
        judge("cellular: P99 of queueing (ms)", 1.38, ours, below(ours, padded), why),
        judge("cellular: P99 of queueing (steps)", 1.38 / 0.25, steps, max(steps) < 6, why),
        judge("padding: P99 of queueing (ms)", None, padded, min(padded) > 100, "paper: above 100"),
    ]


def figure_2_10(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """The lengths, which are drawn from a distribution fitted to these numbers."""
    drawn = [[length(rng) for _ in range(10000)] for rng in map(random.Random, seeds)]
    share = median(sum(each < 100 for each in some) / len(some) for some in drawn)
    mean = median(sum(some) / len(some) for some in drawn)
    why = "log-normal in place of Europarl"
    return [
        Row("share of lengths below 100", 0.99, share, "fitted", why),
        Row("mean length", 24, mean, "fitted", why),
    ]


def figure_2_13(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """Sequence to sequence on two and four GPUs, with encoder batches of 512 and of 256."""
    rows = []
    for workers, paper in ((2, 8.5e3), (4, 17e3)):
        large, equal = (
            Load(sentence_pairs(encoder), 0.8 / workers, seeds).peak(
                cellular(encoder, DECODER_256, workers=workers), paper * 1.5
            )
            for encoder in (ENCODER, ENCODER_256)
        )
        padding = graphs(partial(Padding, 10, 256, True), workers=workers)
        rates = [paper * part for part in (0.6, 0.8, 1.0, 1.2)]
        padded = Load(sentence_pairs(ENCODER_256), 1.5, seeds).peak(padding, *rates)
        gain = [100 * (each / other - 1) for each, other in zip(large, equal, strict=True)]
        order, on = below(padded, large), f"{workers} GPUs,"
        rows += [
            judge(f"{on} cellular-512,256: peak (1/s)", paper, large, order, "above padding"),
            judge(f"{on} padding, full first: peak", None, padded, order, "below cellular"),
            judge(f"{on} gain by 512 (%)", 4.75, gain, min(gain) > 0, "paper: 3.5 to 6"),
        ]
    return rows


def figure_2_14(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """TreeLSTM on random binary trees with 19 leaves on average."""
    load = Load(parse_tree, 0.8, seeds)
    ours, dynet, fold = tree_policies()
    low, dynet_low = load.p90_ms(ours, 1e3), load.p90_ms(dynet, 1e3)
    most = load.peak(ours, 5e3)
    dynet_most = load.peak(dynet, *range(1700, 2701, 200))
    fold_most = load.peak(fold, *range(600, 1001, 100))
    order, fit = below(low, dynet_low), "the cost of {} is fitted to this"
    return [
        judge("cellular: P90 at 1K/s (ms)", 6.8, low, order, "below DyNet"),
        judge("DyNet: P90 at 1K/s (ms)", 9.5, dynet_low, order, "above cellular"),
        Row("cellular: peak (1/s)", 3.1e3, median(most), "fitted", fit.format("cells")),
        Row("DyNet: peak (1/s)", 2.1e3, median(dynet_most), "fitted", fit.format("merging")),
        Row("Fold: peak (1/s)", 3.1e3 / 4, median(fold_most), "fitted", fit.format("merging")),
    ]


def figure_2_15(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """Identical trees of 16 leaves, and the ideal that has this tree built in."""
    graph = tree(LEAF_64, INNER_64, complete_tree(4))
    load, ideal = Load(lambda _: graph, 0.6, seeds), graphs(NodeByNode)
    ours, dynet, _ = tree_policies()
    most, best = load.peak(ours, 6e3), load.peak(ideal, 6e3)
    merged = load.peak(dynet, 2e3, 2.5e3, 3e3, 4e3)
    share = [each / other for each, other in zip(most, best, strict=True)]
    low, ideal_low, dynet_low = (load.p90_ms(each, 1e3) for each in (ours, ideal, dynet))
    order = below(merged, most) and below(most, best)
    return [
        judge("cellular: peak over the ideal's", 0.7, share, order, "DyNet < cellular < ideal"),
        judge("cellular: P90 at 1K/s (ms)", None, low, below(low, dynet_low), "below DyNet"),
        judge(
            "ideal: P90 at 1K/s (ms)", None, ideal_low, below(dynet_low, ideal_low), "the highest"
        ),
    ]


_ALL = [figure_2_5, figure_2_7, figure_2_8, figure_2_9, figure_2_10]
_ALL += [figure_2_13, figure_2_14, figure_2_15]
FIGURES = {each.__name__.removeprefix("figure_").replace("_", "."): each for each in _ALL}
