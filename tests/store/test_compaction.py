"""Compaction returns the space of deleted text in small steps, and leaves no copy."""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import StoreUnavailable
from pensieve.store import ConversationStore
from pensieve.store.compaction import Compaction, CompactionPhase
from pensieve.store.sqlite_backend import Erasure
from tests.store.faulty import FaultyDriver, history, writer_of
from tests.store.talk import create, reply, say, user
from tests.store.test_disk_faults import FULL, IO_ERROR

pytestmark = pytest.mark.sqlite  # pages of SQLite's file are the subject

Open = Callable[..., ConversationStore]


def size(store: ConversationStore) -> int:
    return store.folder.database_path.stat().st_size


def raw(store: ConversationStore) -> bytes:
    writer = writer_of(store)
    return store.folder.database_path.read_bytes() + writer.journal_path.read_bytes()


def copies(store: ConversationStore) -> Counter[str]:
    """Return how often each text is in the files. That must equal the number of its messages."""
    return Counter(mark.decode() for mark in re.findall(rb"SECRET-\d{6}", raw(store)))


def begin_pass(store: ConversationStore) -> None:
    """Begin a compaction pass even if it would save little."""
    assert isinstance(store.erasure, Erasure)
    store.erasure._compaction = Compaction(store.erasure._writer, CompactionPhase.FENCE)


def finish(store: ConversationStore) -> int:
    steps = 1
    while store.erasure.step():
        steps += 1
    return steps


def test_the_file_shrinks_when_more_than_half_is_wiped(open_store: Open) -> None:
    store = open_store(compact_bytes_min=100_000)
    writer_of(store).truncate_journal()
    empty = size(store)  # one page for each table and index
    for number in range(90):
        create(store, f"c{number}", user(f"SECRET-{number:02d}" + "x" * 3900))
    create(store, "keep", user("keep", 1))
    writer_of(store).truncate_journal()
    full = size(store)
    sizes = []
    for number in range(90):
        store.delete_conversation(f"c{number}")
        assert f"SECRET-{number:02d}".encode() not in raw(store)
        finish(store)
        sizes.append(size(store))
        assert store.verify() == []
    assert sizes[40] == full
    assert sizes[-1] - empty < (full - empty) // 2
    assert list(store.log("keep")) == [1]
    assert store.integrity_check() == []


def test_compaction_frees_the_overflow_pages_of_long_texts(open_store: Open) -> None:
    """Overflow pages are outside the leaves, so they are free as soon as the text is wiped."""
    store = open_store(compact_bytes_min=100_000)
    for number in range(4):
        create(store, f"c{number}", user("x" * 300_000))
    writer_of(store).truncate_journal()
    full = size(store)
    for number in range(3):
        store.delete_conversation(f"c{number}")
    finish(store)
    assert size(store) < full // 2
    assert store.messages("c3")[0].content == "x" * 300_000
    assert store.integrity_check() == []


def test_the_size_of_a_step_does_not_depend_on_the_history(open_store: Open) -> None:
    store = open_store(compact_bytes_min=100_000)
    create(store, "large")
    for number in range(1500):
        create(store, f"c{number}", user(f"{number}" * 300, *range(300)))
    for number in range(1500):
        if number % 10:
            store.delete_conversation(f"c{number}")
            if store.erasure.due:
                break
    else:
        raise AssertionError("no deletion made a compaction due")
    journal, journals = writer_of(store).journal_path, []
    while store.erasure.due:
        writer_of(store).truncate_journal()
        store.erasure.step()
        journals.append(journal.stat().st_size)
        if len(journals) % 10 == 0:
            assert store.verify() == []
    assert len(journals) > 20
    assert max(journals) < 2 * 2**20
    assert store.verify() == []
    assert store.integrity_check() == []


