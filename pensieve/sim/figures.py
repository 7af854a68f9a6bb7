"""Figures of two papers, played again: what was measured there on GPUs beside what comes of it here.

From Pensieve (Yu, 2024) figures 3.12 to 3.16 and 3.18: conversations like ShareGPT's, models of table 3.1.
From Sarathi-Serve (Agrawal et al., 2024) table 4 (long_prompts.py).  What is compared is one engine with
itself under options that `pensieve simulate` has as well:

    Pensieve      the scheduler as it is, policy `value`
    GPU cache     no host tier
    stateless     each turn computes its history again, in the same batches
    vLLM-like     stateless, whole prompts in passes of their own
    old kernel    either, with attention that reads a group's keys and values once per query head
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pensieve.sim import long_prompts
from pensieve.sim.cost import MODELS, ModelPreset
from pensieve.sim.scenario import Scenario
from pensieve.sim.study import Line, Panel, Study, X, Y

VLLM_TOKENS = 16_384  # of prompts in a pass: the longest context
Options = dict[str, Any]
VLLM: Options = {"stateless": True, "phases": "separate", "token_budget": VLLM_TOKENS}
SYSTEMS: dict[str, Options] = {
    "Pensieve": {},
    "GPU cache": {"host_tokens": 0},
    "stateless": {"stateless": True},
    "vLLM-like": VLLM,
}
# (figure, model, GPUs, where the search for each system's rate begins, the paper's gain)
GAINS = (
    ("3.12a", "opt-13b", 1, (0.4, 0.3, 0.3, 0.3), "1.25 x"),
    ("3.12b", "llama2-13b-gqa", 1, (1.5, 0.8, 0.8, 0.7), "1.52 x"),
    ("3.13a", "opt-66b", 4, (0.55, 0.4, 0.4, 0.4), "1.5 x"),
    ("3.13b", "llama2-70b", 4, (2.7, 1.1, 0.55, 0.55), "1.6 x"),
)


def _gains(study: Study) -> Iterator[Line]:
    for figure, model, num_gpus, guesses, paper in GAINS:
        title = f"figure {figure}, {model}"
        systems = {
            name: study.scenario(model, num_gpus, **options) for name, options in SYSTEMS.items()
        }
        found = {
            name: study.at_limit(f"{title}, {name}", scenario, guess)
            for (name, scenario), guess in zip(systems.items(), guesses, strict=True)
        }
        ours = found["Pensieve"].tokens_per_second
        for name, told in (("vLLM-like", paper), ("GPU cache", paper), ("stateless", "")):
            m11 = (figure, name) == ("3.12b", "stateless")
            yield Line(
                f"{figure}, M11" if m11 else figure,
                f"{model}: throughput over {name}",
                told,
                ours / (found[name].tokens_per_second or math.nan),
                aim="1.5 x or more" if m11 else "",
            )
        preset = MODELS[model]
        if preset.kv_heads < preset.heads:
            systems |= {
                f"{name}, old kernel": _old_kernel(systems[name], preset)
                for name in ("Pensieve", "vLLM-like")
            }
            with_old = [
                study.at_limit(f"{title}, {name}", scenario, guess).tokens_per_second
                for (name, scenario), guess in zip(
                    list(systems.items())[-2:], (guesses[3] * 1.5, guesses[3] * 0.75), strict=True
                )
            ]
            yield Line(
                figure,
                f"{model}: the same with a kernel that reads KV for each query head",
                paper,
                with_old[0] / (with_old[1] or math.nan),
            )
        if num_gpus == 1:
            lower = study.lower_latency(systems["GPU cache"], systems["vLLM-like"])
            yield Line(
                figure,
                f"{model}: P90 latency, GPU cache below vLLM-like, at most",
                "to 20 %" if model == "opt-13b" else "to 40 %",
                100 * lower,
                "{:.0f} %",
            )
        study.told("the light end of the curves")
        for name in ("Pensieve", "vLLM-like"):
            for share in (0.5, 1.0):
                study.play(systems[name], found["vLLM-like"].rate * share)
        study.draw(f"figure-{figure}", f"{figure}: {model}, {num_gpus} GPU", systems)


def _old_kernel(scenario: Scenario, model: ModelPreset) -> Scenario:
    """Attention as it was in 2023: a group's query heads read their keys and values each for itself."""
    cost = scenario.cost
    slower = cost.attention_seconds_per_key * model.heads / model.kv_heads
    return replace(scenario, cost=replace(cost, attention_seconds_per_key=slower))


