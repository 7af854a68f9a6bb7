"""Examine a GPU in one run: first correctness, then speed, long runs last.

    stage  min.  content                                           decides
    1      4     versions; device, kernels, swap on small shapes;  wrong wide kernel: switch it off and
                 compute-sanitizer                                 continue; wrong narrow kernel: stop
    2      3     attention, decode, prefill, hidden, exactness on  whether figures mean anything
                 small shapes
    3      6     device, kernels, decode, prefill, swap            whether to improve decode's merge inside
                                                                   the kernel, or how warpgroups alternate
                                                                   in prefill (ping-pong)
    4      6     iterations at 1 to 128 rows, with and without     what to improve next: the sampler, the
                 graphs; sampler; hidden                           launches of layers, or the swap-ins
    5      9     attention against torch; exactness under          whether to tune attention for at most 32
                 pressure                                          rows
    6      9     load: conversations at 8, 16, 32 a second         throughput at equal latency

Section `hidden` measures whether the swap-in of a history is hidden behind the computation. Section
`exactness` checks replies under memory pressure.

Each section runs in its own process with a time limit, so a section that hangs or breaks the device affects
only itself. Wrong results are not timed. One folder holds everything: `figures.jsonl` with the figures so
far, `log.txt` with the output, and `decisions.txt`. A stage is skipped if the time left of `--minutes` is
less than half of the stage's minutes. `--prepare` compiles everything the run needs, without a GPU, so that a
machine with a GPU compiles nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from pensieve.kernels import choices
from scripts.gpu_bench.harness import FIGURES, PRELOADED, figures_of, run_section
from scripts.gpu_bench.stages import STAGES, Consequences, Stage, Step, after, decisions, small

LEAST_SECONDS = 5  # no section starts with less time left; a killed section has this time to end


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--stages",
        type=lambda text: {int(each) for each in text.split(",")},
        default={stage.number for stage in STAGES},
        metavar="N,…",
        help="stages to run (default: all)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="default: $OUT, or bench_gpu_<time> in this folder",
    )
    parser.add_argument(
        "--minutes", type=float, default=45.0, help="stop after this time (default: 45)"
    )
    parser.add_argument("--small", action="store_true", help="run small shapes only, on any device")
    parser.add_argument(
        "--prepare", action="store_true", help="compile what a run needs, then exit"
    )
    arguments = parser.parse_args(given)
    if arguments.prepare:
        from pensieve.kernels import nvrtc

        return nvrtc.main(("sm_90a",), chosen=True)
    device = default_device()
    if device == "cpu" and not arguments.small:
        parser.error("no GPU found; use --small to try the bench on the CPU")
    folder = arguments.out or Path(
        os.environ.get("OUT") or time.strftime("bench_gpu_%Y%m%d_%H%M%S")
    )
    folder.mkdir(parents=True, exist_ok=True)
    stages = small(STAGES) if arguments.small else STAGES
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        run = Run(folder, device, arguments.minutes * 60, log)
        run.stages([stage for stage in stages if stage.number in arguments.stages])
        run.print_line(f"results are in {folder}")
    return 1 if run.failed else 0


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class Run:
    """One run of several stages: its folder, its clock, and its failures."""

    def __init__(self, folder: Path, device: str, seconds: float, log: TextIO) -> None:
        self.failed: list[str] = []
        self._folder = folder
        self._device = device
        self._ends = time.monotonic() + seconds
        self._log = log
        self._choices: list[str] = []  # made by a stage for later stages
        # The fork server has imported everything and has neither threads nor a device. So the process that it
        # forks for each section starts at once.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED])

    def print_line(self, line: str) -> None:
        print(line, flush=True)
        self._log.write(line + "\n")
        self._log.flush()

    def stages(self, stages: Sequence[Stage]) -> None:
        examined = False
        for stage in stages:
            left = self._ends - time.monotonic()
            if left < stage.minutes * 60 / 2:
                minutes = f"only {left / 60:.1f} of its {stage.minutes} minutes are left"
                self.print_line(f"stage {stage.number} is skipped: {minutes}")
                continue
            self.print_line(f"\n== {stage.number}: {stage.title} (about {stage.minutes} minutes)")
            examined = True
            consequences = self._decide(stage.number, stage.steps)
            while consequences.choices and consequences.choices not in self._choices:
                self._choices.append(consequences.choices)
                kernel_steps = [step for step in stage.steps if step.section == "kernels"]
                consequences = self._decide(stage.number, kernel_steps)
            # If there are choices here, a kernel is still wrong although it was already switched off.
            if consequences.stop or consequences.choices:
                return
        if not examined:
            self.failed.append("all")
            self.print_line("nothing was examined")

    def _decide(self, number: int, steps: Sequence[Step]) -> Consequences:
        """Run these steps of a stage, and print what their figures decide."""
        first = len(figures_of(self._folder))
        for step in steps:
            self.step(step)
        found = figures_of(self._folder)[first:]
        with (self._folder / "decisions.txt").open("a", encoding="utf-8") as file:
            for sentence in decisions(number, found, [step.section for step in steps]):
                self.print_line(f"  -> {sentence}")
                file.write(f"{number}: {sentence}\n")
        return after(number, found)

    def step(self, step: Step) -> None:
        """Run one section in a process, and end it at its time limit."""
        left = self._ends - time.monotonic()
        limit = min(float(step.seconds), left)
        if left < LEAST_SECONDS:
            self.print_line(f"{step.section:10} skipped: no time left")
            return
        given = os.environ.get(choices.VARIABLE, "")
        chosen = ",".join(filter(None, [given, step.choices, *self._choices]))
        began, before = time.monotonic(), len(figures_of(self._folder))
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=run_section,
            args=(step.section, self._folder, self._device, limit, step.small, chosen, writer),
        )
        process.start()
        writer.close()
        late = threading.Event()

        def end() -> None:
            late.set()
            end_process(process.pid)

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            with os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    self.print_line(line.rstrip("\n"))
            process.join()
        finally:
            timer.cancel()
            if process.is_alive():  # this run was interrupted
                end_process(process.pid)
                process.join(LEAST_SECONDS)
            reader.close()
        if late.is_set():
            self._note(step, f"FAILED: ended after {limit:.0f} s")
        elif process.exitcode and not any(
            each["section"] == step.section and each.get("failed")
            for each in figures_of(self._folder)[before:]
        ):
            self._note(step, f"FAILED: its process ended with status {process.exitcode}")
        elif process.exitcode:
            self.failed.append(step.section)
        self.print_line(f"{'':10} ({time.monotonic() - began:.0f} s)")

    def _note(self, step: Step, line: str) -> None:
        """Record a failure that the process itself could not report."""
        self.failed.append(step.section)
        self.print_line(f"{step.section:10} {line}")
        reported = {"section": step.section, "small": step.small, "line": line, "failed": True}
        with (self._folder / FIGURES).open("a", encoding="utf-8") as out:
            out.write(json.dumps(reported) + "\n")


def end_process(pid: int | None) -> None:
    """Kill a section and everything in its session, or only the process if it has no session yet."""
    if pid is None:
        return
    others = [int(each.name) for each in Path("/proc").glob("[0-9]*")]
    for each in (pid, *others):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if each == pid or os.getsid(each) == pid:
                os.kill(each, signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main())
