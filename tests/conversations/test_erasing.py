"""A deletion whose text cannot be erased at once, as clients and the operator of a daemon see it."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import grpc
import pytest

from pensieve.cli.main import main
from pensieve.conversations import daemon, housekeeping
from pensieve.store import ConversationStore, NewConversation, NewMessage
from pensieve.store.connection import read_only
from pensieve.v1 import admin_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig, wait_for

SHORT = pb.Sampling(max_tokens=4, ignore_eos=True)
SECRET = "a word that nobody says twice"


@contextlib.contextmanager
def reader(rig: DaemonRig) -> Iterator[None]:
    """Another program that reads the history."""
    with read_only(rig.daemon.store.folder.database_path) as conn:
        conn.execute("BEGIN")
        conn.execute("SELECT * FROM conversations").fetchall()
        yield


def delete(rig: DaemonRig, name: str) -> str:
    try:
        rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id=name))
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def is_in_the_files(rig: DaemonRig) -> bool:
    folder = rig.daemon.store.folder.path
    return any(SECRET.encode() in path.read_bytes() for path in folder.glob("conversations.db*"))


def pending(rig: DaemonRig) -> float:
    return float(rig.admin.GetStats(admin_pb2.GetStatsRequest()).stats.more["erasure_pending"])


def test_a_deletion_waits_for_a_reader_and_blocks_no_other_call(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data") as rig, ThreadPoolExecutor(1) as pool:
        rig.ask("secret", SECRET, sampling=SHORT)
        with reader(rig):
            answer = pool.submit(delete, rig, "secret")
            wait_for(lambda: rig.daemon.store.erasure.pending)
            assert rig.ask("other", "hello", sampling=SHORT).completed.revision == 1
            assert is_in_the_files(rig)
        assert answer.result() == "OK"
        assert not is_in_the_files(rig)


def test_deleted_text_is_erased_after_a_blocking_reader_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "ERASED_SECONDS_MAX", 0.0)
    with DaemonRig(tmp_path / "data") as rig, caplog.at_level(logging.WARNING, "pensieve"):
        rig.ask("secret", SECRET, sampling=SHORT)
        with reader(rig):
            assert delete(rig, "secret") == "UNAVAILABLE"
            assert delete(rig, "secret") == "UNAVAILABLE"
            assert rig.ask("other", "hello", sampling=SHORT).completed.revision == 1
            wait_for(lambda: "cannot be erased" in caplog.text)
            assert pending(rig) == 1
            assert is_in_the_files(rig)
            with redirect_stdout(io.StringIO()) as shown:
                main(["admin", "stats", "--data", str(tmp_path / "data")])
            assert "deleted text is not erased from the files yet" in shown.getvalue()
        wait_for(lambda: not pending(rig))
        assert not is_in_the_files(rig)
        wait_for(lambda: "all deleted text is erased" in caplog.text)
        assert caplog.text.count("cannot be erased") == 1
        assert SECRET not in caplog.text
        assert delete(rig, "secret") == "NOT_FOUND"


def test_a_repeated_deletion_erases_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "ERASED_SECONDS_MAX", 0.0)
    monkeypatch.setattr(daemon, "SWEEP_SECONDS", 3600.0)
    with DaemonRig(tmp_path / "data") as rig:
        rig.ask("secret", SECRET, sampling=SHORT)
        with reader(rig):
            assert delete(rig, "secret") == "UNAVAILABLE"
        assert is_in_the_files(rig)
        assert delete(rig, "secret") == "NOT_FOUND"
        assert not is_in_the_files(rig)


def test_a_repeated_deletion_waits_for_a_reader_like_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if the conversation is already gone: the second request must not fail early."""
    monkeypatch.setattr(housekeeping, "ERASED_SECONDS_MAX", 0.0)
    monkeypatch.setattr(daemon, "SWEEP_SECONDS", 3600.0)
    with DaemonRig(tmp_path / "data") as rig, ThreadPoolExecutor(1) as pool:
        rig.ask("secret", SECRET, sampling=SHORT)
        with reader(rig):
            assert delete(rig, "secret") == "UNAVAILABLE"
            tries = []
            finish = rig.daemon.store.erasure.finish
            monkeypatch.setattr(
                rig.daemon.store.erasure, "finish", lambda: (tries.append(1), finish())
            )
            monkeypatch.setattr(housekeeping, "ERASED_SECONDS_MAX", 60.0)
            answer = pool.submit(delete, rig, "secret")
            wait_for(lambda: len(tries) >= 3)
        assert answer.result() == "NOT_FOUND"
        assert not is_in_the_files(rig)


def test_deletions_shrink_the_database_while_turns_are_served(tmp_path: Path) -> None:
    head = [NewMessage("system", "x" * 400_000)]
    with ConversationStore.open(tmp_path / "data", "test") as store:
        for number in range(50):
            store.create_conversation(NewConversation(f"c{number}", "f", head))
    with DaemonRig(tmp_path / "data") as rig:
        database = rig.daemon.store.folder.database_path
        assert database.stat().st_size > 20_000_000
        for number in range(50):
            assert delete(rig, f"c{number}") == "OK"
        wait_for(lambda: database.stat().st_size < 2_000_000)
        assert rig.ask("other", "hello", sampling=SHORT).completed.revision == 1
        assert rig.daemon.store.verify() == []