@pytest.mark.parametrize("seed", range(3))
def test_compaction_leaves_no_copy_of_moved_or_deleted_text(open_store: Open, seed: int) -> None:
    """Turns, deletions and steps in random order leave no byte of a text at its old place."""
    rng = random.Random(seed)
    store = open_store(compact_bytes_min=1)
    texts: dict[str, list[str]] = {}
    num_passes = num_steps = 0
    for number in range(500):
        name = f"c{rng.randrange(number // 5 + 1)}"
        if name not in texts:
            texts[name] = []
            create(store, name)
        mark = f"SECRET-{number:06d}"
        texts[name].append(mark)
        padding = "x" * rng.choice([3, 20, 200, 900, 3000, 9000])
        say(store, name, f"r{number}", user(mark + padding), reply(mark + padding))
        num_bulk_deletions = 0.9 * len(texts) if number % 100 == 99 else 0
        for gone in rng.sample(sorted(texts), int(num_bulk_deletions) or rng.random() < 0.2):
            was_due = store.erasure.due
            store.delete_conversation(gone)
            del texts[gone]
            num_passes += store.erasure.due and not was_due
            assert copies(store) == {mark: 2 for marks in texts.values() for mark in marks}
        for _ in range(rng.randrange(3)):
            num_steps += store.erasure.due
            store.erasure.step()
            writer_of(store).truncate_journal()
            assert copies(store) == {mark: 2 for marks in texts.values() for mark in marks}
    assert num_passes > 2
    assert num_steps > 20
    finish(store)
    assert store.verify() == []
    assert store.integrity_check() == []
    for gone in sorted(texts):
        store.delete_conversation(gone)
        finish(store)
    assert b"SECRET" not in raw(store)


@pytest.mark.parametrize("seed", range(12))
def test_removing_rows_never_copies_live_cells(open_store: Open, seed: int) -> None:
    """The fence rows (compaction.py) separate wiped rows from live rows.

    So SQLite copies no live cell when it balances the leaves.
    """
    rng = random.Random(seed)
    store = open_store()
    alive: set[int] = set()
    for first in (0, 100, 200):
        for number in range(first, first + rng.randrange(30, 100)):
            text = f"SECRET-{number:06d}" + "x" * rng.choice([3, 20, 100, 400, 1000])
            create(store, f"c{number}", user(text, 1))
            alive.add(number)
        for number in rng.sample(sorted(alive), int(len(alive) * rng.uniform(0.5, 0.97))):
            store.delete_conversation(f"c{number}")
            alive.discard(number)
        begin_pass(store)
        while store.erasure.due:
            store.erasure.step()
            writer_of(store).truncate_journal()
            assert copies(store) == {f"SECRET-{number:06d}": 1 for number in alive}
    assert store.verify() == []


@pytest.fixture
def wasteful(tmp_path: Path, driver: Any) -> Path:
    """A closed history. Most of its text is wiped."""
    path = tmp_path / "wasteful"
    with ConversationStore.open(path, "test", driver=driver) as store:
        for number in range(40):
            create(store, f"c{number}")
            say(store, f"c{number}", "r1", user("q" * 3800, 1), reply("a" * 3800, 2))
        for number in range(40):
            if number % 10:
                store.delete_conversation(f"c{number}")
    return path


def open_with_compaction(path: Path, driver: Any) -> ConversationStore:
    return ConversationStore.open(path, "test", driver=driver, compact_bytes_min=1)


def test_the_next_process_continues_the_compaction(wasteful: Path, driver: Any) -> None:
    """The first process may end at any point of the pass."""
    with open_with_compaction(wasteful, driver) as store:
        wanted = history(store)
        full = size(store)
        assert store.erasure.due
    for num_steps in range(6):
        copy = wasteful.with_name(f"copy{num_steps}")
        shutil.copytree(wasteful, copy)
        with open_with_compaction(copy, driver) as store:
            for _ in range(num_steps):
                store.erasure.step()
        with open_with_compaction(copy, driver) as store:
            finish(store)
            assert history(store) == wanted
            assert store.verify() == []
            assert store.integrity_check() == []
            assert size(store) < full // 2 + 12 * 4096


@pytest.mark.parametrize(
    ("code", "after"), [(IO_ERROR, False), (IO_ERROR, True), (FULL, False)], ids=str
)
def test_a_failed_compaction_step_is_retried(
    wasteful: Path, driver: Any, code: int, after: bool
) -> None:
    with open_with_compaction(wasteful, driver) as store:
        wanted = history(store)
    countdown = 0
    while True:
        countdown += 3  # not 1, because a pass has several hundred statements
        faults = FaultyDriver(driver, code, after, False)
        copy = wasteful.with_name(f"copy{countdown}")
        shutil.copytree(wasteful, copy)
        with open_with_compaction(copy, faults) as store:
            faults.arm(countdown)
            while store.erasure.due:
                try:
                    store.erasure.step()
                except StoreUnavailable:
                    assert faults.fired
            faults.heal()
            assert history(store) == wanted, countdown
            assert store.verify() == [], countdown
        shutil.rmtree(copy)
        if not faults.fired:
            break
    assert countdown > 50
