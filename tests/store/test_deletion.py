"""Deletion leaves no text behind: the raw bytes of the files are searched."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import ErasurePending, NotFound, StoreUnavailable
from pensieve.store import ConversationStore, NewConversation, NewMessage, NewTurn
from pensieve.store.bodies import pack_tokens
from pensieve.store.connection import read_only
from pensieve.store.history_reader import HistoryReader
from pensieve.store.sqlite_backend import Snapshots
from tests.store.faulty import FaultyDriver, writer_of
from tests.store.talk import begin, create, reply, say, user
from tests.store.test_disk_faults import FULL

pytestmark = pytest.mark.sqlite  # searches SQLite's files


def raw(store: ConversationStore) -> bytes:
    names = ("conversations.db", "conversations.db-wal")
    return b"".join((store.folder.path / name).read_bytes() for name in names)


def test_no_text_of_a_deleted_conversation_is_on_the_disk(store: ConversationStore) -> None:
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
    request = NewTurn("SECRET-request", [question], {"stop": ["SECRET-stop"]})
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


def test_text_shared_with_a_fork_is_erased_when_the_fork_is_deleted(
    store: ConversationStore,
) -> None:
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
def test_no_copy_of_deleted_text_survives_in_split_or_merged_pages(
    store: ConversationStore, seed: int
) -> None:
    """Pages fill, split and merge. Copies that SQLite made when it moved a text must be gone, too."""
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


@contextlib.contextmanager
def reader(store: ConversationStore) -> Iterator[None]:
    """Another program that reads the history."""
    with read_only(store.folder.database_path, writer_of(store).driver) as conn:
        conn.execute("BEGIN")
        conn.execute("SELECT * FROM conversations").fetchall()
        yield


def test_a_deletion_reports_that_a_reader_delays_the_erasure_and_a_retry_erases(
    store: ConversationStore,
) -> None:
    create(store, "a", user("SECRET-a", 1))
    create(store, "b", user("SECRET-b", 1))
    assert not store.erasure.due
    with reader(store):
        with pytest.raises(ErasurePending, match="not yet erased from the files"):
            store.delete_conversation("a")
        with pytest.raises(NotFound):
            store.get_conversation("a")
        with pytest.raises(ErasurePending, match="not yet erased from the files"):
            store.delete_conversation("a")  # a client that retries
        with pytest.raises(StoreUnavailable):
            store.delete_conversation("b")  # the pending erasure of `a` does not block this
        with pytest.raises(NotFound):
            store.get_conversation("b")
        assert store.erasure.pending
    assert b"SECRET-a" in raw(store)
    with pytest.raises(NotFound):
        store.delete_conversation("a")
    assert b"SECRET" not in raw(store)
    assert not store.erasure.due


def test_an_erasure_step_erases_the_text_after_the_reader_has_ended(
    store: ConversationStore,
) -> None:
    create(store, "a", user("SECRET-a", 1))
    with reader(store):
        for delete_or_step in (lambda: store.delete_conversation("a"), store.erasure.step):
            with pytest.raises(ErasurePending):
                delete_or_step()
        assert store.erasure.due
    assert b"SECRET" in raw(store)
    assert not store.erasure.step()
    assert b"SECRET" not in raw(store)


def test_a_deletion_does_not_wait_for_a_reader(
    open_store: Callable[..., ConversationStore],
) -> None:
    """The busy timeout is an hour. If the deletion used it, it would block until the reader ends."""
    store = open_store(busy_timeout_seconds=3600.0)
    create(store, "a", user("SECRET-a", 1))
    answers: list[Exception] = []

    def delete() -> None:
        try:
            store.delete_conversation("a")
        except StoreUnavailable as error:
            answers.append(error)

    with reader(store):
        thread = threading.Thread(target=delete)
        thread.start()
        thread.join(timeout=60.0)
        has_answered = len(answers) == 1
    thread.join()
    assert has_answered


def test_a_deletion_restores_the_busy_timeout_of_the_connection(
    store: ConversationStore, open_store: Callable[..., ConversationStore]
) -> None:
    store.close()
    store = open_store(busy_timeout_seconds=7.0)
    create(store, "a", user("SECRET-a", 1))
    store.delete_conversation("a")
    with writer_of(store).reading() as conn:
        assert conn.execute("PRAGMA busy_timeout").fetchone() == (7000,)


DYING_CHILD = """
import os, sys
from pathlib import Path
from pensieve.store import ConversationStore
from pensieve.store.connection import WriterConnection
from tests.store.talk import create, user
store = ConversationStore.open(Path(sys.argv[1]), "test")
create(store, "keep", user("keep", 1))
create(store, "a", user("SECRET-a", 1))
WriterConnection.truncate_journal = lambda writer: os._exit(9)
store.delete_conversation("a")
"""


def test_the_next_process_erases_text_that_a_dying_process_did_not_erase(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", DYING_CHILD, str(tmp_path)], check=False)
    assert child.returncode == 9
    assert b"SECRET-a" in (tmp_path / "conversations.db-wal").read_bytes()
    with ConversationStore.open(tmp_path, "test") as store:
        with pytest.raises(NotFound):
            store.get_conversation("a")
        assert b"SECRET" not in raw(store)
        assert list(store.log("keep")) == [1]
        assert not store.erasure.due


def test_wal_recovery_writes_no_uninitialized_memory_to_the_shm_file(tmp_path: Path) -> None:
    """A SQLite connection that recovers a log can write uninitialized memory to the -shm file."""
    subprocess.run([sys.executable, "-c", DYING_CHILD, str(tmp_path)], check=False)
    with ConversationStore.open(tmp_path, "test"):
        shared = (tmp_path / "conversations.db-shm").read_bytes()
    assert len(shared) == 32768
    # After two headers come the page numbers of the log, and a hash table of 16-bit indexes into them.
    assert max(struct.unpack_from("=4062I", shared, 136)) < 1000
    assert max(struct.unpack_from("=8192H", shared, 16384)) < 100


def test_the_next_process_completes_an_erasure_that_a_reader_delayed(
    store: ConversationStore, open_store: Callable[..., ConversationStore]
) -> None:
    create(store, "a", user("SECRET-a", 1))
    with reader(store):
        with pytest.raises(StoreUnavailable):
            store.delete_conversation("a")
        store.close()
        assert b"SECRET-a" in raw(store)
        store = open_store()
        assert not store.integrity_check_due
        assert store.erasure.pending
        assert b"SECRET-a" in raw(store)
    assert not store.erasure.step()
    assert b"SECRET" not in raw(store)


def test_later_steps_complete_an_erasure_that_failed_on_a_full_disk(
    tmp_path: Path, driver: Any
) -> None:
    """Whichever statement of the deletion fails, later steps erase the text."""
    for countdown in itertools.count(1):
        faults = FaultyDriver(driver, FULL, False, True)
        store = ConversationStore.open(tmp_path / str(countdown), "test", driver=faults)
        create(store, "a", user("SECRET-a", 1))
        faults.arm(countdown)
        with contextlib.suppress(StoreUnavailable):
            store.delete_conversation("a")
        faults.heal()
        while store.erasure.step():
            pass
        is_gone = store.list_conversations().conversations == ()
        assert is_gone != (b"SECRET" in raw(store)), countdown
        store.close()
        if not faults.fired:
            break
    assert countdown > 10


def test_a_read_waits_for_a_pending_erasure_but_not_forever(store: ConversationStore) -> None:
    create(store, "tea", user("hi", 1))
    writer, running = writer_of(store), store._transactions
    pending = iter([True, True, True, False])
    reader = HistoryReader(Snapshots(writer.path, writer.driver), running, lambda: next(pending))
    assert reader.get_conversation("tea").num_messages == 1
    assert list(pending) == [], "the read did not wait for the erasure"
    reader.close()
    reader = HistoryReader(Snapshots(writer.path, writer.driver), running, lambda: True)
    assert reader.get_conversation("tea").num_messages == 1
    reader.close()
