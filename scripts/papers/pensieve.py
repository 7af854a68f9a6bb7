"""Figures 3.12 to 3.18 of the Pensieve paper (Yu, 2024).

The conversations are like those of ShareGPT, and the models are those of the paper's table 3.1. One engine is
compared with itself under options that `pensieve simulate` also has:

    Pensieve      the daemon's scheduler, policy `value`
    GPU cache     no host tier
    stateless     each turn computes its history again, in the same batches
    vLLM-like     stateless, whole prompts in separate passes

Figure 3.17 is not simulated: the CPU's attention kernel runs on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pensieve.sim.cost import CHUNK_TOKENS, MODELS, CostModel
from scripts.measurements.replica import Replica
from scripts.papers.claims import about, improvement, less, more, no_claim
from scripts.papers.equal_latency import Crossing, Figures, Search, system
from scripts.papers.rows import Extent, Figure, Row, Spread, ratio

CONTEXT_MAX = 16_384
# A pass of vLLM has only whole prompts, with at most as many tokens in total as the longest context.
SEPARATE: dict[str, Any] = {"phases": "separate", "token_budget": CONTEXT_MAX}
SYSTEMS: dict[str, dict[str, Any]] = {
    "Pensieve": {},
    "GPU cache": {"host_tokens": 0},
    "vLLM-like": {"stateless": True, **SEPARATE},
}
POLICY_RATES = (3.2, 3.6)  # requests per second: in the paper, `lru` loses from 3.2 on


@dataclass(frozen=True)
class Gain:
    """One of the figures 3.12 and 3.13: throughput at equal latency."""

    figure: str
    model: str
    num_gpus: int
    guesses: tuple[float, float, float]  # approximate rate at the limit, by system
    paper: float
    lower_latency: float | None = None  # per cent; with GPU cache, compared with vLLM-like


GAINS = (
    Gain("figure 3.12a", "opt-13b", 1, (0.45, 0.33, 0.33), 1.25, 20),
    Gain("figure 3.12b", "llama2-13b-gqa", 1, (1.6, 0.8, 0.65), 1.52, 40),
    Gain("figure 3.13a", "opt-66b", 4, (0.6, 0.4, 0.4), 1.5),
    Gain("figure 3.13b", "llama2-70b", 4, (2.8, 1.1, 0.5), 1.6),
)


def gains(gain: Gain, extent: Extent) -> Iterator[Row]:
    """Compare Pensieve's throughput with each other system's, at equal latency."""
    search, model, row = Search(gain.model, extent), gain.model, partial(Row, gain.figure)
    systems = {name: system(model, gain.num_gpus, **each) for name, each in SYSTEMS.items()}
    guesses = dict(zip(systems, gain.guesses, strict=True))
    limits = {name: search.at_limit(each, guesses[name]) for name, each in systems.items()}
    speeds = {name: [each.tokens_per_second for each in found] for name, found in limits.items()}
    recomputed = {name: _computed_again(found).shown("{:.1f}") for name, found in limits.items()}
    for other in ("vLLM-like", "GPU cache"):
        ours = ratio(speeds["Pensieve"], speeds[other])
        yield row(f"{model}: throughput over {other}", about(gain.paper), ours).because(
            f"tokens computed again for each output token: {recomputed[other]}, "
            f"with Pensieve {recomputed['Pensieve']}"
        )
    if MODELS[model].kv_heads < MODELS[model].heads:
        yield _old_kernel(search, gain, systems)
    if gain.lower_latency is not None:
        name = (
            "largest reduction of the P90 latency by the device tier alone, compared with vLLM-like"
        )
        ours = _lower_latency(search, systems, limits["vLLM-like"])
        yield row(
            f"{model}: {name}", improvement(gain.lower_latency, form="{:.0f} %"), ours
        ).because(
            "at half and three quarters of vLLM-like's load; prompts that vLLM-like computes again delay its "
            "replies by a whole pass"
        )
    if gain is GAINS[1]:
        stateless = search.at_limit(system(model, stateless=True), 0.7)
        latencies = " and ".join(
            Spread(each.figures["normalized_p90"] for each in found).shown("{:.0f}")
            for found in (limits["Pensieve"], stateless)
        )
        ours = ratio(speeds["Pensieve"], [each.tokens_per_second for each in stateless])
        yield row(
            f"{model}: throughput over the same engine, but stateless", no_claim(), ours
        ).because(f"only the cache differs; P90 {latencies} ms; the paper has no such system")
        yield from _reactions(gain, extent, speeds)
        yield from _phases(search, gain)


def _computed_again(found: list[Crossing]) -> Spread:
    """Return the tokens computed again for each output token."""
    figures = [each.figures for each in found]
    return Spread(each["recomputed_tokens"] / max(each["output_tokens"], 1) for each in figures)


def _lower_latency(
    search: Search, systems: dict[str, Replica], vllm_limits: list[Crossing]
) -> Spread:
    """Return the largest reduction of the P90 by seed, in per cent; NaN if no turn has ended."""
    best = []
    for seed, limit in enumerate(vllm_limits):
        pairs = (
            [
                search.simulate(systems[name], rate, seed)["normalized_p90"]
                for name in ("GPU cache", "vLLM-like")
            ]
            for rate in (limit.rate / 2, limit.rate * 0.75)
        )
        reductions = (1 - ours / theirs for ours, theirs in pairs if ours and theirs)
        best.append(100 * max(reductions, default=math.nan))
    return Spread(best)


def _old_kernel(search: Search, gain: Gain, systems: dict[str, Replica]) -> Row:
    """Compare with the attention of 2023: each query head reads its keys and values separately."""
    preset, speeds = MODELS[gain.model], []
    for name, guess in (("Pensieve", 1.5), ("vLLM-like", 0.75)):
        cost = systems[name].cost
        slower = cost.attention_seconds_per_key * preset.heads / preset.kv_heads
        replica = replace(systems[name], cost=replace(cost, attention_seconds_per_key=slower))
        speeds.append(search.throughputs(replica, gain.guesses[2] * guess))
    name = f"{gain.model}: throughput over vLLM-like, if both read KV once per query head"
    return Row(gain.figure, name, about(gain.paper), ratio(*speeds)).because(
        "our kernels read shared KV once, not once per query head, which helps Pensieve more: its batches "
        "have more turns"
    )


def _reactions(gain: Gain, extent: Extent, speeds: dict[str, list[float]]) -> Iterator[Row]:
    """Figure 3.16: vary the time between a reply and the next message."""
    found = {60: speeds["Pensieve"]}
    for seconds, guess in ((30, 2.0), (120, 1.2)):
        search = Search(gain.model, extent, {"reaction_seconds": float(seconds)})
        found[seconds] = search.throughputs(system(gain.model), guess)
    reason = "longer reactions leave more conversations in memory at once, so more KV is dropped"
    name = f"{gain.model}: throughput if users answer after 30 s, over throughput if after 60 s"
    yield Row("figure 3.16", name, more(), ratio(found[30], found[60]), reason)
    reason += "; as in figure 3.12, our kernel reads KV once for all query heads that share it"
    for seconds, paper in ((60, 1.52), (120, 1.4)):
        name = f"{gain.model}, users answer after {seconds} s: throughput over vLLM-like"
        ours = ratio(found[seconds], speeds["vLLM-like"])
        yield Row("figure 3.16", name, about(paper), ours, reason)


def _phases(search: Search, gain: Gain) -> Iterator[Row]:
    """Figure 3.18: run prompts together with the generating turns, or in separate passes."""
    unified, separate = system(gain.model), system(gain.model, **SEPARATE)
    reason = "separate passes read the weights twice, and replies wait for whole prompts"
    name = f"{gain.model}: throughput, prompts and decodes in one batch over separate batches"
    ours = ratio(search.throughputs(unified, gain.guesses[0]), search.throughputs(separate, 1.4))
    yield Row("figure 3.18", name, more(), ours, reason)
    rates = [each.rate for each in search.at_limit(separate, 1.4)]
    latencies = (
        [search.simulate(each, rate, seed)["normalized_p90"] for seed, rate in enumerate(rates)]
        for each in (unified, separate)
    )
    name = f"{gain.model}: P90 latency with one batch over separate batches, at their highest load"
    yield Row("figure 3.18", name, less(), ratio(*latencies), reason)


def policies(extent: Extent) -> Iterator[Row]:
    """Figure 3.14: compare eviction policies under the same load."""
    search, value = Search("opt-13b", extent), system("opt-13b")
    rates = [rate / search.load.preset.turns_mean for rate in POLICY_RATES]

    def runs(replica: Replica) -> list[list[Figures]]:
        """Return the figures by seed and rate."""
        seeds = range(extent.seeds)
        return [[search.simulate(replica, rate, seed) for rate in rates] for seed in seeds]

    def points(one: Figures, other: Figures) -> float:
        return 100 * ((one["hit_rate"] or 0) - (other["hit_rate"] or 0))

    def saved(one: Figures, other: Figures) -> float:
        return float(100 * (1 - one["recomputed_tokens"] / max(other["recomputed_tokens"], 1)))

    def best(compared: Callable[[Figures, Figures], float]) -> Spread:
        """Return the largest comparison of `value` with `lru` at one of the rates."""
        return Spread(max(map(compared, *both)) for both in zip(found, lru, strict=True))

    lru = runs(replace(value, policy="lru"))
    for what, cost, why in (
        ("in a full batch", value.cost, "so `value` chooses almost as `lru`"),
        (
            "computed alone",
            _costs_alone(value.cost),
            "at the end of the longest context; the paper's number is its largest gain, with a host tier",
        ),
    ):
        found, profile = runs(replace(value, cost=cost)), cost.recompute(CHUNK_TOKENS)
        cost_ratio = profile.chunk_seconds(CONTEXT_MAX) / profile.chunk_seconds(0)
        row = partial(
            Row,
            "figure 3.14",
            reason=f"the most expensive chunk costs {cost_ratio:.1f} x the cheapest, {why}",
        )
        name = f"opt-13b, cost of a chunk {what}: history found in memory, `value` minus `lru`"
        yield row(name, improvement(4.4, form="{:+.1f} points"), best(points))
        name = f"opt-13b, cost of a chunk {what}: recomputed tokens saved by `value`, compared with `lru`"
        yield row(name, improvement(14.6, form="{:+.1f} %"), best(saved))


def _costs_alone(cost: CostModel) -> CostModel:
    """Take the times of chunks that are measured alone.

    In a full batch, attention computes its pairs and reads the context once for all queries. A chunk
    that is measured alone reads its context for a few queries, which takes longer than computing.
    """
    points = tuple(
        (1 << power, cost.attention_seconds_per_key * (1 << power)) for power in range(18)
    )
    profile = replace(cost.recompute(CHUNK_TOKENS), attention_seconds=points)
    return replace(cost, chunk_costs=(CHUNK_TOKENS, profile))


def long_conversations(
    figure: str, model: str, guesses: tuple[float, float], paper: float, extent: Extent
) -> Iterator[Row]:
    """Figure 3.15: compare under conversations of five turns and more."""
    # Such conversations are rarer, so all models have the full time.
    search = Search(model, extent, {"turns_min": 5, "seconds": extent.seconds})
    ours, theirs = (
        search.at_limit(system(model, **SYSTEMS[name]), guess)
        for name, guess in zip(("Pensieve", "vLLM-like"), guesses, strict=True)
    )
    speeds = ratio(*([each.tokens_per_second for each in found] for found in (ours, theirs)))
    name = f"{model}, five turns and more: throughput over vLLM-like"
    yield Row(figure, name, about(paper), speeds).because(
        f"vLLM-like computes {_computed_again(theirs)[0]:.1f} tokens again for each output token; in the "
        "paper, this gain is larger than in figure 3.12"
    )


def kernel(extent: Extent) -> Iterator[Row]:
    """Figure 3.17: attention of 32 prompts of 8 tokens over scattered pages, on this CPU."""
    import torch

    from pensieve.bench.attention import AttentionShape, measure

    torch.set_num_threads(1)
    contexts = (512, 2048)  # their values take the place of seeds
    where = "measured on one core of this CPU, contexts of 512 and 2,048 tokens"
    found = [
        measure(AttentionShape(32, 8, context, 8, 8, 128, "float32"), extent.repeats, 1.0)
        for context in contexts
    ]
    copied = Spread(each.copy_out_seconds / each.contiguous_seconds for each in found)
    by_token = Spread(each.token_by_token_seconds / each.contiguous_seconds for each in found)
    name = "time of our kernel, relative to contiguous KV"
    yield Row("figure 3.17", name, less(), Spread(each.ratio for each in found)).because(
        f"{where}; torch's kernel is the ideal on contiguous memory"
    )
    name = "time if KV is first copied to contiguous memory, relative to contiguous KV"
    yield Row("figure 3.17", name, more(), copied).because(
        f"{where}; the copy grows with the context, as attention does"
    )
    name = "time with one attention call per token, relative to contiguous KV"
    yield Row("figure 3.17", name, more(), by_token).because(
        f"{where}; each of the 8 tokens reads all KV again"
    )


FIGURES: dict[str, Figure] = {
    "pensieve-3.12a": partial(gains, GAINS[0]),
    "pensieve-3.12b-3.16-3.18": partial(gains, GAINS[1]),  # they share simulations
    "pensieve-3.13a": partial(gains, GAINS[2]),
    "pensieve-3.13b": partial(gains, GAINS[3]),
    "pensieve-3.14": policies,
    "pensieve-3.15a": partial(long_conversations, "figure 3.15a", "opt-13b", (0.5, 0.3), 1.3),
    "pensieve-3.15b": partial(
        long_conversations, "figure 3.15b", "llama2-13b-gqa", (1.8, 0.6), 1.7
    ),
    "pensieve-3.17": kernel,
}
