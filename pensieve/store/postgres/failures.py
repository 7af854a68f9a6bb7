"""What a failure of PostgreSQL is to the history: SQLSTATE codes as errors of ours.

A password never gets into an error: the address is shown without it, and libpq's own sentences name host,
port and user (config/parsing.py refuses an address whose parts it might take for something else).
"""

from __future__ import annotations

from typing import Any

from pensieve.errors import DiskFull, StoreCorrupt, StoreUnavailable, one_line

DISK_FULL = "53100"
# By SQLSTATE, or by its class: its first two letters.
UNAVAILABLE = {
    "08": "the connection was lost",
    "25006": "the server is a standby, or read-only",
    "25P03": "the server ended a transaction that stood still",
    "40": "another program changed the same rows",
    "53": "the server lacks memory or connections",
    "53100": "the server's disk is full",
    "55P03": "another program holds a lock",
    "57014": "a statement took too long and was ended",
    "57P01": "the server was stopped",
    "57P02": "the server was stopped",
    "57P03": "the server starts or stops",
    "57P05": "the server ended a connection that stood still",
    "58030": "disk I/O error of the server",
}
CORRUPT = {
    "XX001": "a page of the database is damaged",
    "XX002": "an index of the database is damaged",
    "58P01": "a file of the database is missing",
}
NO_TABLE = {"3F000", "42P01", "42501"}  # they went, or the right to use them


def explained(error: Any, shown: str) -> Exception:
    """The PensieveError for a driver's error; one that should not happen is returned as it is."""
    code = error.sqlstate or ""
    if code == DISK_FULL:
        return DiskFull(f"the history {shown}: {UNAVAILABLE[code]}")
    for table, kind in ((CORRUPT, StoreCorrupt), (UNAVAILABLE, StoreUnavailable)):
        words = table.get(code) or table.get(code[:2])
        if words is not None:
            return kind(f"the history {shown}: {words}")
    if code in NO_TABLE or (not code and _is_operational(error)):
        return StoreUnavailable(f"the history {shown}: {one_line(error)}")
    assert isinstance(error, Exception)
    return error


def _is_operational(error: Any) -> bool:
    """Without a code: the server did not answer, or went away."""
    return any(each.__name__ == "OperationalError" for each in type(error).__mro__)
