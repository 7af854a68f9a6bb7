"""Run a daemon in a thread of this process, with a private socket and without a port.

The daemon is the same as with `pensieve serve`, with a separate engine process. Differences:

* SIGINT is blocked in the daemon's threads and in the engine process. So Ctrl-C reaches only the main thread,
  even during the start.
* The main thread waits until the daemon is serving. If the start fails, the main thread raises the daemon's
  exception. While it waits, the main thread calls `given_up` a few times per second. If `given_up` returns
  true, the main thread stops the daemon and raises KeyboardInterrupt.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from pensieve.api.grpc.admin_socket import socket_address, socket_path
from pensieve.api.grpc.server import Server
from pensieve.config import Resolved
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.conversations.engine_child import EngineChild
from pensieve.errors import ConfigError
from pensieve.guard.exposure import Listening
from pensieve.launch import programs
from pensieve.launch.daemon import DaemonSetup, Hooks, open_server, run
from pensieve.launch.model_folder import Report

WAKE_SECONDS = 0.2
CLOSE_SECONDS = 30.0  # how long to wait for the thread; after that, the end of the process kills it


class EmbeddedDaemon:
    """A context manager: entering it starts the daemon and waits until it serves."""

    def __init__(
        self,
        resolved: Resolved,
        holder: str,
        report: Report,
        engine_program: tuple[str, ...] = programs.ENGINE,
        given_up: Callable[[], bool] = lambda: False,
        take_prestarted_engine: Callable[[], EngineChild | None] = lambda: None,
    ) -> None:
        """`take_prestarted_engine` returns an engine process that was started before its settings were read.

        If it returns None, the daemon starts an engine.
        """
        self._cleanup = contextlib.ExitStack()
        path = self._socket(resolved.settings.data)
        self.address = socket_address(path)
        self._setup = DaemonSetup(
            resolved,
            holder,
            Listening(address="", socket=path),
            DaemonConfig(ttft_seconds=resolved.settings.ttft),
            engine_program,
            check_history_first=True,  # a user should see problems of the history before typing
            take_prestarted_engine=take_prestarted_engine,
        )
        self._report = report
        self._given_up = given_up
        self._started = threading.Event()  # set when the daemon serves or its start has failed
        self._failure: BaseException | None = None
        self._stop_wanted = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.server: Server | None = None  # None until it is open
        self._thread = threading.Thread(target=self._run, name="daemon", daemon=True)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def __enter__(self) -> EmbeddedDaemon:
        self._thread.start()
        try:
            while not self._started.wait(WAKE_SECONDS):
                if self._given_up():
                    self._report("stopping")
                    raise KeyboardInterrupt
            if self._failure is not None:
                raise self._failure
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Interrupt running turns, close the history, end the engine process."""
        # Set the flag before reading `server`. The thread sets `server` before it reads the flag. So at least
        # one of the two threads sees the other's value.
        self._stop_wanted = True
        if self.server is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is already closed
                self._loop.call_soon_threadsafe(self.server.stopping.set)
        self._thread.join(CLOSE_SECONDS)
        self._cleanup.close()

    def _socket(self, data: Path) -> Path:
        """Return the path of the data folder's admin socket, so that `pensieve admin` finds this daemon.

        If that path cannot be used for a socket, return a path in a temporary folder.
        """
        try:
            return socket_path(data)
        except ConfigError:
            folder = tempfile.TemporaryDirectory(prefix="pensieve-")
            return Path(self._cleanup.enter_context(folder)) / "admin.sock"

    # -- in the thread --

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.server = open_server(self._setup, self._report)
        if self._stop_wanted:
            self.server.stopping.set()
        hooks = Hooks(self._report, ready=lambda address: self._started.set())
        await run(self.server, self._setup, hooks, hurry=asyncio.Event())
