"""Send statements to PostgreSQL through libpq's pipeline, using psycopg's wrapper of libpq.

`send` puts a statement into libpq's buffer and returns immediately. Reading a result sends the buffer and
waits for that result and all earlier results. So consecutive statements whose results are not read are sent
together. (psycopg's own cursors send each statement of a pipeline separately. Turns took twice as long with
them.)

    order      Statements run in the order of the calls.
    errors     After a failed statement, the server skips all statements up to the next `sync`. The next call
               that waits for the server raises the error, at the latest this `sync`.
    sync       Waits for everything that was sent. Outside of a transaction, `sync` also commits the
               statements.

A statement is prepared at its second use, up to STATEMENTS_MAX statements. A statement whose text contains a
list of values is different each time, so it is never prepared.

Only one thread at a time may use a `Wire`.

How values are encoded:

    to the server     All ints are sent as bigint, so that a statement is prepared only once. Bytes are sent
                      unchanged, everything else as text.
    from the server   The binary format, decoded by DECODERS. A sum of bigints is a `numeric` and becomes an
                      int. Types that are not in DECODERS stay bytes.
    texts             PostgreSQL rejects NUL. So NUL and ESCAPE are each stored as two characters, the first
                      of which is ESCAPE. Every text survives, and equal texts stay equal.
"""

from __future__ import annotations

import contextlib
import re
import select
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

STATEMENTS_MAX = 256  # limit for prepared statements; the store has fewer
BOOL, BYTEA, NAME, INT8, INT2, INT4, TEXT, OID = 16, 17, 19, 20, 21, 23, 25, 26
FLOAT8, VARCHAR, NUMERIC, UNKNOWN = 701, 1043, 1700, 0
AS_TEXT, AS_BYTES = 0, 1
NUMERIC_BASE = 10_000  # base of the digits of a `numeric`
ESCAPE = "\x1a"
ESCAPED = {"\0": ESCAPE + "0", ESCAPE: ESCAPE + "1"}
UNESCAPED = {written: letter for letter, written in ESCAPED.items()}
TO_ESCAPE = re.compile(f"[\0{ESCAPE}]")
TO_UNESCAPE = re.compile(f"{ESCAPE}[01]")


class PendingResult:
    """The result of a statement, available now or later."""

    def __init__(self, wire: Wire, forget: Callable[[], object] = lambda: None) -> None:
        """`forget` is called if the statement was not executed."""
        self.forget = forget
        self._wire = wire
        self._result: Any = None  # libpq's result
        self._next = 0

    @property
    def status(self) -> str:
        """The server's command tag, such as COMMIT."""
        return (self._wait().command_status or b"").decode()

    def fetchone(self) -> tuple[Any, ...] | None:
        libpq_result = self._wait()
        if self._next >= libpq_result.ntuples:
            return None
        self._next += 1
        return row_of(libpq_result, self._next - 1)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return list(self)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        while (row := self.fetchone()) is not None:
            yield row

    @property
    def has_arrived(self) -> bool:
        return self._result is not None

    def set_result(self, libpq_result: Any) -> None:
        self._result = libpq_result

    def _wait(self) -> Any:
        """Return libpq's result. Wait if it has not arrived yet."""
        if self._result is None:
            self._wire.wait_for(self)
        return self._result


