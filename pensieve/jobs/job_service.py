"""The gRPC JobService: each method converts the request, calls the daemon's jobs, and converts the result.

A caller sees only the jobs of its tenant. An operator may name another tenant; the audit log records such
calls. The number of watchers is limited, and a reader that reads nothing for `stall_seconds` is dropped.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import fields
from typing import Any

from pensieve.api.grpc.forwarding import Forwarder, ForwardingMethods, GrpcMethod, is_forwarded
from pensieve.api.grpc.translate import page_of, timestamp
from pensieve.errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from pensieve.guard.callers import caller
from pensieve.guard.limits import Watchers, write_within
from pensieve.jobs.job_homes import JobLists
from pensieve.jobs.job_records import JobOutcome, JobState, Result, ResultKind
from pensieve.jobs.values import DaemonJobs, JobHeader, JobView
from pensieve.store.records import ID_PATTERN, check_id
from pensieve.v1 import jobs_pb2 as pb
from pensieve.v1 import jobs_pb2_grpc

NAME_BYTES_MAX = 256
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
CHUNK_BYTES = 256 << 10  # per piece of results
WATCHERS_MAX = 256  # per tenant
WATCHERS_OF_ALL_MAX = 1024
STATES = {
    JobState.RECEIVING: pb.JOB_STATE_RECEIVING,
    JobState.CHECKING: pb.JOB_STATE_CHECKING,
    JobState.WAITING: pb.JOB_STATE_WAITING,
    JobState.RUNNING: pb.JOB_STATE_RUNNING,
    JobState.PAUSED: pb.JOB_STATE_PAUSED,
    JobState.ENDED: pb.JOB_STATE_ENDED,
}
OUTCOMES = {
    None: pb.JOB_OUTCOME_UNSPECIFIED,
    JobOutcome.COMPLETED: pb.JOB_OUTCOME_COMPLETED,
    JobOutcome.CANCELLED: pb.JOB_OUTCOME_CANCELLED,
    JobOutcome.FAILED: pb.JOB_OUTCOME_FAILED,
    JobOutcome.CHECKED: pb.JOB_OUTCOME_CHECKED,
}
KINDS = {
    pb.RESULT_KIND_UNSPECIFIED: ResultKind.ALL,
    pb.RESULT_KIND_ANSWERS: ResultKind.ANSWERS,
    pb.RESULT_KIND_ERRORS: ResultKind.ERRORS,
}


WIRE_NAMES = {each.name for each in pb.Job.DESCRIPTOR.fields} - {"state", "outcome"}
SAME_NAMES = [each.name for each in fields(JobView) if each.name in WIRE_NAMES]


JOBS = "pensieve.v1.JobService"
FORWARDED_METHODS = (
    GrpcMethod(JOBS, "GetJob", pb.GetJobResponse, may_repeat=True),
    GrpcMethod(JOBS, "PauseJob", pb.PauseJobResponse, may_repeat=True),
    GrpcMethod(JOBS, "ResumeJob", pb.ResumeJobResponse, may_repeat=True),
    GrpcMethod(JOBS, "CancelJob", pb.CancelJobResponse, may_repeat=True),
    GrpcMethod(JOBS, "DeleteJob", pb.DeleteJobResponse),
    GrpcMethod(JOBS, "GetResults", pb.GetResultsResponse, is_stream=True, may_repeat=True),
    GrpcMethod(JOBS, "WatchJob", pb.WatchJobResponse, is_stream=True, may_repeat=True),
)


class JobService(jobs_pb2_grpc.JobServiceServicer):
    def __init__(
        self, jobs: DaemonJobs | None, stall_seconds: float, lists: JobLists | None = None
    ) -> None:
        """`jobs`: None if this daemon takes none. `lists`: None if no other daemon shares the history."""
        self._jobs_or_none, self._lists = jobs, lists
        self._stall_seconds = stall_seconds
        self._watchers = Watchers(WATCHERS_MAX, WATCHERS_OF_ALL_MAX)

    @property
    def _jobs(self) -> DaemonJobs:
        if self._jobs_or_none is None:
            raise NotFound("this daemon does not run batch jobs")
        return self._jobs_or_none

    async def CreateJob(
        self, requests: AsyncIterator[pb.CreateJobRequest], context: Any
    ) -> pb.CreateJobResponse:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidArgument("header", "is missing: it must come in the first message")
        created = await self._jobs.create(caller().tenant, _header(first.header), _chunks(requests))
        return pb.CreateJobResponse(job=_job(created))

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        return pb.GetJobResponse(job=_job(await self._jobs.get(*_key(request))))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        size, before = page_of(request)
        by = caller()
        if request.all_tenants and not by.admin:
            raise PermissionDenied("only an operator may list the jobs of all tenants")
        tenant = None if request.all_tenants else by.tenant
        if self._lists is None or is_forwarded(context):
            found = await self._jobs.list(tenant)
        else:
            found = await self._lists.all(tenant, context.invocation_metadata() or ())
        remaining = [each for each in found if not before or each.number < before]
        remaining.sort(key=lambda each: -each.number)
        page = pb.ListJobsResponse(jobs=map(_job, remaining[:size]))
        if len(remaining) > size:
            page.next_page_token = str(remaining[size - 1].number)
        return page

    async def PauseJob(self, request: pb.PauseJobRequest, context: Any) -> pb.PauseJobResponse:
        return pb.PauseJobResponse(job=_job(await self._jobs.pause(*_key(request))))

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Any) -> pb.ResumeJobResponse:
        return pb.ResumeJobResponse(job=_job(await self._jobs.resume(*_key(request))))

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> pb.CancelJobResponse:
        return pb.CancelJobResponse(job=_job(await self._jobs.cancel(*_key(request))))

    async def DeleteJob(self, request: pb.DeleteJobRequest, context: Any) -> pb.DeleteJobResponse:
        await self._jobs.delete(*_key(request))
        return pb.DeleteJobResponse()

    async def GetResults(  # type: ignore[override]  # it writes to the context instead of yielding
        self, request: pb.GetResultsRequest, context: Any
    ) -> None:
        kind = KINDS.get(request.kind)
        if kind is None:
            raise InvalidArgument("kind", "is unknown to this server")
        if request.after_line < 0:
            raise InvalidArgument("after_line", "must not be negative")
        last_line = request.after_line
        async for page in self._jobs.results(*_key(request), kind, last_line):
            for piece in _pieces(page, last_line):
                await write_within(self._stall_seconds, context.write(piece))
                last_line = piece.last_line

    async def WatchJob(  # type: ignore[override]  # it writes to the context instead of yielding
        self, request: pb.WatchJobRequest, context: Any
    ) -> None:
        views = self._jobs.watch(*_key(request))
        with self._watchers.enter(caller().tenant):
            async for view in views:
                response = pb.WatchJobResponse(job=_job(view))
                await write_within(self._stall_seconds, context.write(response))


class ForwardingJobService(ForwardingMethods, JobService):
    """The JobService of a daemon that shares its history with others."""

    def __init__(
        self, jobs: DaemonJobs | None, stall_seconds: float, lists: JobLists, forwarder: Forwarder
    ) -> None:
        JobService.__init__(self, jobs, stall_seconds, lists)
        ForwardingMethods.__init__(self, forwarder, FORWARDED_METHODS)


def _key(request: Any) -> tuple[str, str]:
    """Return the tenant and the id of the requested job. Raises NotFound for an impossible id."""
    by = caller()
    if request.tenant and request.tenant != by.tenant and not by.admin:
        raise PermissionDenied("only an operator may name another tenant")
    if not request.job_id:
        raise InvalidArgument("job_id", "is missing")
    if not ID_PATTERN.fullmatch(request.job_id):
        raise NotFound("there is no such job")
    return request.tenant or by.tenant, request.job_id


def _header(header: pb.JobHeader) -> JobHeader:
    job_id = header.job_id or secrets.token_urlsafe(12).replace("-", "~")
    check_id("job_id", job_id)
    if len(header.name.encode()) > NAME_BYTES_MAX:
        raise InvalidArgument("name", f"is longer than {NAME_BYTES_MAX} bytes")
    if header.sha256 and not SHA256_PATTERN.fullmatch(header.sha256):
        raise InvalidArgument("sha256", "is not 64 hexadecimal digits")
    if header.num_bytes < 0:
        raise InvalidArgument("num_bytes", "must not be negative")
    return JobHeader(
        job_id, header.name, header.sha256, header.num_bytes, header.endpoint, header.check_only
    )


async def _chunks(requests: AsyncIterator[pb.CreateJobRequest]) -> AsyncIterator[bytes]:
    """Yield the chunks of a file. Raises if the file is incomplete, usually because the client is gone."""
    async for each in requests:
        part = each.WhichOneof("part")
        if part == "complete":
            return
        if part != "chunk":
            raise InvalidArgument(
                "chunk", "is missing: it must be in each message after the header"
            )
        if each.chunk:
            yield each.chunk
    raise InvalidArgument("complete", "is missing: the file may be incomplete")


def _pieces(page: Sequence[Result], last_line: int) -> Iterator[pb.GetResultsResponse]:
    """Yield the results of a page as lines, in pieces of about CHUNK_BYTES, starting after `last_line`."""
    piece = pb.GetResultsResponse(last_line=last_line)
    for result in page:
        text = result.text.removesuffix(b"\n") + b"\n"
        for first in range(0, len(text), CHUNK_BYTES):
            if len(piece.chunk) >= CHUNK_BYTES:
                yield piece
                piece = pb.GetResultsResponse(last_line=piece.last_line)
            piece.chunk += text[first : first + CHUNK_BYTES]
        piece.last_line = result.line
    yield piece


def _job(view: JobView) -> pb.Job:
    job = pb.Job(
        state=STATES[view.state],
        outcome=OUTCOMES[view.outcome],
        create_time=timestamp(view.created_at),
        **{name: getattr(view, name) for name in SAME_NAMES},
    )
    if view.started_at is not None:
        job.start_time.CopyFrom(timestamp(view.started_at))
    if view.ended_at is not None:
        job.end_time.CopyFrom(timestamp(view.ended_at))
    return job
