"""Run a Pensieve program as the child of a Ray actor: start it, wait until it is ready, watch it and end it.

    starting ──the log line with its addresses──> ready ──exits──> ended
        └───────────exits, or takes too long─────────────────────────┘

Each child has a thread, which starts the process, reads its log to the end of file, and waits for its exit.
Only this thread writes the state. The actor's event loop reads `exit_code` (None until the exit) and awaits
`ready`. The thread must outlive the child: die_with_parent.py kills a child whose starting thread has ended.

The child's log is copied to the actor's standard error, which is in Ray's logs. If the start fails, the last
lines of the log become the error message.

The child does not get Ray's token, because anybody with that token can run programs on all nodes.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from pensieve.errors import Unavailable

LINES_KEPT = 20
NOT_STARTED = -1  # exit code of a child that the system could not start
RAY_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
READY = re.compile(r"ready grpc://")
URL = re.compile(r"(?P<scheme>grpc|https?)://(?P<place>[^\s,\"]+)")


class ChildProcess:
    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """`pass_fds`: open files that the child shares with the actor (slots.py)."""
        self._command = list(command)
        self._environment = {**os.environ, **(environment or {})}
        for name in RAY_VARIABLES:
            self._environment.pop(name, None)
        self._pass_fds = tuple(pass_fds)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[dict[str, str]] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._lines: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)
        self._process: subprocess.Popen[str] | None = None
        self._is_stopping = False
        self.exit_code: int | None = None

    async def start(self, seconds: float) -> dict[str, str]:
        """Start the child and return its addresses by scheme: {"grpc": "127.0.0.1:41234", "http": …}."""
        threading.Thread(target=self._run, name="pensieve child", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), seconds)
        except TimeoutError:
            await self.stop(0.0)
            raise Unavailable(
                f"the daemon was not ready after {seconds:g} s: {self._tail()}"
            ) from None

    async def stop(self, seconds: float) -> None:
        """Drain the child. If it has not ended after `seconds`, kill it.

        Several callers may stop the child, but it gets only one SIGTERM: a second one would interrupt its
        turns.
        """
        if not self._is_stopping:
            self._is_stopping = True
            self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
        self._signal(signal.SIGKILL)
        await self._ended.wait()

    def kill(self) -> None:
        """Kill the child. `ended_unexpectedly` reports this as an unexpected end."""
        self._signal(signal.SIGKILL)

    async def ended_unexpectedly(self) -> bool:
        """Wait until the child has ended. Return whether its end was unexpected."""
        await self._ended.wait()
        return not self._is_stopping

    def check(self) -> None:
        """Raise Unavailable if the child has ended."""
        if self.exit_code is not None:
            raise Unavailable(self.end)

    @property
    def end(self) -> str:
        """How the child ended, for people."""
        return f"the daemon ended with exit code {self.exit_code}: {self._tail()}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    # -- the child's thread --

    def _run(self) -> None:
        exit_code = NOT_STARTED
        try:
            exit_code = self._run_child()
        except OSError as error:  # out of processes or memory
            self._lines.append(f"{self._command[0]}: {error}")
        finally:
            self.exit_code = exit_code
            with contextlib.suppress(RuntimeError):  # the event loop is closed, so nobody waits
                self._loop.call_soon_threadsafe(self._set_ended)

    def _run_child(self) -> int:
        die_with_parent = (
            sys.executable,
            "-m",
            "pensieve.cluster.die_with_parent",
            str(os.getpid()),
        )
        self._process = subprocess.Popen(
            [*die_with_parent, *self._command],
            env=self._environment,
            pass_fds=self._pass_fds,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._lines.append(line.strip())
                with contextlib.suppress(OSError, ValueError):  # full disk, closed file
                    sys.stderr.write(line)
                if READY.search(line):
                    addresses = {each["scheme"]: each["place"] for each in URL.finditer(line)}
                    self._loop.call_soon_threadsafe(self._set_ready, addresses)
        return self._process.wait()

    def _set_ready(self, addresses: dict[str, str]) -> None:
        if not self._ready.done():
            self._ready.set_result(addresses)

    def _set_ended(self) -> None:
        self._ended.set()
        if not self._ready.done():
            self._ready.set_exception(Unavailable(f"the daemon did not start: {self._tail()}"))

    def _signal(self, number: int) -> None:
        if self._process is not None and self.exit_code is None:
            self._process.send_signal(number)

    def _tail(self) -> str:
        return " / ".join(list(self._lines)[-3:]) or "it logged nothing"
