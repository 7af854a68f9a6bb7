"""`pensieve rank` computes some layers, or a part of each, for an engine on another machine."""

from __future__ import annotations

import argparse
import logging
import signal
from typing import Any

from pensieve.config import RANKING, SETTINGS, Resolved
from pensieve.errors import ConfigError

log = logging.getLogger("pensieve")
OWN = ("model", "device", "threads", "rank_secret")
LOADING = tuple(each for each in SETTINGS if each.name in OWN)


def add_parser(commands: Any) -> None:
    from pensieve.cli.flags import add_settings, with_settings

    parser = commands.add_parser(
        "rank",
        help="compute for an engine on another machine",
        description="Be a rank of the engine at --leader (its --rank-address), which is started with "
        "--pipeline-stages or --tensor-parallel. The model has to be here as well: the same files. When the "
        "engine ends, it connects again. One command for each GPU: --device cuda:N.",
    )
    add_settings(parser, RANKING, LOADING)
    parser.set_defaults(run=with_settings(run))


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    from pensieve.launch.log_lines import log_to_stderr

    values = resolved.values
    for name in ("leader", "rank_secret"):
        if values[name] is None:
            raise ConfigError(f"pensieve rank needs --{name.replace('_', '-')}")
    with log_to_stderr("auto", turns=False):
        from pensieve.launch.remote_rank import rank_of

        rank = rank_of(values, log.info)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: rank.stop())
        rank.run()
    return 0
