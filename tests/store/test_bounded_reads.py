"""Partial reads must be bounded in SQL, because a server sends everything that a statement finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pensieve.store import (
    ConversationStore,
    NewConversation,
    conversation_rows,
    message_rows,
    verify,
)
from pensieve.store.conversation_rows import require_conversation
from tests.store.faulty import writer_of
from tests.store.talk import create, reply, say, user

TEXT_BYTES = 1000


class Eager:
    """A connection that, like psycopg, fetches all rows of a statement. `num_bytes` counts their blobs."""

    def __init__(self, conn: Any) -> None:
        self._conn = conn
        self.num_bytes = 0

    def execute(self, sql: str, values: Any = ()) -> Any:
        rows = self._conn.execute(sql, values).fetchall()
        self.num_bytes += sum(len(each) for row in rows for each in row if isinstance(each, bytes))
        return Rows(rows)


class Rows:
    def __init__(self, rows: list[Any]) -> None:
        self._rows = iter(rows)

    def fetchone(self) -> Any:
        return next(self._rows, None)

    def fetchall(self) -> list[Any]:
        return list(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return self._rows


@pytest.fixture
def tea(store: ConversationStore) -> ConversationStore:
    """Forty messages of a thousand bytes and a hundred tokens each."""
    create(store, "tea")
    for number in range(20):
        text = "x" * TEXT_BYTES
        say(store, "tea", f"r{number}", user(text, *[1] * 100), reply(text, *[2] * 100))
    return store


def test_reading_the_first_tokens_of_a_log_reads_no_later_messages(tea: ConversationStore) -> None:
    with writer_of(tea).reading() as conn:
        found = require_conversation(conn, "tea", "")
        eager: Any = Eager(conn)
        assert list(message_rows.read_log(eager, *found, 150)) == [1] * 100 + [2] * 50
        assert eager.num_bytes < 3 * (TEXT_BYTES + 400 + 100)
        assert len(message_rows.read_log(eager, *found, 0)) == 0
        assert len(message_rows.read_log(eager, *found)) == 4000
        assert len(message_rows.read_log(eager, *found, 9000)) == 4000


def test_reading_a_page_of_messages_reads_only_that_page(
    tea: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_rows, "PAGE_BYTES_MAX", 5 * TEXT_BYTES)
    with writer_of(tea).reading() as conn:
        found = require_conversation(conn, "tea", "")
        eager: Any = Eager(conn)
        page = message_rows.read_page(eager, *found, 10, 40, False)
        assert [each.index for each in page.messages] == [10, 11, 12, 13]
        assert page.has_more
        assert eager.num_bytes < 5 * (TEXT_BYTES + 400 + 100)
        last = message_rows.read_page(eager, *found, 38, 60, True)
        assert ([each.index for each in last.messages], last.has_more) == ([38, 39], False)
        assert message_rows.read_page(eager, *found, 40, 60, True).messages == ()


def test_reading_a_page_of_conversations_reads_only_that_page(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_rows, "PAGE_BYTES_MAX", 5 * TEXT_BYTES)
    for number in range(30):
        metadata = {"note": "x" * TEXT_BYTES}
        store.create_conversation(NewConversation(f"c{number}", "f", metadata=metadata))

    def page(before: int, limit: int) -> tuple[list[str], bool]:
        found, more = conversation_rows.conversations_before(eager, "", before, limit)
        return [each.conversation_id for _, each in found], more

    with writer_of(store).reading() as conn:
        eager: Any = Eager(conn)
        assert page(2**62, 30) == (["c29", "c28", "c27", "c26"], True)
        assert eager.num_bytes < 5 * (TEXT_BYTES + 200)
        assert page(2**62, 2) == (["c29", "c28"], True)
        numbers = [require_conversation(conn, f"c{number}", "")[0] for number in range(3)]
        assert page(numbers[2], 2) == (["c1", "c0"], False)
        assert page(numbers[1], 2) == (["c0"], False)
        assert page(numbers[0], 2) == ([], False)


def test_a_scrub_step_reads_a_bounded_number_of_bytes(
    tea: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "BODIES_BYTES", 5 * TEXT_BYTES)
    with writer_of(tea).reading() as conn:
        (highest,) = conn.execute("SELECT max(body) FROM bodies").fetchone()
        after, num_steps, most = 0, 0, 0
        problems: list[str] = []
        while True:
            eager: Any = Eager(conn)
            last = verify.scan_bodies(eager, after, problems)
            most = max(most, eager.num_bytes)
            if last is None:
                break
            after, num_steps = last, num_steps + 1
    assert (after, problems) == (highest, [])
    assert most < 6 * (TEXT_BYTES + 400 + 100)
    assert num_steps > 40 * (TEXT_BYTES + 400) // (5 * TEXT_BYTES)
