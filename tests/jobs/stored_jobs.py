"""Shortcuts for batch jobs, for tests whose subject is something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pensieve.jobs.job_records import (
    JobKey,
    JobLine,
    JobState,
    JobUsage,
    NewAnswer,
    NewJob,
    NewRefusal,
    ResultKind,
    StoredJob,
)
from pensieve.jobs.job_store import JobStore
from pensieve.store.folder import JOBS_NAME

KEY = JobKey("acme", "nightly")
OTHER = JobKey("", "other")
USAGE = JobUsage(100, 60, 7)


def line(number: int, text: str = "") -> JobLine:
    return JobLine(number, json.dumps({"custom_id": f"r{number}", "q": text}).encode())


def answer(number: int, text: str = "yes", usage: JobUsage = USAGE) -> NewAnswer:
    return NewAnswer(number, f"{text} {number}".encode(), usage)


def refusal(number: int, text: str = "no") -> NewRefusal:
    return NewRefusal(number, f"{text} {number}".encode())


def create_waiting(
    store: JobStore, key: JobKey = KEY, num_lines: int = 5, text: str = ""
) -> StoredJob:
    """Create a waiting job."""
    store.create(NewJob(key, "by night", "ab" * 32, {"endpoint": ""}))
    store.append_lines(key, [line(number, text) for number in range(1, num_lines + 1)])
    store.received(key)
    return store.set_state(key, JobState.WAITING)


def numbers(store: JobStore, key: JobKey = KEY) -> list[int]:
    """Return the numbers of the pending lines, read in pages of two."""
    found: list[int] = []
    while page := store.pending_lines(key, found[-1] if found else 0, limit=2):
        found += [each.number for each in page]
    return found


def results(
    store: JobStore, key: JobKey = KEY, which: ResultKind = ResultKind.ALL
) -> list[tuple[int, str]]:
    """Return all results, read in pages of two."""
    found: list[tuple[int, str]] = []
    while page := store.results(key, found[-1][0] if found else 0, 2, which):
        found += [(each.line, each.text.decode()) for each in page]
    return found


def everything(store: JobStore) -> Any:
    """Return everything visible of all jobs, except times."""
    return [
        (
            job.key,
            job.state,
            job.outcome,
            numbers(store, job.key),
            results(store, job.key),
            job.usage,
        )
        for job in store.list_jobs()
    ]


def files(folder: Path) -> list[Path]:
    return sorted((folder / JOBS_NAME).iterdir())


def raw(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in files(folder))
