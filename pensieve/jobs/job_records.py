"""The frozen values that the store of batch jobs takes and returns.

A job is a file of requests, one in each *line*; lines are numbered as in the file, from 1 (an empty line
has a number and is not stored).  A line is *pending* until it has its *result*, once: an answer, or a refusal
that says what is wrong with it.
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
    """The states of a job; JOB_TRANSITIONS says which may follow which."""

    RECEIVING = "receiving"  # its lines are on their way
    CHECKING = "checking"  # all lines are there; each is looked at before anything is computed
    WAITING = "waiting"  # for its turn among the jobs
    RUNNING = "running"
    PAUSED = "paused"
    ENDED = "ended"


class JobOutcome(StrEnum):
    """How a job has ended."""

    COMPLETED = "completed"  # each line has its result, be it a refusal
    CANCELLED = "cancelled"  # what was answered before stays
    FAILED = "failed"  # `problem` says why
    CHECKED = "checked"  # no more was wanted than to see what is wrong with its lines


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
    saved_tokens: int = 0  # of them: not computed, because another request of the job had them
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to create.  `sha256` is that of the whole file, in hex; `options` are the service's."""

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
    outcome: JobOutcome | None  # once it has ended
    problem: str
    num_lines: int
    num_answered: int
    num_refused: int
    usage: JobUsage
    num_bytes: int  # of lines and results
    created_at: float
    started_at: float | None  # when it ran first
    ended_at: float | None

    @property
    def num_pending(self) -> int:
        return self.num_lines - self.num_answered - self.num_refused


class JobLine(NamedTuple):
    """A line as it is in the file, without its line break."""

    number: int
    text: bytes


class NewAnswer(NamedTuple):
    """The answer of a line, as it will be in the file of answers, with or without its line break."""

    line: int
    text: bytes
    usage: JobUsage


class NewRefusal(NamedTuple):
    """What is wrong with a line, as it will be in the file of errors; likewise."""

    line: int
    text: bytes


class Result(NamedTuple):
    """The result of a line."""

    line: int
    text: bytes
    is_answer: bool


class ResultBytes(NamedTuple):
    """What the results of a job take as files, with a line break behind each."""

    answers: int
    errors: int


class Duplicate(NamedTuple):
    """A line whose custom_id an earlier line has."""

    line: int
    custom_id: str
    first_line: int


class ResultKind(StrEnum):
    """Of the results of a job."""

    ALL = "all"
    ANSWERS = "answers"
    ERRORS = "errors"
