"""Daemons that share a history: any of them answers about a job, over gRPC and HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.api.grpc import forwarding
from pensieve.api.grpc.http_forwarding import fetch_path
from pensieve.guard.callers import Token
from pensieve.guard.exposure import Listening
from pensieve.jobs import batch_jobs, job_homes
from pensieve.jobs.job_records import JobKey, ResultBytes
from pensieve.jobs.worker import JobsConfig
from pensieve.launch.sharing import Sharing
from pensieve.v1 import jobs_pb2 as pb
from pensieve.v1 import jobs_pb2_grpc
from tests.api.http.rig_http import MODEL, Answer, HttpRig
from tests.cluster.sharing import needs_sqlite, sharing
from tests.conversations.rig_daemon import DaemonRig, details, wait_for

pytestmark = needs_sqlite
ONE, TWO = 0, 1
CHAT = "/v1/chat/completions"
FORM = {"content-type": "multipart/form-data; boundary=b0"}
HEAD = b"--b0\r\nContent-Disposition: form-data; "


def line(custom_id: str, content: str = "hi") -> bytes:
    messages = [{"role": "user", "content": content}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4}
    found = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return json.dumps(found).encode() + b"\n"


FILE = line("a") + line("b", "ho")
BROKEN = FILE + b"no json\n"


class TwoDaemons:
    """Two echo daemons with one history."""

    def __init__(self, rigs: list[DaemonRig]) -> None:
        self.rigs = rigs
        self.http = [HttpRig(rig) for rig in rigs]
        self.services = [jobs_pb2_grpc.JobServiceStub(rig.channel) for rig in rigs]

    def ask(self, at: int, method: str, path: str, body: Any = None) -> Answer:
        return self.http[at].ask(method, path, body)

    def upload(self, at: int, file: bytes = FILE, **headers: str) -> str:
        parts = (b'name="purpose"', b"batch"), (b'name="file"; filename="in.jsonl"', file)
        body = b"".join(HEAD + name + b"\r\n\r\n" + text + b"\r\n" for name, text in parts)
        answer = self.http[at].ask("POST", "/v1/files", body + b"--b0--\r\n", {**FORM, **headers})
        assert answer.status == 200
        return str(answer.value["id"])

    def batch(self, at: int, file_id: str) -> str:
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        answer = self.ask(at, "POST", "/v1/batches", {**body, "metadata": {"for": "ada"}})
        assert answer.status == 200, answer.value
        return str(answer.value["id"])

    def wait_until_ended(self, at: int, batch_id: str) -> Any:
        path = f"/v1/batches/{batch_id}"
        wait_for(lambda: self.ask(at, "GET", path).value["status"] == "completed")
        return self.ask(at, "GET", path).value

    def ids(self, at: int, path: str) -> list[str]:
        return [each["id"] for each in self.ask(at, "GET", path).value["data"]]

    def create(self, at: int, job_id: str, file: bytes = FILE) -> pb.Job:
        digest = hashlib.sha256(file).hexdigest()
        parts = (
            pb.CreateJobRequest(header=pb.JobHeader(job_id=job_id, sha256=digest)),
            pb.CreateJobRequest(chunk=file),
            pb.CreateJobRequest(complete=True),
        )
        return self.services[at].CreateJob(iter(parts), timeout=60).job


@pytest.fixture
def both(tmp_path: Path) -> Iterator[TwoDaemons]:
    shape: dict[str, Any] = {"batch_jobs": JobsConfig()}
    with sharing(tmp_path, ("one", "two"), {"http": "127.0.0.1:0"}, **shape) as rigs:
        yield TwoDaemons(rigs)


def test_any_daemon_serves_all_files_and_batches(both: TwoDaemons) -> None:
    file_id = both.upload(ONE, BROKEN)
    wait_for(lambda: both.ask(TWO, "GET", f"/v1/files/{file_id}").value["status_details"])
    described = both.ask(ONE, "GET", f"/v1/files/{file_id}")
    assert both.ask(TWO, "GET", f"/v1/files/{file_id}").value == described.value
    content = both.ask(TWO, "GET", f"/v1/files/{file_id}/content")
    assert (content.status, content.body) == (200, BROKEN)
    head = both.ask(TWO, "HEAD", f"/v1/files/{file_id}/content")
    assert (head.status, head.body) == (200, b"")

    batch_id = both.batch(TWO, file_id)  # the batch runs where its file is
    assert [job.key.job_id for job in jobs(both, TWO)] == []
    done = both.wait_until_ended(TWO, batch_id)
    assert done == both.wait_until_ended(ONE, batch_id)
    assert done["metadata"] == {"for": "ada"}
    for file in (done["output_file_id"], done["error_file_id"]):
        path = f"/v1/files/{file}/content"
        assert both.ask(TWO, "GET", path).body == both.ask(ONE, "GET", path).body != b""

    assert both.ask(TWO, "POST", f"/v1/batches/{batch_id}/cancel").value == done
    assert both.ask(TWO, "DELETE", f"/v1/files/{done['output_file_id']}").status == 409
    assert both.ask(TWO, "DELETE", f"/v1/files/{file_id}").value["deleted"]
    assert both.ask(TWO, "DELETE", f"/v1/batches/{batch_id}").value["deleted"]
    for at in (ONE, TWO):
        assert both.ask(at, "GET", f"/v1/files/{file_id}").status == 404
        assert both.ask(at, "GET", f"/v1/batches/{batch_id}").status == 404
        assert both.ids(at, "/v1/batches") == []


def jobs(both: TwoDaemons, at: int) -> list[Any]:
    async def look() -> Any:
        return both.rigs[at].job_store.list_jobs()

    found: list[Any] = both.rigs[at].call(look())
    return found


def test_a_list_has_the_jobs_of_all_daemons_in_one_order(both: TwoDaemons) -> None:
    files = [both.upload(at, BROKEN) for at in (ONE, TWO, TWO, ONE)]
    batches = [both.batch(at, file) for at, file in zip((TWO, TWO, ONE, ONE), files, strict=True)]
    for each in batches:
        both.wait_until_ended(ONE, each)
    for at in (ONE, TWO):
        assert both.ids(at, "/v1/batches") == batches[::-1]
        assert both.ids(at, "/v1/files?purpose=batch&order=asc") == files
        listed = both.ask(at, "GET", "/v1/files?purpose=batch_output").value["data"]
        assert len(listed) == 2 * len(batches)
        for each in listed:
            assert both.ask(ONE, "GET", f"/v1/files/{each['id']}").value == each
        paged, after = [], ""
        while True:
            page = both.ask(at, "GET", f"/v1/batches?limit=1{after}").value
            paged += [each["id"] for each in page["data"]]
            after = f"&after={paged[-1]}"
            if not page["has_more"]:
                break
        assert paged == batches[::-1]
        first = both.services[at].ListJobs(pb.ListJobsRequest(page_size=5), timeout=60)
        token = first.next_page_token
        second = both.services[at].ListJobs(
            pb.ListJobsRequest(page_size=5, page_token=token), timeout=60
        )
        assert [each.job_id for each in (*first.jobs, *second.jobs)] == [
            *batches[::-1],
            *files[::-1],
        ]
        assert not second.next_page_token


def test_lists_omit_a_daemon_that_does_not_answer(
    both: TwoDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = both.upload(ONE)
    other = both.upload(TWO)
    monkeypatch.setattr(job_homes, "LIST_SECONDS", 0.0)
    assert both.ids(TWO, "/v1/files") == [other]
    monkeypatch.undo()
    assert both.ids(TWO, "/v1/files") == [other, file_id]


def test_a_list_asks_each_daemon_once_for_the_sizes_of_its_files(
    both: TwoDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [both.batch(ONE, both.upload(ONE, BROKEN)) for _ in range(3)]
    for each in ids:
        both.wait_until_ended(ONE, each)
    asked: list[str] = []

    async def note_and_fetch(
        channel: Any, metadata: Any, path: str, query: str, seconds: float
    ) -> bytes:
        asked.append(path)
        return await fetch_path(channel, metadata, path, query, seconds)

    monkeypatch.setattr(job_homes, "fetch_path", note_and_fetch)
    for order in ("asc", "desc"):
        path = f"/v1/files?purpose=batch_output&order={order}"
        assert len(both.ids(TWO, path)) == 2 * len(ids)
    assert asked == [job_homes.LIST_PATH, job_homes.SIZES_PATH] * 2
    monkeypatch.setattr(job_homes, "SIZES_AT_ONCE", 2)
    assert len(both.ids(TWO, path)) == 2 * len(ids)
    assert asked[4:] == [job_homes.LIST_PATH, *[job_homes.SIZES_PATH] * 2]


def test_a_list_without_the_sizes_of_files_fails_and_names_the_daemon(
    both: TwoDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = both.batch(ONE, both.upload(ONE, BROKEN))
    both.wait_until_ended(ONE, batch_id)
    store, goes_on = both.rigs[ONE].job_store, threading.Event()
    result_bytes = store.result_bytes

    def stuck(key: JobKey) -> ResultBytes:
        assert goes_on.wait(60)
        return result_bytes(key)

    async def impatient(
        channel: Any, metadata: Any, path: str, query: str, seconds: float
    ) -> bytes:
        seconds = 0.2 if path == job_homes.SIZES_PATH else seconds
        return await fetch_path(channel, metadata, path, query, seconds)

    monkeypatch.setattr(store, "result_bytes", stuck)
    monkeypatch.setattr(job_homes, "fetch_path", impatient)
    try:
        answer = both.ask(TWO, "GET", "/v1/files")
    finally:
        goes_on.set()
        monkeypatch.undo()
    assert answer.status == 503
    assert "one at 127.0.0.1:" in answer.value["error"]["message"]
    assert "does not report the sizes of its files" in answer.value["error"]["message"]
    assert len(both.ids(TWO, "/v1/files")) == 3


@pytest.mark.parametrize("path", [job_homes.LIST_PATH, job_homes.SIZES_PATH])
def test_internal_lists_between_daemons_are_not_served_to_clients(
    both: TwoDaemons, path: str
) -> None:
    assert both.ask(ONE, "GET", path).status == 404


def test_jobs_can_be_controlled_over_grpc_at_any_daemon(both: TwoDaemons) -> None:
    made = both.create(ONE, "nightly")
    service = both.services[TWO]
    with pytest.raises(grpc.RpcError) as failed:
        both.create(TWO, "nightly")
    assert code(failed) == "ALREADY_EXISTS"
    watched = list(service.WatchJob(pb.WatchJobRequest(job_id="nightly"), timeout=60))
    assert watched[-1].job.outcome == pb.JOB_OUTCOME_COMPLETED
    assert watched[-1].job == service.GetJob(pb.GetJobRequest(job_id="nightly"), timeout=60).job
    assert watched[-1].job.create_time == made.create_time
    results = service.GetResults(pb.GetResultsRequest(job_id="nightly"), timeout=60)
    assert b"".join(each.chunk for each in results).count(b"\n") == 2
    with pytest.raises(grpc.RpcError) as failed:
        service.PauseJob(pb.PauseJobRequest(job_id="nightly"), timeout=60)
    assert details(failed.value)["ErrorInfo"].reason == "JOB_STATE"
    service.DeleteJob(pb.DeleteJobRequest(job_id="nightly"), timeout=60)
    for at in (ONE, TWO):
        with pytest.raises(grpc.RpcError) as failed:
            both.services[at].GetJob(pb.GetJobRequest(job_id="nightly"), timeout=60)
        assert code(failed) == "NOT_FOUND"
    assert both.create(TWO, "nightly").job_id == "nightly"
    assert both.services[ONE].GetJob(pb.GetJobRequest(job_id="nightly"), timeout=60).job.job_id


def test_an_upload_that_breaks_off_leaves_its_id_free(both: TwoDaemons) -> None:
    parts = (
        pb.CreateJobRequest(header=pb.JobHeader(job_id="nightly")),
        pb.CreateJobRequest(chunk=FILE),
    )
    with pytest.raises(grpc.RpcError):
        both.services[ONE].CreateJob(iter(parts), timeout=60)
    assert both.create(TWO, "nightly").job_id == "nightly"


def code(failed: pytest.ExceptionInfo[grpc.RpcError]) -> str:
    return str(failed.value.code().name)


def daemon_rig(folder: Path, name: str, **config: Any) -> DaemonRig:
    data = folder / name
    listening = Listening("127.0.0.1:0", data / "admin.sock", http="127.0.0.1:0")
    url = f"sqlite://{folder / 'history.db'}"
    return DaemonRig(data, listening=listening, store=url, batch_jobs=JobsConfig(**config))


def test_the_error_names_an_unreachable_daemon_and_its_jobs_return_with_the_daemon(
    tmp_path: Path,
) -> None:
    with daemon_rig(tmp_path, "two") as two:
        with daemon_rig(tmp_path, "one") as one:
            both = TwoDaemons([one, two])
            file_id = both.upload(ONE)
            assert both.ask(TWO, "GET", f"/v1/files/{file_id}").status == 200
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answer = both.ask(TWO, method, f"/v1/files/{file_id}{path}")
            assert answer.status == 503
            assert answer.value["error"]["message"] == (
                f"job '{file_id}' is in the data folder of one, which is down"
            )
        assert both.ids(TWO, "/v1/files") == []
        with pytest.raises(grpc.RpcError) as failed:
            both.services[TWO].GetJob(pb.GetJobRequest(job_id=file_id), timeout=60)
        assert code(failed) == "UNAVAILABLE"
        with daemon_rig(tmp_path, "one") as one:
            both = TwoDaemons([one, two])
            assert both.ask(TWO, "GET", f"/v1/files/{file_id}/content").body == FILE
            assert both.ids(TWO, "/v1/files") == [file_id]


def test_jobs_of_a_lost_daemon_are_forgotten_after_the_usual_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_jobs, "FORGET_SECONDS", 0.05)
    with daemon_rig(tmp_path, "two", keep_seconds=5.0) as two:
        with daemon_rig(tmp_path, "one") as one:
            file_id = TwoDaemons([one, two]).upload(ONE)
        both = TwoDaemons([one, two])
        assert both.ask(TWO, "GET", f"/v1/files/{file_id}").status == 503
        wait_for(lambda: both.ask(TWO, "GET", f"/v1/files/{file_id}").status == 404)


def test_the_error_names_a_killed_daemon_after_its_lease_has_expired(
    both: TwoDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the lease expires, the killed daemon may restart."""
    file_id = both.upload(ONE)
    find, num_looks = both.rigs[TWO].daemon.store.job_owners.find, 0

    def expiring(*given: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        owner = find(*given)
        assert owner is not None
        return owner._replace(address="127.0.0.1:1" if num_looks < 3 else "")

    monkeypatch.setattr(both.rigs[TWO].daemon.store.job_owners, "find", expiring)
    monkeypatch.setattr(forwarding, "LOOK_SECONDS", 0.05)
    answer = both.ask(TWO, "GET", f"/v1/files/{file_id}")
    assert answer.status == 503
    assert "is in the data folder of one, which is down" in answer.value["error"]["message"]
    assert num_looks > 2


def test_jobs_created_before_the_history_was_shared_are_found(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"batch_jobs": JobsConfig()}
    with DaemonRig(tmp_path / "one", **shape) as alone:
        service = jobs_pb2_grpc.JobServiceStub(alone.channel)
        parts = (
            pb.CreateJobRequest(header=pb.JobHeader(job_id="nightly")),
            pb.CreateJobRequest(chunk=FILE),
            pb.CreateJobRequest(complete=True),
        )
        service.CreateJob(iter(parts), timeout=60)
        assert alone.daemon.store.job_owners.find("", "nightly") is None
    with sharing(tmp_path, ("one", "two"), {"http": "127.0.0.1:0"}, **shape) as rigs:
        both, request = TwoDaemons(rigs), pb.GetJobRequest(job_id="nightly")

        def is_found() -> bool:
            owners = both.rigs[TWO].daemon.store.job_owners
            return both.rigs[TWO].call(in_store(both.rigs[TWO], owners.find)) is not None

        wait_for(is_found)
        assert both.services[TWO].GetJob(request, timeout=60).job.job_id == "nightly"


async def in_store(rig: DaemonRig, function: Any) -> Any:
    return await rig.daemon.threads.in_store("", function, *JobKey("", "nightly"))


@pytest.mark.parametrize("secret", ["", "a secret that all daemons of a cluster have"])
def test_a_tenant_sees_only_its_own_jobs_at_any_daemon(tmp_path: Path, secret: str) -> None:
    names = (("ann", "ann", False), ("bob", "bob", False), ("admin", "", True))
    tokens = [
        Token(hashlib.sha256(name.encode()).digest(), tenant, admin, name=name)
        for name, tenant, admin in names
    ]
    listening = {
        "http": "127.0.0.1:0",
        "tokens": tokens,
        "peer_tokens": Sharing(secret=secret).tokens(),
        "peer_secret": secret,
    }
    with sharing(tmp_path, ("one", "two"), listening, batch_jobs=JobsConfig()) as rigs:
        both = TwoDaemons(rigs)
        ann, bob, admin = ({"authorization": f"Bearer {name}"} for name, _, _ in names)
        file_id = both.upload(ONE, FILE, **ann)
        path = f"/v1/files/{file_id}"
        assert both.http[TWO].ask("GET", "/v1/files", None, ann).value["data"][0]["id"] == file_id
        key = {"x-api-key": "ann"}
        assert both.http[TWO].ask("GET", "/v1/files", None, key).value["data"][0]["id"] == file_id
        assert both.http[TWO].ask("GET", path, None, ann).status == 200
        for other in (bob, admin):
            assert both.http[TWO].ask("GET", path, None, other).status == 404
            assert both.http[TWO].ask("GET", "/v1/files", None, other).value["data"] == []
        request, service = pb.ListJobsRequest(all_tenants=True), both.services[TWO]
        for each, found in ((bob, None), (admin, [file_id])):
            metadata = tuple(each.items())
            if found is None:
                with pytest.raises(grpc.RpcError):
                    service.ListJobs(request, metadata=metadata, timeout=60)
            else:
                listed = service.ListJobs(request, metadata=metadata, timeout=60).jobs
                assert [job.job_id for job in listed] == found
        cancel = pb.CancelJobRequest(job_id=file_id, tenant="ann")
        cancelled = service.CancelJob(cancel, metadata=tuple(admin.items()), timeout=60)
        assert cancelled.job.job_id == file_id
        with pytest.raises(grpc.RpcError) as failed:
            service.CancelJob(cancel, metadata=tuple(bob.items()), timeout=60)
        assert code(failed) == "PERMISSION_DENIED"
