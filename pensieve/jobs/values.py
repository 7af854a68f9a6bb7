"""The values that the jobs of a daemon exchange with their clients.

A job of another tenant does not exist: NotFound. WrongJobState: the job's state does not allow the operation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pensieve.jobs.job_records import JobLine, JobOutcome, JobState, Result, ResultBytes, ResultKind


@dataclass(frozen=True, slots=True)
class JobHeader:
    """`sha256` (hexadecimal) and `num_bytes` are those of the file; empty and 0: the client has not said."""

    job_id: str
    name: str = ""
    sha256: str = ""
    num_bytes: int = 0
    endpoint: str = ""  # the url that each line must have
    check_only: bool = False  # ends when its lines were checked, with the outcome `checked`
    details: Mapping[str, Any] = field(default_factory=dict)  # kept with the job for its client


@dataclass(frozen=True, slots=True)
class JobView:
    """A job at one moment."""

    job_id: str
    tenant: str
    number: int  # in the order of creation
    name: str
    sha256: str  # of what has arrived
    num_bytes: int
    endpoint: str
    check_only: bool
    state: JobState
    outcome: JobOutcome | None  # once it has ended
    problem: str  # one line
    num_lines: int
    num_answered: int
    num_refused: int
    num_running: int
    prompt_tokens: int
    saved_tokens: int
    output_tokens: int
    tokens_per_second: float
    seconds_left: float | None  # None: nobody can say
    created_at: float
    started_at: float | None
    ended_at: float | None
    details: Mapping[str, Any] = field(default_factory=dict)  # that it was created with
    home: str = ""  # the address of the daemon that has it; empty: this one


class DaemonJobs(Protocol):
    """The jobs of a daemon."""

    async def create(self, tenant: str, header: JobHeader, chunks: AsyncIterator[bytes]) -> JobView:
        """Store a job, whose lines are all there when this returns.

        An error of the chunks, or a cancellation, leaves no job.  AlreadyExists, before a chunk is read, if
        the tenant has a job of this id.
        """
        ...

    async def get(self, tenant: str, job_id: str) -> JobView: ...

    async def list(self, tenant: str | None) -> Sequence[JobView]:
        """Those of a tenant, or of all; in any order."""
        ...

    async def pause(self, tenant: str, job_id: str) -> JobView: ...

    async def resume(self, tenant: str, job_id: str) -> JobView: ...

    async def cancel(self, tenant: str, job_id: str) -> JobView: ...

    async def delete(self, tenant: str, job_id: str) -> None: ...

    def results(
        self, tenant: str, job_id: str, which: ResultKind, after: int
    ) -> AsyncIterator[Sequence[Result]]:
        """The results of lines behind `after` that there are by now, in order, in pages of about a MiB."""
        ...

    def lines(self, tenant: str, job_id: str) -> AsyncIterator[Sequence[JobLine]]:
        """The lines that a job was created with, in order, in pages of about a MiB."""
        ...

    async def result_bytes(self, tenant: str, job_id: str) -> ResultBytes:
        """How long its results are by now, as files."""
        ...

    def watch(self, tenant: str, job_id: str) -> AsyncIterator[JobView]:
        """The job now and when it has changed, about once a second at most; its end is the last view.

        NotFound if it is deleted meanwhile.
        """
        ...
