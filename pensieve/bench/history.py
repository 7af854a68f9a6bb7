"""`pensieve bench history` measures how many turns one history carries for several daemons.

A real `pensieve history` and real sessions with it (history/connection.py), whose replicas have neither
engine nor clients.  A turn makes the calls of a turn of a daemon, one after the other:

    look_up, begin_turn        before it runs
    finish_turn                when it has ended

A replica has one turn in this loop at a time, as a daemon has one store thread; so the load grows with the
replicas, and their turns' commits share the disk's syncs.  `alone` is the same turns on the store itself, in
this process and without a service.  Replicas are threads of one process for each core.

Before a figure is printed, every conversation is read back: it must have the revision of its last turn.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pensieve.bench.process_time import cpu_seconds
from pensieve.bench.report import Report, percentile
from pensieve.errors import PensieveError, Unavailable
from pensieve.history.connection import Connection, Replica
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.folder import DataFolder
from pensieve.store.records import NewConversation, NewMessage, TurnRequest
from pensieve.store.remote.remote_store import RemoteStore, Store

CONVERSATIONS = 8  # of each replica
TOKENS_IN, TOKENS_OUT = 40, 120
TAIL_TOKENS = 32
ALONE = 0  # replicas: the store without a service
START_SECONDS = 60.0
ANSWER_SECONDS = 60.0
WARM_UP_SECONDS = 1.0  # in which everybody has begun


@dataclass(frozen=True)
class Load:
    replicas: int
    seconds: float


@dataclass(frozen=True)
class Row:
    replicas: int
    turns: int
    turns_per_second: float
    turn_p50_seconds: float
    turn_p99_seconds: float
    service_cpu_seconds: float  # of one turn; with ALONE of this process
    service_cores: float  # that it kept busy


class Talker:
    """Turns in conversations of its own, on a store of whatever kind."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._names = [f"{name}-{number}" for number in range(CONVERSATIONS)]
        self._revisions = dict.fromkeys(self._names, 0)
        for each in self._names:
            store.create_conversation(NewConversation(each, "bench"))
        self.seconds: list[float] = []

    def talk(self, until: float, from_: float) -> None:
        """Until that time; those that began before `from_` are not counted."""
        number = 0
        while (began := time.monotonic()) < until:
            self._turn(self._names[number % CONVERSATIONS], f"r{number}")
            if began >= from_:
                self.seconds.append(time.monotonic() - began)
            number += 1

    def _turn(self, name: str, request_id: str) -> None:
        store = self._store
        found, known, _ = store.look_up(name, request_id, TAIL_TOKENS)
        if known is not None:
            raise Unavailable(f"{name} has had {request_id} before it was said")
        question = NewMessage("user", "q" * 4 * TOKENS_IN, range(TOKENS_IN))
        request = TurnRequest(request_id, [question], expected_revision=found.revision)
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


def run(nums_replicas: Sequence[int], seconds: float, folder: Path | None, report: Report) -> None:
    """`folder` is where histories are made, on whatever disk that is."""
    rows = []
    for number in nums_replicas:
        with tempfile.TemporaryDirectory(prefix="pensieve-bench-", dir=folder) as place:
            load = Load(number, seconds)
            row = (_alone if number == ALONE else _served)(load, Path(place))
        report.line(_line_of(row))
        rows.append(asdict(row))
    report.finish({"rows": rows})


def _line_of(row: Row) -> str:
    who = "the store alone" if row.replicas == ALONE else f"{row.replicas} replicas"
    return (
        f"{who}: {row.turns_per_second:,.0f} turns/s, "
        f"a turn p50 {row.turn_p50_seconds * 1e3:.2f} ms, p99 {row.turn_p99_seconds * 1e3:.1f} ms; "
        f"{row.service_cpu_seconds * 1e3:.2f} ms of CPU a turn, {row.service_cores:.2f} cores busy"
    )


