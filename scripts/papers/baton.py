"""Tables 1 and 2 and figures 6 to 8 of the Baton paper: the time to answer queries that arrive together.

All systems but ours have padded slots, as in Hugging Face's transformers: the tensors of a step are as wide
as the widest slot, and a slot computes something in every step, even if its query has ended.

    Benchmark   a batch of queries, padded to the longest prompt, runs until its longest reply has ended
    PD          like Benchmark; prompts are computed ahead, in groups of similar length
    Baton       an ended query's slot gets the next query. Its prompt is computed in one step, in which every
                other slot computes as many tokens of padding. The padding stays in the KV of the other slots
    Baton-PD    like Baton; the prompts are computed ahead, so inserting a query takes no step. The KV of all
                slots is padded to the widest
    ours        our scheduler with the same number of turns: no padding

In table 2 and the figures, Baton means Baton-PD, as in the paper's experiments.

The model is Llama-2-7B on an RTX A6000 (table 1) or an RTX 4090 (table 2). A step of transformers takes
`STEP_SECONDS` longer than our cost model predicts. We chose this value so that Benchmark takes the paper's
time in table 2 with batches of 2. Lengths are uniform: 3,000 to 5,000 words for "around 4,000", 24 to 400 for
"a few dozen to 400", and 24 to 200 for the second set. A word has 1.3 tokens.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from pensieve.sim.cost import CostModel, HardwarePreset, ModelPreset, device_tokens_of
from pensieve.sim.trace import Arrival
from scripts.measurements.replica import Replica, Window
from scripts.papers.claims import Claim, about, absolute, less, more, no_claim
from scripts.papers.rows import Extent, Figure, Row, Spread, ratio

MODEL = ModelPreset("llama2-7b", 6.74e9, 32, 32, 32, 128)
STEP_SECONDS = 0.03
A6000 = HardwarePreset("a6000", 155e12, 768e9, 25e9, 48e9, 100e9)
RTX_4090 = HardwarePreset("rtx-4090", 165e12, 1008e9, 25e9, 24e9, 100e9)
TOKENS_PER_WORD = 1.3
BUDGET = 2048
QUERY_SETS = 10  # sets of table 2 per seed; sets of 30 queries differ widely
SYSTEMS = {  # whether slots are refilled, and whether prompts are computed ahead
    "Benchmark": (False, False),
    "PD": (False, True),
    "Baton": (True, False),
    "Baton-PD": (True, True),
}
TABLE_1 = {4: (21_901, 21_781, 20_549, 11_771), 8: (6_619, 6_577, 3_424, 2_654)}  # of SYSTEMS
REASONS = {
    "Benchmark": "every slot is busy until the longest reply of its batch has ended",
    "PD": "prompts take little of the time, so computing them ahead saves little",
    "Baton": "as described, the padding of each inserted prompt stays in the KV of slots with long replies",
    "Baton-PD": "an inserted query brings its KV along, and slots are as wide as the longest query",
}
TABLE_2 = {
    2: (161.77, 83.43),
    4: (92.68, 49.61),
    6: (61.70, 37.25),
    8: (50.07, 31.08),
    10: (40.45, 30.99),
}


class Query(NamedTuple):
    input_tokens: int
    output_tokens: int


def first_set(seed: int, times: int, count: int = 120) -> list[Query]:
    """Draw queries: a quarter have long prompts, another quarter long replies. `times` multiplies lengths."""
    rng = random.Random(seed)

    def length(is_long: bool) -> int:
        words = rng.randint(3000, 5000) if is_long else rng.randint(24, 400)
        return int(words * TOKENS_PER_WORD * times)

    kinds = [(True, False), (False, True), (False, False), (False, False)] * (count // 4)
    rng.shuffle(kinds)
    return [Query(length(long_in), length(long_out)) for long_in, long_out in kinds]


def second_set(seed: int, count: int = 30) -> list[Query]:
    rng = random.Random(seed)

    def length() -> int:
        return int(rng.randint(24, 200) * TOKENS_PER_WORD)

    return [Query(length(), length()) for _ in range(count)]


class Moment(NamedTuple):
    """The state after a step."""

    at: float
    num_ended: int  # queries
    num_tokens: int  # tokens of replies
    kv_tokens: int  # columns of KV in all slots, padding included


@dataclass
class _Slot:
    begin: int  # the first column of its query
    left: int  # tokens of its reply that are left


@dataclass
class PaddedSlots:
    """Slots with tensors of one width. Columns that no query needs any more are cut off at the front."""

    cost: CostModel
    num_slots: int
    refills: bool
    ahead: bool
    moments: list[Moment] = field(default_factory=lambda: [Moment(0.0, 0, 0, 0)])

    def run(self, queries: Sequence[Query]) -> list[Moment]:
        waiting, slots, end = deque(queries), list[_Slot](), 0
        if self.ahead:
            self._compute_ahead(queries)
        while waiting or any(slot.left for slot in slots):
            running = [slot for slot in slots if slot.left]
            if waiting and (len(running) < self.num_slots if self.refills else not running):
                slots = running
                new = [
                    waiting.popleft() for _ in range(min(self.num_slots - len(slots), len(waiting)))
                ]
                end = self._insert(new, slots, end)
                continue
            end += 1
            self._step(1, slots, end)
        return self.moments

    def _compute_ahead(self, queries: Sequence[Query]) -> None:
        """Compute prompts in groups of similar length."""
        lengths = sorted(each.input_tokens for each in queries)
        for first in range(0, len(lengths), self.num_slots):
            group = lengths[first : first + self.num_slots]
            self._advance([(0, group[-1])] * len(group), [], 0)

    def _insert(self, new: Sequence[Query], slots: list[_Slot], end: int) -> int:
        """Add queries to the slots; return the last column."""
        longest = max(each.input_tokens for each in new)
        if self.ahead:
            begin = min((slot.begin for slot in slots), default=end)
            end = max(end, begin + longest)
            slots += [_Slot(end - each.input_tokens, each.output_tokens) for each in new]
            return end
        num_old = len(slots)
        end = end + longest
        slots += [_Slot(end - each.input_tokens, each.output_tokens) for each in new]
        self._step(longest, slots, end, num_old)
        return end

    def _step(self, tokens: int, slots: Sequence[_Slot], end: int, num_old: int = 0) -> None:
        """Run a step with `tokens` columns in every slot; the first `num_old` slots compute only padding."""
        first = min((slot.begin for slot in slots if slot.left), default=end)
        self._advance(
            [(end - tokens - first, end - first)] * len(slots), slots[num_old:], end - first
        )

    def _advance(
        self, spans: Sequence[tuple[int, int]], slots: Sequence[_Slot], width: int
    ) -> None:
        at, num_ended, num_tokens, _ = self.moments[-1]
        for slot in slots:
            if slot.left:
                slot.left -= 1
                num_tokens += 1
                num_ended += not slot.left
        at += self.cost.iteration_seconds(spans)
        self.moments.append(Moment(at, num_ended, num_tokens, width * len(spans)))


def ours(cost: CostModel, tokens: int, queries: Sequence[Query], num_turns: int) -> float:
    """Return the seconds until the last reply has ended with the daemon's scheduler."""
    replica = Replica(cost, tokens, 0, "lru", BUDGET, num_turns)
    counts = replica.simulator(Window(0.0, 0.0, float("inf"))).run(
        Arrival(f"q{index}", 0.0, *each) for index, each in enumerate(queries)
    )
    assert counts.turns == len(queries), f"{len(queries) - counts.turns} queries have no reply"
    return counts.seconds


