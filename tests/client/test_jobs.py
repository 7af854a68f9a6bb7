"""Batch jobs: requests, results, and retries after broken connections."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pensieve import errors
from pensieve.client import AsyncClient, Client, Job, Retry
from pensieve.client.requests import CHUNK_BYTES
from tests.client.scripted import ScriptedServer

FILE = b'{"custom_id": "a"}\n{"custom_id": "bb"}\n{"custom_id": "ccc"}\n'
LINES = FILE.splitlines()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address, retry=Retry(retries=3), sleep=lambda seconds: None) as client:
        yield client


def names(server: ScriptedServer) -> list[str]:
    return [name for name, _ in server.jobs.calls]


def test_a_job_from_its_file_to_its_results(
    server: ScriptedServer, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(FILE)
    job = client.jobs.create(path, job_id="nightly", name="by night", endpoint="/v1/completions")
    assert (job.job_id, job.name, job.endpoint, job.check_only) == (
        "nightly",
        "by night",
        "/v1/completions",
        False,
    )
    assert (job.sha256, job.num_bytes) == (hashlib.sha256(FILE).hexdigest(), len(FILE))
    assert (job.state, job.outcome, job.seconds_left) == ("running", "", 9.5)
    assert job.created_at == datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)
    assert (job.started_at, job.ended_at) == (None, None)
    header = server.jobs.calls[0][1]
    assert (header.sha256, header.num_bytes) == (job.sha256, len(FILE))
    seen = [each.num_answered for each in client.jobs.watch("nightly")]
    assert seen == [0, 1, 2, 3]
    assert client.jobs.get("nightly").outcome == "completed"
    assert list(client.jobs.results("nightly")) == LINES
    assert list(client.jobs.results("nightly", "answers", after_line=2)) == LINES[2:]
    client.jobs.delete("nightly")
    with pytest.raises(errors.NotFound):
        client.jobs.get("nightly")


def test_a_job_is_paused_resumed_and_cancelled(client: Client) -> None:
    client.jobs.create(FILE, job_id="steered")
    assert client.jobs.pause("steered").state == "paused"
    assert client.jobs.resume("steered").state == "waiting"
    assert client.jobs.cancel("steered").outcome == "cancelled"


def test_jobs_are_listed_page_by_page(server: ScriptedServer, client: Client) -> None:
    for number in range(5):
        client.jobs.create(FILE, job_id=f"j{number}", check_only=number == 1)
    found = list(client.jobs.list(all_tenants=True))
    assert [job.job_id for job in found] == ["j4", "j3", "j2", "j1", "j0"]
    assert [job.check_only for job in found] == [False, False, False, True, False]
    assert names(server).count("ListJobs") == 3
    assert server.jobs.calls[-1][1].all_tenants


def test_calls_about_another_tenants_job_send_the_tenant(
    server: ScriptedServer, client: Client
) -> None:
    client.jobs.create(FILE, job_id="theirs")
    calls: list[Callable[..., Any]] = [client.jobs.get, client.jobs.pause, client.jobs.resume]
    calls += [client.jobs.cancel, lambda *a, **o: list(client.jobs.results(*a, **o))]
    calls += [lambda *a, **o: list(client.jobs.watch(*a, **o)), client.jobs.delete]
    for call in calls:
        call("theirs", tenant="acme")
    assert {request.tenant for _, request in server.jobs.calls[1:]} == {"acme"}


@pytest.mark.parametrize(
    "source", [FILE, [FILE[:5], FILE[5:]], iter([b"", FILE])], ids=["bytes", "list", "iterator"]
)
def test_a_file_may_be_bytes_or_come_in_pieces(
    server: ScriptedServer, client: Client, source: Any
) -> None:
    job = client.jobs.create(source)
    assert server.jobs.files[job.job_id] == FILE


def test_a_large_file_is_sent_in_pieces(
    server: ScriptedServer, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "large.jsonl"
    path.write_bytes(b"x" * (3 * CHUNK_BYTES + 1))
    job = client.jobs.create(str(path))
    assert job.num_bytes == 3 * CHUNK_BYTES + 1


def test_a_file_is_sent_again_when_the_connection_breaks(
    server: ScriptedServer, client: Client
) -> None:
    server.jobs.breaks.extend([0, 1])
    job = client.jobs.create(FILE)
    assert server.jobs.files == {job.job_id: FILE}
    assert names(server) == ["CreateJob"] * 3
    assert len({header.job_id for _, header in server.jobs.calls}) == 1


def test_create_returns_the_job_if_the_first_answer_was_lost(
    server: ScriptedServer, client: Client
) -> None:
    server.jobs.lost_answers = 1
    job = client.jobs.create(FILE, job_id="heard")
    assert job.sha256 == hashlib.sha256(FILE).hexdigest()
    assert names(server) == ["CreateJob", "CreateJob", "GetJob"]


def test_create_with_a_used_job_id_raises_already_exists(
    server: ScriptedServer, client: Client
) -> None:
    client.jobs.create(FILE, job_id="taken")
    with pytest.raises(errors.AlreadyExists):
        client.jobs.create(FILE, job_id="taken")  # not a retry, so the job belongs to someone else
    server.jobs.breaks.append(0)
    with pytest.raises(errors.AlreadyExists):
        client.jobs.create(FILE * 2, job_id="taken")


def test_an_upload_from_an_iterator_is_not_retried(server: ScriptedServer, client: Client) -> None:
    server.jobs.breaks.append(0)
    with pytest.raises(errors.Unavailable):
        client.jobs.create(iter([FILE]))
    assert names(server) == ["CreateJob"]
    assert server.jobs.jobs == {}


class Broken(Exception):
    pass


def test_an_error_of_the_uploads_iterator_is_raised_and_no_job_is_created(
    server: ScriptedServer, client: Client
) -> None:
    def pieces() -> Iterator[bytes]:
        yield FILE
        raise Broken

    with pytest.raises(Broken):
        client.jobs.create(pieces())
    assert server.jobs.jobs == {}


def test_invalid_arguments_are_refused_before_sending(
    server: ScriptedServer, client: Client, tmp_path: Path
) -> None:
    wrong: list[tuple[Callable[[], object], type[errors.PensieveError], str]] = [
        (lambda: client.jobs.create(FILE, job_id="a/b"), errors.InvalidArgument, "job_id"),
        (lambda: client.jobs.create(FILE, name="\ud800"), errors.InvalidArgument, "name"),
        (lambda: client.jobs.create(tmp_path / "none"), errors.ConfigError, "none: No such file"),
        (lambda: client.jobs.get(""), errors.InvalidArgument, "job_id"),
        (lambda: list(client.jobs.results("x", "some")), errors.InvalidArgument, "kind"),
        (lambda: list(client.jobs.watch("x", timeout=-1)), errors.InvalidArgument, "timeout"),
    ]
    for call, error, words in wrong:
        with pytest.raises(error, match=words):
            call()
    assert server.jobs.calls == []


@pytest.mark.parametrize("break_after", range(9))
def test_results_continue_where_their_stream_broke(
    server: ScriptedServer, client: Client, break_after: int
) -> None:
    client.jobs.create(FILE, job_id="broken")
    server.jobs.breaks.extend([break_after, break_after])
    assert list(client.jobs.results("broken")) == LINES
    assert names(server).count("GetResults") > 1


def test_a_watch_continues_after_a_break_and_fails_when_retries_run_out(
    server: ScriptedServer, client: Client
) -> None:
    client.jobs.create(FILE, job_id="watched")
    server.jobs.breaks.extend([1, 1])
    assert [each.num_answered for each in client.jobs.watch("watched")] == [0, 1, 2, 3]
    client.jobs.create(FILE, job_id="away")
    server.jobs.breaks.extend([0] * 4)
    with pytest.raises(errors.Unavailable):
        list(client.jobs.watch("away"))


def test_leaving_the_loop_of_a_watch_ends_its_stream(
    server: ScriptedServer, client: Client
) -> None:
    client.jobs.create(FILE, job_id="left")
    server.jobs.is_idle = True
    for job in client.jobs.watch("left"):
        assert job.num_answered == 0
        break
    assert server.jobs.watch_ended.wait(30)


def test_jobs_with_the_async_client(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(FILE)

    async def gather(items: AsyncIterator[Any]) -> list[Any]:
        return [each async for each in items]

    async def main() -> None:
        async def no_pause(seconds: float) -> None:
            pass

        async with AsyncClient(server.address, retry=Retry(retries=3), sleep=no_pause) as client:
            server.jobs.breaks.extend([0, -1, 2])
            assert (await client.jobs.create(path, job_id="a")).num_lines == 3
            seen: list[Job] = await gather(client.jobs.watch("a"))
            assert [each.num_answered for each in seen] == [0, 1, 2, 3]
            assert await gather(client.jobs.results("a")) == LINES
            assert [each.job_id for each in await gather(client.jobs.list())] == ["a"]
            job = await client.jobs.create(iter([FILE]))
            assert (await client.jobs.pause(job.job_id)).state == "paused"
            assert (await client.jobs.resume(job.job_id)).state == "waiting"
            assert (await client.jobs.cancel(job.job_id)).outcome == "cancelled"
            await client.jobs.delete(job.job_id)
            with pytest.raises(errors.NotFound):
                await client.jobs.get(job.job_id)

            def pieces() -> Iterator[bytes]:
                yield FILE
                raise Broken

            with pytest.raises(Broken):
                await client.jobs.create(pieces(), job_id="no")
            assert "no" not in server.jobs.jobs

    asyncio.run(main())
