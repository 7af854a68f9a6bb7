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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pensieve.sim.cost import MODELS, ModelPreset
from scripts.papers.conversations import Scenario, Search
from scripts.papers.rows import Claim, Extent, Figure, Row, Spread, about, less, more, ratio

VLLM_TOKENS = 16_384  # prompt tokens per pass: the longest context
SYSTEMS: dict[str, dict[str, Any]] = {
    "Pensieve": {},
    "GPU cache": {"host_tokens": 0},
    "vLLM-like": {"stateless": True, "phases": "separate", "token_budget": VLLM_TOKENS},
}
POLICY_RATES = (3.2, 3.6)  # requests per second: in the paper, `lru` loses from 3.2 on
CONTEXT_MAX = 16_384


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
    Gain("3.12a", "opt-13b", 1, (0.45, 0.33, 0.33), 1.25, 20),
    Gain("3.12b", "llama2-13b-gqa", 1, (1.6, 0.8, 0.65), 1.52, 40),
    Gain("3.13a", "opt-66b", 4, (0.6, 0.4, 0.4), 1.5),
    Gain("3.13b", "llama2-70b", 4, (2.8, 1.1, 0.5), 1.6),
)


def _row(figure: str, *rest: Any, **named: Any) -> Row:
    return Row(f"Pensieve, figure {figure}", *rest, **named)


def gains(gain: Gain, extent: Extent) -> Iterator[Row]:
    """Compare Pensieve's throughput with each other system's, at equal latency."""
    search = Search(extent)
    model, preset = gain.model, MODELS[gain.model]
    systems = {
        name: search.scenario(model, gain.num_gpus, **options) for name, options in SYSTEMS.items()
    }
    guesses = dict(zip(systems, gain.guesses, strict=True))
    found = {name: search.throughputs(system, guesses[name]) for name, system in systems.items()}
    again = {
        name: [
            each.row["recomputed_tokens"] / max(each.row["output_tokens"], 1)
            for each in search.at_limit(system, guesses[name])
        ]
        for name, system in systems.items()
    }
    for other in ("vLLM-like", "GPU cache"):
        reason = (
            f"tokens computed again for each output token: {Spread(tuple(again[other])).shown('{:.1f}')}, "
            f"with Pensieve {Spread(tuple(again['Pensieve'])).shown('{:.1f}')}"
        )
        ours = ratio(found["Pensieve"], found[other])
        yield _row(
            gain.figure, f"{model}: throughput over {other}", about(gain.paper), ours, reason
        )
    if preset.kv_heads < preset.heads:
        yield _old_kernel(search, gain, systems, preset)
    if gain.lower_latency is not None:
        best = [
            max(
                (
                    1 - ours / theirs
                    for rate in (crossing.rate / 2, crossing.rate * 0.75)
                    if (ours := search.simulate(one, rate)["normalized_p90"])
                    and (theirs := search.simulate(other, rate)["normalized_p90"])
                ),
                default=math.nan,  # no turn ended in so short a load
            )
            for one, other, crossing in zip(
                search.seeded(systems["GPU cache"]),
                search.seeded(systems["vLLM-like"]),
                search.at_limit(systems["vLLM-like"], guesses["vLLM-like"]),
                strict=True,
            )
        ]
        yield _row(
            gain.figure,
            f"{model}: largest reduction of the P90 latency, compared with vLLM-like, without a host tier",
            about(gain.lower_latency, neutral=0.0),
            Spread(tuple(100 * each for each in best)),
            "at half and three quarters of vLLM-like's load; prompts that vLLM-like computes again delay its "
            "replies by a whole pass",
            "{:.0f} %",
        )
    if gain.figure == "3.12b":
        stateless = search.at_limit(search.scenario(model, stateless=True), 0.7)
        crossings = search.at_limit(systems["Pensieve"], guesses["Pensieve"])
        latencies = " and ".join(
            Spread(tuple(each.row["normalized_p90"] for each in some)).shown("{:.0f}")
            for some in (crossings, stateless)
        )
        yield _row(
            gain.figure,
            f"{model}: throughput over the same engine, but stateless",
            None,
            ratio(found["Pensieve"], [each.tokens_per_second for each in stateless]),
            f"only the cache differs; P90 {latencies} ms; the paper has no such system",
        )
        yield from _reactions(search, gain, found["vLLM-like"])
        yield from _phases(search, gain)


