"""The figures of BatchMaker on the simulator, as rows: the paper's number, ours, and a verdict.

Cells take the times that the paper prints for a V100, and the lengths follow the quantiles that it prints.
A few costs are not printed. Each of them is fitted to one number, whose row has the verdict "fitted".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import takewhile
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
DYNET_MERGE, FOLD_MERGE = 10e-6, 33e-6  # seconds for a node (fitted)


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
        """Return the highest throughput at rising rates, until the 90th percentile is too high."""
        best = []
        for seed in self.seeds:
            runs = (simulate(list(self._arrivals(rate, seed))) for rate in rates)
            usable = takewhile(lambda run: run.latency() < LATENCY_MAX, runs)
            best.append(max((run.throughput() for run in usable), default=0.0))
        return best

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


def complete_tree(depth: int) -> Tree:
    return (complete_tree(depth - 1), complete_tree(depth - 1)) if depth else 0


def figure_2_5(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """Eight requests, a time unit for each cell, batches of four: exact, whatever the seeds.

    The text gives the first four lengths and tasks. Of the other lengths it says only that 7 is the longest.
    """
    cell = CellType("cell", 0, batch_max=4, batch_min=4)
    lengths = zip((0, 0, 0, 0, 1.5, 2.5, 2.5, 4.5), (2, 3, 3, 5, 5, 7, 3, 1), strict=True)
    arrivals = [Arrival(at, chain_of((cell, count))) for at, count in lengths]
    costs = Costs({cell: [(4, 1.0)]})
    ours = simulate_cellular(arrivals, [cell], costs)
    graph = simulate_graph_batching(arrivals, Merging(4), costs).finished
    members = [[row.request + 1 for row in task.rows if row] for _, task in ours.tasks[:4]]
    same = members == [[1, 2, 3, 4], [1, 2, 3, 4], [2, 3, 4, 5], [4, 5, 6, 7]]
    told = "the first four tasks have the members that the text names"
    return [
        judge(
            "2.5 graph batching: end of req1 to req4",
            5,
            graph[:4],
            len({*graph[:4]}) == 1,
            "one batch",
        ),
        judge(
            "2.5 graph batching: end of req5 to req8",
            12,
            graph[4:],
            len({*graph[4:]}) == 1,
            "one batch",
        ),
        judge("2.5 cellular: end of req1", 2, ours.finished[:1], same, told),
        judge("2.5 cellular: end of req2 and req3", 3, ours.finished[1:3], same, told),
        judge(
            "2.5 cellular: end of req8",
            None,
            [ours.finished[7]],
            max(ours.finished) < 12,
            "all end earlier",
        ),
    ]


def figure_2_7(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """LSTM: the 90th percentile of the latency, and the peak throughput."""
    short, long = Load(sentences(LSTM), 0.6, seeds), Load(sentences(LSTM), 3, seeds)
    small = Load(sentences(LSTM_64), 0.6, seeds)
    ours, by_turns = cellular(LSTM), graphs(Padding)
    low, padded = short.p90_ms(ours, 5e3), long.p90_ms(by_turns, 5e3)
    light = long.p90_ms(by_turns, 100)
    most, padded_most = short.peak(ours, 26e3), long.peak(by_turns, *range(2000, 12001, 2000))
    full_most = long.peak(graphs(partial(Padding, full_first=True)), *range(12000, 24001, 2000))
    small_low, small_most = (
        small.p90_ms(cellular(LSTM_64), 5e3),
        small.peak(cellular(LSTM_64), 14e3),
    )
    turns = "with strict turns, the few long requests hold up all others"
    between = "the paper is between strict turns and this rule"
    return [
        judge("2.7a cellular: P90 at 5K/s (ms)", 12, low, below(low, padded), "below padding"),
        judge("2.7a padding: least P90 (ms)", 25, light, below(low, light), "above cellular"),
        judge("2.7a padding: P90 at 5K/s (ms)", None, padded, below(low, padded), "above cellular"),
        judge("2.7a cellular: peak (1/s)", 20e3, most, below(full_most, most), "above padding"),
        judge("2.7a padding: peak (1/s)", 16e3, padded_most, below(padded_most, most), turns),
        judge(
            "2.7a padding, full first: peak (1/s)", 16e3, full_most, below(full_most, most), between
        ),
        judge(
            "2.7b batch 64: P90 at 5K/s (ms)", None, small_low, below(small_low, padded), "as 512"
        ),
        judge("2.7b batch 64: peak (1/s)", None, small_most, below(small_most, most), "below 512"),
    ]


def figure_2_8(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """Padding with buckets of several widths: latency at a low load, and peak."""
    load = Load(sentences(LSTM), 3, seeds)
    wide, middle, fine = (graphs(partial(Padding, width, full_first=True)) for width in (40, 10, 1))
    low = [load.p90_ms(each, 1e3) for each in (wide, middle, fine)]
    most = [load.peak(each, *range(12000, 26001, 2000)) for each in (wide, middle, fine)]
    rows = []
    for name, latency, rate in zip((40, 10, 1), low, most, strict=True):
        faster = below(low[0], low[1]) and below(low[1], low[2])
        more = below(most[0], most[2])
        rows.append(
            judge(f"2.8 width {name}: P90 at 1K/s (ms)", None, latency, faster, "wider: sooner")
        )
        rows.append(judge(f"2.8 width {name}: peak (1/s)", None, rate, more, "finer: less padding"))
    return rows


def figure_2_9(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """LSTM at 5,000 requests/s: the 99th percentile of queueing. A step takes about 0.25 ms."""
    load = Load(sentences(LSTM), 1, seeds)
    ours = [1e3 * run.queueing() for run in load.runs(cellular(LSTM), 5e3)]
    padded = [1e3 * run.queueing() for run in load.runs(graphs(Padding), 5e3)]
    steps = [each / 0.25 for each in ours]
    tasks = "a request waits for at most 5 tasks"
    return [
        judge("2.9 cellular: P99 of queueing (ms)", 1.38, ours, below(ours, padded), tasks),
        judge("2.9 cellular: P99 of queueing (steps)", 5.5, steps, max(steps) < 6, tasks),
        judge(
            "2.9 padding: P99 of queueing (ms)", None, padded, min(padded) > 100, "paper: above 100"
        ),
    ]


def figure_2_10(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """The distribution of lengths. It is fitted to these numbers."""
    drawn = [[length(rng) for _ in range(20000)] for rng in map(random.Random, seeds)]
    share = [sum(each < 100 for each in seed) / len(seed) for seed in drawn]
    mean = [sum(seed) / len(seed) for seed in drawn]
    return [
        Row("2.10 lengths below 100 (share)", 0.99, median(share), "fitted", "drawn, not Europarl"),
        Row("2.10 mean length", 24, median(mean), "fitted", "drawn, not Europarl"),
    ]


def figure_2_13(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """Sequence to sequence on two and four GPUs."""
    rows, rates = [], {2: 8.5e3, 4: 17e3}
    for workers, paper in rates.items():
        seconds = 0.8 / workers
        large = Load(sentence_pairs(ENCODER), seconds, seeds)
        equal = Load(sentence_pairs(ENCODER_256), seconds, seeds)
        long = Load(sentence_pairs(ENCODER_256), 2, seeds)
        ours = large.peak(cellular(ENCODER, DECODER_256, workers=workers), paper * 1.5)
        same = equal.peak(cellular(ENCODER_256, DECODER_256, workers=workers), paper * 1.5)
        padding = graphs(partial(Padding, 10, 256, True), workers=workers)
        padded = long.peak(padding, *(paper * part for part in (0.5, 0.7, 0.9, 1.1)))
        order = below(padded, ours)
        name = f"2.13 {workers} GPUs,"
        gain = [100 * (each / other - 1) for each, other in zip(ours, same, strict=True)]
        rows += [
            judge(f"{name} cellular-512,256: peak (1/s)", paper, ours, order, "above padding"),
            judge(f"{name} padding, full first: peak (1/s)", None, padded, order, "below cellular"),
            judge(f"{name} gain of 512 encoders (%)", 4.75, gain, min(gain) > 0, "paper: 3.5 to 6"),
        ]
    return rows


def figure_2_14(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """TreeLSTM on random binary trees with 19 leaves on average."""
    short, long = Load(parse_tree, 0.5, seeds), Load(parse_tree, 1, seeds)
    ours, dynet = cellular(LEAF_64, INNER_64), graphs(Merging, DYNET_MERGE)
    fold = graphs(Merging, FOLD_MERGE)
    low, dynet_low = short.p90_ms(ours, 1e3), long.p90_ms(dynet, 1e3)
    most = short.peak(ours, 5e3)
    dynet_most = long.peak(dynet, *range(1500, 3001, 250))
    fold_most = long.peak(fold, *range(500, 1501, 125))
    fit = "fitted: the cost of {} is not printed"
    return [
        judge("2.14 cellular: P90 at 1K/s (ms)", 6.8, low, below(low, dynet_low), "below DyNet"),
        judge(
            "2.14 DyNet: P90 at 1K/s (ms)", 9.5, dynet_low, below(low, dynet_low), "above cellular"
        ),
        Row("2.14 cellular: peak (1/s)", 3.1e3, median(most), "fitted", fit.format("a cell")),
        Row("2.14 DyNet: peak (1/s)", 2.1e3, median(dynet_most), "fitted", fit.format("merging")),
        Row("2.14 Fold: peak (1/s)", 3.1e3 / 4, median(fold_most), "fitted", fit.format("merging")),
    ]


def figure_2_15(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """Identical trees with 16 leaves, and the ideal that has this tree built in."""
    graph = tree(LEAF_64, INNER_64, complete_tree(4))
    load = Load(lambda rng: graph, 0.6, seeds)
    ours, dynet, ideal = (
        cellular(LEAF_64, INNER_64),
        graphs(Merging, DYNET_MERGE),
        graphs(NodeByNode),
    )
    most = load.peak(ours, 6e3)
    best = load.peak(ideal, 6e3)
    merged = load.peak(dynet, *range(1500, 4001, 500))
    share = [each / other for each, other in zip(most, best, strict=True)]
    low, ideal_low, dynet_low = (load.p90_ms(each, 1e3) for each in (ours, ideal, dynet))
    order = below(most, best) and below(merged, most)
    return [
        judge("2.15 cellular over ideal: peak", 0.7, share, order, "between DyNet and the ideal"),
        judge("2.15 cellular: P90 at 1K/s (ms)", None, low, below(low, dynet_low), "below DyNet"),
        judge(
            "2.15 ideal: P90 at 1K/s (ms)",
            None,
            ideal_low,
            below(dynet_low, ideal_low),
            "the highest",
        ),
    ]


FIGURES: dict[str, Callable[..., list[Row]]] = {
    "2.5": figure_2_5,
    "2.7": figure_2_7,
    "2.8": figure_2_8,
    "2.9": figure_2_9,
    "2.10": figure_2_10,
    "2.13": figure_2_13,
    "2.14": figure_2_14,
    "2.15": figure_2_15,
}
