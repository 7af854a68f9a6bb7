"""`pensieve rank`: compute some layers, or a part of each layer, for an engine on another machine."""

from __future__ import annotations

import argparse
import logging
import signal
from typing import Any

from pensieve.config import RANK, Resolved, settings_for, settings_named
from pensieve.errors import ConfigError

log = logging.getLogger("pensieve")


def add_parser(commands: Any) -> None:
    from pensieve.cli.flags import add_settings, with_settings

    parser = commands.add_parser(
        "rank",
        help="compute a part of the model for an engine on another machine",
        description="Run as a rank of the engine at --leader (its --rank-address). Start the engine with "
        "--pipeline-stages or --tensor-parallel. This machine needs the same model files. The rank "
        "reconnects when the engine restarts. Run one command per GPU, with --device cuda:N.",
    )
    add_settings(parser, (*settings_named("model", "device"), *settings_for(RANK)))
    parser.set_defaults(run=with_settings(run))


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    from pensieve.launch.log_lines import log_to_stderr

    settings = resolved.settings
    for name in ("leader", "cluster_secret"):
        if getattr(settings, name) is None:
            raise ConfigError(f"pensieve rank needs --{name.replace('_', '-')}")
    with log_to_stderr("auto", turns=False):
        from pensieve.launch.remote_rank import rank_of

        rank = rank_of(settings, log.info)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: rank.stop())
        rank.run()
    return 0
