"""Statements on their way to PostgreSQL and back: libpq's pipeline, by psycopg's wrapper of libpq.

`send` puts a statement into libpq's buffer and returns at once; who looks at its result sends what is there,
and waits for that result and all before it.  So a block of statements that nobody asks about goes in one
message.  (psycopg's own cursors in a pipeline send each by itself: a system call or two for each, which made
a turn take twice as long.)

    order      of statements is that of the calls
    errors     a statement that fails makes the server pass over all behind it, up to the next `sync`; its
               error is raised by whoever waits next, at the latest by that `sync`
    sync       ends what is under way; outside of a transaction that commits each statement before it

A statement is prepared when it comes again, up to STATEMENTS_MAX of them; those with a list in them differ
each time and are not.  One thread at a time.  The values:

    to the server    an int is a bigint, however small, so that a statement is prepared once; bytes as they
                     are, all else as text
    from it          binary.  A sum of bigints is a `numeric`, and comes back as int; what has another type
                     than these is left as bytes
    texts            PostgreSQL refuses the letter NUL.  It is stored as two letters that begin with ESCAPE,
                     and ESCAPE itself as two others, so every text comes back and equal ones stay equal
"""

from __future__ import annotations

import contextlib
import re
import select
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

STATEMENTS_MAX = 256  # that are prepared; the store has fewer
BOOL, BYTEA, NAME, INT8, INT2, INT4, TEXT, OID = 16, 17, 19, 20, 21, 23, 25, 26
FLOAT8, VARCHAR, NUMERIC, UNKNOWN = 701, 1043, 1700, 0
AS_TEXT, AS_BYTES = 0, 1
NUMERIC_BASE = 10_000  # of its digits
ESCAPE = "\x1a"
ESCAPED = {"\0": ESCAPE + "0", ESCAPE: ESCAPE + "1"}
UNESCAPED = {written: letter for letter, written in ESCAPED.items()}
TO_ESCAPE = re.compile(f"[\0{ESCAPE}]")
TO_UNESCAPE = re.compile(f"{ESCAPE}[01]")


class PendingResult:
    """Of a statement, perhaps later."""

    def __init__(self, wire: Wire, forget: Callable[[], object] = lambda: None) -> None:
        """`forget` is called where it was not done."""
        self.forget = forget
        self._wire = wire
        self._given: Any = None  # libpq's
        self._next = 0

    @property
    def status(self) -> str:
        """What the server says that it did."""
        return (self._waited_for().command_status or b"").decode()

    def fetchone(self) -> tuple[Any, ...] | None:
        given = self._waited_for()
        if self._next >= given.ntuples:
            return None
        self._next += 1
        return row_of(given, self._next - 1)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return list(self)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        while (row := self.fetchone()) is not None:
            yield row

    @property
    def is_there(self) -> bool:
        return self._given is not None

    def give(self, given: Any) -> None:
        self._given = given

    def _waited_for(self) -> Any:
        if self._given is None:
            self._wire.wait_for(self)
        return self._given


