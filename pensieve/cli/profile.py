"""`pensieve profile`: measure the cost of computing and copying, for the daemons of this machine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from pensieve.cli.flags import add_settings
from pensieve.config import print_settings, resolve, settings_named

DESCRIPTION = """\
Measure how long a model's iterations and KV copies take on this machine, in a few minutes, and keep the
profile. `pensieve serve` and `pensieve chat` then use it for the same model, types, threads and versions: to
decide which KV is worth keeping, whether to copy or recompute it, and how much of a prompt may join an
iteration. Run nothing else meanwhile. The printed prediction error is measured on iterations that were held
out."""
# settings that affect the cost of an engine's computations
PROFILED = settings_named(
    *("model", "device", "dtype", "context_max", "weights", "kv_dtype", "device_cache"),
    *("host_cache", "token_budget", "turns_max", "threads", "tensor_parallel"),
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="measure a model on this machine, so that daemons schedule better",
        description=DESCRIPTION,
    )
    add_settings(parser, PROFILED)
    parser.add_argument(
        "--quick", action="store_true", help="measure fewer iterations, in half a minute"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the profile to FILE, for `pensieve simulate --cost`, instead of keeping it",
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

        plots.matplotlib()  # fail now, not after minutes of measurements
    from pensieve.bench import profile

    report = Report(arguments.json)
    options = profile.ProfileOptions(quick=arguments.quick, output=arguments.output)
    found = profile.run(resolved.settings, options, report)
    if arguments.plot is not None:
        profile.plot(found, arguments.plot, report.facts)
    return 0
