"""After a kill -9 or a power loss during jobs, acknowledged data is stored exactly once."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import NotFound, PensieveError
from pensieve.jobs.job_records import JobKey, JobState
from pensieve.jobs.job_store import JobStore
from tests.jobs.stored_jobs import KEY, answer, create_waiting, files, numbers, results
from tests.scale import SCALE
from tests.store.power import NOTE, Event, files_after, run_recorded
from tests.store.test_power_loss import library

__all__ = ["library"]  # used as a fixture
NUM_KILLS = 12 * SCALE
NUM_LINES = 400

# Continues the job where the last process was killed, and prints a line when something is durable. An answer
# contains the number of the process run that computed it.
CHILD = """
import os, random, sys
from pathlib import Path
from pensieve.jobs.job_records import JobState
from pensieve.jobs.job_store import JobStore
from tests.jobs.stored_jobs import KEY, answer, create_waiting

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole or not at all

life, num_lines = sys.argv[2], int(sys.argv[3])
store = JobStore.open(Path(sys.argv[1]))
if not store.list_jobs():
    create_waiting(store, KEY, num_lines)
    tell("sent")
store.set_state(KEY, JobState.RUNNING)
rng = random.Random(life)
while page := store.pending_lines(KEY, limit=40):
    some = rng.sample(page, min(7, len(page)))
    store.answer(KEY, [answer(each.number, f"life-{life}") for each in some])
    tell(*(each.number for each in some))
tell("done")
sys.stdin.read()
"""


def run_and_kill(folder: Path, life: int, num_said: int, seconds: float) -> list[str]:
    """Run a process and kill it. Return what it acknowledged."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(life), str(NUM_LINES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        said: list[str] = []
        while len(said) < num_said and "done\n" not in said:
            said.append(child.stdout.readline())
            assert said[-1] != ""
        time.sleep(seconds)
        child.send_signal(signal.SIGKILL)
        said += child.stdout.readlines()
    return [each.strip() for each in said]


def test_no_acknowledged_answer_is_lost_or_duplicated(tmp_path: Path) -> None:
    rng = random.Random(5)
    acknowledged: dict[int, int] = {}  # line -> process run that answered it
    was_sent = False
    for life in range(NUM_KILLS):
        said = run_and_kill(tmp_path, life, rng.randrange(1, 5), rng.uniform(0.0, 0.01))
        was_sent = was_sent or bool(said)
        for each in said:
            if each[0].isdigit():
                for number in map(int, each.split()):
                    assert acknowledged.setdefault(number, life) == life, "answered twice"
        with JobStore.open(tmp_path) as store:
            assert store.unreadable == {}
            (job,) = store.list_jobs()
            assert job.state in (JobState.WAITING, JobState.RUNNING)
            found = dict(results(store))
            for number, by in acknowledged.items():
                assert found[number] == f"life-{by} {number}"
            assert job.num_answered == len(found) == NUM_LINES - len(numbers(store))
            assert job.usage.output_tokens == 7 * len(found)
    assert len(acknowledged) > 3 * NUM_KILLS


KILLED_AT = {
    "created": "store.create(NewJob(KEY))",
    "receiving": "store.create(NewJob(KEY)); store.append_lines(KEY, [line(1)])",
    "checking": "store.create(NewJob(KEY)); store.append_lines(KEY, [line(1)]); store.received(KEY);"
    " store.refuse(KEY, [refusal(1)])",
    "waiting": "create_waiting(store)",
    "running": "create_waiting(store); store.set_state(KEY, JobState.RUNNING);"
    " store.answer(KEY, [answer(2)])",
    "paused": "create_waiting(store); store.set_state(KEY, JobState.PAUSED)",
    "ended": "create_waiting(store); store.set_state(KEY, JobState.ENDED, JobOutcome.CANCELLED)",
    "deleted": "create_waiting(store); store.delete(KEY)",
}


