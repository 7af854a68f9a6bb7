"""Deleting leaves nothing: the raw bytes of the files are searched."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from pensieve.errors import NotFound, StoreUnavailable
from pensieve.store import ConversationStore, NewConversation, NewMessage, TurnRequest
from pensieve.store.bodies import pack_tokens
from pensieve.store.connection import read_only
from tests.store.faulty import writer_of
from tests.store.talk import begin, create, reply, say, user


def raw(store: ConversationStore) -> bytes:
    names = ("conversations.db", "conversations.db-wal")
    return b"".join((store.folder.path / name).read_bytes() for name in names)


def test_nothing_of_a_deleted_conversation_is_on_the_disk(store: ConversationStore) -> None:
    create(store, "other", user("keep", 1))
    store.create_conversation(
        NewConversation(
            "SECRET-name",
            "f",
            [NewMessage("system", "SECRET-system" * 900, range(5000, 9000))],
            tools=[{"name": "SECRET-tool"}],
            template_options={"x": "SECRET-option"},
            metadata={"title": "SECRET-title"},
            prefix_id="SECRET-prefix",
        )
    )
    question = NewMessage("user", "SECRET-hi", (70001, 70002), "SECRET-call", {"k": "SECRET-extra"})
    request = TurnRequest("SECRET-request", [question], {"stop": ["SECRET-stop"]})
    turn = store.begin_turn("SECRET-name", request).turn
    store.finish_turn(turn.turn_id, reply("SECRET-hello", 70003), "stop", {})
    interrupted = begin(store, "SECRET-name", "SECRET-second", "SECRET-more", 70004)
    store.interrupt_turn(interrupted)
    assert b"SECRET" in raw(store)
    assert pack_tokens([70001]) in raw(store)
    store.delete_conversation("SECRET-name")
    assert b"SECRET" not in raw(store)
    for token in (70001, 70003, 70004, 5000, 8999):
        assert pack_tokens([token]) not in raw(store)
    assert list(store.log("other")) == [1]
    assert store.verify() == []
    with pytest.raises(NotFound):
        store.get_conversation("SECRET-name")
    with pytest.raises(NotFound):
        store.get_turn(turn.turn_id)


def test_a_deleted_id_is_free_again(store: ConversationStore) -> None:
    create(store, "tea", user("hi", 1))
    store.delete_conversation("tea")
    create(store, "tea")
    assert list(store.log("tea")) == []


def test_what_a_fork_holds_stays_and_goes_with_the_fork(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("SECRET-one", 1), reply("SECRET-two", 2))
    say(store, "tea", "r2", user("SECRET-three", 3), reply("SECRET-four", 4))
    store.fork_conversation("tea", 1, "cup")
    store.delete_conversation("tea")
    left = raw(store)
    assert [word in left for word in (b"-one", b"-two", b"-three", b"-four")] == [
        True,
        True,
        False,
        False,
    ]
    assert list(store.log("cup")) == [1, 2]
    assert store.verify() == []
    store.delete_conversation("cup")
    assert b"SECRET" not in raw(store)
    assert store.verify() == []


@pytest.mark.parametrize("seed", range(2))
def test_no_copy_survives_between_the_pages(store: ConversationStore, seed: int) -> None:
    """Pages fill, split and merge; a text that SQLite once moved must not stay behind."""
    rng = random.Random(seed)
    texts: dict[str, list[str]] = {f"c{number}": [] for number in range(40)}
    for name in texts:
        create(store, name)
    for number in range(300):
        name = rng.choice(sorted(texts))
        mark = f"SECRET-{number:06d}"
        texts[name].append(mark)
        padding = "x" * rng.choice([3, 20, 200, 900, 3000])
        say(store, name, f"r{number}", user(mark + padding), reply(mark + padding))
        if rng.random() < 0.05:
            store.rewind_conversation(name, 0)
    for gone in rng.sample(sorted(texts), len(texts)):
        store.delete_conversation(gone)
        del texts[gone]
        alive = {mark.encode() for marks in texts.values() for mark in marks}
        assert set(re.findall(rb"SECRET-\d{6}", raw(store))) == alive
    assert store.verify() == []
    assert store.integrity_check() == []


def test_the_file_shrinks_when_more_than_half_is_wiped(
    open_store: Callable[..., ConversationStore],
) -> None:
    store = open_store(compact_bytes_min=100_000)
    for number in range(40):
        create(store, f"c{number}", user(f"SECRET-{number:02d}" + "x" * 3900))
    create(store, "keep", user("keep", 1))
    writer_of(store).truncate_journal()
    full = store.folder.database_path.stat().st_size
    sizes = []
    for number in range(40):
        store.delete_conversation(f"c{number}")
        sizes.append(store.folder.database_path.stat().st_size)
        assert f"SECRET-{number:02d}".encode() not in raw(store)
        assert store.verify() == []
    assert sizes[20] == full
    assert sizes[-1] < full // 2
    assert list(store.log("keep")) == [1]
    assert store.integrity_check() == []


def test_a_reader_that_holds_the_journal_is_reported(
    open_store: Callable[..., ConversationStore],
) -> None:
    store = open_store(busy_timeout_seconds=0.05)
    create(store, "a", user("SECRET-a", 1))
    create(store, "b", user("SECRET-b", 1))
    with read_only(store.folder.database_path, writer_of(store).driver) as conn:
        conn.execute("BEGIN")
        conn.execute("SELECT * FROM conversations").fetchall()
        with pytest.raises(StoreUnavailable, match="cannot be emptied"):
            store.delete_conversation("a")
    with pytest.raises(NotFound):
        store.get_conversation("a")
    assert b"SECRET-a" in raw(store)
    with pytest.raises(NotFound):
        store.delete_conversation("a")  # a client that tries again
    assert b"SECRET-a" not in raw(store)
    store.delete_conversation("b")
    assert b"SECRET" not in raw(store)
