"""Three daemons that report one history, a dead address, and a daemon that never answers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from pensieve.client.fleet import FixedReplicas, Fleet, Replica, ReplicaAnswer, asking
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig
from tests.newcomer import free_port

T = TypeVar("T")
HISTORY = "postgresql://10.0.0.9:7000"
SHORT = pb.Sampling(max_tokens=5, ignore_eos=True)
HANG_SECONDS = 1.0  # timeout for the daemon that never answers
ALIVE_SECONDS = 60.0  # minimum for the other daemons, which may be slow on a busy machine
# Between the turns on a and on b. It must exceed the time between the reads of their idle times.
GAP_SECONDS = 10.0


@dataclass
class Replicas:
    rigs: dict[str, DaemonRig]
    alive: tuple[Replica, ...]
    dead: Replica
    hanging: Replica

    @property
    def all(self) -> tuple[Replica, ...]:
        return (*self.alive, self.dead, self.hanging)

    def written(self, replicas: Sequence[Replica]) -> str:
        """Return the replicas as a value of --replicas."""
        return ",".join(f"{each.name}={each.address}" for each in replicas)


def replica_at(name: str, data: Path) -> Replica:
    return Replica(name, f"unix:{data / 'admin.sock'}")


def patient_with_all_but(hanging: Replica) -> Callable[..., Awaitable[ReplicaAnswer[T]]]:
    """Return an `asking._ask` in which a short timeout applies only to this replica."""
    ask = asking._ask

    async def patient_ask(
        replica: Replica, call: Callable[[Replica, float], Awaitable[T]], seconds: float
    ) -> ReplicaAnswer[T]:
        if replica.address != hanging.address:
            seconds = max(seconds, ALIVE_SECONDS)
        return await ask(replica, call, seconds)

    return patient_ask


@contextmanager
def replicas_in(folder: Path) -> Iterator[Replicas]:
    """Start the daemons: `a` serves x and y, then `b` serves x and z. `c` serves nothing."""
    with ExitStack() as stack:
        rigs, alive = {}, []
        for name in ("a", "b", "c"):
            config = DaemonConfig(grace_seconds=0.2, replica=name, history=HISTORY)
            rigs[name] = stack.enter_context(DaemonRig(folder / name, config=config))
            alive.append(replica_at(name, folder / name))
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        for name, conversation_id in (("a", "x"), ("a", "y")):
            rigs[name].ask(conversation_id, "one two three", sampling=SHORT)
        time.sleep(GAP_SECONDS)
        for name, conversation_id in (("b", "x"), ("b", "z")):
            rigs[name].ask(conversation_id, "one two three", sampling=SHORT)
        hanging = Replica("hanging", f"127.0.0.1:{port}")
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(asking, "_ask", patient_with_all_but(hanging))
        dead = Replica("dead", f"127.0.0.1:{free_port()}")
        yield Replicas(rigs, tuple(alive), dead, hanging)


def run_with_fleet(
    replicas: Sequence[Replica], act: Callable[[Fleet], Awaitable[T]], seconds: float = 60.0
) -> T:
    """Return the result of `act` on a fleet of these replicas."""

    async def go() -> T:
        async with Fleet(FixedReplicas(replicas), seconds=seconds) as fleet:
            return await act(fleet)

    return asyncio.run(go())
