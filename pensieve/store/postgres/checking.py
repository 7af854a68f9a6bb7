"""Looks for damage in a history in PostgreSQL: what can be checked through the server.

    bodies and rows   each body against its checksum, and what `verify` says of each conversation
    tables            every row is read in its order, so that a page that the server cannot read, or whose
                      checksum (`initdb --data-checksums`) is wrong, is a problem
    indices           by the extension `amcheck`, where the database has it; its operator installs it

A step of the scrub is one short read transaction, as with SQLite (scrub.py).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from pensieve.errors import StoreCorrupt
from pensieve.store.backend import Reads
from pensieve.store.numbered import KEYS
from pensieve.store.postgres.schema import SCHEMA
from pensieve.store.scrub import (
    ROWS,
    Scrub,
    Walk,
    Walks,
    highest_keys,
    look_at_bodies,
    look_at_conversation,
)
from pensieve.store.verify import PROBLEMS_MAX

log = logging.getLogger("pensieve")
SMALL_TABLES = ("space", "tenants", "prefixes", "owner", "schema_versions")


def _num_steps(conn: Any) -> int:
    highest = highest_keys(conn)
    return highest["conversations"] + sum(highest.values()) // ROWS + 2 * len(WALKS)


def _rows(table: str, conn: Any, after: int, problems: list[str]) -> int | None:
    """`count(r.*)` wants each row as a whole; its number alone is in an index, too."""
    key = KEYS[table]
    last: int | None = conn.execute(
        f"SELECT max(r.{key}), count(r.*)"
        f" FROM (SELECT * FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT ?) AS r",
        (after, ROWS),
    ).fetchone()[0]
    return last


def _small_tables(conn: Any, after: int, problems: list[str]) -> int | None:
    for table in SMALL_TABLES:
        conn.execute(f"SELECT * FROM {table}").fetchall()
    return None


WALKS: tuple[Walk, ...] = (
    look_at_conversation,
    look_at_bodies,
    *(partial(_rows, table) for table in KEYS if table != "bodies"),
    _small_tables,
)
OF_POSTGRES = Walks(WALKS, _num_steps)


def integrity_check(reads: Reads) -> list[str]:
    """The problems that a pass over everything finds, and those of the indices."""
    problems: list[str] = []
    scrub = Scrub(reads, OF_POSTGRES)
    try:
        while not scrub.num_passes and not problems:
            problems += scrub.step()
        problems += _of_indices(reads)
    finally:
        reads.close()
    return problems[:PROBLEMS_MAX]


def _of_indices(reads: Reads) -> list[str]:
    try:
        with reads.snapshot() as conn:
            found = conn.execute(
                "SELECT p.oid::regproc::text, has_function_privilege(p.oid, 'EXECUTE')"
                " AND has_schema_privilege(p.pronamespace, 'USAGE')"
                " FROM pg_extension e JOIN pg_proc p ON p.pronamespace = e.extnamespace"
                " WHERE e.extname = 'amcheck' AND p.proname = 'bt_index_check' AND p.pronargs = 2"
            ).fetchone()
            if found is None or not found[1]:
                log.warning(NO_INDICES, "lacks" if found is None else "does not let this role call")
                return []
            conn.execute(
                f"SELECT {found[0]}(i.indexrelid, true) FROM pg_index i"
                " JOIN pg_class c ON c.oid = i.indexrelid"
                " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = ?"
                " AND c.relam = (SELECT oid FROM pg_am WHERE amname = 'btree')",
                (SCHEMA,),
            ).fetchall()
    except StoreCorrupt as error:
        return [str(error)]
    return []


NO_INDICES = "the indices of the history were not checked: the database %s amcheck's bt_index_check"
