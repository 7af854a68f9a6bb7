"""`pensieve serve`: run a daemon in the foreground until a signal arrives.

After SIGTERM or Ctrl-C, the daemon drains: it accepts no new turns, waits for the running turns (at most
--drain-timeout) and exits. A second signal interrupts the running turns immediately."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pensieve.config import Resolved
from pensieve.errors import ConfigError

if TYPE_CHECKING:
    from pensieve.conversations.engine_child import EarlyEngine

log = logging.getLogger("pensieve")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    from pensieve.conversations.engine_child import EarlyEngine
    from pensieve.launch.log_lines import log_to_stderr
    from pensieve.launch.model_folder import resolve_model
    from pensieve.launch.programs import engine_program

    with log_to_stderr(resolved.settings.log_format, turns=True):
        resolve_model(resolved.settings.model, log.info)  # during this, a signal ends the process
        began = time.monotonic()
        with EarlyEngine(engine_program(resolved)) as early:
            return asyncio.run(_serve(resolved, early, began))


async def _serve(resolved: Resolved, early: EarlyEngine, began: float) -> int:
    from pensieve.launch import daemon, systemd

    setup = replace(daemon.setup_to_serve(resolved), take_prestarted_engine=early.take)
    log.info("model %s", resolved.settings.model or "built-in (for trying out Pensieve)")
    # Ctrl-C must end a wait for the database.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    server = daemon.open_server(setup, log.info)
    hurry = asyncio.Event()

    def stop() -> None:
        if server.stopping.is_set():
            hurry.set()
        server.stopping.set()

    def ready(address: str) -> None:
        urls = ", ".join([f"grpc://{address}", *(each.url for each in server.other_listeners)])
        log.info("ready %s (%.1f s)", urls, time.monotonic() - began)
        if resolved.settings.ready_file is not None:
            _write_ready(resolved.settings.ready_file, address)
        systemd.notify("READY=1")

    def stopping() -> None:
        log.info("draining")
        systemd.notify("STOPPING=1")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    watchdog = loop.create_task(systemd.keep_watchdog(server.wait_for_store))
    try:
        await daemon.run(server, setup, daemon.Hooks(log.info, ready, stopping), hurry)
    finally:
        watchdog.cancel()
    log.info("stopped")
    return 0


def _write_ready(path: Path, address: str) -> None:
    """Write the file atomically, because a program that waits for the file may read it immediately."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(address + "\n", encoding="ascii")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file: cannot write {path}: {error.strerror}") from error
