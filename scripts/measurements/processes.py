"""Processes of a measurement: a daemon on its own core, and the CPU time of a process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pensieve.bench.bench_daemon import BenchDaemon, serving


@contextlib.contextmanager
def pinned(flags: Sequence[str], iteration_seconds: float = 0.0) -> Iterator[BenchDaemon]:
    """Run a daemon without a model on the first core; its engine and this process use the other cores."""
    cores = sorted(os.sched_getaffinity(0))
    with serving(flags, {"PENSIEVE_ENGINE": f"echo:{iteration_seconds}"}) as daemon:
        try:
            for pid, allowed in ((daemon.pid, cores[:1]), (_child(daemon.pid), cores[1:])):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), allowed or cores)
            os.sched_setaffinity(0, cores[1:] or cores)
            yield daemon
        finally:
            os.sched_setaffinity(0, cores)


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in user and kernel mode, to within 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def counts(text: str) -> tuple[int, ...]:
    """Parse numbers with commas between them."""
    return tuple(int(each) for each in text.split(","))
