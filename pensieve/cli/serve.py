"""`pensieve serve`: the daemon, from its settings to its last breath.

    resolve → history → text → listen (NOT_SERVING) → engine process → ready

SIGTERM or Ctrl-C drains: no new turn, the running ones end (at most --drain-timeout), then it stops; the
second signal interrupts them at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pensieve.config import SERVING, Resolved
from pensieve.errors import ConfigError
from pensieve.launch import programs
from pensieve.launch.admin_socket import socket_path

SWITCH_SECONDS = 0.0005  # that the store's thread may make the loop, and so every stream, wait


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    serving = Serving(**{each.name: resolved.values[each.name] for each in SERVING})
    _log_to_stderr(serving.log_format)
    sys.setswitchinterval(SWITCH_SECONDS)
    return asyncio.run(_serve(serving, resolved))


@dataclass(frozen=True)
class Serving:
    """What `serve` alone needs to know."""

    address: str
    ready_file: Path | None
    token_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    insecure: bool | None
    reflection: bool | None
    turns_waiting_max: int
    grace: float
    keepalive: float
    drain_timeout: float
    engine: str
    echo_seconds: float
    log_format: str


async def _serve(serving: Serving, resolved: Resolved) -> int:
    from pensieve.launch.engine import load_texts, resolve_model
    from pensieve.service.daemon import Daemon, DaemonConfig
    from pensieve.service.grpc import auth as door
    from pensieve.service.grpc.server import Listening, Server, check_exposure
    from pensieve.store.conversation_store import ConversationStore

    began = time.monotonic()
    settings, log = resolved.settings, logging.getLogger("pensieve")

    def report(line: str) -> None:
        log.info(line)

    listening = Listening(
        address=serving.address,
        socket=socket_path(settings.data),
        tls_cert=serving.tls_cert,
        tls_key=serving.tls_key,
        tls_client_ca=serving.tls_client_ca,
        tokens=door.read_tokens(serving.token_file) if serving.token_file else (),
        insecure=bool(serving.insecure),
        reflection=serving.reflection,
        keepalive_seconds=serving.keepalive,
        ping_timeout_seconds=serving.keepalive / 3,
    )
    check_exposure(listening)
    report(f"model {settings.model or 'built-in (for trying the machinery)'}")
    folder = resolve_model(settings.model)
    store = ConversationStore.open(settings.data, "pensieve serve")
    for turn in store.interrupted_at_open:
        report(
            f"turn {turn.turn_id} of {turn.conversation_id} was interrupted; its history is unchanged"
        )
    try:
        texts = load_texts(folder, report)
    except BaseException:
        store.close()
        raise
    daemon = Daemon(
        store,
        texts.template,
        texts.fingerprint,
        texts.defaults,
        {**resolved.written, "model": str(folder), "data": str(settings.data)},
        folder,
        _program(serving),
        DaemonConfig(turns_max=serving.turns_waiting_max, grace_seconds=serving.grace),
        report,
        door.limits_of(listening.tokens),
    )
    server = Server(daemon, listening)
    hurry = asyncio.Event()

    def stop() -> None:
        if server.stopping.is_set():
            hurry.set()
        server.stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    drain_seconds = 0.0
    try:
        address = await server.listen()
        starting = loop.create_task(daemon.start())
        stopping = loop.create_task(server.stopping.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            drain_seconds = serving.drain_timeout
            report(f"ready grpc://{address} ({time.monotonic() - began:.1f} s)")
            if serving.ready_file is not None:
                _write_ready(serving.ready_file, address)
            _notify("READY=1")
            if store.integrity_check_due:
                daemon.check_history(report)
            await stopping
        else:
            starting.cancel()
        report("draining")
        _notify("STOPPING=1")
    finally:
        closing = loop.create_task(server.close(drain_seconds))
        hurrying = loop.create_task(hurry.wait())
        await asyncio.wait({closing, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            daemon.hurry()
        hurrying.cancel()
        await closing
    report("stopped")
    return 0


def _program(serving: Serving) -> tuple[str, ...]:
    if serving.engine == "model":
        return programs.ENGINE
    return (*programs.ECHO_ENGINE, f"--seconds={serving.echo_seconds}")


def _write_ready(path: Path, address: str) -> None:
    """Whole or not at all: whoever waits for the file may read it at once."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(address + "\n", encoding="ascii")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _notify(state: str) -> None:
    """Tell systemd, if it asked."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError as error:
            logging.getLogger("pensieve").warning("systemd could not be told: %s", error)


def _log_to_stderr(form: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    plain = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler.setFormatter(_TextLines() if plain else _JsonLines())
    root = logging.getLogger("pensieve")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False


SUBJECTS = ("turn_id", "conversation_id", "tenant")  # what a line may be about


def _subjects(record: logging.LogRecord) -> dict[str, str]:
    return {name: getattr(record, name) for name in SUBJECTS if hasattr(record, name)}


class _TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        about = "".join(f" {name}={value}" for name, value in _subjects(record).items())
        return super().formatMessage(record) + about


class _JsonLines(logging.Formatter):
    """One object a line; whatever a message quotes is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_subjects(record),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry)
