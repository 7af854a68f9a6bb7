"""`pensieve profile` measures what computing and copying cost, for the daemons of this machine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from pensieve.cli.flags import add_settings
from pensieve.config import print_settings, resolve, settings_named

DESCRIPTION = """\
Measure what iterations of a model and copies of its KV cost on this machine, in a few minutes, and keep it:
`pensieve serve` and `pensieve chat` use it from then on, for the same model, types, threads and versions.
It is what decides which KV is worth keeping, whether it is copied or computed again, and how much of a prompt
may join an iteration. Nothing else should run meanwhile. The error of the predictions is that of iterations
which were held out."""
# The settings that decide what an engine computes with.
PROFILED = settings_named(
    *("model", "device", "dtype", "context_max", "weights", "kv_dtype", "device_cache"),
    *("host_cache", "token_budget", "turns_max", "threads", "tensor_parallel"),
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="measure what a model costs on this machine, for its daemons",
        description=DESCRIPTION,
    )
    add_settings(parser, PROFILED)
    parser.add_argument("--quick", action="store_true", help="fewer iterations: half a minute")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write it there, for `pensieve simulate --cost`, instead of keeping it for the next start",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the errors (needs the extra `bench`)"
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    flags = {setting.name: getattr(arguments, setting.name) for setting in PROFILED}
    if arguments.print_config:
        print_settings(resolve(flags, os.environ, arguments.config, PROFILED))
        return 0
    resolved = resolve(flags, os.environ, arguments.config)
    from pensieve.bench.report import Report

    if arguments.plot is not None:
        from pensieve.bench import plots

        plots.matplotlib()  # before minutes are spent
    from pensieve.bench import profile

    report = Report(arguments.json)
    options = profile.ProfileOptions(quick=arguments.quick, output=arguments.output)
    found = profile.run(resolved.settings, options, report)
    if arguments.plot is not None:
        profile.plot(found, arguments.plot, report.facts)
    return 0
