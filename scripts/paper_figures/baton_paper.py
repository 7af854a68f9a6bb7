"""Tables 1 and 2 of the Baton paper: the time to answer queries that all arrive at the start.

    static          compose a batch once, pad it to its longest prompt, and run it until its longest reply has
                    ended (the paper's "Benchmark")
    static, ahead   like static, with prompts computed ahead in groups of similar length ("PD")
    whole prompts   replace each ended query of the batch by the next one; its prompt is computed whole while
                    the others wait (the paper's "Baton", "equivalent to Orca")
    ours            our scheduler with the same number of turns: prompts in pieces, together with the replies;
                    compared with the paper's "Baton-PD", which computes prompts before a slot is free
    ours, elastic   our scheduler with as many turns as memory has room for

The model is Llama-2-7B on an RTX A6000 (table 1) or an RTX 4090 (table 2), with the speeds of their data
sheets. The paper used Hugging Face's transformers, whose steps take longer than reading the weights. So
ratios are compared, not seconds. Lengths are uniform: 3,000 to 5,000 words for "around 4,000", 24 to 400 for
"a few dozen to 400", and 24 to 200 for the second set. A word has 1.3 tokens.

**Idle computation** is the share of computed positions that belong to ended queries or to padding. Our
scheduler computes no such positions. For static batches, the simulation counts them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pensieve.core.cache import CacheConfig
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.sim.cost import CHUNK_TOKENS, CostModel, HardwarePreset, ModelPreset, device_tokens_of
from pensieve.sim.simulator import Simulator
from pensieve.sim.trace import Arrival
from scripts.paper_figures.study import Line, Spread, Study, ratio

MODEL = ModelPreset("llama2-7b", 6.74e9, 32, 32, 32, 128)
A6000 = HardwarePreset("a6000", 155e12, 768e9, 25e9, 48e9, 100e9)
RTX_4090 = HardwarePreset("rtx-4090", 165e12, 1008e9, 25e9, 24e9, 100e9)
TOKENS_PER_WORD = 1.3
BUDGET = 2048
WHOLE = 1_000_000
TURNS_MANY = 256
TABLE_1 = {4: (21_901, 21_781, 20_549, 11_771), 8: (6_619, 6_577, 3_424, 2_654)}
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


class Static(NamedTuple):
    seconds: float
    idle_share: float


def first_set(seed: int, times: int, count: int = 120) -> list[Query]:
    """Draw queries: a quarter have long prompts, another quarter long replies. `times` multiplies lengths."""
    drawn = random.Random(seed)

    def length(is_long: bool) -> int:
        words = drawn.randint(3000, 5000) if is_long else drawn.randint(24, 400)
        return int(words * TOKENS_PER_WORD * times)

    kinds = [(True, False), (False, True), (False, False), (False, False)] * (count // 4)
    drawn.shuffle(kinds)
    return [Query(length(long_in), length(long_out)) for long_in, long_out in kinds]


def second_set(seed: int, count: int = 30) -> list[Query]:
    drawn = random.Random(seed)

    def length() -> int:
        return int(drawn.randint(24, 200) * TOKENS_PER_WORD)

    return [Query(length(), length()) for _ in range(count)]


def static(cost: CostModel, queries: Sequence[Query], batch: int, ahead: bool) -> Static:
    """Run batches in the order of the queries; a slot is free when its whole batch has ended."""
    seconds, computed, needed = 0.0, 0, sum(sum(each) for each in queries)
    groups = sorted(queries) if ahead else list(queries)
    for first in range(0, len(groups), batch):
        group = groups[first : first + batch]
        longest = max(each.input_tokens for each in group)
        seconds += cost.iteration_seconds([(0, longest)] * len(group))
        computed += longest * len(group)
    for first in range(0, len(queries), batch):
        members = queries[first : first + batch]
        start = max(each.input_tokens for each in members)
        for step in range(1, max(each.output_tokens for each in members)):
            at = start + step
            seconds += cost.iteration_seconds([(at, at + 1)] * len(members))
            computed += len(members)
    return Static(seconds, 1 - (needed - len(queries)) / computed)


def simulated(
    cost: CostModel,
    tokens: int,
    queries: Sequence[Query],
    scheduler: SchedulerConfig,
    phases: str,
) -> float:
    """Return the seconds until the last reply has ended with the daemon's scheduler."""
    simulator = Simulator(
        cost,
        policy_named("lru", cost.recompute(CHUNK_TOKENS), CHUNK_TOKENS),
        CacheConfig(tokens // CHUNK_TOKENS, 0),
        scheduler,
        phases=phases,
    )
    counts = simulator.run(
        Arrival(f"q{index}", 0.0, each.input_tokens, each.output_tokens)
        for index, each in enumerate(queries)
    )
    assert counts.turns == len(queries), f"{len(queries) - counts.turns} queries have no reply"
    return counts.seconds


def tables_1_and_2(study: Study) -> Iterator[Line]:
    yield from table(study, "Baton, table 1", A6000, TABLE_1)
    yield from table(study, "Baton, table 2", RTX_4090, TABLE_2)


def table(
    study: Study, name: str, hardware: HardwarePreset, published: Mapping[int, tuple[float, ...]]
) -> Iterator[Line]:
    """Yield how many times faster than static batches each system is, for each batch size."""
    cost, tokens = CostModel.of(MODEL, hardware), device_tokens_of(MODEL, hardware)
    for batch, seconds in published.items():
        study.progress(f"{name}, batches of {batch}")
        by_seed = [
            first_set(seed, 2 if batch == 4 else 1, study.extent.queries)
            if len(seconds) == 4
            else second_set(seed)
            for seed in range(study.extent.seeds)
        ]
        still = [static(cost, queries, batch, ahead=False) for queries in by_seed]
        base = [each.seconds for each in still]
        idle = Spread(tuple(100 * each.idle_share for each in still))
        systems = {
            "whole prompts": (SchedulerConfig(WHOLE, batch), "separate"),
            "ours": (SchedulerConfig(BUDGET, batch), "unified"),
            "ours, elastic": (SchedulerConfig(BUDGET, TURNS_MANY), "unified"),
        }
        papers = {"whole prompts": seconds[2] if len(seconds) == 4 else seconds[1]}
        if len(seconds) == 4:
            papers["ours"] = seconds[3]
            ahead = [static(cost, queries, batch, ahead=True).seconds for queries in by_seed]
            yield Line(
                name,
                f"batches of {batch}: static, ahead over static",
                f"{seconds[0] / seconds[1]:.2f} x",
                ratio(base, ahead),
            )
        for system, (scheduler, phases) in systems.items():
            times = [simulated(cost, tokens, queries, scheduler, phases) for queries in by_seed]
            paper = f"{seconds[0] / papers[system]:.2f} x" if system in papers else ""
            note = f"static: {idle.shown('{:.0f} %')} idle" if system == "whole prompts" else ""
            yield Line(
                name,
                f"batches of {batch}: {system} over static",
                paper,
                ratio(base, times),
                note=note,
            )


FIGURES = {"baton": tables_1_and_2}