def _policies(study: Study) -> Iterator[Line]:
    """Figure 3.14: the same load under LRU and under cost over idle time."""
    model = "opt-13b"
    scenario = study.scenario(model)
    base = study.at_limit("figure 3.14", scenario, GAINS[0][3][0]).rate
    policies = ("lru", "value", "return")
    hits: dict[str, list[tuple[float, float]]] = {name: [] for name in policies}
    latency: dict[str, list[tuple[float, float]]] = {name: [] for name in policies}
    for share in study.extent.crowding:
        for name in policies:
            study.told(f"figure 3.14, {name}")
            row = study.play(replace(scenario, policy=name), base * share)
            found = 1.0 if row["hit_rate"] is None else row["hit_rate"]
            hits[name].append((base * share, 100 * found))
            if row["normalized_p90"]:
                latency[name].append((row["tokens_per_second"], row["normalized_p90"]))
    study.panels += [
        Panel(
            "figure-3.14",
            f"3.14: {model}, policies",
            X,
            Y,
            latency,
            True,
        ),
        Panel(
            "figure-3.14-hits",
            f"3.14: {model}, policies",
            "conversations per second",
            "history found (%)",
            hits,
        ),
    ]
    for name, points, fewer in (("value", "4.4", "14.6 %"), ("return", "", "")):
        pairs = [(mine[1], lru[1]) for mine, lru in zip(hits[name], hits["lru"], strict=True)]
        more = max(mine - lru for mine, lru in pairs)
        less = max(((mine - lru) / (100 - lru) for mine, lru in pairs if lru < 100), default=0.0)
        yield Line(
            "3.14", f"{model}: points of hit rate, {name} over lru, at most", points, more, "{:.1f}"
        )
        yield Line(
            "3.14",
            f"{model}: fewer recomputed tokens, {name} than lru, at most",
            fewer,
            100 * less,
            "{:.1f} %",
        )


def _long_conversations(study: Study) -> Iterator[Line]:
    seconds = 2 * study.extent.seconds  # there are fewer of them
    for figure, model, guesses, paper in (
        ("3.15a", "opt-13b", (0.5, 0.3), "1.3 x"),
        ("3.15b", "llama2-13b-gqa", (1.8, 0.6), "1.7 x"),
    ):
        systems = {
            name: study.scenario(model, turns_min=5, seconds=seconds, **SYSTEMS[name])
            for name in ("Pensieve", "vLLM-like")
        }
        found = {
            name: study.at_limit(f"figure {figure}, {model}, {name}", scenario, guess)
            for (name, scenario), guess in zip(systems.items(), guesses, strict=True)
        }
        study.draw(f"figure-{figure}", f"{figure}: {model}, five turns and more", systems)
        base = found["vLLM-like"].tokens_per_second or math.nan
        gain = found["Pensieve"].tokens_per_second / base
        yield Line(figure, f"{model}, five turns and more: over vLLM-like", paper, gain)


def _reactions(study: Study) -> Iterator[Line]:
    model = "llama2-13b-gqa"
    vllm = study.scenario(model, **VLLM)
    base = study.at_limit("figure 3.16, vLLM-like", vllm, GAINS[1][3][3])
    systems = {}
    for seconds, guess, paper in (
        (30.0, 1.8, ""),
        (60.0, GAINS[1][3][0], "1.52 x"),
        (120.0, 1.1, "about 1.4 x"),
    ):
        options: Options = {} if seconds == 60.0 else {"reaction_seconds": seconds}
        label = f"Pensieve, {seconds:g} s"
        systems[label] = study.scenario(model, **options)
        found = study.at_limit(f"figure 3.16, {label}", systems[label], guess)
        gain = found.tokens_per_second / (base.tokens_per_second or math.nan)
        yield Line("3.16", f"{model}, reactions of {seconds:g} s: over vLLM-like", paper, gain)
    study.draw("figure-3.16", f"3.16: {model}, reaction times", {**systems, "vLLM-like": vllm})


