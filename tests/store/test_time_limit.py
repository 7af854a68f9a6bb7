"""A statement that runs for too long is ended, and the history stays usable."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest

from pensieve.errors import StoreUnavailable
from pensieve.store import ConversationStore, conversation_rows
from tests.store.faulty import write_history, writer_of
from tests.store.talk import create, reply, say, user

Open = Callable[..., ConversationStore]
LONG = """
    WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 300000000)
    SELECT count(*) FROM n
"""  # runs for a minute unless it is interrupted


@pytest.fixture
def seconds(url: str) -> float:
    """Return a time limit that no short statement reaches, even on a busy machine."""
    return 2.0 if url else 1.0


SENTENCE = "a statement took too long and was ended"


def test_a_transaction_over_its_time_limit_changes_nothing(
    open_store: Open, seconds: float
) -> None:
    store = open_store(statement_seconds=seconds)
    write_history(store)

    def run_away() -> None:
        with writer_of(store).writing() as conn:
            conn.execute("DELETE FROM history")
            conn.execute(LONG).fetchone()

    with pytest.raises(StoreUnavailable, match=SENTENCE):
        run_away()
    assert store.verify() == []
    assert len(store.messages("tea")) == 5
    assert say(store, "tea", "r9", user("more", 1), reply("yes", 2)) == 3


def test_a_read_over_its_time_limit_fails_and_the_next_read_succeeds(
    open_store: Open, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read uses the store's connection, and another read uses a reader's connection."""
    store = open_store(statement_seconds=seconds)
    create(store, "tea")
    reader = store.reader()

    def takes_long(conn: Any) -> int:
        count: int = conn.execute(LONG).fetchone()[0]
        return count

    for look in (store.num_conversations, reader.num_conversations):
        with monkeypatch.context() as patch:
            patch.setattr(conversation_rows, "num_conversations", takes_long)
            with pytest.raises(StoreUnavailable, match=SENTENCE):
                look()
        assert look() == 1
    reader.close()


def test_the_time_limit_does_not_apply_to_many_short_calls_together(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: 0.01 * next(looks))
    monkeypatch.setattr("pensieve.store.backend.time", clock)
    store = open_store(statement_seconds=10.0)
    reader = store.reader()
    create(store, "tea")
    for number in range(400):
        say(store, "tea", f"r{number}", user("hi " * 200, 1), reply("hello", 2))
        assert reader.num_conversations() == 1
    assert clock.monotonic() > 10.0
    assert store.integrity_check() == []
    reader.close()