@pytest.mark.parametrize("state", KILLED_AT)
def test_a_kill_in_any_state_leaves_a_valid_job_or_none(tmp_path: Path, state: str) -> None:
    child = (
        "import os, sys; from pathlib import Path; from pensieve.jobs.job_records import *;"
        "from pensieve.jobs.job_store import JobStore; from tests.jobs.stored_jobs import *;"
        f"store = JobStore.open(Path(sys.argv[1])); {KILLED_AT[state]}; os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", child, str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL
    with JobStore.open(tmp_path) as store:
        assert store.unreadable == {}
        if state in ("created", "receiving", "deleted"):
            with pytest.raises(NotFound):
                store.get(KEY)
            assert files(tmp_path) == []
            create_waiting(store)
        job = store.get(KEY)
        if state == "checking":
            assert (job.state, job.num_refused) == (JobState.CHECKING, 1)
        elif state not in ("created", "receiving", "deleted"):
            assert job.state == state
        assert job.num_answered == (1 if state == "running" else 0)


def test_a_deletion_that_was_killed_halfway_is_finished_at_the_next_opening(tmp_path: Path) -> None:
    with JobStore.open(tmp_path) as store:
        create_waiting(store)
        store.answer(KEY, [answer(1, "SECRET")])
        wal_files = [path for path in files(tmp_path) if path.suffix != ".db"]
        assert b"SECRET" in b"".join(path.read_bytes() for path in wal_files)
        kept = {path: path.read_bytes() for path in wal_files}
        store.delete(KEY)
    for path, content in kept.items():
        path.write_bytes(content)
    with JobStore.open(tmp_path) as store:
        assert store.list_jobs() == []
        assert files(tmp_path) == []


POWER_CHILD = """
import importlib, json, os, random, sys
from pathlib import Path
from pensieve.jobs.job_records import JobKey, JobState
from pensieve.jobs.job_store import JobStore
from tests.jobs.stored_jobs import answer, create_waiting
from tests.store.power import note

def tell(what, *words):
    note(json.dumps([what, *words]).encode())

store = JobStore.open(Path(sys.argv[1]), driver=importlib.import_module(sys.argv[2]))
rng = random.Random(4)
pending = {}
for number in range(80):
    if len(pending) < 3:
        name = f"j{number}"
        create_waiting(store, JobKey("", name), 40, "mark-" + name)
        tell("sent", name)
        pending[name] = list(range(1, 41))
    name = rng.choice(list(pending))
    some = [pending[name].pop(rng.randrange(len(pending[name]))) for _ in range(4)]
    text = "answer" + "x" * rng.choice([5, 3000])
    store.answer(JobKey("", name), [answer(each, text) for each in some])
    tell("answered", name, some, text)
    if len(pending[name]) < 4 or rng.random() < 0.1:
        del pending[name]
        tell("deleting", name)
        store.delete(JobKey("", name))
        tell("deleted", name)
os._exit(0)
"""


def broken_promises(folder: Path, events: Sequence[Event], driver: Any) -> list[str]:
    """Return the promises that jobs break after a power loss that follows these events."""
    promised: dict[str, dict[int, str]] = {}
    gone: set[str] = set()
    for event in events:
        if event.what != NOTE:
            continue
        what, name, *rest = json.loads(event.content)
        if what == "sent":
            promised[name] = {}
        elif what == "answered":
            promised[name] |= {each: f"{rest[1]} {each}" for each in rest[0]}
        elif what == "deleting":  # from now on, the job may be present or not
            del promised[name]
        else:
            gone.add(name)
    wrong = []
    try:
        with JobStore.open(folder, driver=driver) as store:
            wrong += list(store.unreadable.values())
            for name, answers in promised.items():
                key = JobKey("", name)
                found = dict(results(store, key))
                if not answers.items() <= found.items():
                    wrong.append(f"{name}: an answer is lost")
                if store.get(key).num_pending != len(numbers(store, key)):
                    wrong.append(f"{name}: miscounted")
            left = b"".join(path.read_bytes() for path in files(folder))
            wrong += [f"{name} was deleted" for name in gone if f'mark-{name}"'.encode() in left]
    except PensieveError as error:
        wrong.append(str(error))
    return wrong


def test_a_loss_of_power_loses_no_answer_and_brings_back_no_deleted_job(
    library: Path, tmp_path: Path, driver: Any
) -> None:
    folder = tmp_path / "data" / "jobs"
    folder.mkdir(parents=True)
    events = run_recorded(library, folder, ["-c", POWER_CHILD, str(folder.parent), driver.__name__])
    notes = [at for at, event in enumerate(events) if event.what == NOTE]
    assert len(notes) > 90
    found = []
    for seed in range(40 * SCALE):
        rng = random.Random(seed)
        at = rng.choice(notes) if seed % 2 else rng.randrange(notes[0], len(events))
        place = tmp_path / "after" / str(seed) / "jobs"
        place.mkdir(parents=True)
        for name, content in files_after(events[: at + 1], rng).items():
            (place / name).write_bytes(content)
        found += [
            f"seed {seed}: {each}"
            for each in broken_promises(place.parent, events[: at + 1], driver)
        ]
    assert found == []
