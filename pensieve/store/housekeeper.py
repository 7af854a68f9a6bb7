"""Which daemon cleans up the history: compacts, forgets, scrubs.

Of several daemons the one that has the row of `housekeeping` does, as long as its session is open and its
lease has not expired. A daemon looks whenever it renews its lease (leases.py). It gets a new epoch when it
takes the row. Work in several transactions, such as a pass of compaction, goes on only in the epoch in which
it began (`fence`). A daemon that has the history for itself does all of it, and has no need of the row.

A deletion erases its content itself, in any daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pensieve.store.backend import database_clock

if TYPE_CHECKING:
    from sqlite3 import Connection


class Housekeeper:
    """Any thread may ask `is_ours`."""

    def __init__(self, *, is_ours: bool) -> None:
        self.is_ours = is_ours
        self._is_alone = is_ours
        self._held: tuple[int, int] | None = (
            None  # our session, and the epoch in which it has the row
        )

    def look(self, conn: Connection, session: int, next_epoch: Callable[[Connection], int]) -> None:
        """Take the row if nobody has it; a part of the transaction that renews the lease."""
        owner, epoch, is_alive = conn.execute(
            "SELECT h.session, h.epoch, s.session IS NOT NULL AND"
            f" (s.lease_until IS NULL OR s.lease_until > {database_clock(conn)})"
            " FROM housekeeping h LEFT JOIN sessions s ON s.session = h.session"
        ).fetchone()
        if owner != session and not is_alive:
            owner, epoch = session, next_epoch(conn)
            conn.execute("UPDATE housekeeping SET session = ?, epoch = ?", (owner, epoch))
        self._held = (owner, epoch) if owner == session else None

    def looked(self) -> None:
        """That transaction is committed."""
        self.is_ours = self._is_alone or self._held is not None

    def fence(self) -> Callable[[Connection], bool]:
        """For work that begins now: says in a transaction whether it may go on."""
        if self._is_alone:
            return lambda conn: True
        held = self._held

        def may_go_on(conn: Connection) -> bool:
            row = conn.execute("SELECT session, epoch FROM housekeeping").fetchone()
            return held is not None and tuple(row) == held

        return may_go_on