class Wire:
    """The pipeline of a psycopg connection that nobody else uses from now on."""

    def __init__(self, conn: Any, driver: Any) -> None:
        self.conn = conn
        self._pgconn = conn.pgconn
        self._driver = driver
        self._status = driver.pq.ExecStatus
        # statements whose results have not been received yet; None stands for a `sync`
        self._sent: deque[PendingResult | None] = deque()
        self._error: Exception | None = None  # the first error since the last `sync`
        self._prepared: dict[tuple[str, tuple[int, ...]], bytes] = {}
        self._num_prepared = 0
        self._is_synced = True
        self._known: set[tuple[str, tuple[int, ...]]] = set()
        self._pgconn.nonblocking = 1
        self._pgconn.enter_pipeline_mode()

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open and has no transaction. False until `sync` if something was sent."""
        idle = self._driver.pq.TransactionStatus.IDLE
        is_known = self._is_synced and not self.conn.closed
        return is_known and self._pgconn.transaction_status == idle

    def send(self, sql: str, values: Sequence[Any] = ()) -> PendingResult:
        """Send a statement with the values of $1, $2 and so on."""
        self._is_synced = False
        encoded, types, formats = encoded_values(values)
        key = (sql, types)
        name = self._prepared.get(key)
        if name is None and key in self._known and len(self._prepared) < STATEMENTS_MAX:
            self._num_prepared += 1
            name = self._prepared[key] = f"s{self._num_prepared}".encode()
            self._pgconn.send_prepare(name, sql.encode(), types)
            self._sent.append(PendingResult(self, forget=lambda: self._prepared.pop(key)))
        if name is not None:
            self._pgconn.send_query_prepared(name, encoded, formats, AS_BYTES)
        else:
            if len(self._known) >= 4 * STATEMENTS_MAX:
                self._known.clear()
            self._known.add(key)
            self._pgconn.send_query_params(sql.encode(), encoded, types, formats, AS_BYTES)
        result = PendingResult(self)
        self._sent.append(result)
        return result

    def wait_for(self, result: PendingResult) -> None:
        """Wait for a result and all earlier results."""
        self._pgconn.send_flush_request()
        self._flush()
        while result in self._sent:
            self._receive()
        if self._error is not None or not result.has_arrived:
            raise self._error or self._driver.OperationalError("the server skipped a statement")

    def sync(self) -> None:
        """Wait until all sent statements are done. Raise the first error."""
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
        """Like `sync`, but ignore errors."""
        with contextlib.suppress(self._driver.Error):
            self.sync()

    def close(self) -> None:
        with contextlib.suppress(self._driver.Error):
            self.conn.close()

    def _receive(self) -> None:
        """Receive the result of the oldest statement."""
        libpq_result = self._next()
        if libpq_result is None:
            raise self._driver.OperationalError("the connection gave no result")
        if libpq_result.status == self._status.PIPELINE_SYNC:
            self._sent.popleft()
            return
        if libpq_result.status == self._status.FATAL_ERROR and self._error is None:
            self._error = self._error_of(libpq_result)
        while (more := self._next()) is not None:
            if self.conn.closed or more.status == self._status.FATAL_ERROR:
                break
        result = self._sent.popleft()
        if result is None:  # the connection was closed
            raise self._error or self._driver.OperationalError("the connection was lost")
        if libpq_result.status in (self._status.COMMAND_OK, self._status.TUPLES_OK):
            result.set_result(libpq_result)
        else:
            result.forget()

    def _error_of(self, libpq_result: Any) -> Exception:
        code = libpq_result.error_field(self._driver.pq.DiagnosticField.SQLSTATE)
        text = libpq_result.error_message.decode(errors="replace")
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


def encoded_values(values: Sequence[Any]) -> tuple[list[bytes | None], tuple[int, ...], list[int]]:
    """Return the encoded values of a statement, their types and formats."""
    encoded, types, formats = [], [], []
    for value in values:
        data, kind = _encoded(value)
        encoded.append(data)
        types.append(kind)
        formats.append(AS_BYTES if kind == BYTEA else AS_TEXT)
    return encoded, tuple(types), formats


def _encoded(value: Any) -> tuple[bytes | None, int]:
    if value is None:
        return None, UNKNOWN
    if isinstance(value, str):
        return escaped(str(value)).encode(), UNKNOWN  # also for string enums
    if isinstance(value, bool):
        return (b"t" if value else b"f"), BOOL
    if isinstance(value, int):
        return str(int(value)).encode(), INT8
    if isinstance(value, float):
        return repr(value).encode(), FLOAT8
    return bytes(value), BYTEA


def row_of(result: Any, number: int) -> tuple[Any, ...]:
    return tuple(_decoded_value(result, number, column) for column in range(result.nfields))


def _decoded_value(result: Any, row: int, column: int) -> Any:
    data = result.get_value(row, column)
    if data is None:
        return None
    decode = DECODERS.get(result.ftype(column))
    return data if decode is None else decode(data)


def _integer(data: bytes) -> int:
    return int.from_bytes(data, signed=True)


def _float(data: bytes) -> float:
    number: float = struct.unpack(">d", data)[0]
    return number


def _numeric(data: bytes) -> int:
    """Decode a whole number."""
    num_digits, weight, sign, _ = struct.unpack_from(">hhHH", data)
    digits = struct.unpack_from(f">{num_digits}h", data, 8)
    whole: int = sum(each * NUMERIC_BASE ** (weight - place) for place, each in enumerate(digits))
    return -whole if sign else whole


def _text(data: bytes) -> str:
    return unescaped(data.decode())


DECODERS: dict[int, Callable[[bytes], Any]] = {
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
    """Return the text in a form that PostgreSQL accepts."""
    if "\0" in text or ESCAPE in text:
        return TO_ESCAPE.sub(lambda match: ESCAPED[match[0]], text)
    return text


def unescaped(text: str) -> str:
    """The inverse of `escaped`."""
    if ESCAPE not in text:
        return text
    return TO_UNESCAPE.sub(lambda match: UNESCAPED[match[0]], text)
