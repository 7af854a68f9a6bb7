"""Batch jobs on the disk: their states, and one result for each line."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    WrongJobState,
)
from pensieve.jobs.job_records import (
    JOB_TRANSITIONS,
    Duplicate,
    JobKey,
    JobLine,
    JobOutcome,
    JobState,
    JobUsage,
    NewAnswer,
    NewJob,
    ResultKind,
)
from pensieve.jobs.job_store import OPEN_MAX, JobStore
from tests.jobs.stored_jobs import (
    KEY,
    answer,
    create_waiting,
    everything,
    files,
    line,
    numbers,
    raw,
    refusal,
    results,
)

OTHER = JobKey("", "nightly")


@pytest.fixture
def open_jobs(tmp_path: Path, driver: Any) -> Iterator[Callable[..., JobStore]]:
    opened = []
    seconds = itertools.count(1000)

    def open_one(**options: Any) -> JobStore:
        options = {"driver": driver, "now": lambda: float(next(seconds)), **options}
        opened.append(JobStore.open(tmp_path, **options))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def jobs(open_jobs: Callable[..., JobStore]) -> JobStore:
    return open_jobs()


def test_a_job_from_its_creation_to_its_end(jobs: JobStore) -> None:
    job = jobs.create(NewJob(KEY, "by night", "ab" * 32, {"endpoint": "/v1/completions"}))
    assert (job.key, job.number, job.state, job.created_at) == (KEY, 1, JobState.RECEIVING, 1000.0)
    jobs.append_lines(KEY, [line(1), line(2)])
    assert jobs.append_lines(KEY, [line(4)]).num_lines == 3  # the third line is empty
    assert jobs.received(KEY).state is JobState.CHECKING
    assert jobs.refuse(KEY, [refusal(2)]).num_refused == 1
    assert jobs.set_state(KEY, JobState.WAITING).started_at is None
    assert jobs.set_state(KEY, JobState.RUNNING).started_at == 1003.0
    assert jobs.pending_lines(KEY) == [line(1), line(4)]
    assert jobs.answer(KEY, [answer(4)]).num_pending == 1
    assert jobs.pending_lines(KEY) == [line(1)]
    jobs.set_state(KEY, JobState.PAUSED)
    assert jobs.set_state(KEY, JobState.RUNNING).started_at == 1003.0
    jobs.answer(KEY, [answer(1, "si", JobUsage(1, 2, 3))])
    assert jobs.pending_lines(KEY) == []
    job = jobs.set_state(KEY, JobState.ENDED, JobOutcome.COMPLETED)
    assert (job.state, job.outcome, job.num_answered, job.num_refused) == (
        JobState.ENDED,
        JobOutcome.COMPLETED,
        2,
        1,
    )
    assert job.usage == JobUsage(101, 62, 10)
    assert job.ended_at == 1006.0
    assert results(jobs) == [(1, "si 1"), (2, "no 2"), (4, "yes 4")]
    assert results(jobs, which=ResultKind.ANSWERS) == [(1, "si 1"), (4, "yes 4")]
    assert results(jobs, which=ResultKind.ERRORS) == [(2, "no 2")]
    assert job.num_bytes == sum(len(line(n).text) for n in (1, 2, 4)) + len("si 1no 2yes 4")
    assert jobs.get(KEY) == job


TO_STATE = {
    JobState.RECEIVING: (),
    JobState.CHECKING: (JobState.CHECKING,),
    JobState.WAITING: (JobState.CHECKING, JobState.WAITING),
    JobState.RUNNING: (JobState.CHECKING, JobState.WAITING, JobState.RUNNING),
    JobState.PAUSED: (JobState.CHECKING, JobState.WAITING, JobState.PAUSED),
    JobState.ENDED: (JobState.CHECKING, JobState.ENDED),
}


def change(jobs: JobStore, state: JobState) -> JobState:
    outcome = JobOutcome.CANCELLED if state is JobState.ENDED else None
    return jobs.set_state(KEY, state, outcome).state


@pytest.mark.parametrize("before", JobState)
@pytest.mark.parametrize("after", JobState)
def test_only_legal_transitions_are_made(jobs: JobStore, before: JobState, after: JobState) -> None:
    jobs.create(NewJob(KEY))
    for state in TO_STATE[before]:
        change(jobs, state)
    if after is before or after in JOB_TRANSITIONS[before]:
        assert change(jobs, after) is after
    else:
        with pytest.raises(WrongJobState, match=f"is {before} and cannot become {after}"):
            change(jobs, after)
        assert jobs.get(KEY).state is before


def test_ending_a_job_again_changes_nothing(jobs: JobStore) -> None:
    create_waiting(jobs)
    first = jobs.set_state(KEY, JobState.ENDED, JobOutcome.FAILED, "no model")
    assert first.problem == "no model"
    assert jobs.set_state(KEY, JobState.ENDED, JobOutcome.CANCELLED) == first


def test_a_job_with_pending_lines_is_not_completed(jobs: JobStore) -> None:
    create_waiting(jobs, num_lines=2)
    jobs.answer(KEY, [answer(2)])
    with pytest.raises(WrongJobState, match="1 lines of job 'nightly' have no result"):
        jobs.set_state(KEY, JobState.ENDED, JobOutcome.COMPLETED)
    jobs.refuse(KEY, [refusal(1)])
    jobs.set_state(KEY, JobState.ENDED, JobOutcome.COMPLETED)


def test_a_line_keeps_its_first_result(jobs: JobStore) -> None:
    create_waiting(jobs)
    jobs.answer(KEY, [answer(1), answer(3)])
    job = jobs.answer(KEY, [answer(1, "other"), answer(2)])
    job = jobs.refuse(KEY, [refusal(3), refusal(4)])
    job = jobs.answer(KEY, [answer(4)])
    assert results(jobs) == [(1, "yes 1"), (2, "yes 2"), (3, "yes 3"), (4, "no 4")]
    assert (job.num_answered, job.num_refused, job.num_pending) == (3, 1, 1)
    assert job.usage == JobUsage(300, 180, 21)  # only of the kept results


def test_a_result_for_a_missing_line_raises_integrity_error(jobs: JobStore, driver: Any) -> None:
    create_waiting(jobs)
    with pytest.raises(driver.IntegrityError):
        jobs.answer(KEY, [answer(1), answer(6)])
    assert results(jobs) == []


def test_operations_that_the_jobs_state_forbids_are_refused(jobs: JobStore) -> None:
    jobs.create(NewJob(KEY))
    jobs.append_lines(KEY, [line(1)])
    with pytest.raises(WrongJobState, match="is receiving"):
        jobs.answer(KEY, [answer(1)])
    jobs.received(KEY)
    with pytest.raises(WrongJobState, match="is checking"):
        jobs.append_lines(KEY, [line(2)])
    jobs.set_state(KEY, JobState.WAITING)
    with pytest.raises(WrongJobState, match="is waiting"):
        jobs.name_lines(KEY, [(1, "a")])
    jobs.set_state(KEY, JobState.ENDED, JobOutcome.CANCELLED)
    inserts: list[Callable[[], object]] = [
        lambda: jobs.answer(KEY, [answer(1)]),
        lambda: jobs.refuse(KEY, [refusal(1)]),
    ]
    for insert in inserts:
        with pytest.raises(WrongJobState, match="is ended"):
            insert()
    assert results(jobs) == []
    with pytest.raises(WrongJobState):
        jobs.set_state(KEY, JobState.RUNNING)


def test_a_custom_id_belongs_to_the_first_line_that_has_it(jobs: JobStore) -> None:
    jobs.create(NewJob(KEY))
    jobs.append_lines(KEY, [line(number) for number in range(1, 7)])
    jobs.received(KEY)
    first = [(1, "a"), (2, "b"), (3, "a"), (4, "\ud800")]
    second = [(5, "b"), (6, "\ud800")]
    wanted = [Duplicate(3, "a", 1)], [Duplicate(5, "b", 2), Duplicate(6, "\ud800", 4)]
    assert (jobs.name_lines(KEY, first), jobs.name_lines(KEY, second)) == wanted
    assert (jobs.name_lines(KEY, first), jobs.name_lines(KEY, second)) == wanted


def test_two_tenants_may_use_the_same_job_id_separately(jobs: JobStore) -> None:
    create_waiting(jobs, KEY, 2)
    create_waiting(jobs, OTHER, 3)
    jobs.answer(OTHER, [answer(3)])
    assert numbers(jobs, KEY) == [1, 2]
    assert [job.key for job in jobs.list_jobs("acme")] == [KEY]
    assert [job.key for job in jobs.list_jobs("")] == [OTHER]
    assert [job.key for job in jobs.list_jobs()] == [KEY, OTHER]
    with pytest.raises(NotFound):
        jobs.get(JobKey("other", "nightly"))
    assert jobs.stored_bytes("acme") == jobs.get(KEY).num_bytes > 0
    assert jobs.stored_bytes("other") == 0
    jobs.delete(KEY)
    assert results(jobs, OTHER) == [(3, "yes 3")]
    assert jobs.stored_bytes("acme") == 0


def test_invalid_or_used_job_ids_are_refused(jobs: JobStore) -> None:
    for job_id in ("", "a/b", "a b", "x" * 129):
        with pytest.raises(InvalidArgument, match="job_id"):
            jobs.create(NewJob(JobKey("", job_id)))
    jobs.create(NewJob(JobKey("", "..")))  # the id is not used as a file name
    create_waiting(jobs)
    with pytest.raises(AlreadyExists, match="job 'nightly' already"):
        jobs.create(NewJob(KEY))
    assert numbers(jobs) == [1, 2, 3, 4, 5]


def test_jobs_are_listed_in_the_order_of_their_creation_also_after_a_restart(
    open_jobs: Callable[..., JobStore],
) -> None:
    jobs = open_jobs(now=lambda: 5.0)
    names = [f"j{(7 * number) % 20}" for number in range(20)]
    for name in names:
        create_waiting(jobs, JobKey("", name), 1)
    before = everything(jobs)
    jobs.close()
    jobs = open_jobs()
    assert [job.key.job_id for job in jobs.list_jobs()] == names
    assert everything(jobs) == before
    assert jobs.create(NewJob(KEY)).number == 21


def test_the_number_of_open_files_is_limited(jobs: JobStore) -> None:
    keys = [JobKey("", f"j{number}") for number in range(3 * OPEN_MAX)]
    for key in keys:
        create_waiting(jobs, key)
    for key in keys:
        jobs.answer(key, [answer(1)])
    assert len(jobs._open) == OPEN_MAX
    wal_files = [path for path in files(jobs.path.parent) if path.suffix == ".db-wal"]
    assert len(wal_files) == OPEN_MAX


def test_a_deleted_job_leaves_nothing_on_the_disk(jobs: JobStore, tmp_path: Path) -> None:
    secret = JobKey("", "SECRET-id")
    create_waiting(jobs, KEY, text="keep")
    jobs.create(NewJob(secret, "SECRET-name", "", {"x": "SECRET-option"}))
    jobs.append_lines(secret, [line(number, "SECRET-line" * 900) for number in range(1, 30)])
    jobs.received(secret)
    jobs.name_lines(secret, [(1, "SECRET-custom")])
    jobs.answer(secret, [answer(number, "SECRET-answer") for number in range(1, 20)])
    assert raw(tmp_path).count(b"SECRET") > 1000
    num_files = len(files(tmp_path))
    jobs.delete(secret)
    assert b"SECRET" not in raw(tmp_path)
    assert len(files(tmp_path)) == num_files - 3  # the database, -wal and -shm
    for call in (jobs.get, jobs.delete, jobs.pending_lines, jobs.results):
        with pytest.raises(NotFound, match="no job 'SECRET-id'"):
            call(secret)
    assert numbers(jobs) == [1, 2, 3, 4, 5]
    assert jobs.create(NewJob(secret)).num_lines == 0  # the id is free again


def test_old_jobs_are_forgotten_a_few_at_a_time(jobs: JobStore) -> None:
    keys = [JobKey("", f"j{number}") for number in range(4)]
    for key in keys:
        create_waiting(jobs, key, 1)
    ends = [
        jobs.set_state(key, JobState.ENDED, JobOutcome.CANCELLED).ended_at or 0.0
        for key in keys[:3]
    ]
    assert jobs.forget_older(ends[0]) == []
    assert jobs.forget_older(ends[2] + 1, limit=2) == keys[:2]
    assert jobs.forget_older(ends[2] + 1) == [keys[2]]
    assert [job.key for job in jobs.list_jobs()] == [keys[3]]


def test_pages_are_limited_by_bytes_and_skip_nothing(jobs: JobStore) -> None:
    large = b"x" * 600_000
    jobs.create(NewJob(KEY))
    jobs.append_lines(KEY, [JobLine(number, large) for number in range(1, 4)])
    jobs.append_lines(KEY, [JobLine(4, large * 3), line(5)])
    jobs.received(KEY)
    assert [each.number for each in jobs.pending_lines(KEY)] == [1]
    assert [each.number for each in jobs.pending_lines(KEY, after=3)] == [4]
    assert numbers(jobs) == [1, 2, 3, 4, 5]
    jobs.answer(KEY, [NewAnswer(number, large, JobUsage()) for number in range(1, 6)])
    assert [each.line for each in jobs.results(KEY)] == [1]
    assert [number for number, _ in results(jobs)] == [1, 2, 3, 4, 5]


def test_fifty_thousand_lines_are_answered_in_chunks_out_of_order(jobs: JobStore) -> None:
    """Lines are read in pages of at most 1,000. Each line is answered once and read once."""
    num_lines = 50_000
    jobs.create(NewJob(KEY))
    for first in range(1, num_lines, 1000):
        jobs.append_lines(KEY, [line(number, "w" * 100) for number in range(first, first + 1000)])
    jobs.received(KEY)
    after = 0
    while page := jobs.pending_lines(KEY, after):
        assert jobs.name_lines(KEY, [(each.number, f"r{each.number}") for each in page]) == []
        assert len(page) == 1000
        after = page[-1].number
    jobs.set_state(KEY, JobState.WAITING)
    order = [1 + (number * 7919) % num_lines for number in range(num_lines)]
    for first in range(0, num_lines, 500):
        jobs.answer(KEY, [answer(number) for number in order[first : first + 500]])
        if first == num_lines // 2:
            assert len(jobs.pending_lines(KEY, limit=10)) == 10
    job = jobs.set_state(KEY, JobState.ENDED, JobOutcome.COMPLETED)
    assert (job.num_answered, job.usage.output_tokens) == (num_lines, 7 * num_lines)
    after = num_read = 0
    while found := jobs.results(KEY, after):
        num_read += len(found)
        assert [each.line for each in found] == list(range(after + 1, found[-1].line + 1))
        after = found[-1].line
    assert num_read == num_lines


def test_using_a_job_from_two_threads_at_once_raises_runtime_error(jobs: JobStore) -> None:
    create_waiting(jobs)
    with jobs._reading(KEY), pytest.raises(RuntimeError, match="the job is being used by another"):
        jobs.pending_lines(KEY)


def test_a_closed_store_opens_its_files_again(jobs: JobStore) -> None:
    create_waiting(jobs)
    jobs.close()
    jobs.close()
    jobs.answer(KEY, [answer(2)])
    assert results(jobs) == [(2, "yes 2")]


def test_all_lines_of_an_ended_job_stay_readable(jobs: JobStore) -> None:
    create_waiting(jobs, num_lines=5)
    jobs.answer(KEY, [answer(2)])
    jobs.set_state(KEY, JobState.ENDED, JobOutcome.CANCELLED)
    found: list[JobLine] = []
    while page := jobs.lines(KEY, found[-1].number if found else 0, limit=2):
        found += page
    assert found == [line(number) for number in range(1, 6)]


def test_result_bytes_equals_the_size_of_the_result_files(jobs: JobStore) -> None:
    create_waiting(jobs, num_lines=5)
    assert jobs.result_bytes(KEY) == (0, 0)
    jobs.answer(KEY, [answer(1), answer(3, "ä")])
    jobs.refuse(KEY, [refusal(2)])
    assert jobs.result_bytes(KEY) == (len("yes 1\nä 3\n".encode()), len(b"no 2\n"))
