"""Measure how many turns daemons commit to one database, by the number of their writing threads (lanes).

A daemon is a process with the real store, without an engine or clients. Each talker has its own conversations
and sends one turn after another. A turn is two tasks in the talker's lane: look_up and begin_turn, then
finish_turn. With one talker there is no lane: the talker calls the store itself. `--store` is a PostgreSQL
database (docs/postgresql.md says how to get one without installing PostgreSQL) or a SQLite file. Compare only
figures of one run, because they share the disk. `--sync-ms` slows down each sync of this host's daemons, to
simulate a slow disk (SQLite only; it needs a C compiler).

Each figure comes with the disk's sync time, measured directly before, and with the time that transactions
waited for the write lock (only one daemon at a time can write to a SQLite file). Before a figure is printed,
every conversation is read back: it must have the revision of its last turn.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar

from pensieve.bench.report import percentile
from pensieve.errors import Unavailable
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.records import NewConversation, NewMessage, NewTurn
from scripts.measurements.processes import counts

CONVERSATIONS = 8  # conversations per thread
SYNCS = 50
TAIL_TOKENS = 32
TOKENS_IN, TOKENS_OUT = 60, 60
BEGIN_SECONDS = 10.0  # time until turns count; all processes must have started by then
T = TypeVar("T")
names = count(time.time_ns())  # unique, so that a database can be used again


SLOW_SYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
#define SLOW(name) int name(int file) {                         \\
    int (*sync)(int) = (int (*)(int))dlsym(RTLD_NEXT, #name);   \\
    usleep(MICROSECONDS);                                       \\
    return sync(file); }
SLOW(fsync)
SLOW(fdatasync)
"""


class Talker:
    """A client of the store that runs turns in its own conversations."""

    def __init__(self, store: ConversationStore, name: str, lane: Executor | None = None) -> None:
        self._store, self._lane = store, lane
        self._names = [f"{name}-{number}" for number in range(CONVERSATIONS)]
        self._revisions = dict.fromkeys(self._names, 0)
        for each in self._names:
            store.create_conversation(NewConversation(each, "bench"))

    def talk(self, from_: float, until: float) -> list[float]:
        """Return the seconds of each turn that began after `from_`."""
        if time.monotonic() > from_:
            raise Unavailable("the replicas did not start in time")
        seconds, number = [], 0
        while (began := time.monotonic()) < until:
            self._turn(self._names[number % CONVERSATIONS], f"r{number}")
            if began >= from_:
                seconds.append(time.monotonic() - began)
            number += 1
        self._in_lane(self.check)
        return seconds

    def _turn(self, name: str, request_id: str) -> None:
        turn_id = self._in_lane(lambda: self._begin(name, request_id))
        self._revisions[name] = self._in_lane(lambda: self._finish(turn_id))

    def _in_lane(self, job: Callable[[], T]) -> T:
        return job() if self._lane is None else self._lane.submit(job).result()

    def _begin(self, name: str, request_id: str) -> int:
        store = self._store
        found, known, _ = store.look_up(name, request_id, TAIL_TOKENS)
        if known is not None:
            raise Unavailable(f"{name} already has {request_id}")
        question = NewMessage("user", "q" * 4 * TOKENS_IN, range(TOKENS_IN))
        request = NewTurn(request_id, [question], expected_revision=found.revision)
        return store.begin_turn(name, request).turn.turn_id

    def _finish(self, turn_id: int) -> int:
        reply = NewMessage("assistant", "a" * 4 * TOKENS_OUT, range(TOKENS_OUT))
        return self._store.finish_turn(turn_id, reply, "stop", {})

    def check(self) -> None:
        for name, revision in self._revisions.items():
            found = self._store.get_conversation(name).revision
            if found != revision:
                raise Unavailable(
                    f"{name} is at revision {found}, and had replies up to {revision}"
                )


class LaneTimes(NamedTuple):
    turns: list[float]  # seconds per turn
    commits: list[float]  # seconds of the latest commits
    num_commits: int
    waits: list[float]  # waits of the latest transactions for SQLite's write lock
    cpu_seconds: float


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure lanes", description=__doc__)
    parser.add_argument(
        "--store", required=True, metavar="URL", help="postgresql://… or sqlite:///FILE"
    )
    parser.add_argument("--lanes", type=counts, default=(1, 16), metavar="N,N,…")
    parser.add_argument("--daemons", type=counts, default=(1, 3), metavar="N,N,…")
    parser.add_argument("--talkers", type=int, help="per daemon (default: the number of lanes)")
    parser.add_argument("--sync-ms", type=int, default=0, help="delay of each sync")
    parser.add_argument("--seconds", type=float, default=5.0, help="per figure (default: 5)")
    parser.add_argument(
        "--disk",
        type=Path,
        metavar="FOLDER",
        help="where to measure syncs (default: the folder of the SQLite file, or the temporary folder)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="how often all combinations are measured (default: 3)",
    )
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        if arguments.sync_ms:
            slow_syncs(Path(folder), arguments.sync_ms)
        measure(arguments)


