"""A cluster on a real Ray with several nodes, and its faults, for nemesis.py.

    talker ──> Ray's proxy on any node ──> replica (an actor, and its child: the daemon) ──> PostgreSQL

Every node has one replica and one proxy. Ray itself replaces killed processes; this module restarts nothing.
A fault affects the replica or the proxy of a node. At any time, at least one replica and at least one proxy
are healthy. Only one fault at a time outlasts the lease.

Two parts have no faults. Ray's own tables, on the head, would need a Redis to survive. The database is
reached by all nodes through a Unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc

from pensieve.v1 import status_pb2
from tests.cluster.faults import LONG_LEASES, SHORT_SECONDS, Fault
from tests.cluster.ray_nodes import Node, Nodes
from tests.cluster.world import Kind

GRPC_PORT, HTTP_PORT = 50051, 8000  # the same on every node, because each node has its own address
UP_SECONDS = 180.0
DOWN_SECONDS = 180.0
WHOLE_SECONDS = 120.0
LOOK_SECONDS = 0.2
REST_SECONDS = 3.0  # time without faults for a target after each fault
REPLACED_SECONDS = 12.0  # after a kill, until Ray has noticed it and started a new process
PROXIES = 100  # the target of node N's proxy is PROXIES + N
NEVER_CUT = 0  # the head node


@dataclass(frozen=True)
class RayFault(Fault):
    def __str__(self) -> str:
        return f"{self.at:6.1f} {self.kind}, node {self.target % PROXIES}, for {self.seconds:.1f} s"


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault."""

    part: str = ""  # the part whose processes get the signal
    number: signal.Signals = signal.SIGSTOP
    may_be_long: bool = False

    @property
    def kills(self) -> bool:
        return self.number is signal.SIGKILL


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
CUT = "cut off"
REPLICA_FAULTS = {
    "kill daemon": FaultKind("daemon", KILL),
    "pause daemon": FaultKind("daemon", STOP, may_be_long=True),
    "kill actor": FaultKind("replica", KILL),
    "pause actor": FaultKind("replica", STOP, may_be_long=True),
}
NODE_FAULTS = {CUT: FaultKind()}  # except the head
PROXY_FAULTS = {"kill proxy": FaultKind("proxy", KILL), "pause proxy": FaultKind("proxy", STOP)}
ALL_FAULTS = {**REPLICA_FAULTS, **NODE_FAULTS, **PROXY_FAULTS}


def _role(target: int) -> str:
    return "proxy" if target >= PROXIES else "replica"


def fault_kinds(target: int) -> dict[str, FaultKind]:
    """Return the faults that this target may have, by name."""
    if target >= PROXIES:
        return PROXY_FAULTS
    return REPLICA_FAULTS if target == NEVER_CUT else {**REPLICA_FAULTS, **NODE_FAULTS}


def schedule(
    seed: int, seconds: float, every: float, num_nodes: int, lease: float
) -> list[RayFault]:
    """Return a fault for each interval. A fault without an allowed target is delayed by a second."""
    choose = random.Random(seed)
    targets = (*range(num_nodes), *range(PROXIES, PROXIES + num_nodes))
    free_at = dict.fromkeys(targets, 0.0)
    no_long_before = 0.0
    faults: list[RayFault] = []

    def may_have_fault(target: int, at: float) -> bool:
        """Return whether the target and another target of its kind have no fault."""
        fellows = [each for each in targets if _role(each) == _role(target) and each != target]
        return free_at[target] <= at and any(free_at[each] <= at for each in fellows)

    at = 1.0
    while at < seconds:
        found = [
            (kind, target)
            for target in targets
            for kind in fault_kinds(target)
            if may_have_fault(target, at) and (kind != CUT or may_have_fault(PROXIES + target, at))
        ]
        if not found:
            at += 1.0
            continue
        kind, target = choose.choice(found)
        lasts = 0.0 if ALL_FAULTS[kind].kills else choose.uniform(*SHORT_SECONDS)
        if ALL_FAULTS[kind].may_be_long and at >= no_long_before and choose.random() < 0.4:
            lasts = lease * choose.uniform(*LONG_LEASES)
            no_long_before = at + lasts + every
        faults.append(RayFault(at, kind, target, lasts))
        pause = REPLACED_SECONDS if ALL_FAULTS[kind].kills else REST_SECONDS
        free_at[target] = at + lasts + pause
        if kind == CUT:
            free_at[PROXIES + target] = free_at[target]
        at += every
    return faults


