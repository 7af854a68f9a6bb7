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
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

from pensieve.cells.baselines import Merging, NodeByNode, Padding
from pensieve.cells.comparison import MODELS, compare, speeds
from pensieve.cells.graph import CellType, Graph, chain, tree
from pensieve.cells.models import lstm
from pensieve.cells.scheduler import Policy, Scheduler
from pensieve.cells.workload import complete_tree, parse_tree, sentence_length, translated_length
from scripts.papers.cell_simulation import Arrival, Costs, Run, simulate
from scripts.papers.claims import about, absolute, improvement, less, more, no_claim
from scripts.papers.rows import Extent, Figure, Row, Spread, ratio

LATENCY_MAX = 0.5  # seconds: the paper's plots end at about this 90th percentile
LSTM_STEP = ((64, 185e-6), (256, 470e-6), (512, 784e-6))  # batch size and seconds
GATHER, GATHER_ROW = 58e-6, 0.115e-6  # a step of 64 takes 250 µs with it, one of 512 901 µs
DECODER = 3.0  # times of an LSTM: decoding is 75 % of the computation
LEAF, INNER = 2.0, 3.35  # times of an LSTM: in proportion to 3 and 5 gates, and 2.68 (fitted)
DYNET_MERGE, FOLD_MERGE = 7e-6, 29e-6  # seconds for a node (fitted)
FIXED_LENGTH = 24  # of figure 2.11
OVERLOAD = 28e3  # LSTM requests per second, more than any policy can serve
MS, RATE = "{:.1f} ms", "{:,.0f}/s"

LSTM, LSTM_64 = CellType("lstm", 0, 512), CellType("lstm", 0, 64)
ENCODER, ENCODER_256 = CellType("encoder", 0, 512), CellType("encoder", 0, 256)
DECODER_256 = CellType("decoder", 1, 256)
LEAF_64, INNER_64 = CellType("leaf", 0, 64), CellType("inner", 1, 64)
TIMES = {LSTM: 1.0, LSTM_64: 1.0, ENCODER: 1.0, ENCODER_256: 1.0}
TIMES |= {DECODER_256: DECODER, LEAF_64: LEAF, INNER_64: INNER}
POINTS = {cell: [(size, part * each) for size, part in LSTM_STEP] for cell, each in TIMES.items()}

Draw = Callable[[random.Random], Graph]
Simulate = Callable[[list[Arrival]], Run]


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
        return Spread(1e3 * run.latency() for run in self.runs(simulate, rate))

    def peak(self, simulate: Simulate, *rates: float) -> Spread:
        """Return the highest throughput at these rates with a 90th percentile below LATENCY_MAX."""
        by_seed = zip(*(self.runs(simulate, rate) for rate in rates), strict=True)
        return Spread(
            max(run.throughput() * (run.latency() < LATENCY_MAX) for run in runs)
            for runs in by_seed
        )

    def overloaded(self, simulate: Simulate, rate: float = OVERLOAD) -> Spread:
        """Return the throughput at a rate above any policy's peak, whatever the latency."""
        return Spread(run.throughput() for run in self.runs(simulate, rate))

    def _arrivals(self, rate: float, seed: int) -> Iterator[Arrival]:
        rng, now = random.Random(seed), 0.0
        while (now := now + rng.expovariate(rate)) < self.seconds:
            yield Arrival(now, self.draw(rng))


def _saved(ours: Spread, theirs: Spread) -> Spread:
    """Return by how many per cent our latency is lower."""
    return Spread(100 * (1 - each) for each in ratio(ours, theirs))


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
    gains = Spread(max(each.values()) / each[2] for each in found)
    name = "LSTM cell on this CPU: rows per second with the best batch, over batches of 2"
    yield Row("figure 2.3", name, more(), gains).because(
        "one thread of this CPU, batches to 256; a larger batch reads the weights once for more rows"
    )