class Wire:
    """Of a connection of psycopg's that nobody else uses from now on."""

    def __init__(self, conn: Any, driver: Any) -> None:
        self.conn = conn
        self._pgconn = conn.pgconn
        self._driver = driver
        self._status = driver.pq.ExecStatus
        self._sent: deque[PendingResult | None] = deque()  # without a result yet; None is a `sync`
        self._error: Exception | None = None  # the first since the last `sync`
        self._prepared: dict[tuple[str, tuple[int, ...]], bytes] = {}
        self._num_prepared = 0
        self._is_synced = True
        self._known: set[tuple[str, tuple[int, ...]]] = set()
        self._pgconn.nonblocking = 1
        self._pgconn.enter_pipeline_mode()

    @property
    def is_idle(self) -> bool:
        """Open, and without a transaction.  What it is in, the server says at each `sync`, and only then."""
        idle = self._driver.pq.TransactionStatus.IDLE
        is_known = self._is_synced and not self.conn.closed
        return is_known and self._pgconn.transaction_status == idle

    def send(self, sql: str, given: Sequence[Any] = ()) -> PendingResult:
        """`sql` has its values as $1, $2."""
        self._is_synced = False
        sent, types, formats = to_send(given)
        key = (sql, types)
        name = self._prepared.get(key)
        if name is None and key in self._known and len(self._prepared) < STATEMENTS_MAX:
            self._num_prepared += 1
            name = self._prepared[key] = f"s{self._num_prepared}".encode()
            self._pgconn.send_prepare(name, sql.encode(), types)
            self._sent.append(PendingResult(self, forget=lambda: self._prepared.pop(key)))
        if name is not None:
            self._pgconn.send_query_prepared(name, sent, formats, AS_BYTES)
        else:
            if len(self._known) >= 4 * STATEMENTS_MAX:
                self._known.clear()
            self._known.add(key)
            self._pgconn.send_query_params(sql.encode(), sent, types, formats, AS_BYTES)
        result = PendingResult(self)
        self._sent.append(result)
        return result

    def wait_for(self, result: PendingResult) -> None:
        """Until it is there, and all before it."""
        self._pgconn.send_flush_request()
        self._flush()
        while result in self._sent:
            self._receive()
        if self._error is not None or not result.is_there:
            raise self._error or self._driver.OperationalError("a statement was passed over")

    def sync(self) -> None:
        """Until all that was sent is done; raises the first error of it."""
        self._pgconn.pipeline_sync()
        self._sent.append(None)
        self._flush()
        while self._sent:
            self._receive()
        self._is_synced = True
        error, self._error = self._error, None
        if error is not None:
            raise error

    def clear(self) -> None:
        """The same, whatever has failed."""
        with contextlib.suppress(self._driver.Error):
            self.sync()

    def close(self) -> None:
        with contextlib.suppress(self._driver.Error):
            self.conn.close()

    def _receive(self) -> None:
        """The result of what was sent first."""
        given = self._next()
        if given is None:
            raise self._driver.OperationalError("the connection gave no result")
        if given.status == self._status.PIPELINE_SYNC:
            self._sent.popleft()
            return
        if given.status == self._status.FATAL_ERROR and self._error is None:
            self._error = self._error_of(given)
        while (more := self._next()) is not None:
            if self.conn.closed or more.status == self._status.FATAL_ERROR:
                break
        result = self._sent.popleft()
        if result is None:  # the connection ended instead
            raise self._error or self._driver.OperationalError("the connection was lost")
        if given.status in (self._status.COMMAND_OK, self._status.TUPLES_OK):
            result.give(given)
        else:
            result.forget()

    def _error_of(self, given: Any) -> Exception:
        code = given.error_field(self._driver.pq.DiagnosticField.SQLSTATE)
        text = given.error_message.decode(errors="replace")
        if code is None:
            error: Exception = self._driver.OperationalError(text)
            return error
        try:
            error = self._driver.errors.lookup(code.decode())(text)
        except KeyError:
            error = self._driver.DatabaseError(text)
            error.sqlstate = code.decode()  # type: ignore[attr-defined]
        return error

    def _flush(self) -> None:
        while self._pgconn.flush():
            self._poll(select.POLLIN | select.POLLOUT)

    def _next(self) -> Any:
        while self._pgconn.is_busy():
            self._poll(select.POLLIN)
        return self._pgconn.get_result()

    def _poll(self, wanted: int) -> None:
        poll = select.poll()  # `select` takes no descriptors above 1023
        poll.register(self._pgconn.socket, wanted)
        for _, found in poll.poll():
            if found & ~select.POLLOUT:
                self._pgconn.consume_input()


def to_send(given: Sequence[Any]) -> tuple[list[bytes | None], tuple[int, ...], list[int]]:
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


def escaped(text: str) -> str:
    """A text that PostgreSQL takes."""
    if "\0" in text or ESCAPE in text:
        return TO_ESCAPE.sub(lambda match: ESCAPED[match[0]], text)
    return text


def unescaped(text: str) -> str:
    """The inverse of `escaped`."""
    if ESCAPE not in text:
        return text
    return TO_UNESCAPE.sub(lambda match: UNESCAPED[match[0]], text)
