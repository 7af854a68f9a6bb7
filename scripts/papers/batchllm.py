"""Tables and figures of the BatchLLM paper (Zheng et al.): batches of requests that share prefixes.

scripts/measurements/batch_simulation.py describes the requests and what is assumed. The systems:

    BatchLLM            the daemon's engine in a job: groups, memory limits the number of requests, and shared
                        KV is read once per iteration
    vLLM                the schedule of vLLM 0.5.4 (scripts/measurements/vllm_batch.py). `+ p` is with prefix
                        caching, `+ c` with chunked prefills of 2,048 tokens, as in the paper
    our engine with LRU the daemon's engine with an LRU cache, at most 256 requests and the order of the file

The paper's MI200 counts as one half of a card (64 GB).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import sub
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
from scripts.measurements.vllm_batch import DEFAULT_BUDGET, VllmBatch
from scripts.papers.claims import Claim, about, absolute, improvement, more, no_claim
from scripts.papers.rows import Extent, Figure, Row, Spread, largest, ratio
from scripts.papers.sarathi import KERNELS

A100 = HARDWARE["a100-80gb"]
MI200 = HardwarePreset("mi200", 181e12, 1.638e12, 25e9, 64e9, 220e9)
LENGTHS = ("2000/200", "1000/1000", "200/2000")  # prefix and own tokens, in figure 5
DEGREES = (4, 16)
CONTEXT_MAX = 32_768  # tokens of whole prompts per iteration, without chunked prefills


@dataclass(frozen=True)
class Machine:
    model: str
    hardware: HardwarePreset

    @property
    def cost(self) -> CostModel:
        return CostModel.of(MODELS[self.model], self.hardware)

    @property
    def device_tokens(self) -> int:
        return device_tokens_of(MODELS[self.model], self.hardware)


System = Callable[[Machine, BatchShape, int], BatchFigures]  # the last argument is the seed


@dataclass(frozen=True)
class OurEngine:
    """The daemon's engine; the defaults are those of a job."""

    sharing: PrefixSharing = "groups"
    turns_max: int = TURNS_BY_MEMORY
    reorders: bool = True
    reads_once: bool = True

    def __call__(self, machine: Machine, shape: BatchShape, seed: int) -> BatchFigures:
        cost = machine.cost
        setting = BatchSetting(
            cost,
            cost.recompute(CHUNK_TOKENS),
            CacheConfig(machine.device_tokens // CHUNK_TOKENS, 0),
            SchedulerConfig(TOKEN_BUDGET, self.turns_max, cost=cost.computing),
            self.reorders,
            self.reads_once,
        )
        batch = drawn_batch(shape, seed)
        if self.reorders and self.sharing != "groups":
            batch.sort(key=lambda each: len(each.prompt))
        return BatchSimulator(setting, batch, shape.output_tokens_max, self.sharing).finish()


@dataclass(frozen=True)
class Vllm:
    chunked: bool
    caches: bool
    budget: int = TOKEN_BUDGET

    def __call__(self, machine: Machine, shape: BatchShape, seed: int) -> BatchFigures:
        batch = VllmBatch(
            *(machine.cost, machine.device_tokens, drawn_batch(shape, seed)),
            chunked=self.chunked,
            caches=self.caches,
            budget=self.budget if self.chunked else CONTEXT_MAX,
        )
        return batch.finish()


BATCHLLM = OurEngine()
UNSHARED = OurEngine("off", TURNS_MAX, reorders=False, reads_once=False)
LRU = replace(UNSHARED, sharing="lru")
VLLMS = {  # in the order of table 1
    "vLLM": Vllm(chunked=False, caches=False),
    "vLLM + p": Vllm(chunked=False, caches=True),
    "vLLM + c": Vllm(chunked=True, caches=False),
    "vLLM + p + c": Vllm(chunked=True, caches=True),
}
BEST_VLLM = VLLMS["vLLM + p + c"]
SYSTEMS: dict[str, System] = {
    **VLLMS,
    "BatchLLM": BATCHLLM,
    "our engine with LRU": LRU,
    f"vLLM + p + c, its default of {DEFAULT_BUDGET} tokens": replace(
        BEST_VLLM, budget=DEFAULT_BUDGET
    ),
}


class Case(NamedTuple):
    """A workload of table 1."""

    name: str
    shape: str  # of SHAPES
    machine: Machine
    rates: tuple[float, ...]  # requests per second of the first of SYSTEMS
    savings: tuple[float, float | None]  # per cent of the prompt tokens: BatchLLM, vLLM + p + c


CASES = (
    Case("case 1", "snippets", Machine("mistral-7b", A100), (7.13, 9.9, 7.08, 9.83, 12.85), (54.9, 44.2)),
    Case("case 2", "ranking", Machine("qwen2-7b", MI200), (4.34, 4.41, 4.56, 5.88, 8.65), (38.0, None)),
)  # fmt: skip
PANELS = (
    *(Machine(model, A100) for model in ("llama3-8b", "qwen2-7b", "mistral-7b")),
    *(Machine(model, MI200) for model in ("qwen2-7b", "mistral-7b")),
)


def _runs(
    system: System, machine: Machine, shape: BatchShape, extent: Extent
) -> list[BatchFigures]:
    shape = replace(shape, requests=int(shape.requests * extent.batch_share))
    return [system(machine, shape, seed) for seed in range(extent.seeds)]


def _speedup(slow: Sequence[BatchFigures], fast: Sequence[BatchFigures]) -> Spread:
    return ratio(*([each.seconds for each in runs] for runs in (slow, fast)))


def _saved(runs: Sequence[BatchFigures]) -> Spread:
    return Spread(100 * each.saving for each in runs)


def table_1(case: Case, extent: Extent) -> Iterator[Row]:
    """Requests per second, and the saved tokens."""
    row = partial(Row, "table 1")
    whole = replace(extent, batch_share=1.0)  # what a cache finds depends on the number of requests
    shape = SHAPES[case.shape]
    found = {name: _runs(system, case.machine, shape, whole) for name, system in SYSTEMS.items()}
    theirs = dict(zip(SYSTEMS, case.rates, strict=False))
    is_fitted = case is CASES[0]
    for name, runs in found.items():
        has_claim = name in theirs and not (is_fitted and name == "vLLM + c")
        claim = absolute(theirs[name], "{:.2f}/s") if has_claim else no_claim("{:.2f}/s")
        rates = Spread(each.requests / each.seconds for each in runs)
        yield row(f"{case.name}: {name}", claim, rates).because(
            "data sheet x 0.6; replies of 100 tokens, chosen for the rate of vLLM + c in case 1"
        )
    best = found["BatchLLM"]
    for name in ("vLLM + c", "vLLM + p + c"):
        claim = about(theirs["BatchLLM"] / theirs[name])
        yield row(f"{case.name}: BatchLLM over {name}", claim, _speedup(found[name], best)).because(
            f"{_saved(best).shown('{:.0f} %')} of the prompt tokens saved, "
            f"{_saved(found[name]).shown('{:.0f} %')} with {name}; all kernels are equally fast here"
        )
    section = "section 6.3.1" if is_fitted else "section 6.2.3"
    for name, paper in zip(("BatchLLM", "vLLM + p + c"), case.savings, strict=True):
        claim = no_claim("{:.1f} %") if paper is None or is_fitted else improvement(paper)
        what = f"{case.name}: prompt tokens saved by {name}"
        yield Row(section, what, claim, _saved(found[name])).because(
            "the group sizes, and for vLLM + p + c the distances of their requests in the file, were chosen "
            "to match case 1, which therefore has no verdict"
        )


def panel(machine: Machine, extent: Extent) -> Iterator[Row]:
    """Figure 5: BatchLLM's throughput over both baselines, by lengths and share degree."""
    row, name = partial(Row, "figure 5"), f"{machine.model} on {machine.hardware.name}"
    paper = about(1.5 if machine.hardware is A100 else 2.0)
    for other, system in (("vLLM + p + c", BEST_VLLM), ("our engine with LRU", LRU)):
        gains: dict[tuple[str, int], Spread] = {}
        for lengths, degree in product(LENGTHS, DEGREES):
            shape = shape_named(f"{lengths}x{degree}")
            runs = (_runs(each, machine, shape, extent) for each in (system, BATCHLLM))
            gains[lengths, degree] = _speedup(*runs)
        shown = ", ".join(
            f"{lengths} x {degree}: {gain.median:.2f}" for (lengths, degree), gain in gains.items()
        )
        what = f"{name}: BatchLLM over {other}, largest ratio of the panel"
        claim = paper if system is BEST_VLLM else no_claim()
        yield row(what, claim, largest(gains.values())).because(
            f"the paper's number is the largest of its panels; {shown}; kernels are equally fast"
        )
        if system is BEST_VLLM:
            what = f"{name}: gain with 2,000 shared tokens over gain with 200"
            rise = ratio(*(gains[each, DEGREES[-1]] for each in (LENGTHS[0], LENGTHS[-1])))
            yield row(what, more(), rise, "a longer prefix saves more")


def valleys(extent: Extent) -> Iterator[Row]:
    """Figures 2 and 6, without shared prefixes."""
    by_memory = replace(UNSHARED, turns_max=TURNS_BY_MEMORY, reorders=True)
    for tokens in (100, 300):
        shape = replace(SHAPES["ranking"], output_tokens=tokens, output_tokens_max=2 * tokens)
        before, after = (
            Spread(100 * each.valleys for each in _runs(system, CASES[1].machine, shape, extent))
            for system in (VLLMS["vLLM + c"], by_memory)
        )
        why = (
            "replies are so short that fewer than 256 requests run, so prompts fill the iterations"
        )
        if before.median > 1:
            why = "256 requests that generate leave no room for prompts"
        yield Row(
            "figures 2 and 6",
            f"replies of {tokens} tokens: fewer iterations (share) below half of the token budget",
            more(0.0, "{:+.0f} points"),
            Spread(map(sub, before, after)),
            f"{before.shown('{:.0f} %')} with vLLM + c, then {after.shown('{:.0f} %')}; {why}; the paper "
            "does not give the length of the replies",
        )


def ablation(extent: Extent) -> Iterator[Row]:
    """Figure 7: reordering and memory-centric batching (case 1), with kernels that are slow on few rows."""
    shape, best = SHAPES["snippets"], list[Spread]()
    low_rows = Machine("mistral-7b", replace(A100, **KERNELS))
    twice = 2 * low_rows.cost.dense_seconds(1024) / low_rows.cost.dense_seconds(2048)
    for sharing, base in (
        ("no sharing", UNSHARED),
        ("groups", replace(BATCHLLM, turns_max=TURNS_MAX, reorders=False)),
    ):
        both = replace(base, reorders=True, turns_max=TURNS_BY_MEMORY)
        plain = _runs(base, low_rows, shape, extent)
        for name, engine in (
            ("reordering", replace(base, reorders=True)),
            ("memory-centric batching", replace(base, turns_max=TURNS_BY_MEMORY)),
            ("both", both),
        ):
            runs = _runs(engine, low_rows, shape, extent)
            best.append(_speedup(plain, runs))
            medians = (Spread(each.iterations for each in some).median for some in (plain, runs))
            steps = " to ".join(f"{each:,.0f}" for each in medians)
            reason = (
                f"{steps} iterations, but two of 1,024 tokens take only {twice:.2f} x one of 2,048"
            )
            yield Row("figure 7a", f"{sharing}: throughput with {name}", more(), best[-1], reason)
        for what, paper, key in (
            ("iterations", 1350 / 1600, "busy_iterations"),
            ("time", 0.85, "busy_seconds"),
        ):
            name = f"{sharing}: {what} with both parts over neither, until the batch begins to run empty"
            values = [Spread(getattr(each, key) for each in some) for some in (plain, runs)]
            shown = " to ".join(f"{each.median:,.0f}" for each in values)
            claim, why = about(paper), "the paper's text does not say which case this is"
            if sharing != "groups":
                claim, why = (
                    no_claim(),
                    "the paper's 1,600 iterations cannot hold all unshared prompts",
                )
            yield Row("figure 7b", name, claim, ratio(values[1], values[0])).because(
                f"{shown} {'seconds' if what == 'time' else what}; {why}"
            )
        evenly = _speedup(*(_runs(each, CASES[0].machine, shape, extent) for each in (base, both)))
        name = "throughput with both, if kernels were as efficient on few rows as on many"
        yield Row("figure 7a", f"{sharing}: {name}", no_claim(), evenly).because(
            "without tiles and unhidden share, as in table 1"
        )
    yield Row("figure 7a", "the largest of the gains", about(1.09), largest(best)).because(
        "tiles of 128 tokens and the unhidden share are those that fit the rows of Sarathi-Serve"
    )


def identification(extent: Extent) -> Iterator[Row]:
    prompts = [each.prompt for each in drawn_batch(SHAPES["snippets"], 0)]
    took = []
    for _ in range(extent.repeats):
        began = time.process_time()
        prefix_groups(prompts)
        took.append(time.process_time() - began)
    name = f"time to find the prefixes of {len(prompts):,} requests"
    claim = Claim(0.0, 0.28, None, "{:.2f} s")
    yield Row("section 6.3.4", name, claim, Spread([min(took)])).because(
        "CPU time on this machine; the batch itself takes minutes"
    )


FIGURES: dict[str, Figure] = {
    **{f"batchllm-table-1-{each.name[-1]}": partial(table_1, each) for each in CASES},
    **{f"batchllm-5-{each.model}-{each.hardware.name}": partial(panel, each) for each in PANELS},
    "batchllm-6": valleys,
    "batchllm-7": ablation,
    "batchllm-6.3.4": identification,
}
