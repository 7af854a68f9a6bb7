"""The history service as a process: `pensieve history`.

    open      the history; this process has it alone
    listen    daemons may open sessions, and those of before may go on
    serve     calls, and what a history needs beside them: erasing, forgetting, scrubbing, backups
    stop      no more calls; what was begun is carried out; the history is closed

It ends as it may be killed: daemons keep what was not answered, and go on when the service is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pensieve.api.grpc.server import Health
from pensieve.config import Resolved, read_secret
from pensieve.conversations.backing_up import BackingUp
from pensieve.conversations.daemon_config import (
    CHAIN_KEEP_SECONDS,
    DAY_SECONDS,
    REQUEST_KEEP_SECONDS,
    SCRUB_SECONDS,
    BackupConfig,
)
from pensieve.conversations.housekeeping import Damage, Erasing, Scrubbing, start_forgetting
from pensieve.conversations.threads import Threads
from pensieve.errors import AddressInUse, ConfigError
from pensieve.guard.exposure import is_loopback
from pensieve.history.connection import MESSAGE_BYTES_MAX
from pensieve.history.guard import Guard
from pensieve.history.service import HistoryConfig, HistoryService
from pensieve.store.conversation_store import ConversationStore
from pensieve.v1 import history_pb2_grpc

log = logging.getLogger("pensieve")
SERVICE = "pensieve.v1.HistoryService"
SWEEP_SECONDS = 1.0
SWITCH_SECONDS = 0.0005  # how long the store's thread may keep the event loop waiting
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)
Report = Callable[[str], None]


@dataclass(frozen=True)
class HistorySetup:
    """What the process is made of."""

    data: Path
    store: str  # the address of a database; empty: SQLite in `data`
    address: str
    config: HistoryConfig
    secret: str = ""
    tls: tuple[bytes, bytes] | None = None  # key and certificate chain, PEM
    event_log: Path | None = None
    backup: BackupConfig | None = None


def setup_of(resolved: Resolved) -> HistorySetup:
    """From the settings of `pensieve history`; ConfigError if it would be open to others by accident."""
    given = resolved.settings
    address, secret = given.history_address, read_secret(given.cluster_secret)
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--address {address!r} is not HOST:PORT")
    store = given.store or ""
    if store.startswith("history"):
        raise ConfigError("--store of `pensieve history` is a database, and not another service")
    if given.backup is not None and store:
        raise ConfigError("--backup is for SQLite; PostgreSQL has backups of its own")
    tls = _tls(given.tls_cert, given.tls_key)
    if not is_loopback(host) and not given.insecure and not (tls and secret):
        raise ConfigError(
            f"--address {address} can be reached by others: give --tls-cert, --tls-key and "
            "--cluster-secret, or say --insecure where the network is private"
        )
    backup = None
    if given.backup is not None:
        keep_seconds = given.backup_keep * DAY_SECONDS
        backup = BackupConfig(given.backup.absolute(), keep_seconds)
    return HistorySetup(
        *(given.data, store, address, HistoryConfig(given.lease), secret, tls),
        given.event_log,
        backup,
    )


def _tls(cert: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key need each other")
    try:
        return key.read_bytes(), cert.read_bytes()
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error


class EventLog:
    """Lines of JSON, each written whole."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"--event-log {path}: {error.strerror}") from error

    def __call__(self, event: Mapping[str, Any]) -> None:
        try:
            os.write(self._file, json.dumps(event).encode() + b"\n")
        except OSError as error:  # what is served is worth more
            log.error("a line of the event log could not be written: %s", error.strerror)

    def close(self) -> None:
        os.close(self._file)


async def run(
    setup: HistorySetup,
    report: Report,
    ready: Callable[[str], None],
    stopping: asyncio.Event,
) -> None:
    """Serve until `stopping` is set."""
    sys.setswitchinterval(SWITCH_SECONDS)
    store = ConversationStore.open(
        setup.data,
        "pensieve history",
        url=setup.store,
        keep_running=True,
    )
    store.replica_sessions.begin_epochs()
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        stopping.set()

    threads = Threads(asyncio.get_running_loop(), 1, failed)
    health = Health(("", SERVICE))
    damage = Damage(store, threads, lambda: health.set(not damage.problems))
    events = EventLog(setup.event_log) if setup.event_log is not None else None
    service = HistoryService(
        store, threads, setup.config, refusal=lambda: damage.refusal, record=events
    )
    server = grpc.aio.server(interceptors=[Guard(setup.secret)], options=OPTIONS)
    history_pb2_grpc.add_HistoryServiceServicer_to_server(service, server)
    server.add_generic_rpc_handlers((health.handlers(),))
    try:
        address = _listen(server, setup)
        await server.start()
        _start_upkeep(setup, store, threads, damage)
        threads.spawn(service.watch())
        if store.integrity_check_due:
            damage.check(report)
        health.set(not damage.problems)
        ready(address)
        await stopping.wait()
    finally:
        health.set(False)
        await server.stop(0.5)
        await threads.end_tasks()
        await threads.close()
        service.close()
        store.close()
        if events is not None:
            events.close()
    if failures:
        raise failures[0]


def _listen(server: grpc.aio.Server, setup: HistorySetup) -> str:
    host = setup.address.rpartition(":")[0]
    bound = 0
    with contextlib.suppress(RuntimeError):
        if setup.tls is not None:
            credentials = grpc.ssl_server_credentials([setup.tls])
            bound = server.add_secure_port(setup.address, credentials)
        else:
            bound = server.add_insecure_port(setup.address)
    if not bound:
        raise AddressInUse(f"cannot listen on {setup.address}; is another process there?")
    return f"{host}:{bound}"


def _start_upkeep(
    setup: HistorySetup, store: ConversationStore, threads: Threads, damage: Damage
) -> None:
    """What a history needs beside its calls."""
    erasing = Erasing(store.erasure, threads)

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if store.erasure.due:
                erasing.start()

    threads.spawn(sweep())
    if setup.backup is not None:
        BackingUp(setup.data, setup.backup, threads).start()
    Scrubbing(
        store.scrub(), threads, SCRUB_SECONDS, lambda: store.erasure.pending, damage.found
    ).start()
    start_forgetting(
        store,
        threads,
        store.now,
        request_seconds=REQUEST_KEEP_SECONDS,
        chain_seconds=CHAIN_KEEP_SECONDS,
    )
