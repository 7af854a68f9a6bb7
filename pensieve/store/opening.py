"""Opens what a history is kept in: which of the two databases, and its driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pensieve.store.backend import Backend


def open_backend(
    folder: Any,
    url: str,
    now: Callable[[], float],
    driver: Any,
    busy_timeout_seconds: float,
    compact_bytes_min: int,
    statement_seconds: float,
) -> Backend:
    """Of the address of a PostgreSQL database, or of the data folder where there is none.

    The first use opens it.
    """
    if url:
        from pensieve.store.postgres.backend import PostgresBackend
        from pensieve.store.postgres.connection import Address

        return PostgresBackend(
            Address(url, driver), folder.holder, now, busy_timeout_seconds, statement_seconds
        )
    from pensieve.store.connection import preferred_driver
    from pensieve.store.sqlite_backend import SqliteBackend

    return SqliteBackend(
        folder,
        now,
        driver or preferred_driver,
        busy_timeout_seconds,
        compact_bytes_min,
        statement_seconds,
    )
