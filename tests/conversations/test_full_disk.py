"""A full disk: the daemon reports it, reads and deletes still work, and writing resumes by itself."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.conversations import housekeeping
from pensieve.errors import DiskFull, StoreUnavailable
from pensieve.store import ConversationStore
from pensieve.store.connection import pensieve_error as sqlite_error
from pensieve.store.folder import RESERVE_NAME
from pensieve.store.postgres.connection import pensieve_error as postgres_error
from pensieve.store.sqlite_backend import Reserve
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import status_pb2
from tests.api.http.rig_http import MODEL, HttpRig, http_rig
from tests.conversations.rig_daemon import details, wait_for
from tests.store.faulty import FaultyDriver

SHORT = pb.Sampling(max_tokens=2)
FULL = 13  # SQLITE_FULL
HEALTH = "/grpc.health.v1.Health/Check"


class FullWithoutReserve(FaultyDriver):
    """Every writing statement fails while the reserve occupies the last space."""

    def __init__(self, driver: Any, reserve: Path) -> None:
        super().__init__(driver, FULL, False, True)
        self.is_full = False
        faults = self

        class Connection(driver.Connection):  # type: ignore[misc]
            def execute(self, sql: str, *arguments: Any) -> Any:
                is_write = sql.split()[0] in ("INSERT", "UPDATE", "DELETE", "COMMIT")
                if faults.is_full and is_write and reserve.exists():
                    raise faults.error()
                return super().execute(sql, *arguments)

        self.connect = lambda *args, **options: driver.connect(*args, factory=Connection, **options)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpRig]:
    with http_rig(tmp_path / "data") as server:
        yield server


@pytest.fixture
def fill(server: HttpRig, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that makes the disk full or not full."""
    monkeypatch.setattr(housekeeping, "FULL_DISK_CHECK_SECONDS", 0.01)
    store: Any = server.rig.daemon.store
    writer = store._writer
    faults = FullWithoutReserve(writer.driver, store.folder.path / RESERVE_NAME)

    def swap() -> None:
        writer.driver = faults
        writer._discard()

    server.rig.call(server.rig.daemon.threads.in_store("", swap))
    refill = Reserve.refill
    monkeypatch.setattr(Reserve, "refill", lambda reserve: not faults.is_full and refill(reserve))

    def fill(is_full: bool) -> None:
        faults.is_full = is_full

    return fill


def is_serving(server: HttpRig) -> bool:
    check = server.rig.channel.unary_unary(
        HEALTH,
        request_serializer=status_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=status_pb2.HealthCheckResponse.FromString,
    )
    answer = check(status_pb2.HealthCheckRequest())
    return bool(answer.status == status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING)


def test_a_full_disk_is_reported_until_space_is_available(
    server: HttpRig, fill: Callable[[bool], None]
) -> None:
    rig = server.rig
    rig.ask("c", "hello", sampling=SHORT)
    assert server.ask("GET", "/health").status == 200
    fill(True)
    for _ in range(2):  # the first call discovers that the disk is full
        with pytest.raises(grpc.RpcError) as refused:
            rig.ask("c", "more", sampling=SHORT)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the disk of the history is full" in str(refused.value.details())
        assert details(refused.value)["ErrorInfo"].reason == "DISK_FULL"
    health = server.ask("GET", "/health")
    assert health.status == 503
    assert "the disk of the history is full" in health.error["message"]
    assert not is_serving(server)
    chat = server.ask("POST", "/v1/chat/completions", {"model": MODEL, "messages": [user("hello")]})
    assert (chat.status, chat.error["code"]) == (507, "disk_full")
    answer = server.ask(
        "POST", "/v1/messages", {"model": MODEL, "max_tokens": 4, "messages": [user("hello")]}
    )
    assert answer.status == 507
    assert "the disk of the history is full" in answer.error["message"]
    assert len(rig.messages("c")) == 2
    fill(False)
    wait_for(lambda: server.ask("GET", "/health").status == 200)
    assert is_serving(server)
    assert rig.ask("c", "more", sampling=SHORT).completed.revision == 2


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_deletions_on_a_full_disk_use_the_reserved_space(
    server: HttpRig, fill: Callable[[bool], None]
) -> None:
    rig = server.rig
    reserve = rig.daemon.store.folder.path / RESERVE_NAME
    for name in ("a", "b"):
        rig.ask(name, "hello", sampling=SHORT)
    assert reserve.stat().st_size > 2**20
    fill(True)
    with pytest.raises(grpc.RpcError):
        rig.ask("a", "more", sampling=SHORT)
    rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id="a"))
    assert not reserve.exists()
    rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id="b"))
    with pytest.raises(grpc.RpcError) as refused:  # the reserved space is only for deletions
        rig.ask("c", "hello", sampling=SHORT)
    assert details(refused.value)["ErrorInfo"].reason == "DISK_FULL"
    assert not rig.stub.ListConversations(pb.ListConversationsRequest()).conversations
    fill(False)
    wait_for(reserve.exists)
    wait_for(lambda: server.ask("GET", "/health").status == 200)
    assert rig.ask("c", "hello", sampling=SHORT).completed.revision == 1


def test_a_deletion_that_uses_the_reserve_returns_freed_pages_at_once(
    tmp_path: Path,
) -> None:
    from tests.store.talk import create, reply, say
    from tests.store.talk import user as user_message

    with ConversationStore.open(tmp_path / "data", "test") as store:
        create(store, "tea")
        say(store, "tea", "r", user_message("x" * 300_000, 1), reply("y" * 300_000, 2))
        writer: Any = store._writer
        writer.truncate_journal()
        before = store.folder.database_bytes
        (store.folder.path / RESERVE_NAME).unlink()
        store.delete_conversation("tea")
        while store.erasure.step():
            pass
        assert store.folder.database_bytes < before - 500_000
        assert store.erasure.has_room()
        assert (store.folder.path / RESERVE_NAME).exists()


def test_no_reserve_is_written_without_enough_disk_space(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / RESERVE_NAME, 1 << 60)
    assert not reserve.refill()
    assert not reserve.is_kept
    assert not reserve.release()


def test_full_disk_errors_of_sqlite_and_postgres_become_disk_full() -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = FULL
    assert isinstance(sqlite_error(error, Path("/data/conversations.db")), DiskFull)

    class Failed(Exception):
        sqlstate = "53100"

    assert isinstance(postgres_error(Failed(), "postgresql://h/d"), DiskFull)
    Failed.sqlstate = "53200"
    other = postgres_error(Failed(), "postgresql://h/d")
    assert isinstance(other, StoreUnavailable)
    assert not isinstance(other, DiskFull)
