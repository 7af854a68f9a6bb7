"""The jobs of the scripted daemon. It stores files, answers each line with a copy, and fails on demand."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc

from pensieve.v1 import jobs_pb2 as pb
from pensieve.v1 import jobs_pb2_grpc

PAGE_SIZE = 2
PIECE_BYTES = 7  # bytes in a message of results, so that lines are cut anywhere


class ScriptedJobs(jobs_pb2_grpc.JobServiceServicer):
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.breaks: deque[int] = (
            deque()
        )  # for the next streams: number of messages before the break; -1: no break
        self.is_idle = False  # True: a watched job does not change
        self.watch_ended = threading.Event()  # set when a watch has ended
        self.lost_answers = 0  # number of CreateJob calls that create the job, but lose the answer
        self.jobs: dict[str, pb.Job] = {}
        self.files: dict[str, bytes] = {}

    def CreateJob(
        self, requests: Iterator[pb.CreateJobRequest], context: grpc.ServicerContext
    ) -> pb.CreateJobResponse:
        first = next(requests)
        header = first.header
        self.calls.append(("CreateJob", header))
        text, complete, break_after = b"", False, self._next_break()
        for number, each in enumerate(requests):
            if number == break_after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "away")
            complete = complete or each.complete
            text += each.chunk
        if not complete:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not whole")
        if header.job_id in self.jobs:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "a job with this id exists")
        job = pb.Job(
            job_id=header.job_id,
            name=header.name,
            number=len(self.jobs),
            endpoint=header.endpoint,
            check_only=header.check_only,
            sha256=hashlib.sha256(text).hexdigest(),
            num_bytes=len(text),
            num_lines=text.count(b"\n"),
            state=pb.JOB_STATE_RUNNING,
            seconds_left=9.5,
        )
        job.create_time.seconds = 1_000_000_000
        self.jobs[header.job_id], self.files[header.job_id] = job, text
        if self.lost_answers:
            self.lost_answers -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        return pb.CreateJobResponse(job=job)

    def GetJob(self, request: pb.GetJobRequest, context: grpc.ServicerContext) -> pb.GetJobResponse:
        return pb.GetJobResponse(job=self._job("GetJob", request, context))

    def ListJobs(
        self, request: pb.ListJobsRequest, context: grpc.ServicerContext
    ) -> pb.ListJobsResponse:
        self.calls.append(("ListJobs", request))
        start = int(request.page_token or 0)
        end = start + PAGE_SIZE
        jobs = list(self.jobs.values())[::-1]
        return pb.ListJobsResponse(
            jobs=jobs[start:end], next_page_token=str(end) if end < len(jobs) else ""
        )

    def PauseJob(
        self, request: pb.PauseJobRequest, context: grpc.ServicerContext
    ) -> pb.PauseJobResponse:
        job = self._job("PauseJob", request, context)
        job.state = pb.JOB_STATE_PAUSED
        return pb.PauseJobResponse(job=job)

    def ResumeJob(
        self, request: pb.ResumeJobRequest, context: grpc.ServicerContext
    ) -> pb.ResumeJobResponse:
        job = self._job("ResumeJob", request, context)
        job.state = pb.JOB_STATE_WAITING
        return pb.ResumeJobResponse(job=job)

    def CancelJob(
        self, request: pb.CancelJobRequest, context: grpc.ServicerContext
    ) -> pb.CancelJobResponse:
        job = self._job("CancelJob", request, context)
        job.state, job.outcome = pb.JOB_STATE_ENDED, pb.JOB_OUTCOME_CANCELLED
        return pb.CancelJobResponse(job=job)

    def DeleteJob(
        self, request: pb.DeleteJobRequest, context: grpc.ServicerContext
    ) -> pb.DeleteJobResponse:
        self._job("DeleteJob", request, context)
        del self.jobs[request.job_id]
        return pb.DeleteJobResponse()

    def GetResults(
        self, request: pb.GetResultsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GetResultsResponse]:
        self._job("GetResults", request, context)
        lines = self.files[request.job_id].splitlines(keepends=True)[request.after_line :]
        text, break_after, last = b"".join(lines), self._next_break(), request.after_line
        for number, first in enumerate(range(0, len(text), PIECE_BYTES)):
            if number == break_after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "away")
            chunk = text[first : first + PIECE_BYTES]
            last += chunk.count(b"\n")
            yield pb.GetResultsResponse(chunk=chunk, last_line=last)

    def WatchJob(
        self, request: pb.WatchJobRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchJobResponse]:
        job, break_after = self._job("WatchJob", request, context), self._next_break()
        if not context.add_callback(self.watch_ended.set):
            self.watch_ended.set()
        number = 0
        while True:
            if number == break_after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "away")
            number += 1
            yield pb.WatchJobResponse(job=job)
            if job.state == pb.JOB_STATE_ENDED:
                return
            if self.is_idle:
                self.watch_ended.wait(30)
                return
            job.num_answered += 1
            if job.num_answered == job.num_lines:
                job.state, job.outcome = pb.JOB_STATE_ENDED, pb.JOB_OUTCOME_COMPLETED
                job.end_time.seconds = 1_000_000_007

    def _next_break(self) -> int:
        return self.breaks.popleft() if self.breaks else -1

    def _job(self, name: str, request: Any, context: grpc.ServicerContext) -> pb.Job:
        self.calls.append((name, request))
        if request.job_id not in self.jobs:
            self._not_found(context)
        return self.jobs[request.job_id]

    @staticmethod
    def _not_found(context: grpc.ServicerContext) -> NoReturn:
        context.abort(grpc.StatusCode.NOT_FOUND, "there is no such job")
        raise AssertionError("abort does not return")
