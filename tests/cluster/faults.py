"""Faults of a cluster, and a schedule of them drawn from a seed.

A fault has a target (a replica, or the database) and lasts some seconds. A target has at most one fault at a
time. Only one fault in the cluster at a time may last longer than a lease, because a cluster that has lost
two of three replicas cannot serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pensieve.store.postgres.schema import SCHEMA
from pensieve.store.shared_file import WriterLock
from tests.cluster.links import Link, Way
from tests.cluster.world import CannotStart, Part, Replica, World

DATABASE = -1  # the number of the target; replicas count from 0
SHORT_SECONDS = (0.3, 4.0)
LONG_LEASES = (1.2, 1.5)
SLOW_SECONDS = 0.08
EXIT_SECONDS = 1.0  # time that a killed process needs to end
STARTS_MAX = 5


@dataclass(frozen=True)
class Fault:
    at: float  # seconds since the start of the schedule
    kind: str
    target: int
    seconds: float

    def __str__(self) -> str:
        where = "database" if self.target == DATABASE else f"replica-{self.target}"
        return f"{self.at:6.1f} {self.kind} {where} for {self.seconds:.1f} s"


async def start(part: Part) -> None:
    """Restart the part until it can open the history, like a supervisor."""
    for _ in range(STARTS_MAX - 1):
        with contextlib.suppress(CannotStart):
            await part.start()
            return
        await asyncio.sleep(EXIT_SECONDS)
    await part.start()


async def kill(part: Part, seconds: float) -> None:
    await part.kill()
    await asyncio.sleep(seconds)
    await start(part)


async def pause(part: Part, seconds: float) -> None:
    """Pause a replica (SIGSTOP). If it was writing to the history, other replicas may kill it."""
    part.pause()
    try:
        await asyncio.sleep(seconds)
    finally:
        part.go_on()
    await asyncio.sleep(EXIT_SECONDS)
    if not part.is_running:
        await start(part)


async def drain(part: Part, seconds: float) -> None:
    status = await part.terminate()
    assert status == 0, f"{part.name} ended with {status}: {part.log.read_text()[-2000:]}"
    await start(part)


@contextmanager
def mended(*links: Link) -> Iterator[None]:
    try:
        yield
    finally:
        for link in links:
            link.heal()


def cut(*names: str, ways: tuple[Way, ...] = ()) -> Callable[[Part, float], Awaitable[None]]:
    """Return a function that makes a network partition: no data passes, and neither side gets an error."""

    async def act(part: Part, seconds: float) -> None:
        links = [getattr(part, f"{name}_link") for name in names]
        with mended(*links):
            for link in links:
                link.hold(*ways)
            await asyncio.sleep(seconds)

    return act


def refuse(*names: str) -> Callable[[Part, float], Awaitable[None]]:
    async def act(part: Part, seconds: float) -> None:
        links = [getattr(part, f"{name}_link") for name in names]
        with mended(*links):
            for link in links:
                link.refuse()
            await asyncio.sleep(seconds)

    return act


async def reset(part: Part, seconds: float) -> None:
    """Reset all connections of a replica, three times in `seconds`."""
    assert isinstance(part, Replica)
    for _ in range(3):
        for link in (part.peer_link, part.client_link):
            link.reset()
        await asyncio.sleep(seconds / 3)


async def slow(part: Part, seconds: float) -> None:
    assert isinstance(part, Replica)
    with mended(part.peer_link):
        part.peer_link.slow(SLOW_SECONDS)
        await asyncio.sleep(seconds)


REPLICA_FAULTS: dict[str, Callable[[Part, float], Awaitable[None]]] = {
    "kill": kill,
    "pause": pause,
    "drain": drain,
    "cut from peers": cut("peer"),
    "cut to peers": cut("peer", ways=(Way.THERE,)),
    "cut back from peers": cut("peer", ways=(Way.BACK,)),
    "cut from clients": cut("client"),
    "cut from all": cut("peer", "client"),
    "refused to peers": refuse("peer"),
    "reset": reset,
    "slow": slow,
}
SERVER_LINK_FAULTS: dict[str, Callable[[Part, float], Awaitable[None]]] = {
    "cut from the server": cut("store"),
    "cut back from the server": cut("store", ways=(Way.BACK,)),
    "refused by the server": refuse("store"),
}
WRITE = "write"  # another program blocks all writers for a while
END_SESSIONS = "end sessions"  # the database server ends all its sessions
MAY_BE_LONG = ("pause", "cut from peers", "cut from all", "kill", *list(SERVER_LINK_FAULTS)[:2])


def schedule(
    seed: int,
    seconds: float,
    every: float,
    num_replicas: int,
    lease: float,
    has_server: bool = False,
) -> list[Fault]:
    """Return a fault for each interval, on a target that has no fault then.

    `has_server`: the database is a server, and each replica has its own link to it.
    """
    replica_kinds = [*REPLICA_FAULTS, *(SERVER_LINK_FAULTS if has_server else ())]
    database_kinds = [WRITE, END_SESSIONS] if has_server else [WRITE]
    choose = random.Random(seed)
    free_at = dict.fromkeys((DATABASE, *range(num_replicas)), 0.0)
    no_long_before = 0.0
    faults = []
    at = 1.0
    while at < seconds:
        free = [target for target, until in free_at.items() if until <= at]
        if free:
            target = choose.choice(free)
            kind = WRITE
            if target != DATABASE or has_server:
                kind = choose.choice(database_kinds if target == DATABASE else replica_kinds)
            lasts = choose.uniform(*SHORT_SECONDS)
            if kind in MAY_BE_LONG and at >= no_long_before and choose.random() < 0.5:
                lasts = lease * choose.uniform(*LONG_LEASES)
                no_long_before = at + lasts + every
            faults.append(Fault(at, kind, target, lasts))
            free_at[target] = at + lasts + 3.0  # a process needs some seconds to start
        at += every
    return faults


def _block_writers(database: Path, seconds: float) -> None:
    """Block all other writers."""
    with WriterLock(database, 60.0, 60.0).taken():
        time.sleep(seconds)


def _inject_at_server(store: str, kind: str, seconds: float) -> None:
    import psycopg

    with psycopg.connect(store) as conn:
        if kind == WRITE:
            conn.execute(f"LOCK TABLE {SCHEMA}.owners, {SCHEMA}.turns IN EXCLUSIVE MODE")
            time.sleep(seconds)
        else:
            conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )


async def inject(world: World, fault: Fault) -> None:
    if fault.target != DATABASE:
        acts = {**REPLICA_FAULTS, **SERVER_LINK_FAULTS}
        await acts[fault.kind](world.replicas[fault.target], fault.seconds)
    elif world.kind.store:
        await asyncio.to_thread(_inject_at_server, world.store, fault.kind, fault.seconds)
    else:
        await asyncio.to_thread(_block_writers, world.database, fault.seconds)
