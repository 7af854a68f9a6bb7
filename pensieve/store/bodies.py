"""The table of private content (texts, tokens, names), built so that deletion leaves no trace.

A body is the private part of a conversation, a message or a turn. It is a JSON object, and for messages also
the packed token ids. One CRC covers both. The logprobs of a turn are a separate body: packed, without JSON.
All other tables hold only numbers, states, fixed words and digests.

SQLite's `secure_delete` overwrites only the current copy of a cell. When SQLite balances a B-tree, it copies
cells between pages. The old copies stay in unused parts of a page, where no later deletion reaches them. (On
random traffic, about one text in 500 survived its deletion.) So the cells of this table must never move
between pages:

    insert   appends after the largest rowid; SQLite then adds a new rightmost leaf and moves no existing cell
    shorten  replaces the JSON by a shorter JSON; the row stays in its page
    wipe     sets the columns to NULL; the row stays in its page, its old cell is zeroed, and its overflow
             pages are zeroed and freed
    delete   happens only in compaction.py, far from every row that still has content

A wiped row keeps its space, and `wiped_bytes` counts that space. When `wiped_bytes` exceeds half of the file,
compaction.py returns the space to the disk. So the file is at most about twice as large as its content.

The table `tenants` holds the size of each tenant's conversations. Every transaction updates the table (in
PostgreSQL, `tenants` is a view that adds up the counts of all connections):

    counted       each body that is not wiped: private part, tokens, and ROW_BYTES for rows and indices
    not counted   space of wiped bodies, the write-ahead log, backups

A message that several forks hold counts once. `verify` recounts everything and compares.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pensieve.errors import StoreCorrupt
from pensieve.store.backend import ServerSession, insert_numbered

if TYPE_CHECKING:
    from sqlite3 import Connection

TOKEN_BYTES = 4
WIPED_AT_ONCE = 100
ROW_BYTES = 256  # estimated size of a record without its body, including history and chains rows
LOCAL_BYTES_MAX = 4061  # the largest part of a row in a 4096-byte leaf page; the rest overflows


def canonical_json(value: Any) -> bytes:
    """Return JSON that is identical for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32 on any machine."""
    packed = array("I", token_ids)
    assert packed.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(tokens: bytes) -> array[int]:
    """The inverse of `pack_tokens`."""
    token_ids = array("I")
    token_ids.frombytes(tokens)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


def body_crc(private: bytes, tokens: bytes) -> int:
    """Return the checksum over both parts of a body."""
    return zlib.crc32(tokens, zlib.crc32(private))


def insert_body(
    conn: Connection, tenant: str, private: Mapping[str, Any], token_ids: Sequence[int] = ()
) -> int:
    """Append a body and return its row number. Add its size to the tenant's bytes."""
    return insert_packed_body(conn, tenant, canonical_json(private), pack_tokens(token_ids))


def insert_packed_body(conn: Connection, tenant: str, fields: bytes, tokens: bytes) -> int:
    """Like `insert_body`, but with both parts already encoded."""
    values = body_crc(fields, tokens), fields, tokens
    body = insert_numbered(conn, "bodies", ("crc", "private", "tokens"), values)
    _count_bytes(conn, tenant, len(fields) + len(tokens) + ROW_BYTES)
    return body


def last_within(lengths: Iterable[tuple[int, int]], bytes_max: int) -> int | None:
    """Return the last key up to which the total length is at most `bytes_max`.

    Return the first key if its length alone is more, and None if there are no keys. Callers use the
    result to limit a query, because a database server sends all rows that a query finds.
    """
    last, num_bytes = None, 0
    for key, length in lengths:
        num_bytes += length
        if last is not None and num_bytes > bytes_max:
            break
        last = key
    return last


def checked_body(
    owner: str, crc: int | None, private: bytes | None, tokens: bytes | None
) -> tuple[bytes, bytes]:
    """Return both parts of a body.

    Raises StoreCorrupt, which names `owner`, if a part is missing or the checksum is wrong.
    """
    if crc is None or private is None or tokens is None:
        raise StoreCorrupt(f"{owner}: a record is missing")
    if body_crc(private, tokens) != crc:
        raise StoreCorrupt(f"{owner}: a record fails its checksum")
    return private, tokens


def read_private(owner: str, crc: int | None, private: bytes | None, tokens: bytes | None) -> Any:
    """Check a body and return its JSON object."""
    return json.loads(checked_body(owner, crc, private, tokens)[0])


