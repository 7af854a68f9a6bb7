"""Nodes of a Ray cluster, each in its own network namespace. To Ray, each is a machine with an address.

    this process ── bridge ─┬─ node 0: the head, which has Ray's own tables
                            ├─ node 1
                            └─ …

The link of a node can be cut. A node's processes are found by its namespace, so no other process is ever
signalled. `Nodes` removes everything at the end of its `with` block.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GCS_PORT = 6379
START_SECONDS = 120.0
STOP_SECONDS = 60.0
LOOK_SECONDS = 0.1
OBJECT_STORE_BYTES = 80 << 20
MARKS = {  # substrings of command lines that identify the processes of a node
    "daemon": (b"pensieve\0serve\0",),
    "replica": (b"ray::ServeReplica:pensieve:Replica",),
    "proxy": (b"ray::ProxyActor",),
}


def why_unavailable() -> str:
    """Return why namespaces are unavailable here; "" if they work."""
    if shutil.which("ip") is None:
        return "`ip` is not installed"
    if os.geteuid():
        return "only root may make network namespaces"
    name = f"pnst{os.getpid()}"
    steps = (
        ("netns", "add", name),
        ("link", "add", name, "type", "bridge"),
        ("-n", name, *("rule", "add", "ipproto", "tcp", "dport", "1", "blackhole")),
    )
    try:
        done = [_ip(*words, check=False) for words in steps]
    finally:
        _ip("link", "del", name, check=False)
        _ip("netns", "del", name, check=False)
    return next((each.stderr.strip() for each in done if each.returncode), "")


class Node:
    """`ray start` in a namespace, and its processes."""

    def __init__(self, number: int, name_prefix: str, address: str, folder: Path) -> None:
        self.number = number
        self.address = address
        self.namespace = f"{name_prefix}n{number}"
        self.log = folder / f"ray-{number}.log"
        self.link = f"{name_prefix}v{number}"  # the end of the link on the bridge
        self._process: subprocess.Popen[bytes] | None = None

    def command(self, *words: str) -> list[str]:
        """Return a command line that runs on this node."""
        return ["ip", "netns", "exec", self.namespace, *words]

    async def start(self, head: str, environment: dict[str, str]) -> None:
        where = [f"--address={head}:{GCS_PORT}"]
        if self.address == head:
            where = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
        ray = (sys.executable, "-m", "ray.scripts.scripts", "start", *where)
        limits = ("--num-cpus=1", f"--object-store-memory={OBJECT_STORE_BYTES}")
        flags = ("--disable-usage-stats", "--block", "--log-color=false")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(*ray, f"--node-ip-address={self.address}", *limits, *flags),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        async with asyncio.timeout(START_SECONDS):
            while b"--block" not in self.log.read_bytes():
                if self._process.poll() is not None:
                    raise AssertionError(f"Ray did not start: {self.log.read_text()[-2000:]}")
                await asyncio.sleep(LOOK_SECONDS)

    def processes(self, part: str) -> list[int]:
        """Return the node's processes of this part; none while Ray replaces the part."""
        found = []
        for pid in self._pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                if any(mark in words for mark in MARKS[part]):
                    found.append(pid)
        return found

    def data_of_daemons(self) -> list[Path]:
        found = []
        for pid in self.processes("daemon"):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                found.append(Path(words[words.index("--data") + 1]))
        return found

    # -- faults --

    def signal(self, part: str, number: int) -> list[int]:
        """Send a signal and return the processes that got it."""
        pids = self.processes(part)
        self.signal_all(pids, number)
        return pids

    @staticmethod
    def signal_all(pids: list[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        _ip("link", "set", self.link, "down")
        try:
            yield
        finally:
            _ip("link", "set", self.link, "up")

    # -- end --

    async def stop(self) -> None:
        """Stop the node as an operator would."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, STOP_SECONDS)

    def kill(self) -> None:
        for _ in range(20):  # a later round kills processes that were forked during an earlier one
            pids = self._pids()
            if not pids:
                break
            self.signal_all(pids, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self._process is not None:
                    self._process.wait(LOOK_SECONDS)
        if self._process is not None:
            self._process.wait()

    def _pids(self) -> list[int]:
        done = _ip("netns", "pids", self.namespace, check=False)
        return [int(pid) for pid in done.stdout.split()]


class Nodes:
    """A bridge with an address for this process, and nodes on it. The first node is the head."""

    def __init__(self, folder: Path, num_nodes: int, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._bridge = f"pns{os.getpid()}"
        self._network = f"10.{97 + os.getpid() // 250 % 100}.{os.getpid() % 250}"
        self._token = folder / "ray.token"
        self.all = [
            Node(number, self._bridge, f"{self._network}.{number + 2}", folder)
            for number in range(num_nodes)
        ]

    @property
    def head(self) -> Node:
        return self.all[0]

    @property
    def address(self) -> str:
        """Ray's address."""
        return f"{self.head.address}:{GCS_PORT}"

    def environment(self) -> dict[str, str]:
        """The environment of Ray's processes and their clients."""
        return {
            **os.environ,
            **self._variables,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        }

    async def __aenter__(self) -> Nodes:
        self._token.write_text(secrets.token_hex(32))
        self._token.chmod(0o600)
        try:
            self._connect()
            for node in self.all:
                await node.start(self.head.address, self.environment())
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._end()

    def _connect(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._network}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for node in self.all:
            in_namespace = ("-n", node.namespace)
            _ip("netns", "add", node.namespace)
            _ip(*in_namespace, "link", "set", "lo", "up")
            _ip(
                "link",
                "add",
                node.link,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                *("netns", node.namespace),
            )
            _ip("link", "set", node.link, "master", self._bridge, "up")
            _ip(*in_namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
            _ip(*in_namespace, "link", "set", "eth0", "up")

    def _end(self) -> None:
        for node in self.all:
            node.kill()
            _ip("link", "del", node.link, check=False)
            _ip("netns", "del", node.namespace, check=False)
        _ip("link", "del", self._bridge, check=False)


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done
