"""Files and batches over HTTP, with plain requests and with OpenAI's client."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from pensieve.guard.callers import Token
from pensieve.guard.guard import GuardedCall
from pensieve.jobs.batch_endpoints import batch_object, result_files
from pensieve.jobs.job_records import JobKey, JobOutcome, JobState, ResultBytes
from pensieve.jobs.values import JobHeader, JobView
from pensieve.jobs.worker import JobsConfig
from tests.api.http.rig_http import MODEL, Answer, HttpRig, http_rig
from tests.conversations.rig_daemon import wait_for

FORM = "multipart/form-data; boundary=b0"


def line(custom_id: str, content: str = "hi", **members: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, **members}
    found = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(found).encode() + b"\n"


FILE = line("a") + b"\n" + line("b", "ho") + b"no json\n" + line("c", best=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    data = Path(tmp_path_factory.mktemp("http")) / "data"
    with http_rig(data, batch_jobs=JobsConfig()) as found:
        yield found


@pytest.fixture
def client(server: HttpRig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def form(*parts: tuple[str, bytes]) -> bytes:
    found = b""
    for head, data in parts:
        named = f"--b0\r\nContent-Disposition: form-data; {head}\r\n\r\n"
        found += named.encode() + data + b"\r\n"
    return found + b"--b0--\r\n"


def upload(server: HttpRig, *parts: tuple[str, bytes], **headers: str) -> Answer:
    return server.ask("POST", "/v1/files", form(*parts), {"content-type": FORM, **headers})


PURPOSE_PART = ('name="purpose"', b"batch")
FILE_PART = ('name="file"; filename="in.jsonl"', FILE)


def wait_until_ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    found: list[openai.types.Batch] = []

    def look() -> bool:
        found.append(client.batches.retrieve(batch_id))
        return found[-1].status in ("completed", "cancelled", "failed")

    wait_for(look)
    return found[-1]


def by_custom_id(text: str) -> Mapping[str, Any]:
    rows = [json.loads(each) for each in text.splitlines()]
    return {each["custom_id"]: each for each in rows}


def test_openais_client_uploads_a_file_and_gets_its_answers(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", FILE), purpose="batch")
    assert (file.object, file.purpose, file.filename) == ("file", "batch", "in.jsonl")
    assert file.bytes == len(FILE)
    assert client.files.content(file.id).content == FILE
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"for": "ada"},
    )
    assert (batch.object, batch.input_file_id, batch.metadata) == ("batch", file.id, {"for": "ada"})
    client.files.delete(file.id)  # the batch keeps its own copy of the lines
    done = wait_until_ended(client, batch.id)
    assert done.status == "completed"
    assert done.request_counts is not None
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 2, 2)
    assert done.completed_at is not None
    assert done.usage is not None
    assert done.usage.output_tokens == 8
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    answers = by_custom_id(client.files.content(done.output_file_id).text)
    assert set(answers) == {"a", "b"}
    assert answers["a"]["response"]["body"]["choices"][0]["message"]["content"]
    text = client.files.content(done.error_file_id).text
    assert client.files.retrieve(done.error_file_id).bytes == len(text.encode())
    errors = [json.loads(each)["error"] for each in text.splitlines()]
    assert [each["line"] for each in errors] == [4, 5]  # line numbers of the file
    listed = {each.id: each.purpose for each in client.files.list()}
    assert listed[done.output_file_id] == listed[done.error_file_id] == "batch_output"
    assert file.id not in listed


@pytest.mark.parametrize("state", JobState)
def test_a_batch_names_its_results_once_it_has_ended(state: JobState) -> None:
    """If results were named earlier, a client could mistake partial results for all results."""
    has_ended = state is JobState.ENDED
    view = JobView(
        *("batch_1", "", 1, "in.jsonl", "", 0, "/v1/chat/completions"),
        check_only=False,
        state=state,
        outcome=JobOutcome.COMPLETED if has_ended else None,
        problem="",
        num_lines=4,
        num_answered=2,
        num_refused=1,
        num_running=0 if has_ended else 1,
        prompt_tokens=0,
        saved_tokens=0,
        output_tokens=0,
        tokens_per_second=0.0,
        seconds_left=None,
        created_at=1.0,
        started_at=2.0,
        ended_at=3.0 if has_ended else None,
    )
    output, errors = ("file-output.batch_1", "file-errors.batch_1") if has_ended else (None, None)
    assert [str(each) for each in result_files(view)] == [each for each in (output, errors) if each]
    shown = batch_object(view)
    assert (shown["output_file_id"], shown["error_file_id"]) == (output, errors)


def test_errors_of_a_file_are_reported_before_a_batch_uses_it(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", FILE), purpose="batch")
    wait_for(lambda: client.files.retrieve(file.id).status_details)
    assert "2 of 4" in (client.files.retrieve(file.id).status_details or "")
    assert file.id not in {each.id for each in client.batches.list()}


def test_a_long_file_is_returned_unchanged(server: HttpRig, client: openai.OpenAI) -> None:
    long = b"".join(line(f"l{number}", "word " * 40) for number in range(4_000))
    assert len(long) > 1 << 20
    file = client.files.create(file=("long.jsonl", long), purpose="batch")
    assert client.files.content(file.id).content == long
    assert server.ask("HEAD", f"/v1/files/{file.id}/content").body == b""
    client.files.delete(file.id)


def test_batches_are_listed_a_page_at_a_time(client: openai.OpenAI) -> None:
    file = client.files.create(file=("one.jsonl", line("a")), purpose="batch")
    made = [
        client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).id
        for _ in range(3)
    ]
    assert [each.id for each in client.batches.list(limit=1)][:3] == made[::-1]
    page = client.batches.list(limit=2)
    assert [each.id for each in page.data] == made[:0:-1]
    assert page.has_more
    oldest = client.files.list(order="asc", limit=1).data[0]
    newest = client.files.list(order="desc", limit=1).data[0]
    assert oldest.created_at <= newest.created_at


def test_a_batch_can_be_cancelled_and_deleted(server: HttpRig, client: openai.OpenAI) -> None:
    many = b"".join(line(f"m{n}", max_tokens=500, ignore_eos=True) for n in range(50))
    file = client.files.create(file=("many.jsonl", many), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    wait_for(lambda: client.batches.retrieve(batch.id).status != "validating")
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status in ("cancelled", "completed")
    deleted = server.ask("DELETE", f"/v1/batches/{batch.id}")
    assert deleted.value == {"id": batch.id, "object": "batch", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(batch.id)


def test_a_file_of_results_can_only_be_deleted_with_its_batch(client: openai.OpenAI) -> None:
    file = client.files.create(file=("one.jsonl", line("a")), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    output = wait_until_ended(client, batch.id).output_file_id
    assert output is not None
    with pytest.raises(openai.ConflictError, match=f"DELETE /v1/batches/{batch.id}"):
        client.files.delete(output)
    assert client.files.content(output).text


def test_a_job_created_over_grpc_is_a_batch_with_its_lines_as_file(
    server: HttpRig, client: openai.OpenAI
) -> None:
    async def chunks() -> Any:
        yield line("a")

    async def create() -> None:
        await server.rig.batch.create("", JobHeader("by-hand", "x.jsonl"), chunks())

    server.rig.call(create())
    found = wait_until_ended(client, "by-hand")
    assert client.files.content(found.input_file_id).content == line("a")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((PURPOSE_PART,), "file"),
        ((FILE_PART,), "purpose"),
        ((('name="purpose"', b"vision"), FILE_PART), "purpose"),
        ((PURPOSE_PART, FILE_PART, FILE_PART), "only once"),
        ((PURPOSE_PART, PURPOSE_PART, FILE_PART), "twice"),
        ((PURPOSE_PART, FILE_PART, ('name="expires_after[seconds]"', b"9")), "not supported"),
        ((('name="purpose"', b"x" * 9_000), FILE_PART), "field"),
        ((PURPOSE_PART, ('name="file"; filename="e"', b"")), "no requests"),
    ],
)
def test_an_invalid_form_leaves_no_file(server: HttpRig, parts: Any, says: str) -> None:
    before = server.ask("GET", "/v1/files?purpose=batch").value["data"]
    refused = upload(server, *parts)
    assert refused.status == 400
    assert says in refused.error["message"]
    assert server.ask("GET", "/v1/files?purpose=batch").value["data"] == before


def test_form_fields_may_follow_the_file(server: HttpRig) -> None:
    assert upload(server, FILE_PART, PURPOSE_PART).value["bytes"] == len(FILE)


def test_invalid_requests_are_refused(server: HttpRig, client: openai.OpenAI) -> None:
    def make(**members: Any) -> Answer:
        body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **members}
        return server.ask("POST", "/v1/batches", body)

    file = upload(server, PURPOSE_PART, FILE_PART).value["id"]
    assert make().error["param"] == "input_file_id"
    assert make(input_file_id="file-" + "0" * 24).status == 404
    assert make(input_file_id="mine").error["param"] == "input_file_id"
    assert make(input_file_id=file, endpoint="/v1/embeddings").error["param"] == "endpoint"
    assert make(input_file_id=file, completion_window="1h").status == 400
    assert make(input_file_id=file, metadata={"a": 1}).error["param"] == "metadata"
    assert make(input_file_id=file, output_expires_after={}).status == 400
    for path in ("/v1/batches/x", f"/v1/batches/{file}", "/v1/files/x", "/v1/files/file-output.x"):
        assert server.ask("GET", path).status == 404, path
    for path in ("/v1/batches?limit=0", "/v1/files?after=x", "/v1/files?page=2"):
        assert server.ask("GET", path).status == 400, path
    plain = server.ask("POST", "/v1/files", FILE, {"content-type": "text/plain"})
    assert plain.error["param"] == "content-type"


def test_a_tenant_sees_only_its_own_files_and_batches(tmp_path: Path) -> None:
    names = ("ada", "bob")
    tokens = [Token(hashlib.sha256(name.encode()).digest(), name) for name in names]
    audit_log = tmp_path / "audit.log"
    http = {"tokens": tokens, "audit_log": audit_log}
    ada, bob = ({"authorization": f"Bearer {name}"} for name in names)
    with http_rig(tmp_path / "data", http=http, batch_jobs=JobsConfig()) as server:
        file = upload(server, PURPOSE_PART, FILE_PART, **ada).value["id"]
        path = f"/v1/files/{file}"
        assert server.ask("GET", path, headers=ada).status == 200
        for method, where in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
            assert server.ask(method, where, headers=bob).status == 404
        assert server.ask("GET", "/v1/files", headers=bob).value["data"] == []
        assert upload(server, PURPOSE_PART, FILE_PART).status == 401
        assert server.ask("DELETE", path, headers=ada).value["deleted"]
    audited = [json.loads(each) for each in audit_log.read_text().splitlines()]
    deletions = [each for each in audited if each["event"] == "delete"]
    assert [(each["job_id"], each["outcome"]) for each in deletions] == [
        (file, "NOT_FOUND"),
        (file, "OK"),
    ]


def test_a_daemon_without_jobs_answers_404(tmp_path: Path) -> None:
    with http_rig(tmp_path / "data") as server:
        assert server.ask("GET", "/v1/batches").status == 404
        assert upload(server, PURPOSE_PART, FILE_PART).status == 404


def test_sizes_of_results_are_read_once_and_lists_are_paged(
    server: HttpRig, client: openai.OpenAI
) -> None:
    file = client.files.create(file=("in.jsonl", FILE), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    done = wait_until_ended(client, batch.id)
    first = {each.id: each.bytes for each in client.files.list()}
    read: list[Any] = []
    store = server.rig.job_store
    result_bytes = store.result_bytes
    store.result_bytes = lambda key: (read.append(key), result_bytes(key))[1]  # type: ignore[method-assign]
    try:
        assert {each.id: each.bytes for each in client.files.list()} == first
        assert (
            client.files.retrieve(str(done.output_file_id)).bytes == first[str(done.output_file_id)]
        )
        assert not read
    finally:
        del store.result_bytes
    for _ in range(101):
        client.files.create(file=("one.jsonl", line("a")), purpose="batch")
    page = client.files.list()
    assert len(page.data) == 100
    assert page.has_more
    assert len(list(client.files.list(limit=10_000))) > 100


def test_a_list_stops_when_its_client_disconnects(server: HttpRig, client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", line("a")), purpose="batch")
    for _ in range(3):
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wait_until_ended(client, batch.id)  # sizes of this batch have not been requested yet
    store = server.rig.job_store
    read, go_on, is_over = [], threading.Event(), threading.Event()
    result_bytes, enter = store.result_bytes, GuardedCall.enter

    async def enter_seen(call: Any, authorization: str | None) -> Any:
        call._transport.add_done_callback(lambda _: is_over.set())
        return await enter(call, authorization)

    def read_slowly(key: JobKey) -> ResultBytes:
        read.append(key)
        assert go_on.wait(60)
        return result_bytes(key)

    store.result_bytes = read_slowly  # type: ignore[method-assign]
    GuardedCall.enter = enter_seen  # type: ignore[method-assign, assignment]
    try:
        connection = server.connection()
        connection.request("GET", "/v1/files")
        wait_for(lambda: read)
        assert not is_over.is_set()
        connection.close()
        assert is_over.wait(30)
    finally:
        go_on.set()
        GuardedCall.enter = enter  # type: ignore[method-assign]
        del store.result_bytes
    assert len(read) == 1
