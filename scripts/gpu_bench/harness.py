"""Run one section of the GPU bench: its process, the device, timing and figures.

`__main__.py` starts and ends a process for each section. Figures are appended to `figures.jsonl` at once, so
a process that is killed leaves its results. On a GPU each call is captured in a graph and replayed over
alternating inputs, so neither Python nor the cache is measured. Shares are relative to the device's own
rates, which section `device` has measured.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import torch

from pensieve.bench.attention import check_close
from pensieve.errors import PensieveError
from pensieve.kernels import choices
from scripts.gpu_bench.stages import unverified_kernels

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
FIGURES = "figures.jsonl"  # in a run's folder
Run = Callable[[], object]


def figures_of(folder: Path) -> list[dict[str, Any]]:
    """Return the figures so far; skip lines that were cut off when their process was killed."""
    path = folder / FIGURES
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


@dataclass
class Bench:
    """The device, its measured rates, and the file for figures."""

    device: torch.device
    small: bool
    out: TextIO
    limit_seconds: float
    began: float
    copy_bandwidth: float = 0.0  # bytes read and written per second
    matrix_rate: float = 0.0  # operations per second
    bus: dict[str, float] | None = None  # bytes per second, by "swap_in" and "swap_out"
    wrong: frozenset[str] = frozenset()  # kinds of `stages.KERNELS` that are wrong or unchecked
    failed: bool = False  # a failure was reported

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def seconds_left(self) -> float:
        return self.limit_seconds - (time.perf_counter() - self.began)

    def report(self, section: str, line: str, **figures: Any) -> None:
        print(f"{section:10} {line}", flush=True)
        reported = {"section": section, "small": self.small, "line": line, **figures}
        self.out.write(json.dumps(reported) + "\n")
        self.out.flush()

    @contextmanager
    def reporting_failure(self, section: str, what: str, **figures: Any) -> Iterator[None]:
        """Report a failure inside the block and continue after the block.

        If the device stays in an error state, end the section instead, because all else would fail, too.
        """
        try:
            yield
        except Exception as error:
            self.failed = True
            line = f"{what}: FAILED: {type(error).__name__}: {error}"
            self.report(section, line, what=what, failed=True, **figures)
            if not isinstance(error, PensieveError):  # a PensieveError's message is complete
                traceback.print_exc(file=sys.stderr)
            try:
                self.synchronize()
            except Exception:
                raise error from None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, runs: Sequence[Run], repeats: int = 5, *, graph: bool = True) -> float:
        """Return the median time of one call; the runs alternate."""
        if self.device.type == "cuda" and graph:
            runs = [capture(run) for run in runs]
        for run in runs:
            run()
        self.synchronize()
        if self.device.type != "cuda":
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                for run in runs:
                    run()
                times.append((time.perf_counter() - begin) / len(runs))
            return statistics.median(times)
        times = []
        rounds = max(1, 8 // len(runs))
        for _ in range(repeats):
            first: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            last: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            first.record()
            for _ in range(rounds):
                for run in runs:
                    run()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3 / (rounds * len(runs)))
        return statistics.median(times)


def share_of(rate: float, device_rate: float | None, what: str) -> tuple[float | None, str]:
    """Return a rate as a share of a device rate, and in words; None if the device rate is unknown."""
    if not device_rate:
        return None, f"{what} is unknown"
    return rate / device_rate, f"{rate / device_rate:.0%} of {what}"


def capture(run: Run) -> Run:
    """Capture one call as a graph that can be replayed."""
    side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        run()
    torch.cuda.current_stream().wait_stream(side_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def check(name: str, answer: torch.Tensor, right: torch.Tensor) -> float:
    return check_close(name, answer, right, TOLERANCE)


# Section -> the module that has it.
SECTIONS = {
    **dict.fromkeys(("versions", "device", "sanitizer", "swap"), "device"),
    **dict.fromkeys(("kernels", "attention", "decode", "prefill"), "kernels"),
    **dict.fromkeys(("iteration", "sampler", "hidden", "exactness", "load"), "engines"),
}
# Modules that the fork server imports once for all processes.
PRELOADED = (
    *(f"scripts.gpu_bench.{module}" for module in dict.fromkeys(SECTIONS.values())),
    "transformers.models.llama.modeling_llama",
)


def run_section(
    name: str,
    folder: Path,
    device: str,
    seconds: float,
    small: bool,
    chosen: str,
    output: Connection,
) -> None:
    """Run one section in this process, print to `output`, and exit with status 0 or 1."""
    os.setsid()  # so that `end_process` can also end its child processes
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    raise SystemExit(0 if succeeded(name, folder, device, seconds, small, chosen) else 1)


def succeeded(
    name: str, folder: Path, device: str, seconds: float, small: bool, chosen: str | None = None
) -> bool:
    """Run one section with the kernel switches `chosen` (kernels/choices.py); report a failure as a figure.

    None: this process's own switches.
    """
    with (folder / FIGURES).open("a", encoding="utf-8") as out, torch.inference_mode():
        bench = Bench(torch.device("cpu"), small, out, seconds, time.perf_counter())
        try:
            if chosen is not None:
                choices.current = choices.of_text(chosen)
                os.environ[choices.VARIABLE] = chosen
            bench.device = torch.device(device)
            if bench.device.type == "cuda":
                bench.device = torch.device("cuda", bench.device.index or 0)
                torch.cuda.set_device(bench.device)
            recall(bench, folder)
            section_named(name)(bench)
            return not bench.failed
        except Exception as error:
            kind = getattr(error, "kind", None)
            bench.report(name, f"FAILED: {type(error).__name__}: {error}", failed=True, kind=kind)
            traceback.print_exc(file=sys.stderr)
    return False


def recall(bench: Bench, folder: Path) -> None:
    """Read what section `device` last measured for shapes of this size, and the wrong kernels."""
    for reported in figures_of(folder):
        if reported["section"] != "device" or reported["small"] != bench.small:
            continue
        bench.copy_bandwidth = reported.get("copy_bandwidth", bench.copy_bandwidth)
        bench.matrix_rate = reported.get("matrix_rate", bench.matrix_rate)
        if "swap_in" in reported:
            bench.bus = {name: reported[name] for name in ("swap_in", "swap_out")}
    bench.wrong = unverified_kernels(figures_of(folder))


def section_named(name: str) -> Callable[[Bench], None]:
    """Return the function of the section; import only its module."""
    module = importlib.import_module(f"scripts.gpu_bench.{SECTIONS[name]}")
    section: Callable[[Bench], None] = getattr(module, f"section_{name}")
    return section
