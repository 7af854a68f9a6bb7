"""Batch jobs of a daemon: each line gets exactly one answer, whatever happens, and chats go first."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    PensieveError,
    StorageFull,
    StoreCorrupt,
    StoreUnavailable,
    WrongJobState,
)
from pensieve.guard.limits import Limits
from pensieve.jobs.job_records import JobOutcome, JobState, ResultKind
from pensieve.jobs.prepared import LineReader
from pensieve.jobs.values import JobHeader, JobView
from pensieve.jobs.worker import JobsConfig
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import ECHO, DaemonRig, wait_for

URL = "/v1/chat/completions"
DOCUMENT = "A library keeps books so that somebody may read them in a hundred years. " * 12
SLOW = (*ECHO, "--seconds=0.02")
BRIEF = pb.Sampling(max_tokens=12)


def line(number: int, **changes: Any) -> dict[str, Any]:
    content = f"{DOCUMENT} What does sentence {number} say?"
    body = {
        "model": "builtin",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        **changes.pop("body", {}),
    }
    return {"custom_id": f"r{number}", "method": "POST", "url": URL, "body": body, **changes}


def file_of(lines: Iterable[dict[str, Any] | str]) -> bytes:
    texts = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    return "".join(f"{each}\n" for each in texts).encode()


def rig(data: Path, program: tuple[str, ...] = ECHO, **settings: str) -> DaemonRig:
    return DaemonRig(data, program=program, batch_jobs=JobsConfig(), written=settings)


def send(rig: DaemonRig, job_id: str, file: bytes, tenant: str = "", **fields: Any) -> JobView:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(file), 1000):
            yield file[start : start + 1000]

    view: JobView = rig.call(rig.batch.create(tenant, JobHeader(job_id, **fields), chunks()))
    return view


def view(rig: DaemonRig, job_id: str, tenant: str = "") -> JobView:
    found: JobView = rig.call(rig.batch.get(tenant, job_id))
    return found


def wait_until_ended(rig: DaemonRig, job_id: str) -> JobView:
    wait_for(lambda: view(rig, job_id).state is JobState.ENDED)
    return view(rig, job_id)


def results(
    rig: DaemonRig, job_id: str, which: ResultKind = ResultKind.ALL
) -> list[dict[str, Any]]:
    async def read() -> list[bytes]:
        pages = rig.batch.results("", job_id, which, 0)
        return [each.text async for page in pages for each in page]

    texts: list[bytes] = rig.call(read())
    assert not any(b"\n" in each for each in texts), "a result has several lines"
    return [json.loads(each) for each in texts]


def words(rig: DaemonRig, job_id: str) -> dict[str, str]:
    """Return the text of each answered line."""
    answers = results(rig, job_id, ResultKind.ANSWERS)
    said = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
        for each in answers
    }
    assert len(said) == len(answers), "a line has two answers"
    return said


def run_undisturbed(data: Path, file: bytes) -> dict[str, str]:
    with rig(data) as alone:
        send(alone, "j", file)
        assert wait_until_ended(alone, "j").outcome is JobOutcome.COMPLETED
        return words(alone, "j")


def test_a_job_is_checked_run_and_answered(tmp_path: Path) -> None:
    file = file_of(line(number) for number in range(20))
    digest = hashlib.sha256(file).hexdigest()
    with rig(tmp_path) as daemon:
        sent = send(daemon, "night", file, name="questions", sha256=digest, num_bytes=len(file))
        assert (sent.state, sent.num_lines, sent.num_bytes) == (JobState.CHECKING, 20, len(file))
        ended = wait_until_ended(daemon, "night")
        assert (ended.outcome, ended.num_answered, ended.num_refused) == ("completed", 20, 0), (
            results(daemon, "night")
        )
        assert ended.saved_tokens > 0.5 * ended.prompt_tokens
        answers = results(daemon, "night")
        assert [each["custom_id"] for each in answers] == [f"r{number}" for number in range(20)]
        body = answers[3]["response"]["body"]
        assert body["object"] == "chat.completion"
        assert body["model"] == "builtin"
        assert body["usage"]["completion_tokens"] <= 12
        assert body["choices"][0]["message"]["content"]


def test_answers_equal_those_of_a_conversation(tmp_path: Path) -> None:
    lines = [line(number) for number in range(6)]
    with rig(tmp_path) as daemon:
        send(daemon, "j", file_of(lines))
        wait_until_ended(daemon, "j")
        said = words(daemon, "j")
        for each in lines:
            content = each["body"]["messages"][0]["content"]
            turn = daemon.ask(each["custom_id"], content, sampling={"max_tokens": 12})
            assert turn.text == said[each["custom_id"]]


def test_invalid_lines_are_named_and_the_rest_of_the_job_runs(tmp_path: Path) -> None:
    lines: list[Any] = [
        line(1),
        "{broken",
        line(3, custom_id="r1"),
        line(4, body={"model": "another"}),
        line(5, body={"messages": [{"role": "user", "content": "word " * 120_000}]}),
        "",
        line(7, url="/v1/embeddings"),
        line(8, body={"stream": True}),
        line(9),
    ]
    with rig(tmp_path) as daemon:
        send(daemon, "j", file_of(lines))
        ended = wait_until_ended(daemon, "j")
        assert (ended.num_lines, ended.num_answered, ended.num_refused) == (8, 2, 6)
        assert set(words(daemon, "j")) == {"r1", "r9"}
        errors = [each["error"] for each in results(daemon, "j", ResultKind.ERRORS)]
        assert [(each["line"], each["code"]) for each in errors] == [
            (2, "invalid_json_line"),
            (3, "duplicate_custom_id"),
            (4, "model_not_found"),
            (5, "context_length_exceeded"),
            (7, "invalid_url"),
            (8, "unsupported_parameter"),
        ]
        assert "is already used in line 1" in errors[1]["message"]


def test_choices_share_their_prompt_and_differ(tmp_path: Path) -> None:
    lines = [line(1, body={"n": 4, "temperature": 1.0, "seed": 5})]
    with rig(tmp_path) as daemon:
        send(daemon, "j", file_of(lines))
        ended = wait_until_ended(daemon, "j")
        (answer,) = results(daemon, "j")
        choices = answer["response"]["body"]["choices"]
        assert [each["index"] for each in choices] == [0, 1, 2, 3]
        assert ended.saved_tokens > 0.6 * ended.prompt_tokens


def test_a_check_only_job_computes_nothing(tmp_path: Path) -> None:
    with rig(tmp_path) as daemon:
        send(daemon, "j", file_of([line(1), "{", line(3)]), check_only=True)
        ended = wait_until_ended(daemon, "j")
        assert (ended.outcome, ended.num_answered, ended.num_refused) == ("checked", 0, 1)


def test_a_resumed_job_continues_where_it_was_paused(tmp_path: Path) -> None:
    file = file_of(line(number) for number in range(60))
    right = run_undisturbed(tmp_path / "alone", file)
    with rig(tmp_path / "data", SLOW, turns_max="4") as daemon:
        send(daemon, "j", file)
        for least in (3, 10, 20):
            wait_for(lambda least=least: view(daemon, "j").num_answered >= least)
            paused = daemon.call(daemon.batch.pause("", "j"))
            assert (paused.state, paused.num_running) == (JobState.PAUSED, 0)
            assert paused.num_answered < 60
            assert daemon.call(daemon.batch.resume("", "j")).state is JobState.WAITING
        ended = wait_until_ended(daemon, "j")
        assert (ended.outcome, ended.num_answered) == ("completed", 60)
        assert words(daemon, "j") == right


def test_a_paused_job_lets_the_next_job_pass(tmp_path: Path) -> None:
    with rig(tmp_path, SLOW, turns_max="2") as daemon:
        send(daemon, "first", file_of(line(number) for number in range(40)))
        wait_for(lambda: view(daemon, "first").num_answered)
        send(daemon, "second", file_of(line(number) for number in range(3)))
        daemon.call(daemon.batch.pause("", "first"))
        wait_until_ended(daemon, "second")
        assert view(daemon, "first").state is JobState.PAUSED


def test_a_cancelled_job_keeps_its_answers_and_a_deleted_job_leaves_nothing(tmp_path: Path) -> None:
    with rig(tmp_path, SLOW, turns_max="2") as daemon:
        send(daemon, "j", file_of(line(number) for number in range(40)))
        wait_for(lambda: view(daemon, "j").num_answered > 2)
        cancelled = daemon.call(daemon.batch.cancel("", "j"))
        assert (cancelled.state, cancelled.outcome) == ("ended", "cancelled")
        assert len(words(daemon, "j")) == cancelled.num_answered < 40
        daemon.call(daemon.batch.delete("", "j"))
        with pytest.raises(NotFound):
            view(daemon, "j")
        assert not [each for each in tmp_path.glob("jobs/*") if each.is_file()]
        send(daemon, "j", file_of([line(1)]))
        wait_until_ended(daemon, "j")


def test_no_answer_is_lost_if_the_engine_is_killed(tmp_path: Path) -> None:
    file = file_of(line(number) for number in range(80))
    right = run_undisturbed(tmp_path / "alone", file)
    with rig(tmp_path / "data", SLOW, turns_max="8") as daemon:
        send(daemon, "j", file)
        killed: list[int | None] = [None]
        for least in (5, 15, 25, 40):
            wait_for(lambda least=least: view(daemon, "j").num_answered >= least)
            wait_for(lambda: daemon.daemon.engine.pid not in killed)
            killed.append(daemon.daemon.engine.pid)
            os.kill(killed[-1], signal.SIGKILL)  # type: ignore[arg-type]
        ended = wait_until_ended(daemon, "j")
        assert (ended.num_answered, ended.num_refused) == (80, 0)
        assert words(daemon, "j") == right


def test_a_restarted_daemon_continues_jobs_and_answers_no_line_twice(tmp_path: Path) -> None:
    file = file_of(line(number) for number in range(60))
    right = run_undisturbed(tmp_path / "alone", file)
    data, before = tmp_path / "data", 0
    for _ in range(3):
        with rig(data, SLOW, turns_max="4") as daemon:
            if not before:
                send(daemon, "j", file)
            wait_for(lambda least=before + 4: view(daemon, "j").num_answered > least)
            before = view(daemon, "j").num_answered
    with rig(data) as daemon:
        ended = wait_until_ended(daemon, "j")
        assert ended.num_answered == 60
        assert words(daemon, "j") == right


def test_forbidden_calls_during_a_job_are_refused_and_do_not_disturb_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, right, num_calls = threading.Event(), LineReader.read_all, 0

    def read_all(self: LineReader, lines: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        gate.wait(60.0)
        return right(self, lines)

    monkeypatch.setattr(LineReader, "read_all", read_all)
    with rig(tmp_path) as daemon:
        send(daemon, "j", file_of(line(number) for number in range(20)), check_only=True)
        wait_for(lambda: num_calls)
        for operation in (daemon.batch.pause, daemon.batch.resume):
            with pytest.raises(WrongJobState):
                daemon.call(operation("", "j"))
        gate.set()
        ended = wait_until_ended(daemon, "j")
        assert (ended.outcome, ended.num_answered, num_calls) == ("checked", 0, 1)
        with pytest.raises(WrongJobState):
            daemon.call(daemon.batch.resume("", "j"))
        assert daemon.call(daemon.batch.cancel("", "j")).outcome is JobOutcome.CHECKED


def test_a_failed_job_leaves_no_turns_in_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path, SLOW, turns_max="8") as daemon:

        def answer(key: Any, answers: Any) -> Any:
            raise StoreCorrupt("the job is damaged")

        monkeypatch.setattr(daemon.job_store, "answer", answer)
        lines = (line(number, body={"max_tokens": 3 + 400 * (number > 0)}) for number in range(8))
        send(daemon, "j", file_of(lines))
        ended = wait_until_ended(daemon, "j")
        assert (ended.outcome, ended.problem) == ("failed", "the job is damaged")

        def running() -> float:
            figures: float = daemon.call(daemon.daemon.stats()).figures["turns_running"]
            return figures

        wait_for(lambda: not running())


def test_a_chat_is_answered_at_once_while_a_job_fills_the_engine(tmp_path: Path) -> None:
    file = file_of(line(number, body={"max_tokens": 100}) for number in range(200))
    right = run_undisturbed(tmp_path / "alone", file)
    with rig(tmp_path / "data", SLOW) as daemon:
        send(daemon, "j", file)
        wait_for(lambda: view(daemon, "j").num_running > 64)
        assert daemon.ask("chat", "hello", sampling=BRIEF).completed is not None
        assert view(daemon, "j").num_answered < 200
        assert wait_until_ended(daemon, "j").num_answered == 200
        assert words(daemon, "j") == right


def test_jobs_of_different_tenants_take_turns(tmp_path: Path) -> None:
    with rig(tmp_path, SLOW, turns_max="2") as daemon:
        for number in range(3):
            send(daemon, f"a{number}", file_of(line(each) for each in range(60)), tenant="a")
        send(daemon, "b", file_of([line(1)]), tenant="b")
        wait_for(lambda: view(daemon, "b", tenant="b").state is JobState.ENDED)
        assert view(daemon, "a2", tenant="a").state is JobState.WAITING


@pytest.mark.parametrize("damage", ["PRAGMA user_version = 77", "UPDATE job SET state = 'lost'"])
def test_an_unreadable_job_is_left_unchanged(tmp_path: Path, damage: str) -> None:
    file = file_of([line(1)])
    with rig(tmp_path) as daemon:
        send(daemon, "j", file)
        wait_until_ended(daemon, "j")
    (path,) = (tmp_path / "jobs").glob("*.db")
    with contextlib.closing(sqlite3.connect(path)) as conn, conn:
        conn.execute(damage)
    with rig(tmp_path) as daemon:
        with pytest.raises(PensieveError):
            send(daemon, "j", file)
        assert path.exists()
        send(daemon, "other", file)
        wait_until_ended(daemon, "other")


def test_a_file_with_too_many_blank_lines_is_refused(tmp_path: Path) -> None:
    with rig(tmp_path) as daemon, pytest.raises(InvalidArgument, match="at most 200,000 lines"):
        send(daemon, "j", b"\n" * 300_000)


def test_running_uploads_count_towards_a_tenants_storage_limit(tmp_path: Path) -> None:
    file = file_of(line(number) for number in range(4))
    limits = {"a": Limits(storage_bytes=3 * len(file))}

    async def send_all(jobs: Any) -> list[Any]:
        async def slowly() -> AsyncIterator[bytes]:
            for start in range(0, len(file), 500):
                await asyncio.sleep(0.01)
                yield file[start : start + 500]

        headers = [JobHeader(f"j{number}", num_bytes=len(file)) for number in range(6)]
        calls = (jobs.create("a", header, slowly()) for header in headers)
        return list(await asyncio.gather(*calls, return_exceptions=True))

    config = DaemonConfig(limits=limits)
    with DaemonRig(tmp_path, config=config, batch_jobs=JobsConfig()) as daemon:
        found = daemon.call(send_all(daemon.batch))
        refused = [each for each in found if isinstance(each, StorageFull)]
        assert 0 < len(found) - len(refused) < 3, found


def test_a_client_that_disconnects_at_once_leaves_no_job(tmp_path: Path) -> None:
    async def disconnect(jobs: Any) -> None:
        async def nothing() -> AsyncIterator[bytes]:
            await asyncio.sleep(60.0)
            yield b""

        call = asyncio.ensure_future(jobs.create("", JobHeader("j"), nothing()))
        for _ in range(3):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    with rig(tmp_path) as daemon:
        daemon.call(disconnect(daemon.batch))
        wait_for(lambda: not list((tmp_path / "jobs").glob("*.db")))
        send(daemon, "j", file_of([line(1)]))
        assert wait_until_ended(daemon, "j").num_answered == 1


def test_a_full_disk_stops_a_job_but_no_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path, SLOW, turns_max="4") as daemon:
        right, is_full = daemon.job_store.answer, True

        def answer(key: Any, answers: Any) -> Any:
            if is_full:
                raise StoreUnavailable("the job: the disk is full")
            return right(key, answers)

        monkeypatch.setattr(daemon.job_store, "answer", answer)
        send(daemon, "j", file_of(line(number) for number in range(12)))
        wait_for(lambda: "disk is full" in view(daemon, "j").problem)
        assert daemon.ask("chat", "hello", sampling=BRIEF).completed is not None
        is_full = False
        ended = wait_until_ended(daemon, "j")
        assert (ended.num_answered, ended.problem) == (12, "")


def test_files_that_contradict_their_header_leave_no_job(tmp_path: Path) -> None:
    with rig(tmp_path) as daemon:
        file = file_of([line(1)])
        for fields, field in (
            ({"sha256": "0" * 64}, "sha256"),
            ({"num_bytes": 5}, "num_bytes"),
        ):
            with pytest.raises(InvalidArgument, match=field):
                send(daemon, "j", file, **fields)
        with pytest.raises(InvalidArgument, match="no requests"):
            send(daemon, "j", b"\n\n")
        with pytest.raises(NotFound):
            view(daemon, "j")
        send(daemon, "j", file)
        with pytest.raises(AlreadyExists):
            send(daemon, "j", file)
        with pytest.raises(NotFound):
            view(daemon, "j", tenant="another")


def test_the_error_for_a_line_that_is_too_long_has_its_number(tmp_path: Path) -> None:
    with rig(tmp_path) as daemon:
        send(daemon, "j", file_of([line(1), "x" * (9 << 20), line(3)]))
        ended = wait_until_ended(daemon, "j")
        assert (ended.num_answered, ended.num_refused) == (2, 1)
        (error,) = [each["error"] for each in results(daemon, "j", ResultKind.ERRORS)]
        assert (error["line"], error["code"]) == (2, "line_too_large")


def test_a_job_with_an_unknown_id_cannot_be_changed(tmp_path: Path) -> None:
    with rig(tmp_path) as daemon:
        for operation in (daemon.batch.pause, daemon.batch.resume, daemon.batch.cancel):
            with pytest.raises(PensieveError, match="no job"):
                daemon.call(operation("", "nothing"))
