"""How many bytes each tenant's conversations take, counted in the transactions that change it.

    counted       each body that is not wiped: private part, tokens, and ROW_BYTES for rows and indices
    not counted   what wiped bodies waste, the write-ahead log, backups

A message that forks share counts once.  Who asks reads one row, however much is stored; `verify` adds
everything up and compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlite3 import Connection

ROW_BYTES = 256  # about what a record takes beside its body, links and chains included


def count(conn: Connection, tenant: str, num_bytes: int) -> None:
    """So much more for a tenant, or less."""
    conn.execute(
        "INSERT INTO tenants (tenant, stored_bytes) VALUES (?, ?)"
        " ON CONFLICT (tenant) DO UPDATE SET stored_bytes = tenants.stored_bytes + excluded.stored_bytes",
        (tenant, num_bytes),
    )


def of_tenant(conn: Connection, tenant: str) -> int:
    row = conn.execute("SELECT stored_bytes FROM tenants WHERE tenant = ?", (tenant,)).fetchone()
    return 0 if row is None else int(row[0])


def of_all(conn: Connection) -> dict[str, int]:
    """Of the tenants that have something."""
    rows = conn.execute("SELECT tenant, stored_bytes FROM tenants WHERE stored_bytes <> 0")
    return {tenant: int(stored_bytes) for tenant, stored_bytes in rows}


def miscounted(conn: Connection) -> dict[str, int]:
    """The tenants whose number is wrong, with what their conversations really take."""
    counted, added = of_all(conn), dict(conn.execute(ADDED_UP))
    return {
        tenant: added.get(tenant, 0)
        for tenant in sorted({*counted, *added})
        if counted.get(tenant, 0) != added.get(tenant, 0)
    }


# (tenant, bytes) added up from the records themselves.  A message belongs to whoever's turn made it, or, when
# that turn is gone, to whoever's history holds it: forks are of the same tenant.
ADDED_UP_BEFORE_LOGPROBS = f"""
    WITH owned AS (
        SELECT tenant, body FROM conversations
        UNION ALL
        SELECT c.tenant, t.body FROM turns t JOIN conversations c USING (conversation)
        UNION ALL
        SELECT coalesce(
            (SELECT c.tenant FROM turns t JOIN conversations c USING (conversation)
                WHERE t.turn_id = m.turn_id),
            (SELECT c.tenant FROM history h JOIN conversations c USING (conversation)
                WHERE h.message = m.message LIMIT 1)
        ), m.body FROM messages m
    )
    SELECT tenant, sum(length(b.private) + length(b.tokens) + {ROW_BYTES})
    FROM owned JOIN bodies b USING (body)
    WHERE b.crc IS NOT NULL AND tenant IS NOT NULL GROUP BY tenant
"""
ADDED_UP = ADDED_UP_BEFORE_LOGPROBS.replace(
    "WITH owned AS (",
    """WITH owned AS (
        SELECT c.tenant, t.logprobs AS body FROM turns t JOIN conversations c USING (conversation)
        UNION ALL
        SELECT c.tenant, r.body FROM responses r JOIN conversations c USING (conversation)
        UNION ALL""",
)