def figure_2_5(extent: Extent) -> Iterator[Row]:
    """Eight requests, a time unit for each cell, batches of four: exact, whatever the seeds.

    The text gives the first four lengths and tasks. It says only that the longest of the others has 7 cells.
    """
    row = partial(Row, "figure 2.5")
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
        yield row(name, absolute(paper, "{:g} units"), Spread(ends)).because(
            "Algorithm 1 with its limit of five tasks, and a minimum batch of four"
        )
    name, last = "end of the last request, cellular over graph batching", max(ours) / max(merged)
    yield row(name, less(), Spread([last])).because(
        "the text does not give the lengths of requests 5 to 8, so these lengths are a choice"
    )


def figure_2_7(extent: Extent) -> Iterator[Row]:
    """LSTM: the 90th percentile of the latency, and the peak throughput."""
    row = partial(Row, "figure 2.7")
    short, long = Load(sentences(), 0.6, extent.seeds), Load(sentences(), 1.5, extent.seeds)
    low = short.p90_ms(CELLULAR, 5e3)
    yield row("LSTM, cellular: P90 at 5,000 requests/s", absolute(12, MS), low).because(
        "steps of at most 64 rows take 250 µs with gathers, as in the paper"
    )
    rise = ratio(short.p90_ms(CELLULAR, 8e3), long.p90_ms(CELLULAR, 1e3))
    yield row("LSTM, cellular: P90 at 8,000 requests/s over 1,000/s", about(1.0), rise).because(
        "a request waits for at most five tasks, whatever the load"
    )
    least = long.p90_ms(TURNS, 100)
    yield row("LSTM, padding: least P90", absolute(25, MS), least).because(
        "the paper's frameworks take longer for a step than the bare cell"
    )
    moderate = long.p90_ms(CELLULAR, 2e3)
    for kind, padding in (("turns", TURNS), ("full first", FULL_FIRST)):
        saved = _saved(moderate, long.p90_ms(padding, 2e3))
        name = f"LSTM at 2,000 requests/s: reduction of the P90, compared with padding, {kind}"
        yield row(name, improvement(37.5, 90.5), saved).because(
            "with padding, a request waits for the batches of other buckets"
        )
    peak, turns_peak = short.peak(CELLULAR, 26e3), long.peak(TURNS, 2e3, 4e3, 6e3, 8e3)
    full_peak = long.peak(FULL_FIRST, 16e3, 20e3, 22e3, 24e3)
    yield row("LSTM, cellular: peak", absolute(20e3, RATE), peak).because(
        "the simulator has no cost but the steps and gathers"
    )
    yield row("LSTM, padding, turns: peak", absolute(16e3, RATE), turns_peak).because(
        "each round serves one batch of the fullest bucket, and also the few sentences above 100 words; the "
        "paper does not say how it avoids this"
    )
    yield row("LSTM, padding, full first: peak", absolute(16e3, RATE), full_peak).because(
        "full buckets do not wait for the long sentences"
    )
    gain = ratio(peak, full_peak)
    yield row("LSTM: peak, cellular over padding, full first", about(1.25), gain).because(
        "the paper's padding is between our two kinds"
    )
    small, cells_64 = Load(sentences(LSTM_64), 0.6, extent.seeds), cellular(LSTM_64)
    name = "LSTM, cellular, 5,000 requests/s: P90 with batches of at most 64 over 512"
    yield row(name, about(1.0), ratio(small.p90_ms(cells_64, 5e3), low)).because(
        "at this load, few batches have more than 64 rows"
    )
    loss = ratio(small.peak(cells_64, 14e3), peak)
    yield row("LSTM, cellular: peak with batches of at most 64 over 512", less(), loss).because(
        "a step of 512 rows takes 3.6 times as long as one of 64"
    )