def _alone(load: Load, folder: Path) -> Row:
    with ConversationStore.open(folder, "pensieve bench") as store:
        talker = Talker(store, _name(0))
        began = time.monotonic()
        cpu = time.process_time()
        talker.talk(began + load.seconds, began)
        cpu = time.process_time() - cpu
        talker.check()
    return _row(load, [talker.seconds], cpu)


def _served(load: Load, folder: Path) -> Row:
    with _service(folder) as (pid, target):
        return _measured(load, pid, target, folder)


def _measured(load: Load, pid: int, target: str, folder: Path) -> Row:
    context = multiprocessing.get_context("forkserver")
    num_processes = min(load.replicas, len(os.sched_getaffinity(0)))
    answers: Any = context.SimpleQueue()
    begin = context.Barrier(num_processes + 1)
    processes = [
        context.Process(
            target=_replicas,
            args=(target, range(index, load.replicas, num_processes), load, folder, begin, answers),
            daemon=True,
        )
        for index in range(num_processes)
    ]
    for each in processes:
        each.start()
    try:
        begin.wait(START_SECONDS)
        time.sleep(WARM_UP_SECONDS)
        cpu = cpu_seconds(pid)
        time.sleep(load.seconds)
        cpu = cpu_seconds(pid) - cpu
        found = [times for _ in processes for times in _answer(answers, processes)]
    except threading.BrokenBarrierError as error:  # the one that has broken it says why
        _answer(answers, processes)
        raise Unavailable("the replicas did not begin") from error
    finally:
        for each in processes:
            each.join(START_SECONDS)
            each.kill()
    return _row(load, found, cpu)


def _answer(answers: Any, processes: Sequence[Any]) -> list[list[float]]:
    """What the turns took in one process; Unavailable where one has failed or is gone."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while answers.empty():
        gone = [each for each in processes if each.exitcode]
        if gone or time.monotonic() > deadline:
            raise Unavailable(f"{len(gone)} processes of replicas ended without an answer")
        time.sleep(0.02)
    answer: str | list[list[float]] = answers.get()
    if isinstance(answer, str):
        raise Unavailable(f"a replica failed: {answer}")
    return answer


def _row(load: Load, found: Sequence[Sequence[float]], cpu: float) -> Row:
    times = [seconds for each in found for seconds in each]
    if not times:
        raise Unavailable("no turn ended in that time: give it more --seconds")
    return Row(
        load.replicas,
        len(times),
        len(times) / load.seconds,
        percentile(times, 0.5),
        percentile(times, 0.99),
        cpu / len(times),
        cpu / load.seconds,
    )


def _replicas(
    target: str, numbers: Sequence[int], load: Load, folder: Path, begin: Any, answers: Any
) -> None:
    """A process with these replicas; what each of their turns took, or what went wrong."""
    with contextlib.ExitStack() as stack:
        try:
            talkers = []
            for number in numbers:
                mine = DataFolder.open(folder / _name(number), "pensieve bench", has_database=False)
                connection = Connection(target, Replica(_name(number)))
                store = RemoteStore(connection, mine, _name(number))
                stack.callback(store.close)
                talkers.append(Talker(store, _name(number)))
            begin.wait(START_SECONDS)
            from_ = time.monotonic() + WARM_UP_SECONDS
            failures = _talk(talkers, from_, from_ + load.seconds)
            answers.put(failures[0] if failures else [each.seconds for each in talkers])
        except PensieveError as error:
            answers.put(str(error))
            begin.abort()


def _talk(talkers: Sequence[Talker], from_: float, until: float) -> list[str]:
    failures: list[str] = []

    def talk(talker: Talker) -> None:
        try:
            talker.talk(until, from_)
            talker.check()
        except Exception as error:  # also a check that fails: no figure is shown then
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=talk, args=(each,)) for each in talkers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def _name(number: int) -> str:
    return f"bench-{number}"


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
