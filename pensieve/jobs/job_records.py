"""The frozen values that the store of batch jobs takes and returns.

A job is a file of requests, one per *line*. Lines are numbered as in the file, from 1. An empty line has a
number and is not stored. A line is *pending* until it has its *result*: an answer, or a refusal that says
what is wrong with the line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class JobKey(NamedTuple):
    """A job of a tenant; another tenant may use the same id."""

    tenant: str
    job_id: str


class JobState(StrEnum):
    """The states of a job. JOB_TRANSITIONS lists the allowed changes."""

    RECEIVING = "receiving"  # its file is being uploaded
    CHECKING = "checking"  # its lines are checked before anything is computed
    WAITING = "waiting"  # waits in the queue of jobs
    RUNNING = "running"
    PAUSED = "paused"
    ENDED = "ended"


class JobOutcome(StrEnum):
    """How a job has ended."""

    COMPLETED = "completed"  # each line has a result, perhaps a refusal
    CANCELLED = "cancelled"  # existing answers stay
    FAILED = "failed"  # `problem` says why
    CHECKED = "checked"  # only a check of its lines was requested


JOB_TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.RECEIVING: frozenset({JobState.CHECKING}),
    JobState.CHECKING: frozenset({JobState.WAITING, JobState.ENDED}),
    JobState.WAITING: frozenset({JobState.RUNNING, JobState.PAUSED, JobState.ENDED}),
    JobState.RUNNING: frozenset({JobState.WAITING, JobState.PAUSED, JobState.ENDED}),
    JobState.PAUSED: frozenset({JobState.WAITING, JobState.RUNNING, JobState.ENDED}),
    JobState.ENDED: frozenset(),
}


class JobUsage(NamedTuple):
    """Tokens of answered lines."""

    prompt_tokens: int = 0
    # Tokens that were not computed, because another request of the job had the same tokens.
    saved_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to create. `sha256` is the hash of the whole file, in hex.

    The store keeps `options`, but does not interpret them.
    """

    key: JobKey
    name: str = ""
    sha256: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A stored job without its lines."""

    key: JobKey
    number: int  # in the order of creation
    name: str
    sha256: str
    options: dict[str, Any]
    state: JobState
    outcome: JobOutcome | None  # set when it has ended
    problem: str
    num_lines: int
    num_answered: int
    num_refused: int
    usage: JobUsage
    num_bytes: int  # size of lines and results
    created_at: float
    started_at: float | None  # when it first ran
    ended_at: float | None

    @property
    def num_pending(self) -> int:
        return self.num_lines - self.num_answered - self.num_refused


class JobLine(NamedTuple):
    """A line of the file, without its line break."""

    number: int
    text: bytes


class NewAnswer(NamedTuple):
    """The answer of a line, as in the file of answers, with or without its line break."""

    line: int
    text: bytes
    usage: JobUsage


class NewRefusal(NamedTuple):
    """The error of a line, as in the file of errors, with or without its line break."""

    line: int
    text: bytes


class Result(NamedTuple):
    """The result of a line."""

    line: int
    text: bytes
    is_answer: bool


class ResultBytes(NamedTuple):
    """The sizes of a job's result files, with a line break after each result."""

    answers: int
    errors: int


class Duplicate(NamedTuple):
    """A line with the custom_id of an earlier line."""

    line: int
    custom_id: str
    first_line: int


class ResultKind(StrEnum):
    """A kind of results."""

    ALL = "all"
    ANSWERS = "answers"
    ERRORS = "errors"
