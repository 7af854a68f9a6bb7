"""A cluster of plain processes: several `pensieve serve` on one database, with links between them.

    talker ──client link──> replica ──peer link──> another replica
                               └──store link──> database

The database is a SQLite file (without a link) or a PostgreSQL server. It has an owner log (owner_log.py).
Every link can be cut separately. Every process can be killed, restarted with the same folder and addresses,
stopped (SIGSTOP) and continued. ray_world.py has the cluster on Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from pensieve.store.shared_file import holder_of_lock, is_stopped
from tests.cluster import owner_log
from tests.cluster.links import Link
from tests.newcomer import free_port

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 180.0
STOP_SECONDS = 120.0
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Kind:
    """The configuration of a world."""

    num_replicas: int = 3  # on Ray: the number of nodes, with one replica each
    lease_seconds: float = 2.0
    engine: str = "echo"
    echo_seconds: float = 0.003
    store: str = ""  # the address of a database; empty: a SQLite file in the world's folder
    has_ray: bool = False  # use ray_world.py

    @property
    def engine_variables(self) -> dict[str, str]:
        """Environment variables that select the daemons' engine."""
        is_echo = self.engine == "echo"
        return {"PENSIEVE_ENGINE": f"echo:{self.echo_seconds}" if is_echo else self.engine}

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the daemons, among them the lease."""
        return {**self.engine_variables, "PENSIEVE_LEASE": str(self.lease_seconds)}


def stop_without_locks(process: subprocess.Popen[Any], *locks: Path) -> None:
    """Stop the process (SIGSTOP) while it holds none of these locks."""
    while True:
        process.send_signal(signal.SIGSTOP)
        while not is_stopped(process.pid):
            assert process.poll() is None, "the process has ended"
            time.sleep(0.001)
        if process.pid not in map(holder_of_lock, locks):
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)


class CannotStart(AssertionError):
    """The history could not be opened."""


class Part:
    """A process of the cluster."""

    def __init__(
        self,
        name: str,
        folder: Path,
        command: list[str],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._variables = variables or {}
        self.log = folder / f"{name}.log"
        self.num_starts = 0
        self._ready = folder / f"{name}.ready"
        self._command = [*command, "--ready-file", str(self._ready)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self, *, waits: bool = True) -> None:
        self._ready.unlink(missing_ok=True)
        self.num_starts += 1
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pensieve", *self._command],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self._variables},
            )
        if waits:
            await self.wait_until_ready()

    async def wait_until_ready(self) -> None:
        async with asyncio.timeout(START_SECONDS):
            while not self._ready.exists():
                if not self.is_running:
                    said = self.log.read_text()[-2000:]
                    is_store = said.splitlines()[-1].startswith("pensieve: the history ")
                    kind = CannotStart if is_store else AssertionError
                    raise kind(f"{self.name} ended: {said}")
                await asyncio.sleep(LOOK_SECONDS)

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def terminate(self) -> int:
        """Drain and end the process as an operator would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self._process.wait, STOP_SECONDS)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def pause_between_writes(self, database: Path) -> None:
        """Pause the process, but not during a write: other daemons kill a process that pauses then."""
        assert self._process is not None
        stop_without_locks(self._process, database.with_name(f"{database.name}.write"))

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class Replica(Part):
    def __init__(self, number: int, folder: Path, kind: Kind, store: str) -> None:
        address = f"127.0.0.1:{free_port()}"
        self.data = folder / f"replica-{number}"
        self.peer_link = Link(address, free_port())
        self.client_link = Link(address)
        self.http_address = f"127.0.0.1:{free_port()}"
        self.store_link: Link | None = None
        if kind.store:
            self.store_link, store = link_to_database(store)
        arguments = [
            *("serve", "--data", str(self.data), "--replica", f"replica-{number}"),
            *("--address", address, "--announce", self.peer_link.address),
            *("--http", self.http_address, "--store", store),
        ]
        super().__init__(f"replica-{number}", folder, arguments, kind.variables)

    @property
    def links(self) -> list[Link]:
        found = [self.peer_link, self.client_link, self.store_link]
        return [link for link in found if link is not None]

    async def open(self) -> None:
        for link in self.links:
            await link.open()

    async def close(self) -> None:
        for link in self.links:
            await link.close()


def link_to_database(store: str) -> tuple[Link, str]:
    """Return a link to a database server, and the URL of the database through this link."""
    parts = urlsplit(store)
    (folder,), port = parse_qs(parts.query).get("host", [""]), parts.port or 5432
    link = Link(f"{folder}/.s.PGSQL.{port}" if folder else f"{parts.hostname}:{port}", free_port())
    user, at, _ = parts.netloc.rpartition("@")
    return link, urlunsplit(parts._replace(netloc=f"{user}{at}{link.address}", query=""))


class World:
    def __init__(self, folder: Path, kind: Kind) -> None:
        self.kind = kind
        self._folder = folder
        self.database = folder / "history.db"  # unused with PostgreSQL
        self.store = kind.store or f"sqlite://{self.database}"
        self.replicas = [
            Replica(number, folder, kind, self.store) for number in range(kind.num_replicas)
        ]

    @property
    def addresses(self) -> list[str]:
        """Addresses for clients."""
        return [replica.client_link.address for replica in self.replicas]

    @property
    def admin_addresses(self) -> list[str]:
        return [f"unix:{replica.data / 'admin.sock'}" for replica in self.replicas]

    async def __aenter__(self) -> World:
        await asyncio.to_thread(owner_log.create_history, self.store, self._folder / "maker")
        try:
            for replica in self.replicas:
                await replica.open()
                await replica.start(waits=False)
            for replica in self.replicas:
                await replica.wait_until_ready()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._end()

    async def stop(self) -> list[int]:
        """Stop everything as an operator would. Return the exit statuses."""
        return await asyncio.gather(*(replica.terminate() for replica in self.replicas))

    async def wait_until_whole(self) -> None:
        """Do nothing: each fault has already restarted the processes that it killed."""

    def events(self, event: str = "", **wanted: Any) -> list[dict[str, Any]]:
        """Return events of the owner log."""
        return owner_log.events(self.store, event, **wanted)

    async def _end(self) -> None:
        for replica in self.replicas:
            if replica.is_running:
                await replica.kill()
        for replica in self.replicas:
            await replica.close()
