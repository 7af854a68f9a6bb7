"""Jobs on a failing, full or damaged disk: each operation happens or not, and only one job is affected."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import (
    AlreadyExists,
    NotFound,
    PensieveError,
    StoreCorrupt,
    StoreError,
    StoreTooNew,
    StoreUnavailable,
)
from pensieve.jobs.job_records import JobKey, JobOutcome, JobState, NewJob
from pensieve.jobs.job_store import LAST_RESORT, JobStore
from tests.jobs.stored_jobs import (
    KEY,
    answer,
    create_waiting,
    everything,
    files,
    line,
    numbers,
    refusal,
    results,
)
from tests.store.faulty import FaultyDriver
from tests.store.talk import DRIVERS
from tests.store.test_disk_faults import FULL, IO_ERROR

NEW = JobKey("", "new")


def prepare(store: JobStore) -> None:
    """Create jobs: `nightly` waits with two results, `new` is being received, and `old` has ended."""
    create_waiting(store)
    store.answer(KEY, [answer(2)])
    store.refuse(KEY, [refusal(4)])
    create_waiting(store, JobKey("", "old"), 1)
    store.set_state(JobKey("", "old"), JobState.ENDED, JobOutcome.CANCELLED)
    store.create(NewJob(NEW))
    store.append_lines(NEW, [line(1)])


ACTS: dict[str, Callable[[JobStore], object]] = {
    "create": lambda store: store.create(NewJob(JobKey("", "third"))),
    "append": lambda store: store.append_lines(NEW, [line(2), line(3)]),
    "received": lambda store: store.received(NEW),
    "name": lambda store: store.name_lines(NEW, [(1, "a")]),
    "set_state": lambda store: store.set_state(KEY, JobState.RUNNING),
    "answer": lambda store: store.answer(KEY, [answer(1), answer(2, "other"), answer(3)]),
    "end": lambda store: store.set_state(KEY, JobState.ENDED, JobOutcome.CANCELLED),
    "delete": lambda store: store.delete(KEY),
    "read": lambda store: (numbers(store), results(store), store.list_jobs()),
}
FAULTS = {
    "error": (IO_ERROR, False, False),
    "error-after": (IO_ERROR, True, False),
    "full-until-healed": (FULL, False, True),
}


@pytest.mark.parametrize("driver", DRIVERS[:1], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ACTS)
def test_an_operation_on_a_job_happens_completely_or_not_at_all(
    tmp_path: Path, driver: Any, name: str, fault: str
) -> None:
    act = ACTS[name]
    with open_in(tmp_path / "wanted", driver) as store:
        prepare(store)
        before = everything(store)
        act(store)
        wanted = everything(store)
    fault_points = 0
    while True:
        fault_points += 1
        faults = FaultyDriver(driver, *FAULTS[fault])
        with open_in(tmp_path / f"{fault_points}", faults) as store:
            prepare(store)
            faults.arm(fault_points)
            raised = False
            try:
                act(store)
            except StoreUnavailable:
                raised = True
            faults.heal()
            if not faults.fired:
                break
            seen = everything(store)
            assert seen in ((before, wanted) if raised else (wanted,)), fault_points
            try:  # a caller that does not know the outcome tries again
                act(store)
            except (AlreadyExists, NotFound):
                assert seen == wanted
            assert everything(store) == wanted
    assert fault_points > (3 if name != "delete" else 0)


def open_in(folder: Path, driver: Any) -> JobStore:
    folder.mkdir(exist_ok=True)
    return JobStore.open(folder, driver=driver)


def test_jobs_are_found_after_every_failure_to_open(tmp_path: Path, driver: Any) -> None:
    with open_in(tmp_path / "data", driver) as store:
        prepare(store)
        store.delete(NEW)
        wanted = everything(store)
        shutil.copytree(tmp_path / "data", tmp_path / "killed")
    fault_points = 0
    while True:
        fault_points += 1
        target = tmp_path / f"{fault_points}"
        shutil.copytree(tmp_path / "killed", target)
        faults = FaultyDriver(driver, IO_ERROR, False, False)
        faults.arm(fault_points)
        with open_in(target, faults) as store:
            if not faults.fired:
                break
            store.list_jobs()  # reads the disk again
            assert store.unreadable == {}
            assert everything(store) == wanted
    assert fault_points > 10


FILE_LIMIT_CHILD = """
import resource, signal, sys
from pathlib import Path
from pensieve.errors import StoreUnavailable
from pensieve.jobs.job_store import JobStore
from tests.jobs.stored_jobs import KEY, OTHER, answer, create_waiting, numbers, results
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = JobStore.open(Path(sys.argv[1]))
create_waiting(store, KEY, 100)
create_waiting(store, OTHER, 1)
limit = (400_000, resource.RLIM_INFINITY)
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
number = 0
try:
    while True:
        store.answer(KEY, [answer(number + 1, "x" * 20_000)])
        number += 1
except StoreUnavailable as error:
    print(number, error)
