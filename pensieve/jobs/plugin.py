"""Plugs batch jobs into the servers: the gRPC JobService, `/v1/files` and `/v1/batches`, metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from pensieve.api.http.requests import ApiRequests
from pensieve.api.http.routes import DELETION, Route
from pensieve.api.metrics.families import GAUGE, MetricFamily, Samples
from pensieve.jobs.batch_endpoints import Batches, Files
from pensieve.jobs.job_records import JobState
from pensieve.jobs.job_service import JobService
from pensieve.jobs.values import DaemonJobs, JobView
from pensieve.v1 import jobs_pb2, jobs_pb2_grpc

FAMILIES = (
    MetricFamily("jobs", GAUGE, "Batch jobs.", ("state",)),
    MetricFamily("job_lines_running", GAUGE, "Lines of batch jobs that the engine has."),
    MetricFamily("job_tokens_per_second", GAUGE, "Tokens of batch jobs in a second."),
)


class JobsPlugin:
    """The doors of the jobs; a plug-in of `api/plugins.py`."""

    service: ServiceDescriptor = jobs_pb2.DESCRIPTOR.services_by_name["JobService"]
    families: Sequence[MetricFamily] = FAMILIES

    def __init__(self, jobs: DaemonJobs | None, stall_seconds: float) -> None:
        """`jobs`: None if this daemon takes none. A reader may take nothing for `stall_seconds`."""
        self._jobs, self._stall_seconds = jobs, stall_seconds

    def add_service(self, server: Any) -> None:
        service = JobService(self._jobs, self._stall_seconds)
        jobs_pb2_grpc.add_JobServiceServicer_to_server(service, server)

    def routes(self, requests: ApiRequests) -> Sequence[Route]:
        files = Files(requests, self._jobs, self._stall_seconds)
        batches = Batches(requests, self._jobs)
        return (
            ("POST", "/v1/files", files.upload, {}),
            ("GET", "/v1/files", files.all, {}),
            ("GET", "/v1/files/{job_id}", files.one, {}),
            ("DELETE", "/v1/files/{job_id}", files.delete, DELETION),
            ("GET", "/v1/files/{job_id}/content", files.content, {}),
            ("POST", "/v1/batches", batches.create, {}),
            ("GET", "/v1/batches", batches.all, {}),
            ("GET", "/v1/batches/{job_id}", batches.one, {}),
            ("DELETE", "/v1/batches/{job_id}", batches.delete, DELETION),
            ("POST", "/v1/batches/{job_id}/cancel", batches.cancel, {}),
        )

    async def samples(self) -> Samples:
        return {} if self._jobs is None else samples_of(await self._jobs.list(None))


def samples_of(views: Iterable[JobView]) -> Samples:
    views = list(views)
    states = Counter(view.state for view in views)
    return {
        "jobs": sorted(((state.value,), states[state]) for state in JobState),
        "job_lines_running": [((), sum(view.num_running for view in views))],
        "job_tokens_per_second": [((), sum(view.tokens_per_second for view in views))],
    }
