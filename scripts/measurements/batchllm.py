"""Compare simulated batches with the figures of the paper BatchLLM.

Each function of `FIGURES` returns rows with the paper's number, ours, and a verdict:

    reproduced       the number is within a tenth of the paper's, or a gain within a quarter
    same shape       the number differs, but the paper's claim holds (at least a quarter of a gain)
    not reproduced   the paper's claim does not hold

batch_simulation.py describes the requests and what is assumed. In addition:

* *vLLM* is our own engine with the limits of vLLM 0.5.4: at most 256 requests at once, in the order of the
  file. Each request reads its own KV, also if requests share a prefix.
* *BatchLLM* is the daemon's engine: memory limits the number of requests, and shared KV is read once per
  iteration.
* The paper's MI200 counts as one half of a card (64 GB).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from pensieve.core.cache import CacheConfig
from pensieve.core.prefix_groups import prefix_groups
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.engine.batch_run import PrefixSharing
from pensieve.sim.cost import (
    CHUNK_TOKENS,
    HARDWARE,
    MODELS,
    CostModel,
    HardwarePreset,
    device_tokens_of,
)
from scripts.measurements.batch_simulation import (
    SHAPES,
    TOKEN_BUDGET,
    TURNS_BY_MEMORY,
    TURNS_MAX,
    BatchFigures,
    BatchSetting,
    BatchShape,
    BatchSimulator,
    drawn_batch,
    shape_named,
)

CLOSE, CLOSE_GAIN, LEAST_GAIN = 0.1, 0.25, 0.25  # see the verdicts above
SEEDS = 3
A100 = HARDWARE["a100-80gb"]
MI200 = HardwarePreset("mi200", 181e12, 1.638e12, 25e9, 64e9, 220e9)
PANELS = (  # of figure 5
    ("llama3-8b", A100),
    ("qwen2-7b", A100),
    ("mistral-7b", A100),
    ("qwen2-7b", MI200),
    ("mistral-7b", MI200),
)
LENGTHS = ("2000/200", "1000/1000", "200/2000")  # prefix and own tokens, in figure 5
DEGREES = (4, 16)
HOST_SECONDS = 0.03  # assumed time of an iteration on the host, in vLLM 0.5.4

REPRODUCED, SAME_SHAPE, NOT_REPRODUCED = "reproduced", "same shape", "not reproduced"


class Row(NamedTuple):
    """A number of the paper beside ours."""

    name: str
    paper: str
    ours: str
    verdict: str
    reason: str


class Engine(NamedTuple):
    """What an engine does with a batch."""

    sharing: PrefixSharing = "groups"
    turns_max: int = TURNS_BY_MEMORY
    reorders: bool = True
    reads_once: bool = True
    memory_share: float = 1.0  # of the memory for KV
    host_seconds: float = 0.0  # of each iteration


BATCHLLM = Engine()
UNSHARED = Engine("off", TURNS_MAX, reorders=False, reads_once=False)  # vLLM with chunked prefills
VLLM = UNSHARED._replace(sharing="lru")  # and with prefix caching


def simulated(
    shape: BatchShape, model: str, hardware: HardwarePreset, engine: Engine, seed: int = 0
) -> BatchFigures:
    preset = MODELS[model]
    cost = CostModel.of(preset, hardware)
    cost = replace(cost, overhead_seconds=cost.overhead_seconds + engine.host_seconds)
    pages = int(engine.memory_share * device_tokens_of(preset, hardware)) // CHUNK_TOKENS
    setting = BatchSetting(
        cost,
        cost.recompute(CHUNK_TOKENS),
        CacheConfig(pages, 0),
        SchedulerConfig(TOKEN_BUDGET, engine.turns_max, cost=cost.computing),
        engine.reorders,
        engine.reads_once,
    )
    batch = drawn_batch(shape, seed)
    if engine.reorders and engine.sharing != "groups":
        batch.sort(key=lambda each: len(each.prompt))
    return BatchSimulator(setting, batch, shape.output_tokens_max, engine.sharing).finish()


def verdict(ours: float, paper: float, claim_holds: bool) -> str:
    if abs(ours - paper) <= CLOSE * paper:
        return REPRODUCED
    return SAME_SHAPE if claim_holds else NOT_REPRODUCED


def gain_verdict(ours: float, paper: float) -> str:
    """Compare two ratios to a baseline, by their distances from 1 on a logarithmic scale."""
    part = math.log(ours) / math.log(paper)
    if 1 - CLOSE_GAIN <= part <= 1 / (1 - CLOSE_GAIN):
        return REPRODUCED
    return SAME_SHAPE if part >= LEAST_GAIN else NOT_REPRODUCED


# -- the figures --


def job_limits(quick: bool = False) -> list[Row]:
    """Return the tokens of an iteration, by what limits a job (snippets on Mistral-7B, A100)."""

    shape = SHAPES["snippets"]

    def tokens(engine: Engine) -> float:
        return median(
            each.iteration_tokens / each.iterations
            for each in _seeds(shape, "mistral-7b", A100, engine, quick)
        )

    narrow = tokens(BATCHLLM._replace(turns_max=64, memory_share=0.5))
    numbered, wide = tokens(BATCHLLM._replace(turns_max=TURNS_MAX)), tokens(BATCHLLM)
    holds = narrow < numbered < wide
    shown = SAME_SHAPE if holds and wide > 0.8 * TOKEN_BUDGET else NOT_REPRODUCED
    paper = f"near {TOKEN_BUDGET:,} (figure 6)"
    return [
        Row(
            "tokens per iteration, limited by memory; by 256 requests; by 64 requests in half of the memory",
            paper,
            f"{wide:,.0f}; {numbered:,.0f}; {narrow:,.0f}",
            shown,
            "the mean includes the cool-down, in which only the last replies are generated",
        )
    ]


def table_1(quick: bool = False) -> list[Row]:
    """Return requests per second of both industry workloads, and the saved tokens of the first."""
    rows: list[Row] = []
    for case, shape, model, hardware, paper in (
        ("case 1", SHAPES["snippets"], "mistral-7b", A100, (7.08, 9.83, 12.85)),
        ("case 2", SHAPES["ranking"], "qwen2-7b", MI200, (4.56, 5.88, 8.65)),
    ):
        engines = (UNSHARED, VLLM, BATCHLLM)
        found = [_seeds(shape, model, hardware, engine, quick) for engine in engines]
        rates = [median(each.requests / each.seconds for each in some) for some in found]
        rises = rates[0] < rates[1] < rates[2]
        assumed = "the device reaches 0.6 of its data sheet, and replies have 100 tokens"
        for name, ours, theirs in zip(
            ("vLLM, chunked prefills", "vLLM, and prefix caching", "BatchLLM"),
            rates,
            paper,
            strict=True,
        ):
            found_here = verdict(ours, theirs, rises)
            name = f"table 1, {case}: {name}"
            rows.append(Row(name, f"{theirs}/s", f"{ours:.2f}/s", found_here, assumed))
        for name, base, reason in (
            ("no sharing", 0, "all kernels are equally fast here"),
            (
                "prefix caching",
                1,
                "the order of the file decides what an LRU cache finds, and is assumed",
            ),
        ):
            ours, theirs = rates[2] / rates[base], paper[2] / paper[base]
            name = f"table 1, {case}: BatchLLM relative to {name}"
            found_here = gain_verdict(ours, theirs)
            rows.append(Row(name, f"{theirs:.2f} x", f"{ours:.2f} x", found_here, reason))
        if case == "case 1":
            savings = [100 * median(each.saving for each in some) for some in found]
            for name, ours, theirs in (
                ("in groups", savings[2], 54.9),
                ("with LRU", savings[1], 44.2),
            ):
                rows.append(
                    Row(
                        f"section 6.3.1: prompt tokens saved {name}",
                        f"{theirs} %",
                        f"{ours:.1f} %",
                        verdict(ours, theirs, savings[2] > savings[1]),
                        "group sizes and the order of the file were chosen to match the paper",
                    )
                )
    return rows


def figure_5(quick: bool = False) -> list[Row]:
    """Return BatchLLM's throughput relative to vLLM with prefix caching, by panel: model and device."""
    rows = []
    for model, hardware in PANELS:
        gains: dict[tuple[str, int], float] = {}
        for lengths in (LENGTHS[0], LENGTHS[-1]) if quick else LENGTHS:
            for degree in DEGREES[1:] if quick else DEGREES:
                shape = shape_named(f"{lengths}x{degree}")
                if quick:
                    shape = replace(shape, requests=500)
                ours, theirs = (
                    simulated(shape, model, hardware, engine) for engine in (BATCHLLM, VLLM)
                )
                gains[lengths, degree] = theirs.seconds / ours.seconds
        least, most = min(gains.values()), max(gains.values())
        longest = max(gain for (lengths, _), gain in gains.items() if lengths == LENGTHS[0])
        shortest = max(gain for (lengths, _), gain in gains.items() if lengths == LENGTHS[-1])
        holds = least > 0.99 and longest > shortest
        paper = 1.5 if hardware is A100 else 2.0
        rows.append(
            Row(
                f"figure 5: {model} on {hardware.name}, relative to vLLM with prefix caching",
                "1.1 to 1.5 x" if hardware is A100 else "up to 2 x",
                f"{least:.2f} to {most:.2f} x",
                gain_verdict(most, paper) if holds else NOT_REPRODUCED,
                "here most prefixes fit into the cache, so LRU loses little"
                if holds
                else "no gain for a long prefix",
            )
        )
    return rows


