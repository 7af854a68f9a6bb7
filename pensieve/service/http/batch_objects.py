"""Jobs as the batches and files of OpenAI's API.

    file-ID            a file that was uploaded: a job whose lines are only checked (`is_file`)
    batch_ID           any other job, however it was created
    file-input.JOB     the lines of a job that was created without an uploaded file
    file-output.JOB    its answers, and file-errors.JOB its refusals: as many as there are by now

A job that is an upload has an id of hexadecimal digits behind `file-`, so no id stands for two things.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from pensieve.service.jobs.values import JobView
from pensieve.store.job_records import JobOutcome, JobState

UPLOADED = re.compile(r"file-[0-9a-f]{24}")
STATUSES = {
    JobState.RECEIVING: "validating",
    JobState.CHECKING: "validating",
    JobState.WAITING: "in_progress",
    JobState.RUNNING: "in_progress",
    JobState.PAUSED: "in_progress",
}
OUTCOMES = {
    JobOutcome.COMPLETED: "completed",
    JobOutcome.CHECKED: "completed",
    JobOutcome.CANCELLED: "cancelled",
    JobOutcome.FAILED: "failed",
}


class Content(StrEnum):
    """What of a job a file holds."""

    UPLOAD = "upload"
    INPUT = "input"
    OUTPUT = "output"
    ERRORS = "errors"


class FileId(NamedTuple):
    """Which job a file belongs to, and what of it."""

    content: Content
    job_id: str

    def __str__(self) -> str:
        if self.content is Content.UPLOAD:
            return self.job_id
        return f"file-{self.content}.{self.job_id}"


def file_id_of(text: str) -> FileId | None:
    """None: no file is called so."""
    if UPLOADED.fullmatch(text):
        return FileId(Content.UPLOAD, text)
    kind, _, job_id = text.removeprefix("file-").partition(".")
    if text.startswith("file-") and job_id and kind in ("input", "output", "errors"):
        return FileId(Content(kind), job_id)
    return None


def is_file(view: JobView) -> bool:
    """Whether a job is there for its file alone."""
    return view.check_only and UPLOADED.fullmatch(view.job_id) is not None


def result_files(view: JobView) -> list[FileId]:
    """Those that a batch has come to, once it has ended."""
    if view.state is not JobState.ENDED:
        return []
    counts = {Content.OUTPUT: view.num_answered, Content.ERRORS: view.num_refused}
    return [FileId(content, view.job_id) for content, count in counts.items() if count]


def file_object(view: JobView, file_id: FileId, num_bytes: int) -> dict[str, Any]:
    is_result = file_id.content in (Content.OUTPUT, Content.ERRORS)
    created_at = view.ended_at if is_result and view.ended_at is not None else view.created_at
    name = f"{view.job_id}_{file_id.content}.jsonl" if is_result else view.name
    return {
        "id": str(file_id),
        "object": "file",
        "bytes": num_bytes,
        "created_at": int(created_at),
        "filename": name,
        "purpose": "batch_output" if is_result else "batch",
        "status": "processed",
        "status_details": _status_details(view) if file_id.content is Content.UPLOAD else None,
        "expires_at": None,
    }


def _status_details(view: JobView) -> str | None:
    if not view.num_refused:
        return None
    return f"{view.num_refused:,} of {view.num_lines:,} requests cannot be answered"


def batch_object(view: JobView) -> dict[str, Any]:
    files = {each.content: str(each) for each in result_files(view)}
    given = view.details.get("input_file_id")
    ended_at = None if view.ended_at is None else int(view.ended_at)
    status = STATUSES[view.state] if view.outcome is None else OUTCOMES[view.outcome]
    ended = {f"{each}_at": ended_at if status == each else None for each in OUTCOMES.values()}
    return {
        "id": view.job_id,
        "object": "batch",
        "endpoint": view.endpoint,
        "model": None,
        "errors": _errors(view) if status == "failed" else None,
        "input_file_id": given or str(FileId(Content.INPUT, view.job_id)),
        "completion_window": "24h",
        "status": status,
        "output_file_id": files.get(Content.OUTPUT),
        "error_file_id": files.get(Content.ERRORS),
        "created_at": int(view.created_at),
        "in_progress_at": None if view.started_at is None else int(view.started_at),
        **ended,
        "expires_at": None,
        "expired_at": None,
        "finalizing_at": None,
        "cancelling_at": ended["cancelled_at"],
        "request_counts": {
            "total": view.num_lines,
            "completed": view.num_answered,
            "failed": view.num_refused,
        },
        "usage": {
            "input_tokens": view.prompt_tokens,
            "input_tokens_details": {"cached_tokens": view.saved_tokens},
            "output_tokens": view.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},  # of jobs they are not counted apart
            "total_tokens": view.prompt_tokens + view.output_tokens,
        },
        "metadata": view.details.get("metadata"),
    }


def _errors(view: JobView) -> dict[str, Any]:
    error = {"code": "job_failed", "message": view.problem, "line": None, "param": None}
    return {"object": "list", "data": [error]}


def listed(data: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