def _runs(
    hardware: HardwarePreset, batch: int, drawn: Sequence[Sequence[Query]], names: Iterable[str]
) -> dict[str, list[list[Moment]]]:
    """Return the moments of each system and seed."""
    cost = CostModel.of(MODEL, replace(hardware, overhead_seconds=STEP_SECONDS))
    return {
        name: [PaddedSlots(cost, batch, *SYSTEMS[name]).run(queries) for queries in drawn]
        for name in names
    }


def _seconds(runs: dict[str, list[list[Moment]]]) -> dict[str, Spread]:
    return {name: Spread(each[-1].at for each in found) for name, found in runs.items()}


def table_1(extent: Extent) -> Iterator[Row]:
    row, tokens = partial(Row, "table 1"), device_tokens_of(MODEL, A6000)
    cost = replace(CostModel.of(MODEL, A6000), overhead_seconds=STEP_SECONDS)
    for batch, published in TABLE_1.items():
        drawn = [first_set(seed, 2 if batch == 4 else 1) for seed in range(extent.seeds)]
        runs = _runs(A6000, batch, drawn, SYSTEMS)
        seconds = _seconds(runs)
        papers = dict(zip(SYSTEMS, published, strict=True))
        for name, paper in papers.items():
            what, claim = f"batches of {batch}: time of {name}", absolute(paper, "{:,.0f} s")
            yield row(what, claim, seconds[name], REASONS[name])
        for name in ("PD", "Baton", "Baton-PD"):
            claim = about(papers["Benchmark"] / papers[name])
            speed = ratio(seconds["Benchmark"], seconds[name])
            gigabytes = _kv_max(runs[name][0]) * MODEL.kv_bytes_per_token / 1e9
            yield row(f"batches of {batch}: speed of {name} over Benchmark", claim, speed).because(
                f"{REASONS[name]}; largest KV {gigabytes:.0f} GB"
            )
        speed = ratio(seconds["Benchmark"], [ours(cost, tokens, each, batch) for each in drawn])
        what = "speed of our scheduler over Benchmark, with the same overhead per step"
        yield row(f"batches of {batch}: {what}", no_claim(), speed).because(
            "no padding, and prompts in pieces beside the replies"
        )


