"""What the sections of the GPU bench share (the device, timing, and writing of figures).

On a GPU each call is captured in a graph and replayed over inputs that take turns, so neither Python nor
the cache is measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from pensieve.bench.checks import check_close
from pensieve.errors import PensieveError

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
FIGURES = "figures.jsonl"  # in a run's folder
Run = Callable[[], object]


def figures_of(folder: Path) -> list[dict[str, Any]]:
    """What was reported so far; a line whose process was ended while it wrote is left out."""
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
    """The device, what was measured of it, and where figures go."""

    device: torch.device
    small: bool
    out: TextIO
    limit_seconds: float
    began: float
    copy_bandwidth: float = 0.0  # bytes read and written a second
    matrix_rate: float = 0.0  # operations a second
    bus: dict[str, float] | None = None  # bytes a second, "swap_in" and "swap_out"
    wrong: frozenset[str] = (
        frozenset()
    )  # of `gpu_stages.KERNELS`, what section kernels has not found right
    failed: bool = False  # something failed that was noted

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
    def noting(self, section: str, what: str, **figures: Any) -> Iterator[None]:
        """What fails inside is reported, and what comes behind it is examined all the same.

        That ends the section where the device is in an error that sticks: all else would only repeat it.
        """
        try:
            yield
        except Exception as error:
            self.failed = True
            line = f"{what}: FAILED: {type(error).__name__}: {error}"
            self.report(section, line, what=what, failed=True, **figures)
            if not isinstance(error, PensieveError):  # which says all that there is to say
                traceback.print_exc(file=sys.stderr)
            try:
                self.synchronize()
            except Exception:
                raise error from None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, runs: Sequence[Run], repeats: int = 5, *, graph: bool = True) -> float:
        """The median time of one call, the runs by turns."""
        if self.device.type == "cuda" and graph:
            runs = [captured(run) for run in runs]
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


def share_of(rate: float, whole: float | None, what: str) -> tuple[float | None, str]:
    """Which part of a rate of the device another one is, and in words; None if nobody has measured that."""
    if not whole:
        return None, f"{what} is unknown"
    return rate / whole, f"{rate / whole:.0%} of {what}"


def captured(run: Run) -> Run:
    """A graph of one call, to be replayed."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def check(name: str, answer: torch.Tensor, right: torch.Tensor) -> float:
    return check_close(name, answer, right, TOLERANCE)
