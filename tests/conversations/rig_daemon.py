"""A daemon in a thread of the test, with its engine in a process; and `pensieve serve` as a process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from pensieve.api.grpc.server import Server
from pensieve.api.http.listener import serve_http
from pensieve.builtin import MODEL_PATH
from pensieve.config import shown_store
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.conversations.engine_client import EngineProgram
from pensieve.guard.exposure import Listening
from pensieve.jobs.batch_jobs import BatchJobs
from pensieve.jobs.job_store import JobStore
from pensieve.jobs.plugin import JobsPlugin
from pensieve.jobs.values import DaemonJobs
from pensieve.jobs.worker import JobsConfig
from pensieve.launch.model_folder import load_texts
from pensieve.launch.sharing import Sharing, announce, open_store
from pensieve.text.tool_calls import style_of
from pensieve.v1 import admin_pb2_grpc, conversation_pb2_grpc, status_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests import fork_server
from tests.conversations.owner_threads import OwnerThreads

ECHO = (sys.executable, "-m", "pensieve.launch.echo_engine")
PATIENCE_SECONDS = float(os.environ.get("PENSIEVE_TEST_PATIENCE", "120"))  # limit of `wait_for`
DETAILS: dict[str, Any] = {
    "ErrorInfo": status_pb2.ErrorInfo,
    "BadRequest": status_pb2.BadRequest,
    "RetryInfo": status_pb2.RetryInfo,
}


def wait_for(holds: Callable[..., Any], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.005)


class DaemonRig:
    """The daemon with its own port; `stub` and `admin` call it."""

    def __init__(
        self,
        data: Path,
        *,
        config: DaemonConfig | None = None,
        listening: Listening | None = None,
        program: tuple[str, ...] = ECHO,
        written: dict[str, str] | None = None,
        jobs: DaemonJobs | None = None,
        batch_jobs: JobsConfig | None = None,
        model_folder: Path = MODEL_PATH,
        store: str = "",
    ) -> None:
        """`jobs` are scripted jobs. With `batch_jobs`, the daemon runs real batch jobs.

        `store` is the address of a database. Daemons with the same `store` share a history.
        """
        self._model_folder, self._store = model_folder, store
        self._arguments = (data, config, listening, program, written or {})
        self._jobs, self._batch_jobs = jobs, batch_jobs
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.lines: list[str] = []
        self.owners = OwnerThreads(self._caller)

    def __enter__(self) -> Self:
        self._thread.start()
        self.call(self._start())
        self.channel = grpc.insecure_channel(self.server.address)
        self.stub = conversation_pb2_grpc.ConversationServiceStub(self.channel)
        data = self._arguments[0]
        self._local = grpc.insecure_channel(f"unix:{data / 'admin.sock'}")
        self.admin = admin_pb2_grpc.AdminServiceStub(self._local)
        return self

    async def _start(self) -> None:
        data, config, listening, program, written = self._arguments
        folder = self._model_folder
        texts = load_texts(folder, self.lines.append)
        replica = data.name if self._store else ""
        store = open_store(data, "pensieve test", self._store, Sharing(replica))
        self.daemon = Daemon(
            store,
            texts,
            EngineProgram(
                program, written, folder, "builtin" if folder == MODEL_PATH else folder.name
            ),
            config or DaemonConfig(grace_seconds=0.2, history=shown_store(self._store)),
            self.lines.append,
        )
        listening = listening or Listening("127.0.0.1:0", data / "admin.sock")
        if self._batch_jobs is not None:
            self.job_store = JobStore.open(data)
            self._jobs = BatchJobs(self.daemon, self.job_store, texts, self._batch_jobs)
        homes = self._jobs.homes if isinstance(self._jobs, BatchJobs) else None
        jobs = JobsPlugin(self._jobs, self.daemon.config.stall_seconds, homes)
        self.server = Server(self.daemon, listening, [jobs])
        if listening.http:
            serve_http(self.server, texts.template, style_of(texts.template))
        await self.server.listen()
        await announce(self.server)
        await self.daemon.start()
        self.owners.watch_daemon(self.daemon)

    def _caller(self) -> str:
        thread = threading.current_thread()
        if thread is self._thread:
            return "loop"
        return "store" if thread.name.startswith("store") else thread.name

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.channel.close()
        self._local.close()
        self.call(self.server.close(0.5))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert not self.owners.violations, self.owners.violations

    # -- shortcuts for tests --

    @property
    def num_live(self) -> int:
        async def look() -> int:
            return self.daemon.conversations.turns.num_live

        return int(self.call(look()))

    def send(self, conversation_id: str, *contents: str, **fields: Any) -> Any:
        messages = [pb.NewMessage(content=content) for content in contents]
        fields.setdefault("create_if_missing", True)
        seconds = fields.pop("seconds", 120)
        request = pb.SendMessageRequest(
            conversation_id=conversation_id, messages=messages, **fields
        )
        return self.stub.SendMessage(request, timeout=seconds)

    def ask(self, conversation_id: str, *contents: str, **fields: Any) -> StreamedTurn:
        return read_turn(self.send(conversation_id, *contents, **fields))

    @property
    def batch(self) -> DaemonJobs:
        assert self._jobs is not None
        return self._jobs

    def messages(self, conversation_id: str) -> list[Any]:
        request = pb.ListMessagesRequest(
            conversation_id=conversation_id, page_size=1000, include_token_ids=True
        )
        return list(self.stub.ListMessages(request).messages)


@contextmanager
def blocked_store(rig: DaemonRig) -> Iterator[None]:
    """Block the store threads inside the block."""
    began, gate = threading.Semaphore(0), threading.Event()
    threads = rig.daemon.threads

    def wait() -> None:
        began.release()
        gate.wait(60.0)

    async def stop() -> None:
        for lane in threads._lanes:
            threads.spawn(lane.run("another", wait))

    rig.call(stop())
    for _ in threads._lanes:
        assert began.acquire(timeout=60.0)
    try:
        yield
    finally:
        gate.set()


@contextmanager
def stopped_engine(rig: DaemonRig) -> Iterator[None]:
    """Stop the engine's process inside the block. Turns can begin, but get no tokens and do not end.

    The daemon kills an engine that is silent for `heartbeat_seconds`.
    """
    pid = rig.daemon.engine.pid
    send_signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # the test may have killed it
            send_signal(pid, signal.SIGCONT)


@dataclass
class StreamedTurn:
    started: Any = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    completed: Any = None
    sequences: list[int] = field(default_factory=list)


def read_turn(events: Iterator[Any]) -> StreamedTurn:
    got = StreamedTurn()
    for event in events:
        got.sequences.append(event.sequence)
        match event.WhichOneof("event"):
            case "started":
                got.started = event.started
            case "delta":
                got.text += event.delta.text
                got.token_ids += event.delta.token_ids
            case "completed":
                got.completed = event.completed
    return got


def details(error: grpc.RpcError) -> dict[str, Any]:
    """Return the google.rpc error details by name."""
    metadata: Any = error.trailing_metadata()
    packed = dict(metadata)["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(packed)
    assert status.code == error.code().value[0]
    found = {}
    for each in status.details:
        name = each.type_url.removeprefix("type.googleapis.com/google.rpc.")
        found[name] = DETAILS[name].FromString(each.value)
    return found


def send_signal(pid: int | None, number: int) -> None:
    """Send a signal to the engine's process, which must exist."""
    assert pid is not None
    os.kill(pid, number)


