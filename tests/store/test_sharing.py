"""Stores of several daemons on one SQLite file: claims, where KV is, and what reads see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import OwnedElsewhere
from pensieve.store import ConversationStore
from pensieve.store import owners as owners_module
from pensieve.store.connection import preferred_driver
from pensieve.store.records import StoredConversation, StoredTurnState
from pensieve.store.shared_file import SHARED_SQLITE_MIN
from tests.store.talk import begin, create, reply, say, user

Open = Callable[[str], ConversationStore]
needs_sqlite = pytest.mark.skipif(
    preferred_driver.sqlite_version_info < SHARED_SQLITE_MIN, reason="needs a newer SQLite"
)


class Daemons:
    """The stores. `stale` lists (replica, conversation) pairs whose KV may be outdated."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: list[ConversationStore] = []
        self.stale: list[tuple[str, str]] = []

    def open(self, name: str) -> ConversationStore:
        url = f"sqlite://{self._folder / 'history.db'}"
        store = ConversationStore.open(self._folder / name, "a test", url=url, replica=name)
        store.watch(lambda tenant, conversation: self.stale.append((name, conversation)))
        store.announce(f"{name}:1", "", "")
        self._opened.append(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    found = Daemons(tmp_path)
    yield found
    found.close()


@needs_sqlite
def test_take_claims_a_conversation_only_if_no_turn_runs(daemons: Daemons) -> None:
    a, b = daemons.open("a"), daemons.open("b")
    create(a, "tea")
    running = begin(a, "tea", "r1", "hi", 1)
    with pytest.raises(OwnedElsewhere):
        b.take("tea")
    a.finish_turn(running, reply("hello", 2), "stop", {})
    daemons.stale.clear()
    b.take("tea")
    assert b.kv_sources == {("", "tea"): "a:1"}  # the address of a, which may have the KV
    assert daemons.stale == [("b", "tea")]
    with pytest.raises(OwnedElsewhere):
        begin(a, "tea", "r2", "more", 3)
    with pytest.raises(OwnedElsewhere):
        a.rewind_conversation("tea", 0)
    with pytest.raises(OwnedElsewhere):
        a.delete_conversation("tea")
    assert list(a.log("tea")) == [1, 2]  # every daemon may read


@needs_sqlite
def test_kv_sources_names_the_previous_owner_only_for_the_current_epoch(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = daemons.open("a"), daemons.open("b")
    for name in ("tea", "cup", "pot"):
        create(a, name)
    b.take("tea")
    b.take("cup")
    b.claim("tea")  # b owns tea already, so nothing changes
    assert b.kv_sources == {("", "tea"): "a:1", ("", "cup"): "a:1"}
    b.delete_conversation("cup")
    create(b, "cup")
    assert b.kv_sources == {("", "tea"): "a:1"}
    a.take("tea")
    a.close()
    b.claim("tea")  # the previous owner has left
    assert b.kv_sources == {}
    monkeypatch.setattr(owners_module, "KV_SOURCES_MAX", 2)
    again = daemons.open("a")
    for name in ("one", "two", "three"):
        create(again, name)
        b.take(name)
    assert b.kv_sources == {("", "two"): "a:1", ("", "three"): "a:1"}


@needs_sqlite
def test_a_fork_belongs_to_its_creator_and_reports_a_source_owned_elsewhere_as_stale(
    daemons: Daemons,
) -> None:
    a, b = daemons.open("a"), daemons.open("b")
    create(a, "tea")
    say(a, "tea", "r1", user("hi", 1), reply("hello", 2))
    b.fork_conversation("tea", 1, "cup")
    with pytest.raises(OwnedElsewhere):
        a.claim("cup")
    b.take("tea")
    say(b, "tea", "r2", user("more", 3), reply("yes", 4))
    daemons.stale.clear()
    a.fork_conversation("tea", 1, "pot")  # a's engine does not have the newest turn of tea
    assert ("a", "tea") in daemons.stale
    assert ("b", "tea") not in daemons.stale


def test_a_turn_that_ends_while_it_is_read_is_not_read_as_interrupted(
    open_store: Callable[..., ConversationStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot is older than the turn's end, so it shows the turn as running."""
    store = open_store()
    create(store, "tea")
    turn = begin(store, "tea", "r1", "hi", 1)
    reader, transactions = store.reader(), vars(store)["_transactions"]
    ends = iter([lambda: store.finish_turn(turn, reply("hello", 2), "stop", {})])
    as_read = transactions.as_read

    def late(conn: Any, found: StoredConversation) -> Any:
        for end in ends:
            end()
        return as_read(conn, found)

    monkeypatch.setattr(transactions, "as_read", late)
    try:
        assert reader.get_conversation("tea").running_turn_id == turn
        assert reader.get_conversation("tea").running_turn_id is None
        found = reader.find_turn("tea", str(turn), "")
        assert found is not None
        assert found.state is StoredTurnState.COMPLETED
    finally:
        reader.close()