def figure_6(quick: bool = False) -> list[Row]:
    """Return the valleys without shared prefixes: iterations with less than half of the token budget."""
    shape = SHAPES["ranking"]
    rows = []
    for output_tokens in (100, 300):
        drawn = replace(shape, output_tokens=output_tokens, output_tokens_max=2 * output_tokens)
        before, after = (
            median(each.valleys for each in _seeds(drawn, "qwen2-7b", MI200, engine, quick))
            for engine in (UNSHARED, UNSHARED._replace(turns_max=TURNS_BY_MEMORY, reorders=True))
        )
        holds = after < before / 2
        rows.append(
            Row(
                f"figures 2 and 6: valleys before and after, replies of {output_tokens} tokens",
                "many, few",
                f"{before:.0%}, {after:.0%} of the iterations",
                SAME_SHAPE if holds else NOT_REPRODUCED,
                "at 256 requests, decodes leave no room for prompts"
                if holds
                else "fewer than 256 requests fill an iteration"
                if before < 0.01
                else "memory is the limit, not the number of requests",
            )
        )
    return rows


def figure_7(quick: bool = False) -> list[Row]:
    """Return the effects of reordering and of memory-centric batching (snippets on Mistral-7B, A100)."""
    shape, rows = _shorter(SHAPES["snippets"], quick), []
    for sharing, base in (
        ("no sharing", UNSHARED),
        ("groups", BATCHLLM._replace(turns_max=TURNS_MAX, reorders=False)),
    ):
        engines = {
            "reordering": base._replace(reorders=True),
            "memory-centric batching": base._replace(turns_max=TURNS_BY_MEMORY),
            "both": base._replace(reorders=True, turns_max=TURNS_BY_MEMORY),
        }
        plain = _seeds(shape, "mistral-7b", A100, base, quick)
        for name, engine in engines.items():
            found = _seeds(shape, "mistral-7b", A100, engine, quick)
            ours = median(old.seconds / new.seconds for old, new in zip(plain, found, strict=True))
            paper = "up to 1.09 x" if name == "both" else "above 1 x"
            rows.append(
                Row(
                    f"figure 7a, {sharing}: throughput with {name}",
                    paper,
                    f"{ours:.3f} x",
                    gain_verdict(ours, 1.09),
                    "fewer iterations do not save time, because here 200 tokens fill the GPU",
                )
            )
        busy = [
            (
                median(each.busy_iterations for each in some),
                median(each.busy_seconds for each in some),
            )
            for some in (plain, found)
        ]
        (steps, seconds), (fewer, less) = busy
        rows.append(
            Row(
                f"figure 7b, {sharing}: iterations without the cool-down, with both",
                f"{1350 / 1600:.2f} x (1,600 to 1,350)",
                f"{fewer / steps:.2f} x ({steps:,.0f} to {fewer:,.0f})",
                gain_verdict(fewer / steps, 1350 / 1600),
                "fewer valleys" if fewer < steps else "fewer than 256 requests fill an iteration",
            )
        )
        rows.append(
            Row(
                f"figure 7b, {sharing}: time without the cool-down, with both",
                "down to 0.85 x",
                f"{less / seconds:.2f} x",
                gain_verdict(less / seconds, 0.85),
                "as in figure 7a",
            )
        )
        if sharing == "groups":
            slow = [
                _seeds(shape, "mistral-7b", A100, each._replace(host_seconds=HOST_SECONDS), quick)
                for each in (base, engines["both"])
            ]
            ratio = median(old.seconds / new.seconds for old, new in zip(*slow, strict=True))
            rows.append(
                Row(
                    f"figure 7a, {sharing}: both, and {1000 * HOST_SECONDS:.0f} ms on the host",
                    "up to 1.09 x",
                    f"{ratio:.3f} x",
                    gain_verdict(ratio, 1.09),
                    "this time per iteration is assumed for vLLM 0.5.4",
                )
            )
    return rows


