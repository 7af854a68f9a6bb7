"""Measure how many turns one history carries for several daemons.

A real `pensieve history` and real sessions with it (history/connection.py), whose replicas have neither
engine nor clients. A turn makes the calls of a turn of a daemon, one after the other: look_up and begin_turn
before it runs, finish_turn when it has ended. A replica has one turn at a time, as a daemon has one store
thread; so the load grows with the replicas, and their turns' commits share the disk's syncs. 0 replicas: the
same turns on the store itself, in this process and without a service. Replicas are threads of one process for
each core.

Before a figure is printed, every conversation is read back: it must have the revision of its last turn.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from pensieve.bench.report import percentile
from pensieve.errors import Unavailable
from pensieve.history.connection import Connection, Replica
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.folder import DataFolder
from pensieve.store.records import NewConversation, NewMessage, NewTurn
from pensieve.store.remote.remote_store import RemoteStore
from scripts.measurements.processes import counts, cpu_seconds

CONVERSATIONS = 8  # of each replica
TOKENS_IN, TOKENS_OUT = 40, 120
TAIL_TOKENS = 32
START_SECONDS = 60.0  # for the service
BEGIN_SECONDS = 5.0  # until turns count: in that time all processes have begun


class Found(NamedTuple):
    turns: list[float]  # the seconds of each
    cpu_seconds: float  # of the service


class Talker:
    """Turns in conversations of its own, on a store of whatever kind."""

    def __init__(self, store: ConversationStore | RemoteStore, name: str) -> None:
        self._store = store
        self._names = [f"{name}-{number}" for number in range(CONVERSATIONS)]
        self._revisions = dict.fromkeys(self._names, 0)
        for each in self._names:
            store.create_conversation(NewConversation(each, "bench"))

    def talk(self, from_: float, until: float) -> list[float]:
        """Return the seconds of each turn that began after `from_`."""
        if time.monotonic() > from_:
            raise Unavailable("the replicas did not begin in time")
        seconds, number = [], 0
        while (began := time.monotonic()) < until:
            self._turn(self._names[number % CONVERSATIONS], f"r{number}")
            if began >= from_:
                seconds.append(time.monotonic() - began)
            number += 1
        self.check()
        return seconds

    def _turn(self, name: str, request_id: str) -> None:
        store = self._store
        found, known, _ = store.look_up(name, request_id, TAIL_TOKENS)
        if known is not None:
            raise Unavailable(f"{name} has had {request_id} before it was said")
        question = NewMessage("user", "q" * 4 * TOKENS_IN, range(TOKENS_IN))
        request = NewTurn(request_id, [question], expected_revision=found.revision)
        turn = store.begin_turn(name, request).turn
        reply = NewMessage("assistant", "a" * 4 * TOKENS_OUT, range(TOKENS_OUT))
        self._revisions[name] = store.finish_turn(turn.turn_id, reply, "stop", {})

    def check(self) -> None:
        for name, revision in self._revisions.items():
            found = self._store.get_conversation(name).revision
            if found != revision:
                raise Unavailable(
                    f"{name} is at revision {found}, and had replies up to {revision}"
                )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure history", description=__doc__)
    parser.add_argument("--replicas", type=counts, default=(0, 1, 4, 16), metavar="N,N,…")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each figure (default: 5)")
    parser.add_argument("--folder", type=Path, help="where histories are made, and removed")
    arguments = parser.parse_args(given)
    for number in arguments.replicas:
        with tempfile.TemporaryDirectory(prefix="pensieve-bench-", dir=arguments.folder) as folder:
            found = (served if number else alone)(number, arguments.seconds, Path(folder))
        turns, cpu = found
        print(
            f"{number} replicas: {len(turns) / arguments.seconds:,.0f} turns/s, "
            f"a turn p50 {percentile(turns, 0.5) * 1e3:.2f} ms, p99 {percentile(turns, 0.99) * 1e3:.1f} ms; "
            f"{cpu / len(turns) * 1e3:.2f} ms of CPU a turn, {cpu / arguments.seconds:.2f} cores busy"
        )


def alone(number: int, seconds: float, folder: Path) -> Found:
    with ConversationStore.open(folder, "scripts/measure") as store:
        talker = Talker(store, "alone")
        cpu, from_ = time.process_time(), time.monotonic() + 0.01
        turns = talker.talk(from_, from_ + seconds)
        return Found(turns, time.process_time() - cpu)


def served(num_replicas: int, seconds: float, folder: Path) -> Found:
    num_processes = min(num_replicas, len(os.sched_getaffinity(0)))
    with (
        _service(folder) as (pid, target),
        ProcessPoolExecutor(num_processes, multiprocessing.get_context("forkserver")) as processes,
    ):
        from_ = time.monotonic() + BEGIN_SECONDS
        running = [
            processes.submit(
                _replicas,
                *(
                    target,
                    range(index, num_replicas, num_processes),
                    folder,
                    from_,
                    from_ + seconds,
                ),
            )
            for index in range(num_processes)
        ]
        time.sleep(max(from_ - time.monotonic(), 0.0))
        cpu = cpu_seconds(pid)
        time.sleep(seconds)
        cpu = cpu_seconds(pid) - cpu
        return Found([turn for each in running for turn in each.result()], cpu)


def _replicas(
    target: str, numbers: Sequence[int], folder: Path, from_: float, until: float
) -> list[float]:
    """A process with these replicas; the seconds of each of their turns."""
    with contextlib.ExitStack() as stack:
        talkers = []
        for number in numbers:
            name = f"bench-{number}"
            mine = DataFolder.open(folder / name, "scripts/measure", has_database=False)
            store = RemoteStore(Connection(target, Replica(name)), mine, name)
            stack.callback(store.close)
            talkers.append(Talker(store, name))
        with ThreadPoolExecutor(len(talkers)) as threads:
            running = [threads.submit(talker.talk, from_, until) for talker in talkers]
            return [turn for each in running for turn in each.result()]


@contextlib.contextmanager
def _service(folder: Path) -> Iterator[tuple[int, str]]:
    """A history service with a history in that folder: its process, and where it listens."""
    ready, log = folder / "ready", folder / "log"
    command = [sys.executable, "-m", "pensieve", "history", "--data", str(folder / "history")]
    command += ["--address", "127.0.0.1:0", "--ready-file", str(ready)]
    with log.open("w") as lines:
        process = subprocess.Popen(command, stderr=lines)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise Unavailable("the history service did not start: " + log.read_text()[-500:])
            time.sleep(0.02)
        yield process.pid, ready.read_text().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


if __name__ == "__main__":
    main()
