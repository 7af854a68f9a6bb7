"""Each tenant has one random salt. It never changes, even if threads or daemons create it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import pytest

from pensieve.errors import StoreCorrupt
from pensieve.store import ConversationStore
from tests.store.faulty import history, write_history, writer_of
from tests.store.older_schemas import POSTGRES_TO_SCHEMA_11, TO_SCHEMA_11

Open = Callable[..., ConversationStore]


def never(num_bits: int) -> int:
    raise AssertionError("a salt was drawn")


def draw_together(*values: int) -> Callable[[int], int]:
    """Return a source of random bits that waits until all callers have found no salt."""
    remaining, barrier = list(values), Barrier(len(values))

    def draw(num_bits: int) -> int:
        barrier.wait(30)
        return remaining.pop()

    return draw


def stored_salts(store: ConversationStore) -> list[tuple[str, bytes]]:
    with writer_of(store).reading() as conn:
        rows = conn.execute("SELECT tenant, salt FROM salts ORDER BY tenant").fetchall()
    return [(tenant, bytes(salt)) for tenant, salt in rows]


def test_a_salt_is_random_and_never_changes(open_store: Open) -> None:
    with open_store() as store:
        salts = [store.salt_of(tenant) for tenant in ("", "acme", "other")]
        assert [len(each) for each in salts] == [16] * 3
        assert len(set(salts)) == 3
        assert [store.salt_of(tenant) for tenant in ("", "acme", "other")] == salts
    with open_store(random_bits=never) as store:
        assert [store.salt_of(tenant) for tenant in ("", "acme", "other")] == salts
        assert store.verify() == store.integrity_check() == []


def test_a_known_salt_is_not_read_again(open_store: Open) -> None:
    store = open_store(random_bits=lambda num_bits: num_bits)
    assert store.salt_of("acme") == (128).to_bytes(16)
    with writer_of(store).writing() as conn:
        conn.execute("DELETE FROM salts")
    assert store.salt_of("acme") == (128).to_bytes(16)
    assert stored_salts(store) == []


def test_threads_that_create_a_salt_at_once_get_the_same_salt(open_store: Open) -> None:
    store = open_store(random_bits=draw_together(1, 2, 3))
    with ThreadPoolExecutor(3) as threads:
        salts = set(threads.map(store.salt_of, ["acme"] * 3))
    assert stored_salts(store) == [("acme", *salts)]


def test_daemons_that_create_a_salt_at_once_get_the_same_salt(start: Open) -> None:
    draw = draw_together(1, 2)
    daemons = [start(name, random_bits=draw) for name in ("a", "b")]
    with ThreadPoolExecutor(2) as threads:
        salts = set(threads.map(lambda store: store.salt_of("acme"), daemons))
    assert stored_salts(daemons[0]) == [("acme", *salts)]
    assert start("c", random_bits=never).salt_of("acme") in salts


def test_a_salt_that_could_not_be_stored_is_not_used(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = iter((1, 2))
    store = open_store(random_bits=lambda num_bits: next(draws))
    kind = type(writer_of(store))
    writing = kind.writing

    @contextmanager
    def failing(self: Any, is_serializable: bool = False) -> Iterator[Any]:
        with writing(self, is_serializable) as conn:
            yield conn
            raise OSError("no commit")

    with monkeypatch.context() as patch:
        patch.setattr(kind, "writing", failing)
        with pytest.raises(OSError, match="no commit"):
            store.salt_of("acme")
    assert store.salt_of("acme") == (2).to_bytes(16)
    assert stored_salts(store) == [("acme", (2).to_bytes(16))]


def test_a_damaged_salt_is_not_used(store: ConversationStore) -> None:
    with writer_of(store).writing() as conn:
        conn.execute("INSERT INTO salts (tenant, salt) VALUES (?, ?)", ("acme", b"short"))
    with pytest.raises(StoreCorrupt, match="tenant 'acme': its salt has 5 bytes"):
        store.salt_of("acme")


def test_a_history_of_schema_11_gets_salts_after_its_migration(
    open_store: Open, driver: Any
) -> None:
    with open_store() as store:
        write_history(store)
        store.salt_of("acme")
        before = history(store)
        with writer_of(store).writing() as conn:
            for statement in POSTGRES_TO_SCHEMA_11 if driver is None else TO_SCHEMA_11:
                conn.execute(statement)
    with open_store() as store:
        assert stored_salts(store) == []
        salt = store.salt_of("acme")
        assert stored_salts(store) == [("acme", salt)]
        assert history(store) == before
        assert store.verify() == store.integrity_check() == []
