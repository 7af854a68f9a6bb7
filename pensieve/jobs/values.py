"""The values that a daemon's jobs exchange with their clients.

A job of another tenant counts as missing, so the error is NotFound. The error WrongJobState means that the
job's state does not allow the operation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pensieve.jobs.job_records import JobLine, JobOutcome, JobState, Result, ResultBytes, ResultKind


@dataclass(frozen=True, slots=True)
class JobHeader:
    """The description of a new job. `sha256` (hexadecimal) and `num_bytes` of the file are optional."""

    job_id: str
    name: str = ""
    sha256: str = ""
    num_bytes: int = 0
    endpoint: str = ""  # the url that each line must have; empty: any
    check_only: bool = False  # ends after its lines were checked, with the outcome `checked`
    details: Mapping[str, Any] = field(default_factory=dict)  # stored with the job for its client


@dataclass(frozen=True, slots=True)
class JobView:
    """A job at one moment."""

    job_id: str
    tenant: str
    number: int  # in the order of creation
    name: str
    sha256: str  # of the uploaded file
    num_bytes: int
    endpoint: str
    check_only: bool
    state: JobState
    outcome: JobOutcome | None  # set when it has ended
    problem: str  # one line
    num_lines: int
    num_answered: int
    num_refused: int
    num_running: int
    prompt_tokens: int
    saved_tokens: int
    output_tokens: int
    tokens_per_second: float
    seconds_left: float | None  # None if unknown
    created_at: float
    started_at: float | None
    ended_at: float | None
    details: Mapping[str, Any] = field(default_factory=dict)  # as given when it was created
    home: str = ""  # address of the daemon that has it; empty: this daemon


class DaemonJobs(Protocol):
    """The jobs of a daemon."""

    async def create(self, tenant: str, header: JobHeader, chunks: AsyncIterator[bytes]) -> JobView:
        """Store a job. All its lines are stored when this returns.

        If `chunks` raises or the call is cancelled, no job is stored. If the tenant has a job with this id,
        AlreadyExists is raised before any chunk is read.
        """
        ...

    async def get(self, tenant: str, job_id: str) -> JobView: ...

    async def list(self, tenant: str | None) -> Sequence[JobView]:
        """Return the jobs of a tenant, or of all tenants, in any order."""
        ...

    async def pause(self, tenant: str, job_id: str) -> JobView: ...

    async def resume(self, tenant: str, job_id: str) -> JobView: ...

    async def cancel(self, tenant: str, job_id: str) -> JobView: ...

    async def delete(self, tenant: str, job_id: str) -> None: ...

    def results(
        self, tenant: str, job_id: str, kind: ResultKind, after: int
    ) -> AsyncIterator[Sequence[Result]]:
        """Yield the existing results of lines after `after`, in order, in pages of about 1 MiB."""
        ...

    def lines(self, tenant: str, job_id: str) -> AsyncIterator[Sequence[JobLine]]:
        """Yield the lines of a job's file, in order, in pages of about 1 MiB."""
        ...

    async def result_bytes(self, tenant: str, job_id: str) -> ResultBytes:
        """Return the current sizes of the result files."""
        ...

    def watch(self, tenant: str, job_id: str) -> AsyncIterator[JobView]:
        """Yield the job's state now and after changes, at most once a second, until the job has ended.

        Raises NotFound if the job is deleted meanwhile.
        """
        ...