def identification(quick: bool = False) -> list[Row]:
    """Return the seconds to find the prefixes of 3,000 requests. Measured on this machine."""
    prompts = [each.prompt for each in drawn_batch(SHAPES["snippets"], 0)]
    took = []
    for _ in range(1 if quick else 5):
        began = time.perf_counter()
        prefix_groups(prompts)
        took.append(time.perf_counter() - began)
    ours = min(took)
    return [
        Row(
            "section 6.3.4: time to find the prefixes of 3,000 requests",
            "0.28 s",
            f"{ours:.2f} s",
            REPRODUCED if ours < 0.28 else verdict(ours, 0.28, ours < 2.33),
            "nearly nothing beside the batch's 233 s",
        )
    ]


FIGURES: dict[str, Callable[[bool], list[Row]]] = {
    "job-limits": job_limits,
    "table-1": table_1,
    "figure-5": figure_5,
    "figure-6": figure_6,
    "figure-7": figure_7,
    "identification": identification,
}


def _seeds(
    shape: BatchShape, model: str, hardware: HardwarePreset, engine: Engine, quick: bool
) -> list[BatchFigures]:
    seeds = range(1 if quick else SEEDS)
    return [simulated(shape, model, hardware, engine, seed) for seed in seeds]


def _shorter(shape: BatchShape, quick: bool) -> BatchShape:
    """Return fewer requests, for engines without an LRU cache. They take a shorter time, in proportion."""
    return replace(shape, requests=shape.requests // 2) if quick else shape


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure batchllm", description=__doc__)
    parser.add_argument("--figure", action="append", choices=list(FIGURES), help="(default: all)")
    parser.add_argument("--quick", action="store_true", help="one seed, fewer requests")
    arguments = parser.parse_args(given)
    for name in arguments.figure or FIGURES:
        for row in FIGURES[name](arguments.quick):
            print(
                f"{row.name}: paper {row.paper}, ours {row.ours}: {row.verdict} ({row.reason})",
                flush=True,
            )


if __name__ == "__main__":
    main()
