"""`scripts/bench_gpu` checks and measures a GPU in one run of at most nine minutes.

    device       what it is; how fast a large copy, a large product and a large pinned copy are, each way
    kernels      every kernel against the float32 reference, over shapes, types and scattered pages
    attention    figure 3.17: eight queries over scattered pages against torch on keys in one piece (M5)
    decode       bytes of KV read over time, as a share of the large copy's bandwidth (M6)
    prefill      against the better of torch's flash and cuDNN, and the large product's rate (M7)
    swap         scattered pages over the bus, by kernel and by copy engine, against one large copy (M8)
    hidden       512 new tokens on an 8 B model, their history of 4,000 in either tier (M8)
    exactness    a model replies the same with swaps, drops and recompute as without memory pressure
    load         ShareGPT-like conversations: throughput at equal P90 normalized latency (M11)

Correctness comes first; what is wrong is not timed. A section that fails reports why, and the next one
runs. All figures go to `--out` as JSON lines as they come, so a run that is cut off leaves what it had
measured. On a GPU each call is captured in a graph and replayed over inputs that take turns, so neither
Python nor the cache is measured. `--small` runs every section on small shapes, on any device.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pensieve.bench.gpu_device import section_device, section_swap
from pensieve.bench.gpu_exactness import section_exactness
from pensieve.bench.gpu_harness import Bench, Run
from pensieve.bench.gpu_hidden import section_hidden
from pensieve.bench.gpu_kernels import (
    section_attention,
    section_decode,
    section_kernels,
    section_prefill,
)
from pensieve.bench.gpu_load import section_load
from pensieve.bench.gpu_model import random_model
from pensieve.model.loader import LoadedModel

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "device": section_device,
    "kernels": section_kernels,
    "attention": section_attention,
    "decode": section_decode,
    "prefill": section_prefill,
    "swap": section_swap,
}
SECTIONS_WITH_MODEL: dict[str, Callable[[Bench, LoadedModel], None]] = {
    "hidden": section_hidden,
    "exactness": section_exactness,
    "load": section_load,
}
NAMES = (*SECTIONS, *SECTIONS_WITH_MODEL)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sections",
        default=",".join(NAMES),
        metavar="NAME,…",
        help="sections to run (default: all)",
    )
    parser.add_argument("--out", type=Path, default=Path("bench_gpu.jsonl"), metavar="FILE")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="stop after so many (default: 9)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="run small shapes only, on any device")
    arguments = parser.parse_args(given)
    wanted = arguments.sections.split(",")
    if unknown := sorted(set(wanted) - set(NAMES)):
        parser.error(f"no such section: {', '.join(unknown)}")
    device = torch.device(arguments.device)
    if device.type == "cpu" and not arguments.small:
        parser.error("there is no GPU here; --small tries it out on the CPU")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    with arguments.out.open("a", encoding="utf-8") as out, torch.inference_mode():
        bench = Bench(device, arguments.small, out, arguments.minutes, time.perf_counter())
        failed = run(bench, wanted)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(bench: Bench, wanted: list[str]) -> list[str]:
    """The sections in this order, those that need a model last; the names of those that failed."""
    failed = [
        name
        for name in wanted
        if name in SECTIONS and not _succeeds(bench, name, partial(SECTIONS[name], bench))
    ]
    of_models = [name for name in SECTIONS_WITH_MODEL if name in wanted]
    if not of_models:
        return failed
    models: list[LoadedModel] = []

    def make() -> None:
        models.append(random_model(bench.device, bench.small))

    if not _succeeds(bench, "model", make):
        return [*failed, *of_models]
    for name in of_models:
        section = partial(SECTIONS_WITH_MODEL[name], bench, models[0])
        if not _succeeds(bench, name, section):
            failed.append(name)
    return failed


def _succeeds(bench: Bench, name: str, section: Run) -> bool:
    """Run one section; the reason of one that fails is reported."""
    began = time.perf_counter()
    try:
        section()
    except Exception as error:
        bench.report(name, f"FAILED: {type(error).__name__}: {error}", failed=True)
        traceback.print_exc(file=sys.stderr)
        return False
    finally:
        print(f"{'':10} ({time.perf_counter() - began:.0f} s)", flush=True)
    return True


if __name__ == "__main__":
    raise SystemExit(main())
