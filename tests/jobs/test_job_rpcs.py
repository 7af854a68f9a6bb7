"""The methods of JobService over the wire, with scripted jobs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.guard import callers
from pensieve.guard.exposure import Listening
from pensieve.guard.request_bodies import SENDING_MAX
from pensieve.jobs.job_records import JobKey, JobState
from pensieve.jobs.job_service import CHUNK_BYTES
from pensieve.v1 import jobs_pb2 as pb
from pensieve.v1 import jobs_pb2_grpc
from tests.conversations.rig_daemon import DaemonRig, details, wait_for
from tests.jobs.scripted_jobs import ScriptedJobs

LINES = [json.dumps({"custom_id": f"r{n}", "q": "w" * n}) for n in range(1, 8)]
FILE = "\n".join([*LINES[:3], "broken", "", *LINES[3:]]).encode() + b"\n"
COMPLETE = pb.CreateJobRequest(complete=True)
ACME, OTHER, OPERATOR = (
    (("authorization", f"Bearer {name}"),) for name in ("acme", "other", "operator")
)


class JobsRig(DaemonRig):
    """A server with tokens of two tenants and an operator."""

    def __init__(self, folder: Path) -> None:
        self.jobs = ScriptedJobs(folder / "scripted")
        self.audit = folder / "audit.jsonl"
        tokens = [
            callers.Token(hashlib.sha256(name.encode()).digest(), tenant, admin, name=name)
            for name, tenant, admin in (
                ("acme", "acme", False),
                ("other", "other", False),
                ("operator", "", True),
            )
        ]
        socket = folder / "data" / "admin.sock"
        listening = Listening("127.0.0.1:0", socket, tokens=tokens, audit_log=self.audit)
        super().__init__(folder / "data", listening=listening, jobs=self.jobs)

    def __enter__(self) -> JobsRig:
        super().__enter__()
        self.service = jobs_pb2_grpc.JobServiceStub(self.channel)
        return self

    def create(self, header: pb.JobHeader, *chunks: bytes, caller: Any = ACME) -> pb.Job:
        parts = [
            pb.CreateJobRequest(header=header),
            *(pb.CreateJobRequest(chunk=c) for c in chunks),
        ]
        parts.append(COMPLETE)
        return self.service.CreateJob(iter(parts), metadata=caller, timeout=60).job

    def results(
        self, job_id: str, caller: Any = ACME, **fields: Any
    ) -> list[pb.GetResultsResponse]:
        request = pb.GetResultsRequest(job_id=job_id, **fields)
        return list(self.service.GetResults(request, metadata=caller, timeout=60))

    def states(self) -> dict[JobKey, JobState]:
        async def look() -> dict[JobKey, JobState]:
            return {job.key: job.state for job in self.jobs.store.list_jobs()}

        found: dict[JobKey, JobState] = self.call(look())
        return found

    def work(self, key: JobKey, num_lines: int) -> None:
        async def act() -> None:
            self.jobs.work(key, num_lines)

        self.call(act())


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobsRig]:
    with JobsRig(tmp_path_factory.mktemp("jobs")) as rig:
        yield rig


def refused(call: Callable[[], object]) -> tuple[str, str]:
    """Return the code of an error and the field that the error names."""
    with pytest.raises(grpc.RpcError) as error:
        call()
    found = details(error.value)
    field = found["BadRequest"].field_violations[0].field if "BadRequest" in found else ""
    return error.value.code().name, field


def test_a_job_from_its_file_to_its_results(rig: JobsRig) -> None:
    digest = hashlib.sha256(FILE).hexdigest()
    header = pb.JobHeader(
        job_id="first", name="by night", sha256=digest, endpoint="/v1/completions"
    )
    job = rig.create(header, FILE[:10], b"", FILE[10:])
    assert (job.job_id, job.tenant, job.name, job.endpoint) == (
        "first",
        "acme",
        "by night",
        "/v1/completions",
    )
    assert (job.state, job.sha256, job.num_lines) == (pb.JOB_STATE_RUNNING, digest, 8)
    assert (job.num_refused, job.num_running, job.seconds_left) == (1, 3, 3.5)
    assert job.start_time.seconds >= job.create_time.seconds > 0
    assert not job.HasField("end_time")
    rig.work(JobKey("acme", "first"), 2)
    request = pb.GetJobRequest(job_id="first")
    job = rig.service.GetJob(request, metadata=ACME).job
    assert (job.num_answered, job.prompt_tokens, job.saved_tokens, job.output_tokens) == (
        2,
        18,
        10,
        4,
    )
    whole, errors, rest = (
        b"".join(piece.chunk for piece in rig.results("first", **fields)).splitlines()
        for fields in ({}, {"kind": pb.RESULT_KIND_ERRORS}, {"after_line": 2})
    )
    assert [json.loads(line)["custom_id"] for line in whole] == ["r1", "r2", None]
    assert [json.loads(line)["error"]["line"] for line in errors] == [4]
    assert rest == errors
    rig.work(JobKey("acme", "first"), 10)
    answers = rig.results("first", kind=pb.RESULT_KIND_ANSWERS)
    text = b"".join(piece.chunk for piece in answers)
    assert [json.loads(line)["response"] for line in text.splitlines()] == [
        "w" * n for n in range(1, 8)
    ]
    assert answers[-1].last_line == 9
    job = rig.service.GetJob(request, metadata=ACME).job
    assert (job.state, job.outcome) == (pb.JOB_STATE_ENDED, pb.JOB_OUTCOME_COMPLETED)
    assert job.HasField("end_time")
    assert not job.HasField("seconds_left")
    rig.service.DeleteJob(pb.DeleteJobRequest(job_id="first"), metadata=ACME)
    assert refused(lambda: rig.service.GetJob(request, metadata=ACME)) == ("NOT_FOUND", "")


def test_a_job_can_be_paused_resumed_and_cancelled(rig: JobsRig) -> None:
    rig.create(pb.JobHeader(job_id="steered"), FILE)
    seen = []
    method: Any
    for method, kind in (
        (rig.service.PauseJob, pb.PauseJobRequest),
        (rig.service.ResumeJob, pb.ResumeJobRequest),
        (rig.service.CancelJob, pb.CancelJobRequest),
    ):
        job = method(kind(job_id="steered"), metadata=ACME).job
        seen.append((job.state, job.outcome))
    assert seen == [
        (pb.JOB_STATE_PAUSED, pb.JOB_OUTCOME_UNSPECIFIED),
        (pb.JOB_STATE_RUNNING, pb.JOB_OUTCOME_UNSPECIFIED),
        (pb.JOB_STATE_ENDED, pb.JOB_OUTCOME_CANCELLED),
    ]
    pause = pb.PauseJobRequest(job_id="steered")
    assert refused(lambda: rig.service.PauseJob(pause, metadata=ACME)) == (
        "FAILED_PRECONDITION",
        "",
    )


def test_a_check_only_job_computes_nothing(rig: JobsRig) -> None:
    job = rig.create(pb.JobHeader(job_id="checked", check_only=True), FILE)
    assert (job.outcome, job.check_only) == (pb.JOB_OUTCOME_CHECKED, True)
    assert (job.num_refused, job.num_answered) == (1, 0)


HEADERS = [
    (pb.JobHeader(job_id="a/b"), "job_id"),
    (pb.JobHeader(name="x" * 257), "name"),
    (pb.JobHeader(sha256="AB" * 32), "sha256"),
    (pb.JobHeader(num_bytes=-1), "num_bytes"),
    (pb.JobHeader(sha256="ab" * 32), "sha256"),  # the digest of another file
    (pb.JobHeader(endpoint="x" * 5000), "header"),
]


@pytest.mark.parametrize(("header", "field"), HEADERS, ids=[field for _, field in HEADERS])
def test_the_error_for_an_invalid_header_names_the_field(
    rig: JobsRig, header: pb.JobHeader, field: str
) -> None:
    before = len(rig.service.ListJobs(pb.ListJobsRequest(), metadata=ACME).jobs)
    assert refused(lambda: rig.create(header, FILE)) == ("INVALID_ARGUMENT", field)
    assert len(rig.service.ListJobs(pb.ListJobsRequest(), metadata=ACME).jobs) == before


def test_an_invalid_sequence_of_upload_messages_is_refused(rig: JobsRig) -> None:
    header = pb.CreateJobRequest(header=pb.JobHeader(job_id="odd"))
    chunk = pb.CreateJobRequest(chunk=b"{}\n")
    large = pb.CreateJobRequest(chunk=b"x" * (1 << 20) + b"x")
    for parts, field in (
        ([], "header"),
        ([chunk], "header"),
        ([pb.CreateJobRequest()], "header"),
        ([header, chunk, header], "chunk"),
        ([header, pb.CreateJobRequest()], "chunk"),
        ([header, large], "chunk"),
        ([header, chunk], "complete"),
    ):
        call = partial(rig.service.CreateJob, iter(parts), metadata=ACME)
        assert refused(call) == ("INVALID_ARGUMENT", field)
    assert refused(lambda: rig.service.GetJob(pb.GetJobRequest(job_id="odd"), metadata=ACME)) == (
        "NOT_FOUND",
        "",
    )


def test_a_used_job_id_is_refused_and_a_missing_job_id_is_generated(rig: JobsRig) -> None:
    rig.create(pb.JobHeader(job_id="taken"), FILE)
    assert refused(lambda: rig.create(pb.JobHeader(job_id="taken"), FILE)) == ("ALREADY_EXISTS", "")
    generated = {rig.create(pb.JobHeader(), FILE).job_id for _ in range(2)}
    assert len(generated) == 2


def test_an_interrupted_upload_leaves_no_job(rig: JobsRig) -> None:
    received = rig.jobs.num_chunks
    more = threading.Event()

    def parts() -> Iterator[pb.CreateJobRequest]:
        yield pb.CreateJobRequest(header=pb.JobHeader(job_id="left"))
        yield pb.CreateJobRequest(chunk=FILE)
        more.wait(60)

    call = rig.service.CreateJob.future(parts(), metadata=ACME)
    wait_for(lambda: rig.jobs.num_chunks > received)
    assert rig.states()[JobKey("acme", "left")] is JobState.RECEIVING
    call.cancel()
    more.set()
    wait_for(lambda: JobKey("acme", "left") not in rig.states())


def test_the_number_of_simultaneous_uploads_of_a_tenant_is_limited(rig: JobsRig) -> None:
    end = threading.Event()

    def parts(number: int) -> Iterator[pb.CreateJobRequest]:
        yield pb.CreateJobRequest(header=pb.JobHeader(job_id=f"slow-{number}"))
        end.wait(60)
        yield COMPLETE

    num_headers = len(rig.jobs.headers)
    calls = [
        rig.service.CreateJob.future(parts(number), metadata=OTHER) for number in range(SENDING_MAX)
    ]
    wait_for(lambda: len(rig.jobs.headers) == num_headers + SENDING_MAX)
    header = pb.JobHeader(job_id="one-more")
    assert refused(lambda: rig.create(header, FILE, caller=OTHER)) == ("RESOURCE_EXHAUSTED", "")
    assert rig.create(header, FILE).num_lines == 8  # the same id for another tenant
    end.set()
    assert [call.result(60).job.num_lines for call in calls] == [0] * SENDING_MAX
    assert rig.create(header, FILE, caller=OTHER).num_lines == 8


def test_a_tenant_sees_only_its_own_jobs_and_an_operator_sees_all(rig: JobsRig) -> None:
    rig.create(pb.JobHeader(job_id="mine"), FILE)
    service, get = rig.service, pb.GetJobRequest(job_id="mine")
    named = pb.GetJobRequest(job_id="mine", tenant="acme")
    everyone = pb.ListJobsRequest(all_tenants=True)
    assert refused(lambda: service.GetJob(get)) == ("UNAUTHENTICATED", "")
    assert refused(lambda: service.GetJob(get, metadata=OTHER)) == ("NOT_FOUND", "")
    assert refused(lambda: service.GetJob(named, metadata=OTHER)) == ("PERMISSION_DENIED", "")
    assert refused(lambda: service.ListJobs(everyone, metadata=OTHER)) == ("PERMISSION_DENIED", "")
    assert service.GetJob(named, metadata=ACME).job.job_id == "mine"
    assert refused(lambda: service.GetJob(get, metadata=OPERATOR)) == ("NOT_FOUND", "")
    assert service.GetJob(named, metadata=OPERATOR).job.tenant == "acme"
    seen = service.ListJobs(everyone, metadata=OPERATOR).jobs
    assert {"acme", "other"} <= {job.tenant for job in seen}
    own = service.ListJobs(pb.ListJobsRequest(), metadata=OTHER).jobs
    assert {job.tenant for job in own} == {"other"}
    pause = pb.PauseJobRequest(job_id="mine", tenant="acme")
    assert service.PauseJob(pause, metadata=OPERATOR).job.state == pb.JOB_STATE_PAUSED
    with grpc.insecure_channel(f"unix:{rig.daemon.store.folder.path / 'admin.sock'}") as local:
        resume = pb.ResumeJobRequest(job_id="mine", tenant="acme")
        job = jobs_pb2_grpc.JobServiceStub(local).ResumeJob(resume).job
        assert job.state == pb.JOB_STATE_RUNNING


def test_jobs_are_listed_in_pages_newest_first(rig: JobsRig) -> None:
    created = [rig.create(pb.JobHeader(), FILE).job_id for _ in range(5)]
    request = pb.ListJobsRequest(page_size=2)
    found: list[str] = []
    while True:
        page = rig.service.ListJobs(request, metadata=ACME)
        found += [job.job_id for job in page.jobs]
        if len(found) == 2:
            rig.create(pb.JobHeader(job_id="later"), FILE)  # must not shift the pages
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert found[:5] == created[::-1]
    assert len(set(found)) == len(found)
    for fields, field in (
        ({"page_size": 1001}, "page_size"),
        ({"page_token": "x"}, "page_token"),
    ):
        request = pb.ListJobsRequest(**fields)
        call = partial(rig.service.ListJobs, request, metadata=ACME)
        assert refused(call) == ("INVALID_ARGUMENT", field)


def test_a_watch_shows_each_change_and_ends_with_the_job(rig: JobsRig) -> None:
    rig.create(pb.JobHeader(job_id="watched"), FILE)
    watch = rig.service.WatchJob(pb.WatchJobRequest(job_id="watched"), metadata=ACME, timeout=60)
    answered = [next(watch).job.num_answered]
    for _ in range(3):
        rig.work(JobKey("acme", "watched"), 3)
        answered.append(next(watch).job.num_answered)
    assert answered == [0, 3, 6, 7]
    assert list(watch) == []
    again = list(rig.service.WatchJob(pb.WatchJobRequest(job_id="watched"), metadata=ACME))
    assert [each.job.state for each in again] == [pb.JOB_STATE_ENDED]


def test_a_result_larger_than_a_message_is_sent_in_pieces(rig: JobsRig) -> None:
    """Each piece says which lines are complete so far."""
    large = json.dumps({"custom_id": "large", "q": "x" * (9 << 20)}).encode()
    chunks = [large[at : at + (1 << 20)] for at in range(0, len(large), 1 << 20)]
    rig.create(pb.JobHeader(job_id="large"), LINES[0].encode(), b"\n", *chunks)
    for _ in range(2):
        rig.work(JobKey("acme", "large"), 1)
    pieces = rig.results("large")
    assert max(len(piece.chunk) for piece in pieces) < 2 * CHUNK_BYTES
    first, second = b"".join(piece.chunk for piece in pieces).splitlines()
    assert json.loads(first)["custom_id"] == "r1"
    assert len(json.loads(second)["response"]) == 9 << 20
    assert [piece.last_line for piece in pieces] == [1] * (len(pieces) - 1) + [2]


def test_the_audit_log_has_deletions_and_actions_of_operators(rig: JobsRig) -> None:
    rig.create(pb.JobHeader(job_id="audited"), FILE)
    own = pb.CancelJobRequest(job_id="audited")
    rig.service.PauseJob(pb.PauseJobRequest(job_id="audited", tenant="acme"), metadata=OPERATOR)
    rig.service.CancelJob(own, metadata=ACME)
    rig.service.DeleteJob(pb.DeleteJobRequest(job_id="audited"), metadata=ACME)

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in rig.audit.read_text().splitlines()]
        return [line for line in found if line.get("job_id") == "audited"]

    wait_for(lambda: len(lines()) >= 2)
    paused, deleted = lines()
    assert (paused["event"], paused["method"], paused["of_tenant"], paused["token"]) == (
        "admin",
        "PauseJob",
        "acme",
        "operator",
    )
    assert (deleted["event"], deleted["tenant"], deleted["outcome"]) == ("delete", "acme", "OK")


def test_a_daemon_without_jobs_reports_that_jobs_are_off(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        service = jobs_pb2_grpc.JobServiceStub(rig.channel)
        with pytest.raises(grpc.RpcError) as error:
            service.GetJob(pb.GetJobRequest(job_id="x"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert "does not run batch jobs" in str(error.value.details())
