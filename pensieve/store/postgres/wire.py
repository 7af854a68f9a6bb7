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
each time and are not.  Values go and come as values.py says.  One thread at a time.
"""

from __future__ import annotations

import contextlib
import select
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pensieve.store.postgres import values

STATEMENTS_MAX = 256  # that are prepared; the store has fewer
BINARY = 1


class Result:
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
        return values.row_of(given, self._next - 1)

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
        self._sent: deque[Result | None] = deque()  # without a result yet; None is a `sync`
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

    def send(self, sql: str, given: Sequence[Any] = ()) -> Result:
        """`sql` has its values as $1, $2."""
        self._is_synced = False
        sent, types, formats = values.sent(given)
        key = (sql, types)
        name = self._prepared.get(key)
        if name is None and key in self._known and len(self._prepared) < STATEMENTS_MAX:
            self._num_prepared += 1
            name = self._prepared[key] = f"s{self._num_prepared}".encode()
            self._pgconn.send_prepare(name, sql.encode(), types)
            self._sent.append(Result(self, forget=lambda: self._prepared.pop(key)))
        if name is not None:
            self._pgconn.send_query_prepared(name, sent, formats, BINARY)
        else:
            if len(self._known) >= 4 * STATEMENTS_MAX:
                self._known.clear()
            self._known.add(key)
            self._pgconn.send_query_params(sql.encode(), sent, types, formats, BINARY)
        result = Result(self)
        self._sent.append(result)
        return result

    def wait_for(self, result: Result) -> None:
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