def table_2(extent: Extent) -> Iterator[Row]:
    row = partial(Row, "table 2")
    drawn = [second_set(seed) for seed in range(QUERY_SETS * extent.seeds)]
    for batch, (benchmark, baton) in TABLE_2.items():
        runs = _runs(RTX_4090, batch, drawn, ("Benchmark", "Baton-PD"))
        seconds = _seconds(runs)
        claim, reason = absolute(benchmark, "{:.0f} s"), "Benchmark's own time"
        if batch == 2:
            claim, reason = no_claim("{:.0f} s"), "this time sets the overhead of a step"
        yield row(f"batches of {batch}: time of Benchmark", claim, seconds["Benchmark"], reason)
        claim, speed = about(benchmark / baton), ratio(seconds["Benchmark"], seconds["Baton-PD"])
        yield row(f"batches of {batch}: speed of Baton-PD over Benchmark", claim, speed).because(
            "Benchmark waits for the longest reply of each batch; its median is "
            f"{seconds['Benchmark'].median:.0f} s"
        )
        yield from _over_time(batch, runs)


def _over_time(batch: int, runs: dict[str, list[list[Moment]]]) -> Iterator[Row]:
    """Figures 6 to 8: ended queries, tokens and KV over time."""

    def row(number: int, what: str, claim: Claim, value: Callable[[list[Moment]], float]) -> Row:
        def medians(name: str) -> Spread:
            values = [value(each) for each in runs[name]]
            seeds = range(0, len(values), QUERY_SETS)
            return Spread(Spread(values[at : at + QUERY_SETS]).median for at in seeds)

        name = f"batches of {batch}: {what}, Baton-PD over Benchmark"
        return Row(
            f"figure {number}", name, claim, ratio(medians("Baton-PD"), medians("Benchmark"))
        )

    yield row(6, "longest time without an ended query", less(), _longest_pause).because(
        "with Benchmark, the longest replies of a batch end last and hold up the next batch"
    )
    yield row(7, "variation of the tokens per second", less(), _variation).because(
        "with Benchmark, the rate falls in each batch as replies end; the end of the run, without queries to "
        "refill slots, is left out"
    )
    yield row(8, "largest KV", about(1.0), _kv_max).because(
        "both have as many slots, and padding keeps a slot as wide as the widest"
    )
    yield row(8, "mean share of the largest KV", more(), _mean_kv_share).because(
        "Benchmark frees all KV after each batch: a sawtooth"
    )


def _kv_max(moments: Sequence[Moment]) -> int:
    return max(each.kv_tokens for each in moments)


def _busy_moments(moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments before the last slots run empty: while at most 70 % of the queries have ended."""
    last = moments[-1].num_ended
    return [each for each in moments if each.num_ended <= 0.7 * last]


def _longest_pause(moments: Sequence[Moment]) -> float:
    ends = [moments[0].at] + [b.at for a, b in pairwise(moments) if b.num_ended > a.num_ended]
    return max(b - a for a, b in pairwise(ends))


def _variation(moments: Sequence[Moment]) -> float:
    """Return the deviation of the token rate over its mean, in windows of 20 steps."""
    body = _busy_moments(moments)[::20]
    rates = [(b.num_tokens - a.num_tokens) / (b.at - a.at) for a, b in pairwise(body)]
    return statistics.pstdev(rates) / statistics.mean(rates)


def _mean_kv_share(moments: Sequence[Moment]) -> float:
    body = _busy_moments(moments)
    weighted = sum(b.kv_tokens * (b.at - a.at) for a, b in pairwise(body))
    return weighted / (body[-1].at * _kv_max(moments))


FIGURES: dict[str, Figure] = {"baton-table-1": table_1, "baton-table-2-and-6-to-8": table_2}