def figure_2_8(extent: Extent) -> Iterator[Row]:
    """Padding by the width of its buckets, with full buckets first."""
    row = partial(Row, "figure 2.8")
    load, busy = Load(sentences(), 1.5, extent.seeds), Load(sentences(), 2.5, extent.seeds)
    policies = {width: graphs(partial(Padding, width, full_first=True)) for width in (1, 10, 40)}
    low = {width: load.p90_ms(each, 1e3) for width, each in policies.items()}
    most = {width: busy.overloaded(each) for width, each in policies.items()}
    for one, other in ((1, 10), (10, 40)):
        name = f"LSTM, padding at 1,000 requests/s: P90, bucket width {one} over {other}"
        yield row(name, more(), ratio(low[one], low[other])).because(
            f"a request waits for more buckets; {low[one].median:.0f} ms and {low[other].median:.0f} ms"
        )
        name = f"LSTM, padding: peak, bucket width {one} over {other}"
        yield row(name, more(), ratio(most[one], most[other])).because(
            f"less padding; {most[one].median:,.0f}/s and {most[other].median:,.0f}/s"
        )


def figure_2_9(extent: Extent) -> Iterator[Row]:
    """LSTM at 5,000 requests/s: queueing and computation."""
    row, load = partial(Row, "figure 2.9"), Load(sentences(), 0.6, extent.seeds)
    ours, padded = (load.runs(each, 5e3) for each in (CELLULAR, TURNS))

    def saved(part: Callable[[Run], float]) -> list[float]:
        return [part(theirs) - part(run) for theirs, run in zip(padded, ours, strict=True)]

    waits = Spread(1e3 * run.queueing() for run in ours)
    yield row("LSTM, cellular: P99 of queueing", absolute(1.38, "{:.2f} ms"), waits).because(
        "a request waits for at most five tasks of 250 µs"
    )
    waits = Spread(1e3 * run.queueing() for run in padded)
    yield row("LSTM, padding: P99 of queueing", more(100, "{:.0f} ms"), waits).because(
        "a request waits for the batches of other buckets"
    )
    computing = ratio(*([run.computation() for run in runs] for runs in (ours, padded)))
    name = "LSTM: median computation time, cellular over padding"
    yield row(name, less(), computing).because(
        "requests wait for their bucket's turn with padding, so its batches are larger and its steps slower; "
        "padded cells are the smaller part"
    )
    parts = ratio(saved(lambda run: run.queueing(0.5)), saved(lambda run: run.computation(0.5)))
    name = "LSTM: reduction of the median queueing time, over that of the median computation time"
    yield row(name, more(), parts).because(
        "queueing is the larger part of what cellular batching saves"
    )


def figure_2_10(extent: Extent) -> Iterator[Row]:
    """The lengths, which are drawn from a distribution fitted to these numbers."""
    row = partial(Row, "figure 2.10")
    drawn = [
        [sentence_length(rng) for _ in range(10_000)]
        for rng in map(random.Random, range(extent.seeds))
    ]
    share = Spread(100 * sum(each < 100 for each in some) / len(some) for some in drawn)
    mean = Spread(sum(some) / len(some) for some in drawn)
    why = "fitted to the paper's {}: log-normal in place of Europarl"
    yield row("lengths below 100", no_claim("{:.1f} %"), share, why.format("99 %"))
    yield row("mean length", no_claim("{:.1f}"), mean, why.format("24"))


