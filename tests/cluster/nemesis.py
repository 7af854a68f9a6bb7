"""Send messages to a cluster while its parts are killed, paused and cut off. Then check everything.

    python -m tests.cluster.nemesis FOLDER --seed 7                   # 3 minutes, 50 conversations
    python -m tests.cluster.nemesis FOLDER --seeds 1..5 --lease 2
    python -m tests.cluster.nemesis FOLDER --seed 7 --engine model    # the built-in model
    python -m tests.cluster.nemesis FOLDER --seed 7 --store postgresql    # a private server
    python -m tests.cluster.nemesis FOLDER --seed 7 --cluster ray --nodes 2   # on Ray Serve

The seed determines the faults and the messages, but not which call meets which fault. For each seed, FOLDER
contains the history with its owner log, and the logs of the processes. results.jsonl has a line for each run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pensieve.builtin import MODEL_PATH
from pensieve.client import AsyncClient, Retry
from pensieve.client.admin import Admin
from pensieve.errors import PensieveError, Unavailable
from pensieve.store.conversation_store import ConversationStore
from pensieve.text import Tokenizer
from tests.cluster import owner_log
from tests.cluster.checker import Stored, wrong_owners, wrong_tokens, wrong_turns
from tests.cluster.faults import Fault, inject, schedule
from tests.cluster.ray_world import RayWorld
from tests.cluster.talkers import Spoken, Talker
from tests.cluster.world import Kind, World
from tests.store.postgres_server import serving

RECOVERY_SECONDS = 30.0  # from the last fault until all talkers get answers
OWN_SERVER = "postgresql"  # used instead of a database address: start a private server
HANG_SECONDS = 150.0  # after this time, a request counts as unanswered


@dataclass(frozen=True)
class Storm:
    """The parameters of a run."""

    seed: int
    seconds: float = 180.0
    every: float = 5.0
    num_talkers: int = 50
    pause_seconds: float = 0.4  # mean pause of a talker between its turns
    kind: Kind = field(default_factory=Kind)


@dataclass
class Outcome:
    """The result of a run."""

    seed: int
    faults: dict[str, int] = field(default_factory=dict)
    num_turns: int = 0
    num_retries: int = 0  # in all turns together
    num_visible: int = 0  # errors that a user of the SDK sees
    visible: dict[str, int] = field(default_factory=dict)  # number of visible errors, by message
    num_claims: int = 0  # claims that took a conversation from another session
    recovery_seconds: float = 0.0  # from the last fault to the answer of the slowest talker
    whole_seconds: float = 0.0  # from the last fault until every part runs again
    longest_turn_seconds: float = 0.0
    longest_turn: list[str] = field(default_factory=list)  # its request and its errors
    problems: list[str] = field(default_factory=list)


async def run(folder: Path, storm: Storm, say: Any = print) -> Outcome:
    """Run one storm in its own folder."""
    folder.mkdir(parents=True)
    outcome = Outcome(storm.seed)
    async with _world(folder, storm.kind) as world:
        clients = [AsyncClient(address, retry=Retry(retries=0)) for address in world.addresses]
        talkers = [
            Talker(number, clients, storm.seed, storm.pause_seconds)
            for number in range(storm.num_talkers)
        ]
        enough = asyncio.Event()
        talking = [asyncio.create_task(talker.talk(enough)) for talker in talkers]
        faults = _schedule(world, storm)
        await _inject_all(world, faults, outcome, say)
        healed_at = time.monotonic()
        await _until_all_talk(talkers, talking, healed_at, outcome)
        await world.wait_until_whole()
        outcome.whole_seconds = time.monotonic() - healed_at
        enough.set()
        _, hung = await asyncio.wait(talking, timeout=HANG_SECONDS)
        for task in talking:
            task.cancel()
        for talker, error in zip(
            talkers, await asyncio.gather(*talking, return_exceptions=True), strict=True
        ):
            if error is not None and not isinstance(error, asyncio.CancelledError):
                outcome.problems.append(f"{talker.conversation_id} failed: {error!r}")
        outcome.problems += [f"{len(hung)} talkers never ended"] if hung else []
        # Use new clients: those of the talkers may still avoid replicas that were away.
        readers = [AsyncClient(address) for address in world.addresses]
        await _read_back(talkers, readers, storm, outcome)
        for client in (*clients, *readers):
            await client.close()
        outcome.problems += await asyncio.to_thread(_admin_check, world)
        statuses = await world.stop()
        if any(statuses):
            outcome.problems.append(f"the processes ended with {statuses}")
    if isinstance(world, World):
        events = owner_log.events(world.store)
        outcome.problems += wrong_owners(events)
        outcome.num_claims = sum(each.get("previous", 0) > 0 for each in events)
    outcome.problems += _check_store(folder / "last", world.store)
    _count(talkers, healed_at, outcome)
    return outcome


def _world(folder: Path, kind: Kind) -> World | RayWorld:
    return RayWorld(folder, kind) if kind.has_ray else World(folder, kind)


def _schedule(world: World | RayWorld, storm: Storm) -> Sequence[Fault]:
    if isinstance(world, RayWorld):
        return world.schedule(storm.seed, storm.seconds, storm.every)
    kind = storm.kind
    amount = storm.seconds, storm.every, kind.num_replicas, kind.lease_seconds
    return schedule(storm.seed, *amount, has_server=bool(kind.store))


async def _inject_all(
    world: World | RayWorld, faults: Sequence[Fault], outcome: Outcome, say: Any
) -> None:
    began = time.monotonic()
    locks: dict[int, asyncio.Lock] = {}

    async def inject_when_free(fault: Fault) -> None:
        async with locks.setdefault(
            fault.target, asyncio.Lock()
        ):  # the previous fault may still be restarting the target
            say(f"{fault} (at {time.monotonic() - began:.1f})")
            await (world.inject(fault) if isinstance(world, RayWorld) else inject(world, fault))
        outcome.faults[fault.kind] = outcome.faults.get(fault.kind, 0) + 1

    async with asyncio.TaskGroup() as under_way:
        for fault in faults:
            await asyncio.sleep(max(began + fault.at - time.monotonic(), 0.0))
            under_way.create_task(inject_when_free(fault))


async def _until_all_talk(
    talkers: Sequence[Talker],
    talking: Sequence[asyncio.Task[None]],
    healed_at: float,
    outcome: Outcome,
) -> None:
    """Wait until each talker has received one more answer."""
    while waiting := [t for t in talkers if not any(s.ended_at > healed_at for s in t.spoken)]:
        if time.monotonic() - healed_at > HANG_SECONDS or any(task.done() for task in talking):
            outcome.problems.append(
                f"after the last fault these talkers got no answer: {[t.conversation_id for t in waiting]}"
            )
            return
        await asyncio.sleep(0.05)


async def _read_back(
    talkers: Sequence[Talker], clients: Sequence[AsyncClient], storm: Storm, outcome: Outcome
) -> None:
    size = Tokenizer.load(MODEL_PATH).vocab_size
    for number, talker in enumerate(talkers):
        client = clients[number % len(clients)]
        name = talker.conversation_id
        try:
            messages = [
                each async for each in client.conversation(name).messages(include_token_ids=True)
            ]
        except PensieveError as error:
            outcome.problems.append(f"{name} cannot be read: {error}")
            continue
        stored = [Stored(each.role, each.text, each.revision) for each in messages]
        outcome.problems += wrong_turns(name, talker.spoken, stored)
        if storm.kind.engine == "echo":
            replies = [(bool(each.finish_reason), each.token_ids) for each in messages]
            outcome.problems += wrong_tokens(name, replies, size)


def _admin_check(world: World | RayWorld) -> list[str]:
    """Run `admin check` when the engines run again. Return the problems."""
    until = time.monotonic() + HANG_SECONDS
    with Admin(world.admin_addresses[0]) as admin:
        while True:
            try:
                return [f"admin check: {problem}" for problem in admin.check()]
            except Unavailable:
                if time.monotonic() > until:
                    raise
            time.sleep(0.5)


def _check_store(data: Path, url: str) -> list[str]:
    with ConversationStore.open(data, "the nemesis", url=url) as store:
        running = [f"turn {each.turn_id} still ran" for each in store.interrupted_at_open]
        return [*running, *store.verify(), *store.integrity_check()]


def _count(talkers: Sequence[Talker], healed_at: float, outcome: Outcome) -> None:
    spoken: list[Spoken] = [each for talker in talkers for each in talker.spoken]
    outcome.num_turns = sum(each.reply is not None for each in spoken)
    outcome.num_retries = sum(len(each.failures) for each in spoken)
    seen = Counter(error[:120] for each in spoken for error in each.visible)
    outcome.num_visible, outcome.visible = sum(seen.values()), dict(seen.most_common(20))
    ended = [each for each in spoken if each.ended_at]
    longest = max(ended, key=lambda each: each.ended_at - each.begun_at)
    outcome.longest_turn_seconds = longest.ended_at - longest.begun_at
    outcome.longest_turn = [longest.request_id, *longest.failures]
    first_answers = [
        min((each.ended_at for each in talker.spoken if each.ended_at > healed_at), default=None)
        for talker in talkers
    ]
    outcome.recovery_seconds = max(
        (at - healed_at for at in first_answers if at is not None), default=0.0
    )


@contextmanager
def _database(given: str) -> Iterator[str]:
    """Yield the URL of the database: a new one on a private server, or `given` ("": a SQLite file)."""
    if given != OWN_SERVER:
        yield given
        return
    with serving(max_connections="200") as server:
        yield server.new_database()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="", help="FIRST..LAST")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--talkers", type=int, default=50)
    parser.add_argument("--pause", type=float, default=0.4)
    parser.add_argument("--cluster", choices=("processes", "ray"), default="processes")
    parser.add_argument("--replicas", "--nodes", type=int, default=3, help="with Ray: nodes")
    parser.add_argument("--lease", type=float, default=10.0)
    parser.add_argument("--engine", choices=("echo", "model"), default="echo")
    parser.add_argument("--store", default="", help=f"{OWN_SERVER}, or postgresql://…")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that child processes end, too
    first, _, last = given.seeds.partition("..")
    seeds = [given.seed or int(time.time())]
    if first:
        seeds = list(range(int(first), int(last or first) + 1))
    has_failed = False
    for seed in seeds:
        has_ray = given.cluster == "ray"
        with _database(given.store) as store:
            kind = Kind(given.replicas, given.lease, given.engine, store=store, has_ray=has_ray)
            storm = Storm(seed, given.seconds, given.every, given.talkers, given.pause, kind)
            print(f"seed {seed}: {storm}", flush=True)
            outcome = asyncio.run(run(given.folder / f"seed-{seed}-{int(time.time())}", storm))
        if outcome.recovery_seconds > RECOVERY_SECONDS:
            outcome.problems.append(f"it took {outcome.recovery_seconds:.1f} s to recover")
        if outcome.whole_seconds > RECOVERY_SECONDS:
            outcome.problems.append(
                f"it took {outcome.whole_seconds:.1f} s until all parts ran again"
            )
        parameters = {"cluster": given.cluster, "lease": given.lease, "replicas": given.replicas}
        parameters |= {"store": given.store.partition(":")[0] or "sqlite"}
        line = {**asdict(outcome), **parameters}
        with (given.folder / "results.jsonl").open("a") as results:
            results.write(json.dumps(line) + "\n")
        print(json.dumps(line, indent=1), flush=True)
        has_failed = has_failed or bool(outcome.problems)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
