"""A private Ray cluster on this machine. `pensieve cluster up` starts it, `pensieve cluster down` stops it.

Clients need a token (RAY_AUTH_MODE=token), which is in a file that only its owner can read. There is no
dashboard, and no usage statistics are sent. But Ray listens on all interfaces of the machine. The nodes are
`ray start --block` processes, which outlive this process. A file in the cluster's folder lists their pids and
start times. The start times prevent `stop` from killing another process that got the same pid.

    FOLDER/ray.json     address and processes
    FOLDER/ray.token    the token for clients
    FOLDER/ray-N.log    the output of node N
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.errors import ConfigError, Unavailable

HOST = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20  # no large objects pass through Ray
START_SECONDS = 60.0
STOP_SECONDS = 120.0  # Ray waits until its actors have drained
PROXY_SECONDS = 2.0  # between two checks of a proxy; Ray replaces it after three failures
EDGE = "pensieve.cluster.http_edge:middlewares"
GONE = "gone"  # the start time of a process that is not running


class Node(NamedTuple):
    pid: int
    started: str  # start time from /proc; GONE if the process had already ended

    @property
    def runs(self) -> bool:
        return self.started != GONE and _start_time(self.pid) == self.started


class LocalRay:
    """The Ray cluster whose state is in `folder`, whether it is running or not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state = folder / "ray.json"
        self._token = folder / "ray.token"

    @property
    def address(self) -> str | None:
        """The address of the cluster; None if it is not running."""
        state = self._read()
        if state is None or not any(node.runs for node in self._nodes(state)):
            return None
        return str(state["address"])

    def environment(self) -> dict[str, str]:
        """Return the environment variables that a client of this cluster needs."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def start(self, num_nodes: int, cpus_per_node: int) -> str:
        """Start the nodes and return the address. `cpus_per_node` is only the number that Ray may reserve."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._make_token()
        address = f"{HOST}:{_free_port()}"
        nodes: list[Node] = []
        for index in range(num_nodes):
            node_options = [
                *("--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"),
                # We do not use this server, but its default port may be taken.
                f"--ray-client-server-port={_free_port()}",
            ]
            if index:
                node_options = [f"--address={address}"]
            try:
                nodes.append(
                    self._start_node(index, [*node_options, f"--num-cpus={cpus_per_node}"])
                )
            finally:
                self._write({"address": address, "nodes": nodes})
            self._await_node(index, nodes[-1])
        return address

    def stop(self) -> bool:
        """Stop the nodes. Return whether any was running."""
        state = self._read()
        if state is None:
            return False
        nodes = [node for node in self._nodes(state) if node.runs]
        for node in reversed(nodes):
            _signal(node, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while any(node.runs for node in nodes) and time.monotonic() < deadline:
            _reap()
            time.sleep(0.1)
        for node in nodes:
            if node.runs:
                _signal(node, signal.SIGKILL)
        self._state.unlink(missing_ok=True)
        return bool(nodes)

    def _start_node(self, index: int, node_options: list[str]) -> Node:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *node_options),
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            *("--disable-usage-stats", "--block", "--log-color=false"),
        ]
        with self._log(index).open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    **self.environment(),
                    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": EDGE,
                    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": str(PROXY_SECONDS),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C does not stop it
            )
        return Node(process.pid, _start_time(process.pid))

    def _await_node(self, index: int, node: Node) -> None:
        deadline = time.monotonic() + START_SECONDS
        while "--block" not in self._log(index).read_text("utf-8", "replace"):
            _reap()
            if not node.runs or time.monotonic() > deadline:
                self.stop()
                raise Unavailable(f"Ray did not start; see {self._log(index)}")
            time.sleep(0.1)

    def _log(self, index: int) -> Path:
        return self._folder / f"ray-{index}.log"

    def _make_token(self) -> None:
        with contextlib.suppress(FileExistsError):
            handle = os.open(self._token, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32))

    def _read(self) -> Mapping[str, Any] | None:
        try:
            found: Mapping[str, Any] = json.loads(self._state.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {self._state}: {error}") from error
        return found

    def _write(self, state: Mapping[str, Any]) -> None:
        partial = self._state.with_suffix(".partial")
        partial.write_text(json.dumps(state), encoding="utf-8")
        partial.replace(self._state)

    @staticmethod
    def _nodes(state: Mapping[str, Any]) -> list[Node]:
        return [Node(*each) for each in state["nodes"]]


def check_free(host: str, port: int) -> None:
    """Raise Unavailable if another program listens at this address."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)  # the text of `error` would repeat the address
        raise Unavailable(f"cannot listen on {host}:{port}: {reason}") from error


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _start_time(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; GONE if it is not running."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return GONE
    return GONE if fields[0] == "Z" else fields[19]


def _signal(node: Node, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may end at any time
        os.kill(node.pid, number)


def _reap() -> None:
    """Reap ended child processes, so that no zombies remain."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
