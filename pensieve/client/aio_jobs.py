"""Batch jobs for asyncio: `AsyncJobs`. jobs.py is generated from this file (see aio.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypedDict

from pensieve.client.aio_base_client import AsyncBaseClient
from pensieve.client.requests import JobSource, JobUpload, check_id, check_text
from pensieve.client.retry import Deadline, Tries
from pensieve.client.values import RESULT_KINDS, Job, job_of
from pensieve.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    PensieveError,
    Unavailable,
)
from pensieve.v1 import jobs_pb2 as pb


class AsyncJobs:
    """The batch jobs of a client's tenant: `client.jobs`.

    A job is a file of requests in OpenAI's Batch format, one JSON object per line. The daemon runs it in the
    background, with a lower priority than conversations. The job continues if its client disconnects. Each
    line gets exactly one result, an answer or an error, even if the daemon crashes.

        job = await client.jobs.create("requests.jsonl", job_id="nightly")
        async for job in client.jobs.watch("nightly"):
            print(job.num_answered, "of", job.num_lines)
        async for line in client.jobs.results("nightly"):
            print(json.loads(line)["custom_id"])

    Each method takes a `timeout` in seconds, retries included; None uses the client's default. The client
    retries all methods except `delete` while the server is unavailable. A broken stream continues where it
    broke. An operator may pass the `tenant` of a job; by default, it is the tenant of the client.
    """

    def __init__(self, client: AsyncBaseClient) -> None:
        self._client = client

    async def create(
        self,
        source: JobSource,
        *,
        job_id: str | None = None,
        name: str = "",
        endpoint: str = "",
        check_only: bool = False,
        timeout: float | None = None,
    ) -> Job:
        """Upload a file of requests and return the stored job.

        Args:
            source: the path of the file, its bytes, or an iterable of its pieces. If the connection breaks,
                a file or bytes are sent again to the same daemon, which stores only one job. The pieces of
                an iterable are not sent again.
            job_id: the id of the job; random by default.
            name: a name for people.
            endpoint: the `url` that each line must have, such as "/v1/chat/completions". By default, the
                lines may have different urls.
            check_only: only check the lines for errors; compute nothing.

        Raises:
            AlreadyExists: a job with this id exists.
        """
        upload = JobUpload(source, job_id, name, endpoint, check_only)
        connection, deadline = self._client._connection, self._deadline(timeout)
        tries, was_sent = Tries(self._client.retry, deadline), False
        route = connection.route(upload.header.job_id)
        while True:
            try:
                created = await connection.send_all(
                    lambda link: link.jobs_stub.CreateJob, upload.messages(), deadline, route
                )
                return job_of(created.job)
            except PensieveError as error:
                if upload.error is not None:
                    raise upload.error from None
                failure = error
            if was_sent and isinstance(failure, AlreadyExists):
                route.answered()
                stored = await self._stored_job(upload.header.job_id)
                if stored is not None and stored.state != "receiving":
                    if stored.sha256 == upload.header.sha256:
                        return stored
                    raise failure
                failure = Unavailable("the server is still receiving an earlier try of this upload")
            has_next_address = route.try_next_address(failure, repeat=False)
            if not upload.can_repeat:
                raise route.explained(failure)
            if not isinstance(failure, Unavailable) or failure.may_have_arrived:
                was_sent = True
                route.stay()  # otherwise two daemons might compute the job
            if not has_next_address:
                await self._client._sleep(tries.pause(route.explained(failure)))
                route.begin_round()

    async def _stored_job(self, job_id: str) -> Job | None:
        """Return the job. None if the daemon has discarded the incomplete upload of an earlier try."""
        try:
            return await self.get(job_id)
        except NotFound:
            return None

    async def get(self, job_id: str, *, tenant: str = "", timeout: float | None = None) -> Job:
        """Return the current state of the job.

        Raises:
            NotFound: there is no such job.
        """
        request = pb.GetJobRequest(**_job_fields(job_id, tenant))
        answer = await self._client.call(
            lambda link: link.jobs_stub.GetJob, request, timeout, repeat=True
        )
        return job_of(answer.job)

    async def list(
        self, *, all_tenants: bool = False, timeout: float | None = None
    ) -> AsyncIterator[Job]:
        """Iterate over the jobs, newest first. Operators may list the jobs of `all_tenants`.

        `timeout` applies to each page that is fetched.
        """
        request = pb.ListJobsRequest(all_tenants=all_tenants)
        async for page in self._client.pages(
            lambda link: link.jobs_stub.ListJobs, request, timeout
        ):
            for each in page.jobs:
                yield job_of(each)

    async def pause(self, job_id: str, *, tenant: str = "", timeout: float | None = None) -> Job:
        """Start no more lines of the job until `resume`. Existing answers stay."""
        request = pb.PauseJobRequest(**_job_fields(job_id, tenant))
        answer = await self._client.call(
            lambda link: link.jobs_stub.PauseJob, request, timeout, repeat=True
        )
        return job_of(answer.job)

    async def resume(self, job_id: str, *, tenant: str = "", timeout: float | None = None) -> Job:
        """Put a paused job back into the queue of jobs."""
        request = pb.ResumeJobRequest(**_job_fields(job_id, tenant))
        answer = await self._client.call(
            lambda link: link.jobs_stub.ResumeJob, request, timeout, repeat=True
        )
        return job_of(answer.job)

    async def cancel(self, job_id: str, *, tenant: str = "", timeout: float | None = None) -> Job:
        """End the job permanently. Existing answers stay."""
        request = pb.CancelJobRequest(**_job_fields(job_id, tenant))
        answer = await self._client.call(
            lambda link: link.jobs_stub.CancelJob, request, timeout, repeat=True
        )
        return job_of(answer.job)

    async def delete(self, job_id: str, *, tenant: str = "", timeout: float | None = None) -> None:
        """Delete the job permanently, with its lines and results.

        Raises:
            NotFound: there is no such job.
        """
        request = pb.DeleteJobRequest(**_job_fields(job_id, tenant))
        await self._client.call(lambda link: link.jobs_stub.DeleteJob, request, timeout)

    async def results(
        self,
        job_id: str,
        kind: str = "all",
        *,
        after_line: int = 0,
        tenant: str = "",
        timeout: float | None = None,
    ) -> AsyncIterator[bytes]:
        """Iterate over the results so far, in the order of the lines. Each result is one line of JSON.

        Args:
            kind: "all", "answers" or "errors".
            after_line: skip the results of the lines up to this line number of the file.
        """
        if kind not in RESULT_KINDS:
            raise InvalidArgument("kind", f"must be one of {', '.join(RESULT_KINDS)}")
        request = pb.GetResultsRequest(
            **_job_fields(job_id, tenant), kind=RESULT_KINDS[kind], after_line=after_line
        )
        connection, deadline = self._client._connection, self._deadline(timeout)
        tries, route = Tries(self._client.retry, deadline), connection.route(job_id)
        while True:
            stream = await connection.stream(
                lambda link: link.jobs_stub.GetResults, request, deadline, route
            )
            partial_line = b""  # the beginning of an incomplete line
            try:
                while (piece := await stream.read()) is not None:
                    *lines, partial_line = (partial_line + piece.chunk).split(b"\n")
                    for line in lines:
                        yield line
                        tries.made_progress()
                    request.after_line = piece.last_line
                return
            except PensieveError as error:
                failure = error
            finally:
                stream.cancel()
            if not route.try_next_address(failure):
                await self._client._sleep(tries.pause(route.explained(failure)))
                route.begin_round()

    async def watch(
        self, job_id: str, *, tenant: str = "", timeout: float | None = None
    ) -> AsyncIterator[Job]:
        """Iterate over the job's state until the job ends. There is about one update per second.

        Raises:
            NotFound: there is no such job, or it was deleted.
        """
        request = pb.WatchJobRequest(**_job_fields(job_id, tenant))
        connection, deadline = self._client._connection, self._deadline(timeout)
        tries, route = Tries(self._client.retry, deadline), connection.route(job_id)
        while True:
            stream = await connection.stream(
                lambda link: link.jobs_stub.WatchJob, request, deadline, route
            )
            try:
                while (update := await stream.read()) is not None:
                    tries.made_progress()
                    yield job_of(update.job)
                return
            except PensieveError as error:
                failure = error
            finally:
                stream.cancel()
            if not route.try_next_address(failure):
                await self._client._sleep(tries.pause(route.explained(failure)))
                route.begin_round()

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._client.timeout if timeout is None else timeout)


class _JobFields(TypedDict):
    job_id: str
    tenant: str


def _job_fields(job_id: str, tenant: str) -> _JobFields:
    """Return the request fields that identify a job."""
    return {"job_id": check_id(job_id, "job_id"), "tenant": check_text("tenant", tenant)}