print(len(results(store)), store.get(KEY).num_answered)
print(store.answer(OTHER, [answer(1)]).num_answered)
store.delete(KEY)
print([job.key.job_id for job in store.list_jobs()])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(store.answer(OTHER, [answer(1)]).num_answered)
"""


def test_a_full_disk_refuses_answers_but_jobs_can_still_be_deleted(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILE_LIMIT_CHILD, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stderr == ""
    refused, kept, other, left, after = done.stdout.splitlines()
    number, _, words = refused.partition(" ")
    assert int(number) > 0
    assert words.startswith(f"the job {tmp_path}/jobs/")
    assert words.endswith(("the disk is full", "disk I/O error"))
    assert kept == f"{number} {number}"
    assert (other, left, after) == ("1", "['other']", "1")


def test_a_flipped_bit_is_not_served_and_the_error_names_its_line(
    tmp_path: Path, driver: Any
) -> None:
    with open_in(tmp_path, driver) as store:
        create_waiting(store, text="plain")
        store.answer(KEY, [answer(1), answer(4)])
    flip(file_of(tmp_path), b'"custom_id": "r3"')
    flip(file_of(tmp_path), b"yes 4")
    with open_in(tmp_path, driver) as store:
        with pytest.raises(StoreCorrupt, match="'nightly': line 3 fails its checksum"):
            store.pending_lines(KEY)
        assert [each.number for each in store.pending_lines(KEY, after=3)] == [5]
        with pytest.raises(StoreCorrupt, match="'nightly': line 4 fails its checksum"):
            store.results(KEY)
        assert [each.text for each in store.results(KEY, limit=1)] == [b"yes 1"]


def file_of(folder: Path, index: int = 0) -> Path:
    return [path for path in files(folder) if path.suffix == ".db"][index]


def flip(path: Path, text: bytes) -> None:
    content = path.read_bytes()
    assert content.count(text) == 1
    path.write_bytes(content.replace(text, bytes([text[0] ^ 1]) + text[1:]))


def test_a_damaged_job_is_named_and_deletable_and_other_jobs_continue(
    tmp_path: Path, driver: Any
) -> None:
    with open_in(tmp_path, driver) as store:
        create_waiting(store)
    damaged = file_of(tmp_path)
    with open_in(tmp_path, driver) as store:
        create_waiting(store, JobKey("", "other"))
    damaged.write_bytes(b"To be, or not to be" * 1000)
    with open_in(tmp_path, driver) as store:
        assert [job.key.job_id for job in store.list_jobs()] == ["other"]
        assert store.unreadable == {damaged.name: f"the job {damaged}: the file is not a database"}
        store.answer(JobKey("", "other"), [answer(1)])
        for call in (store.get, numbers_of(store), lambda key: store.create(NewJob(key))):
            with pytest.raises(StoreCorrupt, match="the file is not a database"):
                call(KEY)
        store.delete(KEY)
        assert store.unreadable == {}
        assert not damaged.exists()
        assert create_waiting(store).num_lines == 5


def numbers_of(store: JobStore) -> Callable[[JobKey], object]:
    return lambda key: numbers(store, key)


def test_a_page_damaged_under_an_open_store_fails_only_its_job(tmp_path: Path, driver: Any) -> None:
    with open_in(tmp_path, driver) as store:
        create_waiting(store, num_lines=2000, text="x" * 200)
        create_waiting(store, JobKey("", "other"))
    path = next(path for path in files(tmp_path) if path.stat().st_size > 100_000)
    content = bytearray(path.read_bytes())
    content[30 * 4096 : 60 * 4096] = b"\xff" * (30 * 4096)
    path.write_bytes(content)
    with open_in(tmp_path, driver) as store:
        with pytest.raises(StoreCorrupt, match="the database is damaged"):
            numbers(store)
        assert numbers(store, JobKey("", "other")) == [1, 2, 3, 4, 5]
        assert (
            store.set_state(KEY, JobState.ENDED, JobOutcome.FAILED, "damaged").problem == "damaged"
        )
        store.delete(KEY)


def edit(path: Path, driver: Any, statement: str) -> None:
    conn = driver.connect(str(path), isolation_level=None)
    conn.execute(statement)
    conn.close()


@pytest.mark.parametrize(
    ("statement", "error", "words"),
    [
        ("PRAGMA user_version = 7", StoreTooNew, f"that wrote it, or {LAST_RESORT}"),
        ("PRAGMA application_id = 1", StoreError, "a database of another program"),
        ("UPDATE job SET job_id = 'moved'", StoreError, "has the wrong name for its job"),
    ],
)
def test_a_file_of_another_program_or_version_is_left_unchanged(
    tmp_path: Path, driver: Any, statement: str, error: type[PensieveError], words: str
) -> None:
    with open_in(tmp_path, driver) as store:
        create_waiting(store)
    edit(file_of(tmp_path), driver, statement)
    before = file_of(tmp_path).read_bytes()
    with open_in(tmp_path, driver) as store:
        assert store.list_jobs() == []
        (problem,) = store.unreadable.values()
        assert words in problem
        with pytest.raises(error):
            store.get(KEY)
    assert file_of(tmp_path).read_bytes() == before


def test_foreign_files_in_the_folder_are_left_unchanged(tmp_path: Path, driver: Any) -> None:
    with open_in(tmp_path, driver) as store:
        create_waiting(store)
    for name in ("notes.txt", "x.db", "x.db-wal", f"{'a' * 31}.db-wal"):
        (tmp_path / "jobs" / name).write_text("mine")
    gone = tmp_path / "jobs" / f"{'a' * 32}.db-wal"
    gone.write_text("of a job that was being deleted")
    with open_in(tmp_path, driver) as store:
        assert len(store.list_jobs()) == 1
        assert store.unreadable == {}
    assert len(files(tmp_path)) == 5
    assert not gone.exists()


def test_a_folder_that_cannot_be_created_raises_unavailable(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("")
    with pytest.raises(StoreUnavailable, match=r"jobs cannot be used: File exists"):
        JobStore.open(tmp_path)


def test_jobs_are_private_to_the_owner(tmp_path: Path, driver: Any) -> None:
    with open_in(tmp_path, driver) as store:
        create_waiting(store)
        modes = {path.stat().st_mode & 0o777 for path in files(tmp_path)}
        assert (len(files(tmp_path)), modes) == (3, {0o600})
        assert (tmp_path / "jobs").stat().st_mode & 0o777 == 0o700
