"""A history service in a thread of the test, and daemons' connections to it, which can be cut."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from pensieve.api.grpc.server import Health
from pensieve.conversations.threads import Threads
from pensieve.guard.exposure import Listening
from pensieve.history.connection import Connection, Replica
from pensieve.history.guard import Guard
from pensieve.history.service import HistoryConfig, HistoryService
from pensieve.launch.history import OPTIONS, SERVICE, EventLog
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.remote.methods import METHODS
from pensieve.v1 import history_pb2 as pb
from pensieve.v1 import history_pb2_grpc
from tests.cluster.links import Link
from tests.conversations.rig_daemon import DaemonRig, wait_for
from tests.loop_thread import LoopThread


class ServiceRig:
    """The service behind a port of its own; `link` is the daemons' way to it."""

    def __init__(self, folder: Path, *, lease_seconds: float = 60.0, secret: str = "") -> None:
        self._folder = folder
        self._secret = secret
        self._lease_seconds = lease_seconds
        self._event_log = folder / "events.jsonl"
        self._connections: list[Connection] = []

    def __enter__(self) -> ServiceRig:
        self._loop = LoopThread()
        self.run, self.do = self._loop.run, self._loop.do  # in the loop of the service
        self.run(self._start())
        return self

    async def _start(self) -> None:
        self._store = ConversationStore.open(self._folder / "data", "a test", keep_running=True)
        self.threads = Threads(self._loop.loop, 1)
        self._events = EventLog(self._event_log)
        config = HistoryConfig(self._lease_seconds)
        self.service = HistoryService(self._store, self.threads, config, record=self._events)
        self._server = grpc.aio.server(interceptors=[Guard(self._secret)], options=OPTIONS)
        history_pb2_grpc.add_HistoryServiceServicer_to_server(self.service, self._server)
        health = Health(("", SERVICE))
        health.set(True)
        self._server.add_generic_rpc_handlers((health.handlers(),))
        address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self.threads.spawn(self.service.watch())
        self.link = Link(address)
        await self.link.open()
        self.direct = grpc.insecure_channel(address)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.do(self.link.heal)
        for connection in self._connections:
            connection.close()
        self.direct.close()
        self.run(self._stop())
        self._loop.close()

    async def _stop(self) -> None:
        await self.link.close()
        await self._server.stop(0.5)
        await self.threads.end_tasks()
        await self.threads.close()
        self.service.close()
        self._store.close()
        self._events.close()

    def stand_still(self, seconds: float) -> None:
        """The service does nothing for so long, as a process that is paused."""
        self.do(time.sleep, seconds)

    def connect(self, name: str = "one") -> Connection:
        connection = Connection(self.link.address, Replica(name, f"{name}:1"), answer_seconds=60.0)
        self._connections.append(connection)
        return connection

    def reconnected(self, name: str, after: int) -> bool:
        """There was another connection than the first so many, and the daemon has its stream."""
        is_there = {each.name: each.connected for each in self.replicas()}
        return self.link.num_connections > after and is_there[name]

    def num_calls(self) -> int:
        """Those that wait in line, or are being carried out."""
        return sum(len(each.under_way) for each in self.service.presence.all())

    def replicas(self) -> list[Any]:
        stub = history_pb2_grpc.HistoryServiceStub(self.direct)
        return list(stub.ListReplicas(pb.ListReplicasRequest(), timeout=60).replicas)

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = self._event_log.read_text().splitlines()
        return [each for each in map(json.loads, lines) if each["event"] == kind]


@contextmanager
def sharing(
    folder: Path,
    names: Sequence[str],
    listening: Mapping[str, Any],
    *,
    each_listening: Sequence[Mapping[str, Any]] = (),
    **daemon: Any,
) -> Iterator[tuple[ServiceRig, list[DaemonRig]]]:
    """A history service and daemons that share it; `listening` and `daemon` are fields of each.

    `each_listening` has more fields of one after the other.
    """
    with ServiceRig(folder) as service, ExitStack() as stack:
        rigs = []
        for number, name in enumerate(names):
            data, more = folder / name, each_listening[number] if each_listening else {}
            places = Listening("127.0.0.1:0", data / "admin.sock", **{**listening, **more})
            rig = DaemonRig(data, listening=places, history=service.link.address, **daemon)
            rigs.append(stack.enter_context(rig))
        yield service, rigs


def call(connection: Connection, name: str, *given: Any, **named: Any) -> Any:
    return connection.call(METHODS[name], given, named).value


@contextmanager
def impatient(connection: Connection) -> Iterator[None]:
    """Its calls are given up almost at once."""
    before, connection._answer_seconds = connection._answer_seconds, 0.2
    try:
        yield
    finally:
        connection._answer_seconds = before


def in_thread(function: Callable[..., Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


__all__ = ["ServiceRig", "call", "impatient", "in_thread", "sharing", "wait_for"]
