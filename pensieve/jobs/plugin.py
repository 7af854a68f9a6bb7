"""Add batch jobs to the servers: the gRPC JobService, `/v1/files` and `/v1/batches`, and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from pensieve.api.forwarded import FORWARDED, ForwardHttp
from pensieve.api.grpc.forwarding import Forwarder
from pensieve.api.grpc.http_forwarding import HttpForwarder
from pensieve.api.http.exchange import Exchange
from pensieve.api.http.requests import ApiRequests
from pensieve.api.http.route import Route, Schema
from pensieve.api.http.routes import DELETION, refuse_as_unknown
from pensieve.api.metrics.families import GAUGE, MetricFamily, Samples
from pensieve.guard.callers import Caller
from pensieve.jobs.batch_endpoints import Batches, Files
from pensieve.jobs.job_homes import (
    ALL_TENANTS,
    LIST_PATH,
    SIZES_PATH,
    JobHomes,
    JobLists,
    job_list_body,
)
from pensieve.jobs.job_records import JobState
from pensieve.jobs.job_service import ForwardingJobService, JobService
from pensieve.jobs.values import DaemonJobs, JobView
from pensieve.v1 import jobs_pb2, jobs_pb2_grpc

FAMILIES = (
    MetricFamily("jobs", GAUGE, "Batch jobs.", ("state",)),
    MetricFamily("job_lines_running", GAUGE, "Lines of batch jobs in the engine."),
    MetricFamily("job_tokens_per_second", GAUGE, "Tokens of batch jobs per second."),
)

FORM_TYPE = "multipart/form-data"
FORM: Schema = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"enum": ["batch"]},
        "file": {"type": "string", "contentMediaType": "application/jsonl"},
    },
}


class JobsPlugin:
    """The services and routes of batch jobs; a plug-in of `api/plugins.py`."""

    service: ServiceDescriptor = jobs_pb2.DESCRIPTOR.services_by_name["JobService"]
    families: Sequence[MetricFamily] = FAMILIES

    def __init__(
        self, jobs: DaemonJobs | None, stall_seconds: float, homes: JobHomes | None = None
    ) -> None:
        """`jobs`: None if this daemon takes none. `homes`: None if no other daemon shares the history.

        A reader that reads nothing for `stall_seconds` is dropped.
        """
        self._jobs, self._stall_seconds, self._homes = jobs, stall_seconds, homes
        self._lists: JobLists | None = None
        self._forward: ForwardHttp | None = None

    def add_service(
        self, server: Any, forwarder_of: Callable[[JobHomes], Forwarder] | None
    ) -> None:
        service = JobService(self._jobs, self._stall_seconds)
        if self._jobs is not None and self._homes is not None and forwarder_of is not None:
            forwarder = forwarder_of(self._homes)
            self._forward = HttpForwarder(forwarder)
            self._lists = JobLists(self._jobs, self._homes, forwarder.peers)
            service = ForwardingJobService(self._jobs, self._stall_seconds, self._lists, forwarder)
        jobs_pb2_grpc.add_JobServiceServicer_to_server(service, server)

    def routes(self, requests: ApiRequests) -> Sequence[Route]:
        files = Files(requests, self._jobs, self._stall_seconds, self._lists)
        batches = Batches(requests, self._jobs, self._lists)
        routes: list[Route] = [
            Route("POST", "/v1/files", files.upload, "Upload a file", body=FORM, takes=FORM_TYPE),
            Route("GET", "/v1/files", files.list_all, "All files"),
            Route("GET", "/v1/files/{job_id}", files.get, "A file"),
            Route("DELETE", "/v1/files/{job_id}", files.delete, "Delete a file", DELETION),
            Route(
                *("GET", "/v1/files/{job_id}/content", files.content, "The content of a file"),
                answers="application/octet-stream",
            ),
            Route("POST", "/v1/batches", batches.create, "Create a batch", body={"type": "object"}),
            Route("GET", "/v1/batches", batches.list_all, "All batches"),
            Route("GET", "/v1/batches/{job_id}", batches.get, "A batch"),
            Route("DELETE", "/v1/batches/{job_id}", batches.delete, "Delete a batch", DELETION),
            Route("POST", "/v1/batches/{job_id}/cancel", batches.cancel, "Cancel a batch"),
        ]
        if self._lists is not None:
            routes += [
                Route("GET", LIST_PATH, self._list_here),
                Route("GET", SIZES_PATH, files.sizes),
            ]
        return [
            each._replace(settings={**each.settings, "forward": self._forward}) for each in routes
        ]

    async def _list_here(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        """Answer another daemon that builds a list."""
        if self._jobs is None or FORWARDED not in exchange.scope:
            return await refuse_as_unknown(exchange, by)
        all_tenants = by.admin and ALL_TENANTS.encode() == exchange.scope["query_string"]
        return job_list_body(await self._jobs.list(None if all_tenants else by.tenant))

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