def figure_2_11(extent: Extent) -> Iterator[Row]:
    """LSTM with all lengths equal, and with lengths of at most 50 and 100."""
    row = partial(Row, "figure 2.11")
    draws: dict[str, Draw] = {
        "24": lambda _: chain_of((LSTM, FIXED_LENGTH)),
        "50": lambda rng: chain_of((LSTM, sentence_length(rng, 50))),
        "100": lambda rng: chain_of((LSTM, sentence_length(rng, 100))),
    }
    padding = dict.fromkeys(draws, TURNS) | {"24": graphs(partial(Padding, FIXED_LENGTH))}
    loads = {name: Load(draw, 1.0, extent.seeds) for name, draw in draws.items()}
    busy = {name: Load(draw, 2.5, extent.seeds) for name, draw in draws.items()}
    ours = {name: load.p90_ms(CELLULAR, 5e3) for name, load in loads.items()}
    theirs = {name: load.p90_ms(padding[name], 5e3) for name, load in loads.items()}
    most = {name: load.overloaded(padding[name]) for name, load in busy.items()}
    yield row("LSTM, all lengths 24, padding: peak", absolute(27_136, RATE), most["24"]).because(
        "full batches of 512, whose step the paper prints; the bucket ends at 24"
    )
    gain = ratio(loads["24"].overloaded(CELLULAR), most["24"])
    yield row("LSTM, all lengths 24: peak, cellular over padding", no_claim(), gain).because(
        "fitted to the paper's 0.87: the cost of a gather"
    )
    name = "LSTM, all lengths 24, 5,000 requests/s: P90, cellular over padding"
    yield row(name, less(), ratio(ours["24"], theirs["24"])).because(
        "a request does not wait for the batch that runs when it arrives"
    )
    name = "LSTM, cellular at 5,000 requests/s: P90, maximum length 100 over 50"
    yield row(name, about(1.0), ratio(ours["100"], ours["50"])).because(
        "without waiting, the latency is that of the request's own steps"
    )
    for short, long, lengths in (
        ("24", "50", "maximum length 50 over all 24"),
        ("50", "100", "maximum length 100 over 50"),
    ):
        name = f"LSTM, padding, turns, 5,000 requests/s: P90, {lengths}"
        yield row(name, more(), ratio(theirs[long], theirs[short])).because(
            "a request waits for more buckets"
        )
        name = f"LSTM, padding, turns: peak, {lengths}"
        yield row(name, less(), ratio(most[long], most[short])).because(
            "the requests are spread over more buckets, so batches are smaller; in strict turns, nearly "
            "empty buckets of long sentences take turns, too"
        )


def figure_2_13(extent: Extent) -> Iterator[Row]:
    """Sequence to sequence on two and four GPUs, with encoder batches of 512 and of 256."""
    for workers, paper in ((2, 8.5e3), (4, 17e3)):
        row, on = partial(Row, "figure 2.13"), f"sequence to sequence, {workers} GPUs"

        def load(seconds: float, encoder: CellType = ENCODER_256) -> Load:
            return Load(sentence_pairs(encoder), seconds, extent.seeds)

        peak, small_peak = (
            load(0.8, encoder).peak(cellular(encoder, DECODER_256, workers=workers), 1.5 * paper)
            for encoder in (ENCODER, ENCODER_256)
        )
        yield row(f"{on}, cellular: peak", absolute(paper, RATE), peak).because(
            "the simulator has no cost but the steps and gathers"
        )
        for full_first, why in (
            (
                False,
                "strict turns as in the paper; nearly empty buckets of long sentences take turns, too",
            ),
            (True, "the paper's padding takes strict turns; full first makes fuller batches"),
        ):
            padding = graphs(partial(Padding, 10, 256, full_first), workers=workers)
            # Without a bound of the latency: the P90 of padding can be above the bound at any rate.
            padding_peak = load(1.5).overloaded(padding, 1.5 * paper)
            name = f"{on}: peak, cellular over padding, {'full first' if full_first else 'turns'}"
            yield row(name, about(1.6), ratio(peak, padding_peak), why)
        ours, theirs = (
            load(0.8).p90_ms(each, paper / 4)
            for each in (cellular(ENCODER_256, DECODER_256, workers=workers), padding)
        )
        name = f"{on}, {paper / 4:,.0f} requests/s: reduction of the P90, compared with padding"
        yield row(name, improvement(17.5, 82.6), _saved(ours, theirs)).because(
            "requests leave each stage as soon as they can"
        )
        gain = Spread(100 * (each - 1) for each in ratio(peak, small_peak))
        claim = improvement(3.5, 6, "{:+.1f} %")
        yield row(
            f"{on}: peak gained by encoder batches of 512 instead of 256", claim, gain
        ).because("the encoder is a quarter of the computation")


