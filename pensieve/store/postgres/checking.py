"""Looks for damage in a history in PostgreSQL: what can be checked through the server.

    bodies and rows   each body against its checksum, and what `verify` says of each conversation
    tables            every row is read in its order, so that a page that the server cannot read, or whose
                      checksum (`initdb --data-checksums`) is wrong, is a problem
    indices           by the extension `amcheck`, where the database has it; its operator installs it

A step of the scrub is one short read transaction, as with SQLite (scrub.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pensieve.errors import StoreCorrupt
from pensieve.store.postgres.connection import PostgresSnapshots
from pensieve.store.postgres.schema import SCHEMA
from pensieve.store.scrub import KEYS, ROWS, look_at_bodies
from pensieve.store.verify import PROBLEMS_MAX, verify_conversation

SMALL_TABLES = ("space", "tenants", "prefixes", "owner", "schema_versions")
Walk = Callable[[Any, int, list[str]], int | None]  # from a key on; returns the last one


class PostgresScrub:
    """In one thread at a time; see scrub.Scrub."""

    def __init__(self, snapshots: PostgresSnapshots) -> None:
        self.num_passes = 0
        self._snapshots = snapshots
        self._walk = 0
        self._after = 0

    def num_steps(self) -> int:
        """About so many a pass has now, rather more than fewer."""
        with self._snapshots.snapshot() as conn:
            highest: dict[str, int] = {
                table: conn.execute(f"SELECT coalesce(max({key}), 0) FROM {table}").fetchone()[0]
                for table, key in KEYS.items()
            }
        return highest["conversations"] + sum(highest.values()) // ROWS + 2 * len(WALKS)

    def step(self) -> list[str]:
        """Look at a little; returns the problems found there."""
        problems: list[str] = []
        try:
            with self._snapshots.snapshot() as conn:
                last = WALKS[self._walk](conn, self._after, problems)
            self._after = last or 0
            self._walk += last is None
        except StoreCorrupt as error:
            problems.append(str(error))
        if self._walk == len(WALKS) or problems:
            self._walk = self._after = 0
            self.num_passes += not problems
            self.close()
        return problems

    def close(self) -> None:
        self._snapshots.close()


def _conversations(conn: Any, after: int, problems: list[str]) -> int | None:
    number: int | None = conn.execute(
        "SELECT min(conversation) FROM conversations WHERE conversation > ?", (after,)
    ).fetchone()[0]
    if number is not None:
        verify_conversation(conn, number, problems)
    return number


def _rows(table: str, conn: Any, after: int, problems: list[str]) -> int | None:
    key = KEYS[table]
    last: int | None = conn.execute(
        f"SELECT max({key}) FROM (SELECT * FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT ?) AS r",
        (after, ROWS),
    ).fetchone()[0]
    return last


def _small_tables(conn: Any, after: int, problems: list[str]) -> int | None:
    for table in SMALL_TABLES:
        conn.execute(f"SELECT * FROM {table}").fetchall()
    return None


WALKS: tuple[Walk, ...] = (
    _conversations,
    look_at_bodies,
    *(partial(_rows, table) for table in KEYS if table != "bodies"),
    _small_tables,
)


def integrity_check(snapshots: PostgresSnapshots) -> list[str]:
    """The problems that a pass over everything finds, and those of the indices."""
    problems: list[str] = []
    scrub = PostgresScrub(snapshots)
    try:
        while not scrub.num_passes and not problems:
            problems += scrub.step()
        problems += _of_indices(snapshots)
    finally:
        snapshots.close()
    return problems[:PROBLEMS_MAX]


def _of_indices(snapshots: PostgresSnapshots) -> list[str]:
    try:
        with snapshots.snapshot() as conn:
            found = conn.execute(
                "SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace"
                " WHERE e.extname = 'amcheck'"
            ).fetchone()
            if found is not None:
                conn.execute(
                    f'SELECT "{found[0]}".bt_index_check(i.indexrelid, true) FROM pg_index i'
                    " JOIN pg_class c ON c.oid = i.indexrelid"
                    " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = ?"
                    " AND c.relam = (SELECT oid FROM pg_am WHERE amname = 'btree')",
                    (SCHEMA,),
                ).fetchall()
    except StoreCorrupt as error:
        return [str(error)]
    return []
