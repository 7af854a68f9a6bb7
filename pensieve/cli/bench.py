"""`pensieve bench`: measure this machine and this build. Each benchmark has its own module."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from pensieve.bench import plots
from pensieve.cli import bench_attention, bench_capacity, bench_chat, bench_step


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure this machine and this build")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind in (bench_chat, bench_capacity, bench_attention, bench_step):
        kind.add_parser(kinds)
    for each in kinds.choices.values():
        each.add_argument("--json", action="store_true", help="print figures as JSON")
        each.set_defaults(run=partial(_run, each.get_default("run")))


def _run(act: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    if getattr(arguments, "plot", None) is not None:
        plots.matplotlib()  # fail now, not after minutes of measurements
    return act(arguments)