def figure_2_14(extent: Extent) -> Iterator[Row]:
    """TreeLSTM on random binary trees with 19 leaves on average."""
    row, load = partial(Row, "figure 2.14"), Load(parsed, 0.8, extent.seeds)
    ours, dynet = load.p90_ms(TREES, 1e3), load.p90_ms(DYNET, 1e3)
    reason = "a small batch is assumed to cost as much as a batch of 64, whose cost is fitted to the peak"
    yield row("TreeLSTM, cellular: P90 at 1,000 requests/s", absolute(6.8, MS), ours, reason)
    yield row("TreeLSTM, DyNet: P90 at 1,000 requests/s", absolute(9.5, MS), dynet, reason)
    name = "TreeLSTM, 1,000 requests/s: reduction of the P90, compared with DyNet"
    yield row(name, improvement(28), _saved(ours, dynet), "a tree joins the batch that runs")
    fold = _saved(load.p90_ms(TREES, 300), load.p90_ms(FOLD, 300))
    name = "TreeLSTM, 300 requests/s: reduction of the P90, compared with Fold"
    yield row(name, improvement(87), fold).because(
        "less than half of Fold's peak; merging takes longer than computing"
    )
    for name, policy, cost, paper, rates in (
        ("cellular", TREES, "a cell", 3100, range(2600, 3401, 200)),
        ("DyNet", DYNET, "a merged node", 2100, range(1700, 2701, 200)),
        ("Fold", FOLD, "a merged node", 775, range(600, 1001, 100)),
    ):
        peak = load.peak(policy, *rates)
        yield row(f"TreeLSTM, {name}: peak", no_claim(RATE), peak).because(
            f"fitted to the paper's {paper:,}/s: the cost of {cost}"
        )


def figure_2_15(extent: Extent) -> Iterator[Row]:
    """Identical trees of 16 leaves, and the ideal that has this tree built in."""
    row, graph = partial(Row, "figure 2.15"), tree(LEAF_64, INNER_64, complete_tree(4))
    load, ideal = Load(lambda _: graph, 0.6, extent.seeds), graphs(NodeByNode)
    peaks = ratio(load.peak(TREES, 6e3), load.peak(ideal, 6e3))
    yield row("identical trees: peak, cellular over the ideal", about(0.7), peaks).because(
        "scheduling and gathers, as fitted to LSTM"
    )
    slow = load.p90_ms(ideal, 1e3)
    for other, policy in (("cellular", TREES), ("DyNet", DYNET)):
        name = f"identical trees, 1,000 requests/s: P90, the ideal over {other}"
        yield row(name, more(), ratio(slow, load.p90_ms(policy, 1e3))).because(
            "the ideal runs the 31 cells of a tree one after the other"
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
    row, on = partial(Row, f"figure {figure}"), f"{name} on this CPU"
    for other in (*baselines, "no batching"):
        columns = [("throughput", "throughput", more(), reasons[0])]
        if other in baselines:
            columns.append(("P90", "p90_ms", less(), reasons[1]))
            columns.append(("P99", "p99_ms", less(), reasons[2]))
        for title, what, claim, reason in columns:
            found = ratio(
                *([getattr(run[each], what) for run in runs] for each in ("cellular", other))
            )
            yield row(f"{on}: {title}, cellular over {other}", claim, found, reason)


FIGURES: dict[str, Figure] = {
    f"batchmaker-{each.__name__.removeprefix('figure_').replace('_', '.')}": each
    for each in (
        *(figure_2_3, figure_2_5, figure_2_7, figure_2_8, figure_2_9, figure_2_10),
        *(figure_2_11, figure_2_13, figure_2_14, figure_2_15),
    )
}
FIGURES |= {f"batchmaker-cpu-{name}": partial(on_this_cpu, name) for name in MODELS}