def _old_kernel(
    search: Search, gain: Gain, systems: dict[str, Scenario], preset: ModelPreset
) -> Row:
    """Compare with the attention of 2023: each query head reads its keys and values separately."""
    found = {}
    for name, guess in (("Pensieve", 1.5), ("vLLM-like", 0.75)):
        cost = systems[name].cost
        slower = cost.attention_seconds_per_key * preset.heads / preset.kv_heads
        scenario = replace(systems[name], cost=replace(cost, attention_seconds_per_key=slower))
        found[name] = search.throughputs(scenario, gain.guesses[2] * guess)
    return _row(
        gain.figure,
        f"{gain.model}: throughput over vLLM-like, if both read KV once per query head",
        about(gain.paper),
        ratio(found["Pensieve"], found["vLLM-like"]),
        "our kernels read shared KV once, not once per query head, which helps Pensieve more: its batches "
        "have more turns",
    )


def _reactions(search: Search, gain: Gain, vllm: list[float]) -> Iterator[Row]:
    """Figure 3.16: vary the time between a reply and the next message."""
    found = {}
    for seconds, guess in ((30, 2.0), (60, gain.guesses[0]), (120, 1.2)):
        options: dict[str, Any] = {} if seconds == 60 else {"reaction_seconds": float(seconds)}
        found[seconds] = search.throughputs(search.scenario(gain.model, **options), guess)
    reason = "longer reactions leave more conversations in memory at once, so more KV is dropped"
    yield _row(
        "3.16",
        f"{gain.model}: throughput if users answer after 30 s, over throughput if after 60 s",
        more(),
        ratio(found[30], found[60]),
        reason,
    )
    gain_reason = (
        f"{reason}; as in figure 3.12, our kernel reads KV once for all query heads that share it"
    )
    for seconds, paper in ((60, 1.52), (120, 1.4)):
        name = f"{gain.model}, users answer after {seconds} s: throughput over vLLM-like"
        yield _row("3.16", name, about(paper), ratio(found[seconds], vllm), gain_reason)


def _phases(search: Search, gain: Gain) -> Iterator[Row]:
    """Figure 3.18: run prompts together with the generating turns, or in separate passes."""
    unified = search.scenario(gain.model)
    separate = replace(unified, phases="separate", token_budget=VLLM_TOKENS)
    pairs = search.throughputs(unified, gain.guesses[0]), search.throughputs(separate, 1.4)
    reason = "separate passes read the weights twice, and replies wait for whole prompts"
    name = f"{gain.model}: throughput, prompts and decodes in one batch over separate batches"
    yield _row("3.18", name, more(), ratio(*pairs), reason)
    latencies = []
    for one, other in zip(search.seeded(unified), search.seeded(separate), strict=True):
        rate = search.at_limit(separate, 1.4)[other.seed].rate
        both = (search.simulate(each, rate)["normalized_p90"] for each in (one, other))
        latencies.append(tuple(both))
    yield _row(
        "3.18",
        f"{gain.model}: P90 latency at the highest load of separate batches, one batch over separate",
        less(),
        ratio(*zip(*latencies, strict=True)),
        reason,
    )