class RayWorld:
    def __init__(self, folder: Path, kind: Kind) -> None:
        assert kind.store, "nodes share a history in PostgreSQL"
        self.store = kind.store
        self.kind = kind
        self.event_log = folder / "events.jsonl"
        self.event_log.touch()  # this cluster writes no events
        self.data = folder / "d"
        self._folder = folder
        self._nodes = Nodes(folder, kind.num_replicas, kind.engine_variables)
        self._config = folder / "serve.yaml"  # JSON, which is valid YAML

    @property
    def addresses(self) -> list[str]:
        """Addresses for clients."""
        return [f"{node.address}:{GRPC_PORT}" for node in self._nodes.all]

    @property
    def admin_addresses(self) -> list[str]:
        """Addresses of the running daemons."""
        folders = [folder for node in self._nodes.all for folder in node.data_of_daemons()]
        return [f"unix:{folder / 'admin.sock'}" for folder in folders]

    async def __aenter__(self) -> RayWorld:
        self._config.write_text(json.dumps(self._serve_config()))
        await self._nodes.__aenter__()
        try:
            await self._run_cluster_command(UP_SECONDS, "up", str(self._config))
            await self.wait_until_whole()
        except BaseException:
            await self._nodes.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._nodes.__aexit__(*exc)

    async def stop(self) -> list[int]:
        """Stop the cluster as an operator would. Return the exit statuses."""
        await self._run_cluster_command(DOWN_SECONDS, "down")
        for node in reversed(self._nodes.all):
            await node.stop()
        return [0]

    async def wait_until_whole(self) -> None:
        """Wait until every node has a serving replica and proxy."""
        async with asyncio.timeout(WHOLE_SECONDS):
            while not await self._is_whole():
                await asyncio.sleep(LOOK_SECONDS)

    def schedule(self, seed: int, seconds: float, every: float) -> list[RayFault]:
        return schedule(seed, seconds, every, self.kind.num_replicas, self.kind.lease_seconds)

    async def inject(self, fault: Fault) -> None:
        """Apply a fault and wait until it is over. Ray may then still be replacing killed parts."""
        fault_kind, node = ALL_FAULTS[fault.kind], self._nodes.all[fault.target % PROXIES]
        if fault.kind == CUT:
            with node.unplugged():
                await asyncio.sleep(fault.seconds)
        else:
            await _send_signals(node, fault_kind, fault.seconds)

    async def _is_whole(self) -> bool:
        nodes = self._nodes.all
        if not all(len(node.processes("daemon")) == 1 for node in nodes):
            return False
        return all(await asyncio.gather(*(_serves(address) for address in self.addresses)))

    async def _run_cluster_command(self, seconds: float, *words: str) -> None:
        """Run `pensieve cluster` on the head."""
        ray = ("--ray", self._nodes.address, "--data", str(self._folder / "cluster"))
        command = self._nodes.head.command(sys.executable, "-m", "pensieve", "cluster")
        done = await asyncio.to_thread(
            subprocess.run,
            [*command, *words, *ray],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env=self._nodes.environment(),
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _serve_config(self) -> dict[str, object]:
        return {
            "proxy_location": "EveryNode",
            "http_options": {"host": "0.0.0.0", "port": HTTP_PORT},
            "grpc_options": {
                "port": GRPC_PORT,
                "grpc_servicer_functions": ["pensieve.cluster.grpc_edge:add_services"],
            },
            "applications": [
                {
                    "name": "pensieve",
                    "route_prefix": "/",
                    "import_path": "pensieve.cluster.deployments:build",
                    "args": {
                        "replicas": self.kind.num_replicas,
                        "insecure": True,
                        "data": str(self.data),
                        "serve": {"store": self.kind.store},
                    },
                }
            ],
        }


async def _send_signals(node: Node, fault_kind: FaultKind, seconds: float) -> None:
    pids = node.processes(fault_kind.part)
    while not pids:  # Ray is replacing this part
        await asyncio.sleep(LOOK_SECONDS)
        pids = node.processes(fault_kind.part)
    node.signal_all(pids, fault_kind.number)
    if not fault_kind.kills:
        try:
            await asyncio.sleep(seconds)
        finally:
            node.signal_all(pids, signal.SIGCONT)


async def _serves(address: str) -> bool:
    """Return whether a proxy and its chosen replica answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=status_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=status_pb2.HealthCheckResponse.FromString,
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            answer = await check(status_pb2.HealthCheckRequest(), timeout=5.0)
            return bool(answer.status == status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING)
    return False
