"""The table of private content (texts, tokens, names), from which deletion leaves no trace.

A body is the private part of a conversation, a message or a turn: a JSON object, and for messages the
packed token ids, under one CRC.  The logprobs of a turn are a body of their own: packed, and no JSON.  All
other tables hold numbers, states, fixed words and digests.

Why one table.  `secure_delete` overwrites a cell where it lies *now*, but when SQLite balances a B-tree it
copies cells between pages and leaves the old copies in the unused middle of a page, where no later delete
finds them (measured: about one text in 500 survived on random traffic).  So the cells of this table must
never move between pages:

    insert   appends at the largest rowid; SQLite then adds a new rightmost leaf and moves no existing cell
    shorten  replaces the JSON by less: like wiping, the row stays in its page
    wipe     sets the columns to NULL; a row that shrinks stays in its page, its old cell is zeroed,
             and its overflow pages are zeroed and freed
    delete   happens in compaction.py only, and far from every row that still has content

A wiped row keeps its space in its leaf.  `wiped_bytes` counts that space; when it is more than half of the
file, compaction.py gives it back.  So the file is at most about twice as large as its content, and the cost
of moving what is alive is spread over the deletions.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pensieve.errors import StoreCorrupt
from pensieve.store import stored_bytes
from pensieve.store.numbered import ServerSession, insert_numbered

if TYPE_CHECKING:
    from sqlite3 import Connection

TOKEN_BYTES = 4
WIPED_AT_ONCE = 100
LOCAL_BYTES_MAX = 4061  # the most of one row that a 4096-byte leaf page holds; the rest overflows


def canonical_json(value: Any) -> bytes:
    """JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, whatever the machine's byte order."""
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
    """The checksum over both parts of a body."""
    return zlib.crc32(tokens, zlib.crc32(private))


def insert_body(
    conn: Connection, tenant: str, private: Mapping[str, Any], token_ids: Sequence[int] = ()
) -> int:
    """Append a body of a tenant's; returns its row number."""
    return insert_packed_body(conn, tenant, canonical_json(private), pack_tokens(token_ids))


def insert_packed_body(conn: Connection, tenant: str, fields: bytes, tokens: bytes) -> int:
    """The same, of the bytes of both parts."""
    values = body_crc(fields, tokens), fields, tokens
    body = insert_numbered(conn, "bodies", ("crc", "private", "tokens"), values)
    stored_bytes.count(conn, tenant, len(fields) + len(tokens) + stored_bytes.ROW_BYTES)
    return body


def last_within(lengths: Iterable[tuple[int, int]], bytes_max: int) -> int | None:
    """The last of (key, bytes) up to which they are no more than `bytes_max`; the first one may be more.

    What is read is bounded before it is asked for: a server sends all that a statement finds.
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
    """The two parts of a body as they were written; raises StoreCorrupt, which names the owner."""
    if crc is None or private is None or tokens is None:
        raise StoreCorrupt(f"{owner}: a record is missing")
    if body_crc(private, tokens) != crc:
        raise StoreCorrupt(f"{owner}: a record fails its checksum")
    return private, tokens


def read_private(owner: str, crc: int | None, private: bytes | None, tokens: bytes | None) -> Any:
    """The JSON object of a body, checked."""
    return json.loads(checked_body(owner, crc, private, tokens)[0])


def shorten_body(conn: Connection, tenant: str, body: int, private: Mapping[str, Any]) -> None:
    """Replace the JSON of a body without tokens by less, and count the space that this wastes."""
    fields = canonical_json(private)
    ((num_bytes,),) = conn.execute(
        "SELECT coalesce(sum(length(private)), 0) FROM bodies WHERE body = ?", (body,)
    ).fetchall()
    _waste(conn, max(0, min(LOCAL_BYTES_MAX, num_bytes) - len(fields)))
    stored_bytes.count(conn, tenant, len(fields) - num_bytes)
    conn.execute(
        "UPDATE bodies SET crc = ?, private = ? WHERE body = ?",
        (body_crc(fields, b""), fields, body),
    )


def wipe_bodies(conn: Connection, tenant: str, bodies: Iterable[int]) -> None:
    """Overwrite bodies of a tenant's with nothing and count the space that they waste."""
    numbers = [str(int(body)) for body in bodies]
    for first in range(0, len(numbers), WIPED_AT_ONCE):
        some = ",".join(numbers[first : first + WIPED_AT_ONCE])
        lengths = conn.execute(
            f"SELECT length(private) + length(tokens) FROM bodies WHERE body IN ({some})"
            " AND private IS NOT NULL AND tokens IS NOT NULL"
        ).fetchall()
        _waste(conn, sum(min(LOCAL_BYTES_MAX, num_bytes) for (num_bytes,) in lengths))
        num_bytes = sum(num_bytes + stored_bytes.ROW_BYTES for (num_bytes,) in lengths)
        stored_bytes.count(conn, tenant, -num_bytes)
        conn.execute(
            f"UPDATE bodies SET crc = NULL, private = NULL, tokens = NULL WHERE body IN ({some})"
        )


def _waste(conn: Connection, num_bytes: int) -> None:
    conn.execute("UPDATE space SET wiped_bytes = wiped_bytes + ?", (num_bytes,))
    if isinstance(conn, ServerSession):
        conn.note_wiped()
