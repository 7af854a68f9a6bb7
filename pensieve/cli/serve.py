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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve.config import Resolved, print_settings
from pensieve.errors import ConfigError

if TYPE_CHECKING:
    pass

SWITCH_SECONDS = 0.001  # that the store's thread may make the loop, and so every stream, wait
SOCKET_BYTES_MAX = 107  # of a UNIX socket's path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("listening")
    group.add_argument(
        "--address", default="127.0.0.1:50051", metavar="HOST:PORT", help="port 0 picks one"
    )
    group.add_argument(
        "--ready-file", type=Path, metavar="FILE", help="write the address there when ready"
    )
    group.add_argument(
        "--token-file", type=Path, metavar="FILE", help="who may come in; see `pensieve token`"
    )
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain, PEM")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    group.add_argument(
        "--tls-client-ca", type=Path, metavar="FILE", help="clients need a certificate of this CA"
    )
    group.add_argument(
        "--insecure", action="store_true", help="serve strangers without TLS or tokens"
    )
    group.add_argument(
        "--reflection", action="store_true", default=None, help="also when tokens are needed"
    )
    group = parser.add_argument_group("turns")
    group.add_argument(
        "--turns-waiting-max",
        type=int,
        default=1024,
        metavar="N",
        help="begun and not ended; more are refused (default: 1024)",
    )
    group.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="to attach again after a broken connection (default: 5)",
    )
    group.add_argument(
        "--keepalive",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="between pings; a client that does not answer for a third of it is gone (default: 30)",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="for running turns at the end (default: 30)",
    )
    parser.add_argument(
        "--engine",
        choices=("model", "echo"),
        default="model",
        help="echo: arithmetic in the model's place, to measure or break the service alone",
    )
    parser.add_argument(
        "--echo-seconds", type=float, default=0.0, metavar="S", help="of an iteration of echo"
    )
    parser.add_argument(
        "--log-format",
        choices=("auto", "text", "json"),
        default="auto",
        help="auto: text on a terminal",
    )


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    if arguments.print_config:
        print_settings(resolved)
        return 0
    _log_to_stderr(arguments.log_format)
    sys.setswitchinterval(SWITCH_SECONDS)
    return asyncio.run(_serve(arguments, resolved))


async def _serve(arguments: argparse.Namespace, resolved: Resolved) -> int:
    from pensieve.cli.assembly import load_texts, resolve_model
    from pensieve.service import door
    from pensieve.service.daemon import Daemon, DaemonConfig
    from pensieve.service.server import Listening, Server, check_exposure
    from pensieve.store.conversation_store import ConversationStore

    began = time.monotonic()
    settings, log = resolved.settings, logging.getLogger("pensieve")

    def report(line: str) -> None:
        log.info(line)

    listening = Listening(
        address=arguments.address,
        socket=socket_path(settings.data),
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        tls_client_ca=arguments.tls_client_ca,
        tokens=door.read_tokens(arguments.token_file) if arguments.token_file else (),
        insecure=arguments.insecure,
        reflection=arguments.reflection,
        keepalive_seconds=arguments.keepalive,
        ping_timeout_seconds=arguments.keepalive / 3,
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
        DaemonConfig(turns_max=arguments.turns_waiting_max, grace_seconds=arguments.grace),
        report,
        _program(arguments),
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
            drain_seconds = arguments.drain_timeout
            report(f"ready grpc://{address} ({time.monotonic() - began:.1f} s)")
            if arguments.ready_file is not None:
                _write_ready(arguments.ready_file, address)
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


def _program(arguments: argparse.Namespace) -> tuple[str, ...] | None:
    if arguments.engine == "model":
        return None
    seconds = f"--seconds={arguments.echo_seconds}"
    return (sys.executable, "-m", "pensieve.cli.echo_engine", seconds)


def socket_path(data: Path) -> Path:
    """DATA/admin.sock, or a name in XDG_RUNTIME_DIR where that is too long for a socket."""
    path = data / "admin.sock"
    if len(os.fsencode(path)) <= SOCKET_BYTES_MAX:
        return path
    import hashlib

    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        raise ConfigError(
            f"{path} is too long for a socket; set XDG_RUNTIME_DIR or a shorter --data"
        )
    name = hashlib.sha256(os.fsencode(data.absolute())).hexdigest()[:16]
    return Path(runtime) / f"pensieve-{name}.sock"


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
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(message)s") if plain else _JsonLines()
    )
    root = logging.getLogger("pensieve")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False


class _JsonLines(logging.Formatter):
    """One object a line; whatever a message quotes is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry)