def policies(extent: Extent) -> Iterator[Row]:
    """Figure 3.14: compare eviction policies under the same load."""
    search = Search(extent)
    lru = search.scenario("opt-13b", policy="lru")
    value = replace(lru, policy="value")
    measured = replace(value, reads_keys=True)
    rates = [rate / lru.preset.turns_mean for rate in POLICY_RATES]

    def runs(system: Scenario) -> list[list[dict[str, Any]]]:
        return [[search.simulate(each, rate) for rate in rates] for each in search.seeded(system)]

    base = runs(lru)
    for what, system, why in (
        ("chunk costs in full batches", value, "so `value` chooses almost as `lru`"),
        (
            "chunk costs alone",
            measured,
            "at the end of the longest context; the paper's number is the largest of its rates, for the host",
        ),
    ):
        pairs = [list(zip(*each, strict=True)) for each in zip(runs(system), base, strict=True)]
        points = [
            max(100 * ((one["hit_rate"] or 0) - (other["hit_rate"] or 0)) for one, other in each)
            for each in pairs
        ]
        saved = [
            100
            * max(
                1 - one["recomputed_tokens"] / max(other["recomputed_tokens"], 1)
                for one, other in each
            )
            for each in pairs
        ]
        dear = system._recompute().chunk_seconds(CONTEXT_MAX) / system._recompute().chunk_seconds(0)
        reason = f"the dearest chunk costs {dear:.1f} x the cheapest, {why}"
        name = f"opt-13b, {what}: history found in memory, `value` minus `lru`"
        yield _row(
            "3.14", name, about(4.4, neutral=0), Spread(tuple(points)), reason, "{:+.1f} points"
        )
        name = f"opt-13b, {what}: recomputed tokens saved by `value`, compared with `lru`"
        yield _row("3.14", name, about(14.6, neutral=0), Spread(tuple(saved)), reason, "{:+.1f} %")


def long_conversations(
    figure: str, model: str, guesses: tuple[float, float], paper: float, extent: Extent
) -> Iterator[Row]:
    """Figure 3.15: compare under conversations of five turns and more."""
    search = Search(extent)
    # Such conversations are rarer.
    options: dict[str, Any] = {"turns_min": 5, "seconds": extent.seconds}
    ours, theirs = (
        search.at_limit(search.scenario(model, **options, **SYSTEMS[name]), guess)
        for name, guess in zip(("Pensieve", "vLLM-like"), guesses, strict=True)
    )
    again = theirs[0].row["recomputed_tokens"] / max(theirs[0].row["output_tokens"], 1)
    yield _row(
        figure,
        f"{model}, five turns and more: throughput over vLLM-like",
        about(paper),
        ratio(*([each.tokens_per_second for each in found] for found in (ours, theirs))),
        f"vLLM-like computes {again:.1f} tokens again for each output token; in the paper, this gain is "
        "larger than in figure 3.12",
    )


def kernel(extent: Extent) -> Iterator[Row]:
    """Figure 3.17: attention of 32 prompts of 8 tokens over scattered pages, on this CPU."""
    import torch

    from pensieve.bench.attention import AttentionShape, measure

    torch.set_num_threads(1)
    contexts = (512, 2048)
    found = [
        measure(AttentionShape(32, 8, context, 8, 8, 128, "float32"), extent.repeats, 1.0)
        for context in contexts
    ]
    where = (
        f"measured on one core of this CPU, contexts of {contexts[0]:,} and {contexts[1]:,} tokens"
    )

    def row(name: str, claim: Claim, values: list[float], reason: str) -> Row:
        """The values of both contexts take the place of seeds."""
        return _row(
            "3.17",
            f"{name}, relative to contiguous KV",
            claim,
            Spread(tuple(values)),
            f"{where}; {reason}",
        )

    yield row(
        "time of our kernel",
        less(),
        [each.ratio for each in found],
        "torch's kernel is the ideal on contiguous memory",
    )
    yield row(
        "time if KV is first copied to contiguous memory",
        more(),
        [each.copy_out_seconds / each.contiguous_seconds for each in found],
        "the copy grows with the context, as attention does",
    )
    yield row(
        "time with one attention call per token",
        more(),
        [each.token_by_token_seconds / each.contiguous_seconds for each in found],
        "each of the 8 tokens reads all KV again",
    )


FIGURES: dict[str, Figure] = {
    "pensieve-3.12a": partial(gains, GAINS[0]),
    "pensieve-3.12b-3.16-3.18": partial(gains, GAINS[1]),  # they share simulations
    "pensieve-3.13a": partial(gains, GAINS[2]),
    "pensieve-3.13b": partial(gains, GAINS[3]),
    "pensieve-3.14": policies,
    "pensieve-3.15a": partial(long_conversations, "3.15a", "opt-13b", (0.5, 0.3), 1.3),
    "pensieve-3.15b": partial(long_conversations, "3.15b", "llama2-13b-gqa", (1.8, 0.6), 1.7),
    "pensieve-3.17": kernel,
}
