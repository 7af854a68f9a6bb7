"""Figures 2.3 to 2.15 of BatchMaker: cellular batching, chapter 2 of Yu's dissertation.

Most rows are simulated (cell_simulation.py) with the policies of `pensieve.cells`. Cells take the times that
the paper prints for a V100, and the lengths follow the quantiles that it prints (pensieve/cells/workload.py).
A few costs are not printed. Each of them is fitted to one number of the paper. That number is then no claim,
and its row has no verdict.

There are two kinds of padding. With *turns*, the buckets take strict turns, as the paper says. With *full
first*, a bucket with a full batch does not wait for its turn. Figures 2.3 and "on this CPU" run real cells.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

from pensieve.cells.baselines import Merging, NodeByNode, Padding
from pensieve.cells.comparison import MODELS, compare, speeds
from pensieve.cells.graph import CellType, Graph, chain, tree
from pensieve.cells.models import lstm
from pensieve.cells.scheduler import Policy, Scheduler
from pensieve.cells.workload import complete_tree, parse_tree, sentence_length, translated_length
from scripts.papers.cell_simulation import Arrival, Costs, Run, simulate
from scripts.papers.rows import Extent, Figure, Row, Spread, about, less, more, ratio

LATENCY_MAX = 0.5  # seconds: the paper's plots end at about this 90th percentile
LSTM_STEP = ((64, 185e-6), (256, 470e-6), (512, 784e-6))  # batch size and seconds
GATHER, GATHER_ROW = 58e-6, 0.115e-6  # a step of 64 takes 250 µs with it, one of 512 901 µs
DECODER = 3.0  # times of an LSTM: decoding is 75 % of the computation
LEAF, INNER = 2.0, 3.35  # times of an LSTM: in proportion to 3 and 5 gates, and 2.68 (fitted)
DYNET_MERGE, FOLD_MERGE = 7e-6, 29e-6  # seconds for a node (fitted)
FIXED_LENGTH = 24  # of figure 2.11
OVERLOAD = 28e3  # LSTM requests per second, more than any policy can serve

LSTM, LSTM_64 = CellType("lstm", 0, 512), CellType("lstm", 0, 64)
ENCODER, ENCODER_256 = CellType("encoder", 0, 512), CellType("encoder", 0, 256)
DECODER_256 = CellType("decoder", 1, 256)
LEAF_64, INNER_64 = CellType("leaf", 0, 64), CellType("inner", 1, 64)
TIMES = {LSTM: 1.0, LSTM_64: 1.0, ENCODER: 1.0, ENCODER_256: 1.0}
TIMES |= {DECODER_256: DECODER, LEAF_64: LEAF, INNER_64: INNER}
POINTS = {cell: [(size, part * each) for size, part in LSTM_STEP] for cell, each in TIMES.items()}

Draw = Callable[[random.Random], Graph]
Simulate = Callable[[list[Arrival]], Run]


def _row(figure: str, *rest: Any, **named: Any) -> Row:
    return Row(f"BatchMaker, figure {figure}", *rest, **named)


def cellular(*cells: CellType, workers: int = 1) -> Simulate:
    costs = Costs(POINTS, GATHER, GATHER_ROW)
    return lambda arrivals: simulate(arrivals, Scheduler(cells), costs, workers)


def graphs(policy: Callable[[], Policy], merge: float = 0.0, workers: int = 1) -> Simulate:
    costs = Costs(POINTS, per_row=merge)
    return lambda arrivals: simulate(arrivals, policy(), costs, workers)


CELLULAR, TURNS = cellular(LSTM), graphs(Padding)
FULL_FIRST = graphs(partial(Padding, full_first=True))
TREES, DYNET = cellular(LEAF_64, INNER_64), graphs(Merging, DYNET_MERGE)
FOLD = graphs(Merging, FOLD_MERGE)


class Load(NamedTuple):
    """Requests with Poisson arrivals, for some simulated seconds, with each seed."""

    draw: Draw
    seconds: float
    num_seeds: int

    def runs(self, simulate: Simulate, rate: float) -> list[Run]:
        return [simulate(list(self._arrivals(rate, seed))) for seed in range(self.num_seeds)]

    def p90_ms(self, simulate: Simulate, rate: float) -> Spread:
        return _spread(1e3 * run.latency() for run in self.runs(simulate, rate))

    def peak(self, simulate: Simulate, *rates: float) -> Spread:
        """Return the highest throughput at these rates with a 90th percentile below LATENCY_MAX."""
        by_seed = zip(*(self.runs(simulate, rate) for rate in rates), strict=True)
        return _spread(
            max(run.throughput() * (run.latency() < LATENCY_MAX) for run in runs)
            for runs in by_seed
        )

    def overloaded(self, simulate: Simulate) -> Spread:
        """Return the throughput under OVERLOAD, whatever the latency."""
        return _spread(run.throughput() for run in self.runs(simulate, OVERLOAD))

    def _arrivals(self, rate: float, seed: int) -> Iterator[Arrival]:
        rng, now = random.Random(seed), 0.0
        while (now := now + rng.expovariate(rate)) < self.seconds:
            yield Arrival(now, self.draw(rng))


def _spread(values: Iterable[float]) -> Spread:
    return Spread(tuple(values))


def _over(ours: Spread, theirs: Spread) -> Spread:
    return ratio(ours.values, theirs.values)


def _saved(ours: Spread, theirs: Spread) -> Spread:
    """Return by how many per cent our latency is lower."""
    return _spread(100 * (1 - each) for each in _over(ours, theirs).values)


@cache
def chain_of(*stages: tuple[CellType, int]) -> Graph:
    return chain(*((cell, [()] * count) for cell, count in stages))


def sentences(cell: CellType = LSTM) -> Draw:
    return lambda rng: chain_of((cell, sentence_length(rng)))


def sentence_pairs(encoder: CellType) -> Draw:
    def draw(rng: random.Random) -> Graph:
        source = sentence_length(rng)
        return chain_of((encoder, source), (DECODER_256, translated_length(rng, source)))

    return draw


@cache
def _parsed(number: int) -> Graph:
    return tree(LEAF_64, INNER_64, parse_tree(random.Random(number)))


def parsed(rng: random.Random) -> Graph:
    return _parsed(rng.randrange(300))


def figure_2_3(extent: Extent) -> Iterator[Row]:
    (cell,) = lstm(hidden=1024).cells.values()
    found = [speeds(cell, 256, extent.repeats) for _ in range(extent.seeds)]
    yield _row(
        "2.3",
        "LSTM cell on this CPU: rows per second with the best batch, over batches of 2",
        more(),
        _spread(max(each.values()) / each[2] for each in found),
        "one thread of this CPU, batches to 256; a larger batch reads the weights once for more rows",
    )


def figure_2_5(extent: Extent) -> Iterator[Row]:
    """Eight requests, a time unit for each cell, batches of four: exact, whatever the seeds.

    The text gives the first four lengths and tasks. Of the others it says only that the longest is 7.
    """
    cell = CellType("cell", 0, batch_max=4, batch_min=4)
    lengths = zip((0, 0, 0, 0, 1.5, 2.5, 2.5, 4.5), (2, 3, 3, 5, 5, 7, 3, 1), strict=True)
    arrivals = [Arrival(at, chain_of((cell, count))) for at, count in lengths]
    costs = Costs({cell: [(4, 1.0)]})
    merged, ours = (
        simulate(arrivals, policy, costs).finished for policy in (Merging(4), Scheduler([cell]))
    )
    for name, paper, ends in (
        ("graph batching: end of requests 1 to 4", 5, merged[:4]),
        ("graph batching: end of requests 5 to 8", 12, merged[4:]),
        ("cellular batching: end of request 1", 2, ours[:1]),
        ("cellular batching: end of requests 2 and 3", 3, ours[1:3]),
    ):
        why = "Algorithm 1 with its limit of five tasks, and a minimum batch of four"
        yield _row("2.5", name, about(paper, neutral=None), _spread(ends), why, "{:g} units")
    why = "the text does not give the lengths of requests 5 to 8, so these lengths are a choice"
    last = _spread([max(ours) / max(merged)])
    yield _row("2.5", "end of the last request, cellular over graph batching", less(), last, why)


def figure_2_7(extent: Extent) -> Iterator[Row]:
    """LSTM: the 90th percentile of the latency, and the peak throughput."""
    row = partial(_row, "2.7")
    short, long = Load(sentences(), 0.6, extent.seeds), Load(sentences(), 1.5, extent.seeds)
    low, least = short.p90_ms(CELLULAR, 5e3), long.p90_ms(TURNS, 100)
    moderate = long.p90_ms(CELLULAR, 2e3)
    peak, turns_peak = short.peak(CELLULAR, 26e3), long.peak(TURNS, 2e3, 4e3, 6e3, 8e3)
    full_peak = long.peak(FULL_FIRST, 16e3, 20e3, 22e3, 24e3)
    small, cells_64 = Load(sentences(LSTM_64), 0.6, extent.seeds), cellular(LSTM_64)
    yield row(
        "LSTM, cellular: P90 at 5,000 requests/s",
        about(12, neutral=None),
        low,
        "steps of at most 64 rows take 250 µs with gathers, as in the paper",
        "{:.1f} ms",
    )
    yield row(
        "LSTM, cellular: P90 at 8,000 requests/s over 1,000/s",
        about(1.0),
        _over(short.p90_ms(CELLULAR, 8e3), long.p90_ms(CELLULAR, 1e3)),
        "a request waits for at most five tasks, whatever the load",
    )
    yield row(
        "LSTM, padding: least P90",
        about(25, neutral=None),
        least,
        "the paper's frameworks take longer for a step than the bare cell",
        "{:.1f} ms",
    )
    for name, padding in (("turns", TURNS), ("full first", FULL_FIRST)):
        yield row(
            f"LSTM at 2,000 requests/s: reduction of the P90, compared with padding, {name}",
            about(37.5, 90.5, neutral=0.0),
            _saved(moderate, long.p90_ms(padding, 2e3)),
            "with padding, a request waits for the batches of other buckets",
            "{:.1f} %",
        )
    yield row(
        "LSTM, cellular: peak",
        about(20e3, neutral=None),
        peak,
        "the simulator has no cost but the steps and gathers",
        "{:,.0f}/s",
    )
    yield row(
        "LSTM, padding, turns: peak",
        about(16e3, neutral=None),
        turns_peak,
        "each round serves one batch of the fullest bucket, and also the few sentences above 100 words; the "
        "paper does not say how it avoids this",
        "{:,.0f}/s",
    )
    yield row(
        "LSTM, padding, full first: peak",
        about(16e3, neutral=None),
        full_peak,
        "full buckets do not wait for the long sentences",
        "{:,.0f}/s",
    )
    yield row(
        "LSTM: peak, cellular over padding, full first",
        about(1.25),
        _over(peak, full_peak),
        "the paper's padding is between our two kinds",
    )
    yield row(
        "LSTM, cellular, 5,000 requests/s: P90 with batches of at most 64 over 512",
        about(1.0),
        _over(small.p90_ms(cells_64, 5e3), low),
        "at this load, few batches have more than 64 rows",
    )
    yield row(
        "LSTM, cellular: peak with batches of at most 64 over 512",
        less(),
        _over(small.peak(cells_64, 14e3), peak),
        "a step of 512 rows takes 3.6 times as long as one of 64",
    )


def figure_2_8(extent: Extent) -> Iterator[Row]:
    """Padding by the width of its buckets, with full buckets first."""
    load, busy = Load(sentences(), 1.5, extent.seeds), Load(sentences(), 2.5, extent.seeds)
    policies = {width: graphs(partial(Padding, width, full_first=True)) for width in (1, 10, 40)}
    low = {width: load.p90_ms(each, 1e3) for width, each in policies.items()}
    most = {width: busy.overloaded(each) for width, each in policies.items()}
    for narrow, wide in ((1, 10), (10, 40)):
        yield _row(
            "2.8",
            f"LSTM, padding at 1,000 requests/s: P90, bucket width {narrow} over {wide}",
            more(),
            _over(low[narrow], low[wide]),
            f"a request waits for more buckets; {low[narrow].median:.0f} ms and {low[wide].median:.0f} ms",
        )
        yield _row(
            "2.8",
            f"LSTM, padding: peak, bucket width {narrow} over {wide}",
            more(),
            _over(most[narrow], most[wide]),
            f"less padding; {most[narrow].median:,.0f}/s and {most[wide].median:,.0f}/s",
        )


def figure_2_9(extent: Extent) -> Iterator[Row]:
    """LSTM at 5,000 requests/s: queueing and computation."""
    load = Load(sentences(), 0.6, extent.seeds)
    ours, padded = (load.runs(each, 5e3) for each in (CELLULAR, TURNS))

    def saved(part: Callable[[Run], float]) -> list[float]:
        return [part(theirs) - part(run) for theirs, run in zip(padded, ours, strict=True)]

    yield _row(
        "2.9",
        "LSTM, cellular: P99 of queueing",
        about(1.38, neutral=None),
        _spread(1e3 * run.queueing() for run in ours),
        "a request waits for at most five tasks of 250 µs",
        "{:.2f} ms",
    )
    yield _row(
        "2.9",
        "LSTM, padding: P99 of queueing",
        more(100),
        _spread(1e3 * run.queueing() for run in padded),
        "a request waits for the batches of other buckets",
        "{:.0f} ms",
    )
    yield _row(
        "2.9",
        "LSTM: median computation time, cellular over padding",
        less(),
        ratio([run.computation() for run in ours], [run.computation() for run in padded]),
        "requests wait for their bucket's turn with padding, so its batches are larger and its steps slower; "
        "padded cells are the smaller part",
    )
    yield _row(
        "2.9",
        "LSTM: medians, saved queueing time over saved computation time",
        more(),
        ratio(saved(lambda run: run.queueing(0.5)), saved(lambda run: run.computation(0.5))),
        "queueing is the larger part of what cellular batching saves",
    )


def figure_2_10(extent: Extent) -> Iterator[Row]:
    """The lengths, which are drawn from a distribution fitted to these numbers."""
    drawn = [
        [sentence_length(rng) for _ in range(10_000)]
        for rng in map(random.Random, range(extent.seeds))
    ]
    why = "fitted to the paper's {}: log-normal in place of Europarl"
    share = _spread(100 * sum(each < 100 for each in some) / len(some) for some in drawn)
    mean = _spread(sum(some) / len(some) for some in drawn)
    yield _row("2.10", "lengths below 100", None, share, why.format("99 %"), "{:.1f} %")
    yield _row("2.10", "mean length", None, mean, why.format("24"), "{:.1f}")


def figure_2_11(extent: Extent) -> Iterator[Row]:
    """LSTM with all lengths equal, and with lengths of at most 50 and 100."""
    row = partial(_row, "2.11")
    draws: dict[str, Draw] = {"24": lambda _: chain_of((LSTM, FIXED_LENGTH))}
    for longest in (50, 100):
        draws[str(longest)] = partial(_clipped, longest)
    loads = {name: Load(draw, 1.0, extent.seeds) for name, draw in draws.items()}
    padding = dict.fromkeys(draws, TURNS) | {"24": graphs(partial(Padding, FIXED_LENGTH))}
    ours = {name: load.p90_ms(CELLULAR, 5e3) for name, load in loads.items()}
    theirs = {name: load.p90_ms(padding[name], 5e3) for name, load in loads.items()}
    most = {
        name: load._replace(seconds=2.5).overloaded(padding[name]) for name, load in loads.items()
    }
    yield row(
        "LSTM, all lengths 24, padding: peak",
        about(27_136, neutral=None),
        most["24"],
        "full batches of 512, whose step the paper prints; the bucket ends at 24",
        "{:,.0f}/s",
    )
    yield row(
        "LSTM, all lengths 24: peak, cellular over padding",
        None,
        _over(loads["24"].overloaded(CELLULAR), most["24"]),
        "fitted to the paper's 0.87: the cost of a gather",
    )
    yield row(
        "LSTM, all lengths 24, 5,000 requests/s: P90, cellular over padding",
        less(),
        _over(ours["24"], theirs["24"]),
        "a request does not wait for the batch that runs when it arrives",
    )
    yield row(
        "LSTM, cellular at 5,000 requests/s: P90, maximum length 100 over 50",
        about(1.0),
        _over(ours["100"], ours["50"]),
        "without waiting, the latency is that of the request's own steps",
    )
    for short, long, lengths in (
        ("24", "50", "maximum length 50 over all 24"),
        ("50", "100", "maximum length 100 over 50"),
    ):
        yield row(
            f"LSTM, padding, turns, 5,000 requests/s: P90, {lengths}",
            more(),
            _over(theirs[long], theirs[short]),
            "a request waits for more buckets",
        )
        yield row(
            f"LSTM, padding, turns: peak, {lengths}",
            less(),
            _over(most[long], most[short]),
            "the requests are spread over more buckets, so batches are smaller; in strict turns, nearly "
            "empty buckets of long sentences take turns, too",
        )


def _clipped(longest: int, rng: random.Random) -> Graph:
    return chain_of((LSTM, sentence_length(rng, longest)))


def figure_2_13(extent: Extent) -> Iterator[Row]:
    """Sequence to sequence on two and four GPUs, with encoder batches of 512 and of 256."""
    for workers, paper in ((2, 8.5e3), (4, 17e3)):
        row, on = partial(_row, "2.13"), f"sequence to sequence, {workers} GPUs"
        loads = {
            encoder: Load(sentence_pairs(encoder), 0.8 / workers, extent.seeds)
            for encoder in (ENCODER, ENCODER_256)
        }
        peaks = {
            encoder: load.peak(cellular(encoder, DECODER_256, workers=workers), 1.5 * paper)
            for encoder, load in loads.items()
        }
        padding = graphs(partial(Padding, 10, 256, True), workers=workers)
        rates = [paper * part for part in (0.6, 0.8, 1.0, 1.2)]
        long = loads[ENCODER_256]._replace(seconds=1.5)
        moderate = long._replace(seconds=0.8)
        yield row(
            f"{on}, cellular: peak",
            about(paper, neutral=None),
            peaks[ENCODER],
            "the simulator has no cost but the steps and gathers",
            "{:,.0f}/s",
        )
        yield row(
            f"{on}: peak, cellular over padding, full first",
            about(1.6),
            _over(peaks[ENCODER], long.peak(padding, *rates)),
            "the paper's padding takes strict turns; full first is stronger, and nears the limit of the GPUs",
        )
        yield row(
            f"{on}, {paper / 4:,.0f} requests/s: reduction of the P90, compared with padding",
            about(17.5, 82.6, neutral=0.0),
            _saved(
                moderate.p90_ms(cellular(ENCODER_256, DECODER_256, workers=workers), paper / 4),
                moderate.p90_ms(padding, paper / 4),
            ),
            "requests leave each stage as soon as they can",
            "{:.1f} %",
        )
        gains = _over(peaks[ENCODER], peaks[ENCODER_256]).values
        yield row(
            f"{on}: gain by encoder batches of 512",
            about(3.5, 6, neutral=0.0),
            _spread(100 * (each - 1) for each in gains),
            "the encoder is a quarter of the computation",
            "{:+.1f} %",
        )


def figure_2_14(extent: Extent) -> Iterator[Row]:
    """TreeLSTM on random binary trees with 19 leaves on average."""
    row, load = partial(_row, "2.14"), Load(parsed, 0.8, extent.seeds)
    ours, dynet = load.p90_ms(TREES, 1e3), load.p90_ms(DYNET, 1e3)
    slow = "a small batch is taken to cost as much as one of 64, and the cost of 64 is fitted to the peak"
    yield row(
        "TreeLSTM, cellular: P90 at 1,000 requests/s",
        about(6.8, neutral=None),
        ours,
        slow,
        "{:.1f} ms",
    )
    yield row(
        "TreeLSTM, DyNet: P90 at 1,000 requests/s",
        about(9.5, neutral=None),
        dynet,
        slow,
        "{:.1f} ms",
    )
    yield row(
        "TreeLSTM, 1,000 requests/s: reduction of the P90, compared with DyNet",
        about(28, neutral=0.0),
        _saved(ours, dynet),
        "a tree joins the batch that runs",
        "{:.1f} %",
    )
    yield row(
        "TreeLSTM, 300 requests/s: reduction of the P90, compared with Fold",
        about(87, neutral=0.0),
        _saved(load.p90_ms(TREES, 300), load.p90_ms(FOLD, 300)),
        "less than half of Fold's peak; merging takes longer than computing",
        "{:.1f} %",
    )
    for name, policy, cost, paper, rates in (
        ("cellular", TREES, "a cell", 3100, (5000,)),
        ("DyNet", DYNET, "a merged node", 2100, range(1700, 2701, 200)),
        ("Fold", FOLD, "a merged node", 775, range(600, 1001, 100)),
    ):
        yield row(
            f"TreeLSTM, {name}: peak",
            None,
            load.peak(policy, *rates),
            f"fitted to the paper's {paper:,}/s: the cost of {cost}",
            "{:,.0f}/s",
        )


def figure_2_15(extent: Extent) -> Iterator[Row]:
    """Identical trees of 16 leaves, and the ideal that has this tree built in."""
    graph = tree(LEAF_64, INNER_64, complete_tree(4))
    load, ideal = Load(lambda _: graph, 0.6, extent.seeds), graphs(NodeByNode)
    yield _row(
        "2.15",
        "identical trees: peak, cellular over the ideal",
        about(0.7),
        _over(load.peak(TREES, 6e3), load.peak(ideal, 6e3)),
        "scheduling and gathers, as fitted to LSTM",
    )
    slow = load.p90_ms(ideal, 1e3)
    for name, policy in (("cellular", TREES), ("DyNet", DYNET)):
        yield _row(
            "2.15",
            f"identical trees, 1,000 requests/s: P90, the ideal over {name}",
            more(),
            _over(slow, load.p90_ms(policy, 1e3)),
            "the ideal runs the 31 cells of a tree one after the other",
        )


AT_ONCE, AT_80 = "all requests at once, by CPU time", "at 80 % of the throughput of merging"
LONGEST = f"{AT_80}: the longest requests set the P99, and share each of their steps with others"
SMALL_GAIN = f"{AT_ONCE}: merging has large batches of trees too, except at their highest levels"
COMPARED = {  # the figure that has this order, the baselines, and why throughput, P90 and P99 are so
    "lstm": ("2.7", ("padding", "merging"), AT_ONCE, AT_80, LONGEST),
    "seq2seq": ("2.13", ("padding", "merging"), AT_ONCE, AT_80, LONGEST),
    "tree": ("2.14", ("merging",), SMALL_GAIN, AT_80, AT_80),
}


def on_this_cpu(name: str, extent: Extent) -> Iterator[Row]:
    """Serve real requests by each policy, on one thread."""
    figure, baselines, *reasons = COMPARED[name]
    runs = [compare(name, 3 * extent.requests // 2, seed) for seed in range(extent.seeds)]
    assert all(each.exact for run in runs for each in run.values()), "replies differ"
    row, on = partial(_row, figure), f"{name} on this CPU"
    for other in (*baselines, "no batching"):
        columns = [("throughput", "throughput", more(), reasons[0])]
        if other in baselines:
            columns.append(("P90", "p90_ms", less(), reasons[1]))
            columns.append(("P99", "p99_ms", less(), reasons[2]))
        for title, what, claim, reason in columns:
            ratio = _spread(
                getattr(run["cellular"], what) / getattr(run[other], what) for run in runs
            )
            yield row(f"{on}: {title}, cellular over {other}", claim, ratio, reason)


FIGURES: dict[str, Figure] = {
    f"batchmaker-{each.__name__.removeprefix('figure_').replace('_', '.')}": each
    for each in (
        *(figure_2_3, figure_2_5, figure_2_7, figure_2_8, figure_2_9, figure_2_10),
        *(figure_2_11, figure_2_13, figure_2_14, figure_2_15),
    )
}
FIGURES |= {f"batchmaker-cpu-{name}": partial(on_this_cpu, name) for name in MODELS}