class ServeProcess:
    """`pensieve serve`, started as a user would start it."""

    def __init__(
        self,
        data: Path,
        *arguments: str,
        engine: str = "echo",
        environment: Mapping[str, str] | None = None,
        parameters: Mapping[str, Mapping[str, Any]] | None = None,  # see serve_with.py
    ) -> None:
        self.data = data
        self.program = ["pensieve", "serve"]
        internal, config = dict((parameters or {}).get("settings", {})), dict(parameters or {})
        config.pop("settings", None)
        if config:
            self.program = ["tests.conversations.serve_with", json.dumps(config)]
        self.environment = {
            **{f"PENSIEVE_{name.upper()}": value for name, value in internal.items()},
            "PENSIEVE_ENGINE": engine,
            **(environment or {}),
        }
        self.arguments = arguments
        self.log = data.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._kill_if_running)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self, seconds: float = 120.0) -> str:
        ready = self.data.with_suffix(".ready")
        ready.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", *self.program, "--data", str(self.data)),
                    *("--address", "127.0.0.1:0", "--ready-file", str(ready)),
                    *self.arguments,
                ],
                stderr=log,
                stdout=log,
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                    **self.environment,
                },
            )
        wait_for(lambda: ready.exists() or self.process.poll() is not None, seconds)
        assert ready.exists(), self.log.read_text()
        self.address = ready.read_text().strip()
        return self.address

    def _kill_if_running(self) -> None:
        """Kill the process if a failed test has left it running."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def engine_pid(self) -> int | None:
        children = fork_server.children_of(self.process.pid)
        return children[0] if children else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, seconds: float = 120.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)
