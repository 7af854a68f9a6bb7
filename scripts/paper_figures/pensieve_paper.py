"""Figures 3.12 to 3.16 and 3.18 of the Pensieve paper (Yu, 2024).

The conversations are like those of ShareGPT, and the models are those of the paper's table 3.1. One engine is
compared with itself under options that `pensieve simulate` also has:

    Pensieve      the daemon's scheduler, policy `value`
    GPU cache     no host tier
    stateless     each turn computes its history again, in the same batches
    vLLM-like     stateless, whole prompts in separate passes
    old kernel    Pensieve or vLLM-like, with attention that reads a group's KV once per query head
    half memory   Pensieve or vLLM-like, with half the memory bandwidth and the same compute rate
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pensieve.sim.cost import MODELS, CostModel, ModelPreset
from scripts.paper_figures.scenario import Scenario
from scripts.paper_figures.study import P90, THROUGHPUT, Line, Panel, Spread, Study, ratio

VLLM_TOKENS = 16_384  # prompt tokens per pass: the longest context
Options = dict[str, Any]
VLLM: Options = {"stateless": True, "phases": "separate", "token_budget": VLLM_TOKENS}
SYSTEMS: dict[str, Options] = {
    "Pensieve": {},
    "GPU cache": {"host_tokens": 0},
    "stateless": {"stateless": True},
    "vLLM-like": VLLM,
}


@dataclass(frozen=True)
class Gain:
    """One of the figures 3.12 and 3.13: throughput at equal latency."""

    figure: str
    model: str
    num_gpus: int
    guesses: tuple[float, float, float, float]  # approximate rate at the limit, by system
    paper: str
    lower_latency: str = ""  # how much lower it is with GPU cache than with vLLM-like, in the paper


GAINS = {
    gain.figure: gain
    for gain in (
        Gain("3.12a", "opt-13b", 1, (0.45, 0.33, 0.33, 0.33), "1.25 x", "to 20 %"),
        Gain("3.12b", "llama2-13b-gqa", 1, (1.6, 0.8, 0.7, 0.65), "1.52 x", "to 40 %"),
        Gain("3.13a", "opt-66b", 4, (0.6, 0.4, 0.4, 0.4), "1.5 x"),
        Gain("3.13b", "llama2-70b", 4, (2.8, 1.1, 0.55, 0.5), "1.6 x"),
    )
}


def gains(study: Study, figure: str) -> Iterator[Line]:
    """Yield the ratio of Pensieve's throughput to each other system's, at equal latency."""
    gain = GAINS[figure]
    model = gain.model
    systems = {
        name: study.scenario(model, gain.num_gpus, **options) for name, options in SYSTEMS.items()
    }
    guesses = dict(zip(systems, gain.guesses, strict=True))
    found = {
        name: study.throughputs(f"figure {figure}, {model}, {name}", scenario, guesses[name])
        for name, scenario in systems.items()
    }
    for name, paper in (("vLLM-like", gain.paper), ("GPU cache", gain.paper), ("stateless", "")):
        m11 = (figure, name) == ("3.12b", "stateless")
        yield Line(
            f"{figure}, M11" if m11 else figure,
            f"{model}: throughput over {name}",
            paper,
            ratio(found["Pensieve"], found[name]),
            aim="1.5 x or more" if m11 else "",
        )
    study.note_crossings(figure, systems)
    _note_history(study, figure, systems)
    preset = MODELS[model]
    if preset.kv_heads < preset.heads:
        changed = {name: _old_kernel(systems[name], preset) for name in ("Pensieve", "vLLM-like")}
        changed_guesses = (guesses["vLLM-like"] * 1.5, guesses["vLLM-like"] * 0.75)
        what = "throughput over vLLM-like, if both read KV once per query head"
        yield _changed(study, gain, "old kernel", changed, changed_guesses, what)
    if gain.num_gpus == 1:
        changed = {name: _half_memory(systems[name]) for name in ("Pensieve", "vLLM-like")}
        changed_guesses = (guesses["Pensieve"] * 0.6, guesses["vLLM-like"] * 0.7)
        what = "throughput over vLLM-like, if both read memory at half the rate"
        yield _changed(study, gain, "half memory", changed, changed_guesses, what)
    if gain.lower_latency:
        what = f"{model}: largest reduction of P90 latency, GPU cache compared with vLLM-like"
        lower = study.lower_latency(systems["GPU cache"], systems["vLLM-like"])
        yield Line(figure, what, gain.lower_latency, lower, "{:.0f} %")
    first = study.at_limit("", systems["vLLM-like"], guesses["vLLM-like"])[0]
    study.progress("the light end of the curves")
    for name in ("Pensieve", "vLLM-like"):
        for share in (0.5, 1.0):
            study.simulate(systems[name], first.rate * share)
    study.draw(f"figure-{figure}", f"{figure}: {model}, {gain.num_gpus} GPU", systems)


def _changed(
    study: Study,
    gain: Gain,
    label: str,
    systems: dict[str, Scenario],
    guesses: tuple[float, float],
    what: str,
) -> Line:
    """Compare Pensieve with vLLM-like on a machine that differs from the assumed one."""
    named = {f"{name} ({label})": scenario for name, scenario in systems.items()}
    ours, theirs = (
        study.throughputs(f"figure {gain.figure}, {gain.model}, {name}", scenario, guess)
        for (name, scenario), guess in zip(named.items(), guesses, strict=True)
    )
    study.note_crossings(gain.figure, named)
    return Line(gain.figure, f"{gain.model}: {what}", gain.paper, ratio(ours, theirs))


def _old_kernel(scenario: Scenario, model: ModelPreset) -> Scenario:
    """Return a scenario with the attention of 2023: each query head reads its keys and values separately."""
    cost = scenario.cost
    slower = cost.attention_seconds_per_key * model.heads / model.kv_heads
    return replace(scenario, cost=replace(cost, attention_seconds_per_key=slower))


def _half_memory(scenario: Scenario) -> Scenario:
    """Return a scenario in which reading weights and KV takes twice as long, and computing does not."""
    cost = scenario.cost
    slower: CostModel = replace(
        cost,
        dense_seconds_min=2 * cost.dense_seconds_min,
        attention_seconds_per_key=2 * cost.attention_seconds_per_key,
    )
    return replace(scenario, cost=slower)


def _note_history(study: Study, figure: str, systems: dict[str, Scenario]) -> None:
    """Note how much history each system recomputed at the limit, which explains their difference."""
    found = []
    for name in ("Pensieve", "GPU cache", "vLLM-like"):
        rows = [each.row for each in study.at_limit(name, systems[name], 1.0)]
        hits = Spread(tuple(100 * (row["hit_rate"] or 0.0) for row in rows))
        again = Spread(
            tuple(row["recomputed_tokens"] / max(row["output_tokens"], 1) for row in rows)
        )
        found.append(
            f"{name} finds {hits.shown('{:.0f} %')} of its history in memory and computes "
            f"{again.shown('{:.2f}')} tokens of it again for each output token"
        )
    study.notes.append((figure, f"at the limit {'; '.join(found)}"))


def policies(study: Study) -> Iterator[Line]:
    """Figure 3.14: compare three policies under the same load.

    `lru`, `value` (recompute cost divided by idle time) and `return` (learns which conversations come back).
    """
    gain = GAINS["3.12a"]
    scenario = study.scenario(gain.model)
    crossings = study.at_limit("figure 3.14, the load", scenario, gain.guesses[0])
    names, shares = ("lru", "value", "return"), study.extent.crowding
    rows: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}  # by seed, by load
    for seeded, crossing in zip(study.seeded(scenario), crossings, strict=True):
        for name in names:
            study.progress(f"figure 3.14, {name}")
            system = replace(seeded, policy=name)
            rows[name].append([study.simulate(system, crossing.rate * share) for share in shares])
    title = f"3.14: {gain.model}, policies"
    latencies = {
        name: [
            [
                (row["tokens_per_second"], row["normalized_p90"])
                for row in seed
                if row["normalized_p90"]
            ]
            for seed in rows[name]
        ]
        for name in names
    }
    hits = {
        name: [[(row["rate"], 100 * _hit_rate(row)) for row in seed] for seed in rows[name]]
        for name in names
    }
    x = "conversations per second"
    for figure, across, y, found, most in (
        ("figure-3.14", THROUGHPUT, P90, latencies, None),
        ("figure-3.14-hits", x, "history in memory (%)", hits, 100.0),
    ):
        lines = {name: each[0] for name, each in found.items()}
        repeats = {name: each[1:] for name, each in found.items()}
        study.panels.append(Panel(figure, title, across, y, lines, repeats, most=most))
    loads = f"{len(shares)} loads" if len(shares) > 1 else "one load"
    for name, points, fewer in (("value", "to 4.4", "to 14.6 %"), ("return", "", "")):
        more, saved = [], []
        single_more, single_saved = [], []
        for mine, lru in zip(rows[name], rows["lru"], strict=True):
            differences = [
                100 * (_hit_rate(a) - _hit_rate(b)) for a, b in zip(mine, lru, strict=True)
            ]
            more.append(statistics.mean(differences))
            single_more += differences
            again, base = (sum(row["recomputed_tokens"] for row in each) for each in (mine, lru))
            saved.append(100 * (1 - again / base) if base else 0.0)
            single_saved += [
                100 * (1 - a["recomputed_tokens"] / b["recomputed_tokens"])
                for a, b in zip(mine, lru, strict=True)
                if b["recomputed_tokens"]
            ]
        yield Line(
            "3.14",
            f"{gain.model}: points of hit rate, {name} over lru, mean of {loads}",
            points,
            Spread(tuple(more)),
            "{:+.1f}",
            _single(single_more, "{:+.1f}"),
        )
        yield Line(
            "3.14",
            f"{gain.model}: fewer recomputed tokens, {name} than lru, over {loads}",
            fewer,
            Spread(tuple(saved)),
            "{:+.1f} %",
            _single(single_saved, "{:+.1f} %"),
        )


def _hit_rate(row: dict[str, Any]) -> float:
    found = row["hit_rate"]
    return 1.0 if found is None else float(found)


def _single(values: list[float], form: str) -> str:
    if not values:
        return ""
    return f"single runs {form.format(min(values))} to {form.format(max(values))}"


def long_conversations(study: Study) -> Iterator[Line]:
    """Figure 3.15: compare under conversations of five turns and more."""
    for figure, model, guesses, paper in (
        ("3.15a", "opt-13b", (0.5, 0.3), "1.3 x"),
        ("3.15b", "llama2-13b-gqa", (1.8, 0.6), "1.7 x"),
    ):
        systems = {
            name: study.scenario(
                model,
                turns_min=5,
                seconds=2 * study.seconds_of(model),  # such conversations are rarer
                **SYSTEMS[name],
            )
            for name in ("Pensieve", "vLLM-like")
        }
        ours, theirs = (
            study.throughputs(f"figure {figure}, {model}, {name}", scenario, guess)
            for (name, scenario), guess in zip(systems.items(), guesses, strict=True)
        )
        study.draw(f"figure-{figure}", f"{figure}: {model}, five turns and more", systems)
        study.note_crossings(figure, systems)
        what = f"{model}, five turns and more: throughput over vLLM-like"
        yield Line(figure, what, paper, ratio(ours, theirs))


def reactions(study: Study) -> Iterator[Line]:
    """Figure 3.16: vary the time between a reply and the next message."""
    gain = GAINS["3.12b"]
    model = gain.model
    vllm = study.scenario(model, **VLLM)
    base = study.throughputs("figure 3.16, vLLM-like", vllm, gain.guesses[3])
    systems = {}
    for seconds, guess, paper in (
        (30.0, 2.0, ""),
        (60.0, gain.guesses[0], "1.52 x"),
        (120.0, 1.2, "about 1.4 x"),
    ):
        options: Options = {} if seconds == 60.0 else {"reaction_seconds": seconds}
        label = f"Pensieve, {seconds:g} s"
        systems[label] = study.scenario(model, **options)
        ours = study.throughputs(f"figure 3.16, {label}", systems[label], guess)
        what = f"{model}, reactions of {seconds:g} s: throughput over vLLM-like"
        yield Line("3.16", what, paper, ratio(ours, base))
    systems["vLLM-like"] = vllm
    study.note_crossings("3.16", systems)
    study.draw("figure-3.16", f"3.16: {model}, reaction times", systems)


def phases(study: Study) -> Iterator[Line]:
    """Figure 3.18: run prompts together with the generating turns, or in separate passes."""
    gain = GAINS["3.12b"]
    model = gain.model
    systems = {
        "unified": study.scenario(model),
        "separate": study.scenario(model, phases="separate", token_budget=VLLM_TOKENS),
    }
    unified, separate = (
        study.throughputs(f"figure 3.18, {name}", scenario, gain.guesses[0])
        for name, scenario in systems.items()
    )
    what = f"{model}: throughput, unified over separate phases"
    yield Line("3.18", what, "better", ratio(unified, separate))
    lower = study.lower_latency(*systems.values())
    what = f"{model}: largest reduction of P90 latency, unified compared with separate"
    yield Line("3.18", what, "better", lower, "{:.0f} %")
    study.note_crossings("3.18", systems)
    study.draw("figure-3.18", f"3.18: {model}, phases", systems)


FIGURES: dict[str, Callable[[Study], Iterator[Line]]] = {
    "3.12a": lambda study: gains(study, "3.12a"),
    "3.12b": lambda study: gains(study, "3.12b"),
    "3.13a": lambda study: gains(study, "3.13a"),
    "3.13b": lambda study: gains(study, "3.13b"),
    "3.14": policies,
    "3.15": long_conversations,
    "3.16": reactions,
    "3.18": phases,
}
