"""A history service in a thread of the test, and daemons' connections to it, which can be cut."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from pensieve.history.connection import Connection, Replica
from pensieve.history.service import HistoryConfig, HistoryService
from pensieve.launch import history
from pensieve.store.remote.methods import METHODS
from pensieve.v1 import history_pb2 as pb
from pensieve.v1 import history_pb2_grpc
from tests.cluster.links import Link
from tests.service.rig_daemon import wait_for


class ServiceRig:
    """`launch.history.run`, as the process does it; `link` is the way to it."""

    def __init__(self, folder: Path, *, lease_seconds: float = 60.0) -> None:
        self.event_log = folder / "events.jsonl"
        self._setup = history.HistorySetup(
            folder / "history",
            "",
            "127.0.0.1:0",
            HistoryConfig(lease_seconds),
            event_log=self.event_log,
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._connections: list[Connection] = []
        self.service: HistoryService | None = None

    def __enter__(self) -> ServiceRig:
        self._thread.start()
        ready: asyncio.Future[str] = asyncio.Future(loop=self.loop)
        self._stopping = self.run(_event())
        self._running = asyncio.run_coroutine_threadsafe(
            history.run(self._setup, lambda line: None, ready.set_result, self._stopping), self.loop
        )
        address = self.run(_result(ready))
        self.link = Link(address)
        self.run(self.link.open())
        self.direct = grpc.insecure_channel(address)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.direct.close()
        self.do(self.link.heal)
        for connection in self._connections:
            connection.close()
        self.loop.call_soon_threadsafe(self._stopping.set)
        self._running.result(60)
        self.run(self.link.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """In the loop of the service."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        async def call() -> Any:
            return function(*arguments)

        return self.run(call())

    def stop_loop(self, seconds: float) -> None:
        """The service does nothing for so long, as a process that is paused."""
        self.do(time.sleep, seconds)

    def connect(self, name: str = "one", *, answer_seconds: float = 30.0) -> Connection:
        connection = Connection(
            self.link.address, Replica(name, f"{name}:1"), answer_seconds=answer_seconds
        )
        self._connections.append(connection)
        return connection

    def replicas(self) -> list[Any]:
        stub = history_pb2_grpc.HistoryServiceStub(self.direct)
        return list(stub.ListReplicas(pb.ListReplicasRequest(), timeout=60).replicas)

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = self.event_log.read_text().splitlines()
        return [each for each in map(json.loads, lines) if each["event"] == kind]


def call(connection: Connection, name: str, *given: Any, **named: Any) -> Any:
    return connection.call(METHODS[name], given, named).value


def in_thread(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


async def _event() -> asyncio.Event:
    return asyncio.Event()


async def _result(future: asyncio.Future[str]) -> str:
    return await future


__all__ = ["ServiceRig", "call", "in_thread", "wait_for"]