def _phases(study: Study) -> Iterator[Line]:
    model, guess = "llama2-13b-gqa", GAINS[1][3][0]
    systems = {
        "unified": study.scenario(model),
        "separate": study.scenario(model, phases="separate", token_budget=VLLM_TOKENS),
    }
    unified, separate = (
        study.at_limit(f"figure 3.18, {name}", scenario, guess)
        for name, scenario in systems.items()
    )
    gain = unified.tokens_per_second / (separate.tokens_per_second or math.nan)
    what = f"{model}: throughput, unified over separate phases"
    yield Line("3.18", what, "better", gain)
    lower = study.lower_latency(*systems.values())
    what = f"{model}: P90 latency, unified below separate, at most"
    yield Line("3.18", what, "better", 100 * lower, "{:.0f} %")
    study.draw("figure-3.18", f"3.18: {model}, phases", systems)


def _batching(study: Study) -> Iterator[Line]:
    """Table 4."""
    played = {"requests": study.extent.requests, "seeds": study.extent.seeds}
    halvings = 3 + 2 * study.extent.narrowings
    for workload, told in long_prompts.TABLE_4.items():
        study.told(f"table 4, {workload}: the load")
        rate = long_prompts.rate_with(workload, told["combined"][0], halvings=halvings, **played)
        found = {}
        for name, scheduling in {
            **long_prompts.SCHEDULERS,
            "prefill first": long_prompts.PREFILL_FIRST,
        }.items():
            found[name] = long_prompts.play(workload, rate, scheduling, **played)
            study.told(
                f"  {name}, {rate:.2f} requests/s: first token {found[name]['first_token']:.2f} s, "
                f"P99 gap {found[name]['gap']:.2f} s"
            )
        for name, (first_token, gap) in told.items():
            what = f"{long_prompts.MODEL}, {workload}, {name}"
            calibrated = "sets the load" if name == "combined" else ""
            yield Line(
                "table 4",
                f"{what}: first token P50",
                f"{first_token:.2f} s",
                found[name]["first_token"],
                "{:.2f} s",
                calibrated,
            )
            yield Line(
                "table 4",
                f"{what}: between tokens P99",
                f"{gap:.2f} s",
                found[name]["gap"],
                "{:.2f} s",
            )
        ours, other = found["combined"], found["prefill first"]
        paper = f"{told['combined'][1] / told['hybrid batches only'][1]:.2f} x (hybrid)"
        same = ours["tokens_per_second"] / other["tokens_per_second"]
        yield Line(
            "M12",
            f"{long_prompts.MODEL}, {workload}: P99 between tokens over prefill first",
            paper,
            ours["gap"] / other["gap"],
            note=f"throughput {same:.2f} x",
            aim="0.33 x or less",
        )


NOTES = {  # by figure: where it differs, and why as far as it was tried
    "3.12a": "the order is the paper's, the gap wider. With memory read at half the rate (0.3 of the data "
    "sheet, computing as before) it is 1.22 x, so decodes that were further from the machine's "
    "rate than prefills would explain it.",
    "3.12b": "most of the difference is attention. Kernels of that time read a group's keys and values "
    "once per query head, which costs the decodes of every system four times the reading. With "
    "memory at half the rate it is 1.96 x; 20 ms of overhead in every iteration change little "
    "(2.40 for 2.24 x).",
    "3.13b": "as 3.12b, with eight query heads to a group. A token's KV is small beside the model, so "
    "nearly all histories stay; computing them again is nearly all that the stateless systems do.",
    "3.14": "a chunk behind 2,000 tokens costs only 6 % more than a first one when attention runs at the "
    "matrix rate, so cost over idle time orders much as idle time alone. The largest saving is "
    "where little is computed again; over the five loads `value` finds 0.7 points more to 0.5 "
    "less than lru, `return` 3.6 more to 0.8 less.",
    "3.15b": "presumably as 3.12b.",
    "3.16": "falls with the reaction time as in the paper; the level is that of 3.12b.",
    "3.18": "throughput is bound by the room for KV, which both have; it is latency that separate passes "
    "cost.",
    "table 4": "documents, hybrid batches: here all prompts that wait go into one pass, so the median first "
    "token is earlier and the stall longer than a single prompt's.",
}

PARTS: tuple[Callable[[Study], Iterator[Line]], ...] = (
    _gains,
    _policies,
    _long_conversations,
    _reactions,
    _phases,
    _batching,
)


def lines(study: Study) -> Iterator[Line]:
    """Every row, as it is known; the plots gather in the study."""
    for part in PARTS:
        yield from part(study)