def slow_syncs(folder: Path, milliseconds: int) -> None:
    """Delay each sync of programs that start from now on."""
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(SLOW_SYNC)
    command = ["cc", "-shared", "-fPIC", f"-DMICROSECONDS={1000 * milliseconds}"]
    subprocess.run([*command, "-o", str(library), str(source), "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = str(library)


def measure(arguments: argparse.Namespace) -> None:
    scheme, _, path = arguments.store.partition("://")
    store_folder = Path(path).parent if scheme == "sqlite" else Path(tempfile.gettempdir())
    disk = arguments.disk or store_folder
    for _ in range(arguments.repeats):
        for num_daemons in arguments.daemons:
            for num_lanes in arguments.lanes:
                num_talkers = arguments.talkers or num_lanes
                syncs = sync_seconds(disk)
                turns, commits, num_commits, waits, cpu = measured(
                    arguments.store, num_daemons, num_lanes, arguments.seconds, num_talkers
                )
                wait = f"p99 {_quantile(waits, 0.99)}" if waits else "none"
                print(
                    f"{num_daemons} daemons of {num_lanes} lanes, {num_talkers} turns at once: "
                    f"{len(turns) / arguments.seconds:,.0f} turns/s, a turn p50 {_quantile(turns, 0.5)}, p99 "
                    f"{_quantile(turns, 0.99)}; a commit p50 {_quantile(commits, 0.5)}, p99 "
                    f"{_quantile(commits, 0.99)}, {2 * len(turns) / num_commits:.1f} calls each; waiting "
                    f"for the write lock {wait}; a sync p50 {_quantile(syncs, 0.5)}; "
                    f"{cpu / len(turns) * 1e3:.2f} ms of CPU per turn, without the server",
                    flush=True,
                )


def _quantile(seconds: Sequence[float], share: float) -> str:
    return f"{percentile(seconds, share) * 1e3:.1f} ms"


def sync_seconds(disk: Path) -> list[float]:
    """Return the seconds of several syncs of one page."""
    found = []
    with tempfile.TemporaryFile(dir=disk) as file:
        for _ in range(SYNCS):
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            found.append(time.perf_counter() - began)
    return found


def measured(
    url: str, num_daemons: int, num_lanes: int, seconds: float, num_talkers: int = 0
) -> LaneTimes:
    """Run the daemons and return their figures; `num_talkers` 0: as many as lanes."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(num_daemons, context) as processes:
        from_ = time.monotonic() + BEGIN_SECONDS
        running = [
            processes.submit(
                _daemon,
                url,
                f"bench-{next(names)}",
                num_lanes,
                num_talkers or num_lanes,
                from_,
                from_ + seconds,
            )
            for _ in range(num_daemons)
        ]
        found = [each.result() for each in running]
    return LaneTimes(
        [turn for each in found for turn in each.turns],
        [commit for each in found for commit in each.commits],
        sum(each.num_commits for each in found),
        [wait for each in found for wait in each.waits],
        sum(each.cpu_seconds for each in found),
    )


def _daemon(
    url: str, name: str, num_lanes: int, num_talkers: int, from_: float, until: float
) -> LaneTimes:
    with (
        tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder,
        ConversationStore.open(
            Path(folder), "scripts/measure", url=url, num_lanes=num_lanes
        ) as store,
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(num_talkers) as threads,
    ):
        lanes: list[ThreadPoolExecutor | None] = [None]
        if num_talkers > 1:
            lanes = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(num_lanes)]
        talkers = [
            (lanes[number % len(lanes)] or threads)
            .submit(Talker, store, f"{name}-{number}", lanes[number % len(lanes)])
            .result()
            for number in range(num_talkers)
        ]
        running = [threads.submit(each.talk, from_, until) for each in talkers]
        time.sleep(max(from_ - time.monotonic(), 0.0))
        cpu, num_commits = time.process_time(), store.figures.num_commits
        turns = [turn for each in running for turn in each.result()]
        figures, used = store.figures, time.process_time() - cpu
        committed = (list(figures.commit_seconds), figures.num_commits - num_commits)
        return LaneTimes(turns, *committed, list(figures.wait_seconds), used)


if __name__ == "__main__":
    main()
