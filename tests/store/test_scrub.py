"""A scrub finds damage in any page of the history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pensieve.store import ConversationStore, sqlite_backend, verify
from pensieve.store.responses import StoredResponse
from pensieve.store.sqlite_backend import scrub_of_files
from tests.store.faulty import write_history, writer_of
from tests.store.talk import create, reply, say, user

# The tests damage SQLite's file. The tests for PostgreSQL are in test_postgres.py.
pytestmark = pytest.mark.sqlite

Open = Callable[..., ConversationStore]


def whole_pass(path: Path, driver: Any) -> list[str]:
    scrub = scrub_of_files(path, driver)
    num_steps = scrub.num_steps()
    for number in range(10_000):
        if problems := scrub.step():
            return problems
        if scrub.num_passes:
            assert number < num_steps  # the pauses between steps are computed from this estimate
            return []
    raise AssertionError("the scrub did not complete a pass")


@pytest.fixture
def path(open_store: Open) -> Path:
    """The closed database of a history in which every table and index has several pages."""
    store = open_store()
    write_history(store)
    for number in range(60):
        create(store, f"c{number}", user("head", 1))
        for turn in range(3):
            text = "text " * (5000 if number == 7 else 60)
            answer = reply(text, 2, logprobs=b"packed" if number % 2 else b"")
            say(store, f"c{number}", f"r{turn}", user(text, 1), answer)
            response = StoredResponse(f"resp_{number}_{turn}", f"c{number}", {"text": text})
            store.responses.save(response)
        store.fork_conversation(f"c{number}", 2, f"f{number}")
        store.rewind_conversation(f"c{number}", 1)
    store.close()
    return store.folder.database_path


def test_a_sound_history_has_no_problems(
    path: Path, driver: Any, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert whole_pass(path, driver) == []
    for module in (sqlite_backend, verify):
        monkeypatch.setattr(module, "ROWS", 7)
    store = open_store()
    store.delete_conversation("c3")
    assert whole_pass(path, driver) == []


def test_damage_in_any_page_is_found(path: Path, driver: Any) -> None:
    sound = path.read_bytes()
    conn = driver.connect(f"file:{path}?mode=ro", uri=True)
    (page_bytes,) = conn.execute("PRAGMA page_size").fetchone()
    (num_free,) = conn.execute("PRAGMA freelist_count").fetchone()
    conn.close()
    num_pages = len(sound) // page_bytes
    unseen = []
    for page in range(3, num_pages + 1):  # page 2 is a map of pages, only used to shorten the file
        at = (page - 1) * page_bytes
        path.write_bytes(sound[:at] + bytes(page_bytes) + sound[at + page_bytes :])
        if not whole_pass(path, driver):
            unseen.append(page)
    path.write_bytes(sound)
    assert num_pages > 100
    assert len(unseen) == num_free, unseen


def test_a_flipped_bit_in_a_text_is_found(path: Path, driver: Any) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"text text")] ^= 1
    path.write_bytes(data)
    (problem,) = whole_pass(path, driver)[:1]
    assert "fails its checksum" in problem


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE conversations SET fingerprint = CAST(x'ff' AS TEXT) WHERE conversation = 3",
        "UPDATE tenants SET tenant = CAST(x'ff' AS TEXT)",
    ],
)
def test_text_that_is_not_valid_utf8_is_reported_as_damage(
    path: Path, driver: Any, open_store: Open, damage: str
) -> None:
    """The driver has no error code for such a text. The error must still not end the daemon."""
    conn = driver.connect(str(path))
    conn.execute(damage)
    conn.commit()
    conn.close()
    (problem,) = whole_pass(path, driver)
    assert "a text is damaged" in problem
    with open_store() as store:
        assert "a text is damaged" in store.verify()[0]


def test_a_scrub_continues_during_deletions_and_delays_none_of_them(
    open_store: Open, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    for number in range(20):
        create(store, f"c{number}", user("head", 1))
        say(store, f"c{number}", "r", user("a secret", 1), reply("yes", 2))
    for module in (sqlite_backend, verify):
        monkeypatch.setattr(module, "ROWS", 3)
    scrub = scrub_of_files(store.folder.database_path, driver)
    for number in range(20):
        assert scrub.step() == []
        store.delete_conversation(f"c{number}")
        assert not store.erasure.pending
    assert writer_of(store).journal_path.read_bytes() == b""
    while not scrub.num_passes:
        assert scrub.step() == []
