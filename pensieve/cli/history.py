"""`pensieve history` has the history for several daemons, until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from typing import Any

from pensieve.cli.flags import add_settings, with_settings
from pensieve.config import HISTORY, Resolved, settings_for

log = logging.getLogger("pensieve")


def add_parser(commands: Any) -> None:
    service = commands.add_parser(
        "history",
        help="have one history for several daemons",
        description="Serve one history, in SQLite or PostgreSQL, to several daemons: each runs with "
        "`pensieve serve --store history://HOST:PORT`, and every conversation is served by one of them at a "
        "time. Killed and started again it goes on where it was.",
    )
    add_settings(service, settings_for(HISTORY))
    service.set_defaults(run=with_settings(run))


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    from pensieve.launch.log_lines import log_to_stderr

    with log_to_stderr(resolved.settings.log_format, turns=False):
        return asyncio.run(_serve(resolved))


async def _serve(resolved: Resolved) -> int:
    from pensieve.launch import history, systemd
    from pensieve.launch.ready_file import write_ready

    setup, stopping = history.setup_of(resolved), asyncio.Event()
    scheme = "history" if setup.tls is None else "historys"

    def ready(address: str) -> None:
        log.info("ready %s://%s", scheme, address)
        if resolved.settings.ready_file is not None:
            write_ready(resolved.settings.ready_file, address)
        systemd.notify("READY=1")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await history.run(setup, log.info, ready, stopping)
    log.info("stopped")
    return 0
