"""Elect the housekeeper: the daemon that compacts, forgets and scrubs a shared history.

The table `housekeeping` has one row, which names a daemon's session. That daemon is the housekeeper as long
as its session is open and its lease has not expired. Each daemon checks the row when it renews its lease
(leases.py). If the housekeeper is gone, the daemon puts its own session into the row, with a new epoch. Work
that takes several transactions, such as a compaction pass, stops when the epoch changes (`fence`). A daemon
that was suspended is not the housekeeper until it has renewed its lease: another daemon may be in the row.
A daemon with an exclusive history is always the housekeeper and does not use the row.

Deleted content is erased by the daemon that deleted it, not by the housekeeper.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pensieve.store.backend import database_clock

if TYPE_CHECKING:
    from sqlite3 import Connection


class Housekeeper:
    """Tracks whether this daemon is the housekeeper. Any thread may read `is_ours`."""

    def __init__(self, *, is_ours: bool) -> None:
        self._is_alone = is_ours
        # by time.monotonic(): until when this daemon is the housekeeper
        self._until = math.inf if is_ours else 0.0
        # our session and epoch, if this daemon is in the row
        self._held: tuple[int, int] | None = None

    @property
    def is_ours(self) -> bool:
        return time.monotonic() < self._until

    def claim_if_free(
        self, conn: Connection, session: int, next_epoch: Callable[[Connection], int]
    ) -> None:
        """Put our session into the row if the daemon in the row is gone.

        Called in the transaction that renews the lease.
        """
        owner, epoch, is_alive = conn.execute(
            "SELECT h.session, h.epoch, s.session IS NOT NULL AND"
            f" (s.lease_until IS NULL OR s.lease_until > {database_clock(conn)})"
            " FROM housekeeping h LEFT JOIN sessions s ON s.session = h.session"
        ).fetchone()
        if owner != session and not is_alive:
            owner, epoch = session, next_epoch(conn)
            conn.execute("UPDATE housekeeping SET session = ?, epoch = ?", (owner, epoch))
        self._held = (owner, epoch) if owner == session else None

    def confirm_claim(self, lease_until: float) -> None:
        """Apply the result of `claim_if_free` after its transaction is committed.

        `lease_until`: when the renewed lease expires, by time.monotonic(), or earlier.
        """
        if not self._is_alone:
            self._until = lease_until if self._held is not None else 0.0

    def fence(self) -> Callable[[Connection], bool]:
        """Return a function for work that begins now: it tells each transaction whether to continue."""
        if self._is_alone:
            return lambda conn: True
        held = self._held

        def may_go_on(conn: Connection) -> bool:
            row = conn.execute("SELECT session, epoch FROM housekeeping").fetchone()
            return held is not None and tuple(row) == held

        return may_go_on
