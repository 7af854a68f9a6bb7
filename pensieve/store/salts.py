"""A random salt for each tenant, for the identities of the tenant's cached chunks.

Equal tokens of two tenants get different identities, so tenants never share KV. A salt is made when it is
first needed, and never changes. All daemons that share the history read the same salt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pensieve.errors import StoreCorrupt
from pensieve.store.transactions import StoreTransactions, repeated

if TYPE_CHECKING:
    from sqlite3 import Connection

SALT_BYTES = 16


class Salts:
    """Used outside of transactions, in the store's threads."""

    def __init__(self, transactions: StoreTransactions, random_bits: Callable[[int], int]) -> None:
        self._transactions, self._random_bits = transactions, random_bits
        self._known: dict[str, bytes] = {}  # only salts that are committed

    @repeated
    def get(self, tenant: str) -> bytes:
        """Return the tenant's salt. The first call for a new tenant stores a new salt."""
        salt = self._known.get(tenant)
        if salt is None:
            with self._transactions.reading() as conn:
                salt = _find(conn, tenant)
            self._known[tenant] = salt = salt or self._make(tenant)
        return salt

    def _make(self, tenant: str) -> bytes:
        drawn = self._random_bits(8 * SALT_BYTES).to_bytes(SALT_BYTES)
        with self._transactions.writing() as conn:
            conn.execute(
                "INSERT INTO salts (tenant, salt) VALUES (?, ?) ON CONFLICT (tenant) DO NOTHING",
                (tenant, drawn),
            )
            # may be the salt that another thread or daemon inserted first
            stored = _find(conn, tenant)
        assert stored is not None
        return stored


def _find(conn: Connection, tenant: str) -> bytes | None:
    row = conn.execute("SELECT salt FROM salts WHERE tenant = ?", (tenant,)).fetchone()
    if row is None:
        return None
    salt = bytes(row[0])
    if len(salt) != SALT_BYTES:
        raise StoreCorrupt(f"tenant {tenant!r}: its salt has {len(salt)} bytes")
    return salt