def shorten_body(conn: Connection, tenant: str, body: int, private: Mapping[str, Any]) -> None:
    """Replace the JSON of a body without tokens by a shorter JSON, and count the wasted space."""
    fields = canonical_json(private)
    ((num_bytes,),) = conn.execute(
        "SELECT coalesce(sum(length(private)), 0) FROM bodies WHERE body = ?", (body,)
    ).fetchall()
    _count_wasted(conn, max(0, min(LOCAL_BYTES_MAX, num_bytes) - len(fields)))
    _count_bytes(conn, tenant, len(fields) - num_bytes)
    conn.execute(
        "UPDATE bodies SET crc = ?, private = ? WHERE body = ?",
        (body_crc(fields, b""), fields, body),
    )


def wipe_bodies(conn: Connection, tenant: str, bodies: Iterable[int]) -> None:
    """Overwrite bodies with NULL and count the space that they waste."""
    numbers = [str(int(body)) for body in bodies]
    for first in range(0, len(numbers), WIPED_AT_ONCE):
        batch = ",".join(numbers[first : first + WIPED_AT_ONCE])
        lengths = conn.execute(
            f"SELECT length(private) + length(tokens) FROM bodies WHERE body IN ({batch})"
            " AND private IS NOT NULL AND tokens IS NOT NULL"
        ).fetchall()
        _count_wasted(conn, sum(min(LOCAL_BYTES_MAX, num_bytes) for (num_bytes,) in lengths))
        num_bytes = sum(num_bytes + ROW_BYTES for (num_bytes,) in lengths)
        _count_bytes(conn, tenant, -num_bytes)
        conn.execute(
            f"UPDATE bodies SET crc = NULL, private = NULL, tokens = NULL WHERE body IN ({batch})"
        )


def _count_wasted(conn: Connection, num_bytes: int) -> None:
    """Record that `num_bytes` more bytes of the file are wasted by wiped bodies."""
    if isinstance(conn, ServerSession):
        conn.note_wiped()
    else:
        conn.execute("UPDATE space SET wiped_bytes = wiped_bytes + ?", (num_bytes,))


def _count_bytes(conn: Connection, tenant: str, num_bytes: int) -> None:
    """Add to a tenant's bytes; `num_bytes` may be negative."""
    if isinstance(conn, ServerSession):
        conn.count_bytes(tenant, num_bytes)
        return
    conn.execute(
        "INSERT INTO tenants (tenant, stored_bytes) VALUES (?, ?)"
        " ON CONFLICT (tenant) DO UPDATE SET stored_bytes = tenants.stored_bytes + excluded.stored_bytes",
        (tenant, num_bytes),
    )


def bytes_of_tenant(conn: Connection, tenant: str) -> int:
    row = conn.execute("SELECT stored_bytes FROM tenants WHERE tenant = ?", (tenant,)).fetchone()
    return 0 if row is None else int(row[0])


def bytes_by_tenant(conn: Connection) -> dict[str, int]:
    """Return the size of the conversations of each tenant that has any."""
    rows = conn.execute("SELECT tenant, stored_bytes FROM tenants WHERE stored_bytes <> 0")
    return {tenant: int(stored_bytes) for tenant, stored_bytes in rows}


def corrected_byte_counts(conn: Connection) -> dict[str, int]:
    """Return the correct size for each tenant whose counter is wrong."""
    counted, added = bytes_by_tenant(conn), dict(conn.execute(STORED_BYTES_QUERY))
    return {
        tenant: added.get(tenant, 0)
        for tenant in sorted({*counted, *added})
        if counted.get(tenant, 0) != added.get(tenant, 0)
    }


# Yields (tenant, bytes), recounted from the records. A message counts for the tenant of the turn that made
# it. If that turn is gone, it counts for the tenant of a history that holds it; all forks are of one tenant.
STORED_BYTES_QUERY_BEFORE_LOGPROBS = f"""
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
STORED_BYTES_QUERY = STORED_BYTES_QUERY_BEFORE_LOGPROBS.replace(
    "WITH owned AS (",
    """WITH owned AS (
        SELECT c.tenant, t.logprobs AS body FROM turns t JOIN conversations c USING (conversation)
        UNION ALL
        SELECT c.tenant, r.body FROM responses r JOIN conversations c USING (conversation)
        UNION ALL""",
)
