"""Values of the store as PostgreSQL sends and receives them.

to the server    an int is a bigint, however small, so that a statement is prepared once; bytes as they
                 are, all else as text
from it          binary.  A sum of bigints is a `numeric`, and comes back as int; what has another type
                 than these is left as bytes
texts            PostgreSQL refuses the letter NUL; see dialect.py
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from pensieve.store.postgres.dialect import escaped, unescaped

BOOL, BYTEA, NAME, INT8, INT2, INT4, TEXT, OID = 16, 17, 19, 20, 21, 23, 25, 26
FLOAT8, VARCHAR, NUMERIC, UNKNOWN = 701, 1043, 1700, 0
AS_TEXT, AS_BYTES = 0, 1
NUMERIC_BASE = 10_000  # of its digits


def sent(given: Sequence[Any]) -> tuple[list[bytes | None], tuple[int, ...], list[int]]:
    """The values of a statement, their types and formats."""
    written, types, formats = [], [], []
    for value in given:
        data, kind = _sent(value)
        written.append(data)
        types.append(kind)
        formats.append(AS_BYTES if kind == BYTEA else AS_TEXT)
    return written, tuple(types), formats


def _sent(value: Any) -> tuple[bytes | None, int]:
    if value is None:
        return None, UNKNOWN
    if isinstance(value, str):
        return escaped(str(value)).encode(), UNKNOWN  # an enum's text, too
    if isinstance(value, bool):
        return (b"t" if value else b"f"), BOOL
    if isinstance(value, int):
        return str(int(value)).encode(), INT8
    if isinstance(value, float):
        return repr(value).encode(), FLOAT8
    return bytes(value), BYTEA


def row_of(result: Any, number: int) -> tuple[Any, ...]:
    return tuple(_received(result, number, column) for column in range(result.nfields))


def _received(result: Any, row: int, column: int) -> Any:
    data = result.get_value(row, column)
    if data is None:
        return None
    read = RECEIVED.get(result.ftype(column))
    return data if read is None else read(data)


def _integer(data: bytes) -> int:
    return int.from_bytes(data, signed=True)


def _float(data: bytes) -> float:
    number: float = struct.unpack(">d", data)[0]
    return number


def _numeric(data: bytes) -> int:
    """Of a whole number."""
    num_digits, weight, sign, _ = struct.unpack_from(">hhHH", data)
    digits = struct.unpack_from(f">{num_digits}h", data, 8)
    whole: int = sum(each * NUMERIC_BASE ** (weight - place) for place, each in enumerate(digits))
    return -whole if sign else whole


def _text(data: bytes) -> str:
    return unescaped(data.decode())


RECEIVED: dict[int, Callable[[bytes], Any]] = {
    BOOL: lambda data: data != b"\0",
    INT2: _integer,
    INT4: _integer,
    INT8: _integer,
    OID: int.from_bytes,
    FLOAT8: _float,
    NUMERIC: _numeric,
    TEXT: _text,
    VARCHAR: _text,
    NAME: _text,
}
