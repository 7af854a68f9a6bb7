"""The read-write connections to a history in PostgreSQL, and the connections for reads.

**Threads.** `PostgresLanes` has one connection for each thread that writes concurrently, up to a limit. The
isolation level is "repeatable read": a transaction sees the database as it was when the transaction began. If
another transaction has changed the same rows since, or on a deadlock, the transaction fails with Conflict.
The store then repeats the call (transactions.py).

**Daemons.** Each session that may write holds an advisory lock on the database until the session ends.
Daemons take this lock in shared mode; owners.py decides which daemon may write to a conversation. A process
that needs the database exclusively (for a migration or a copy) takes the lock in exclusive mode. If that
fails, its error names the processes that have the lock. The server frees the lock when it notices that the
session has ended: immediately if the process was killed, by keepalives if the host or the network failed.
After that, no transaction of the session can be committed.

**Takeover.** The table `owner` has the token of the process that opened the database last. If an exclusive
process reopens a connection and finds another token, it stops writing, because its knowledge of running turns
is outdated.

**Slots.** Each connection also holds the lock of a slot. A slot is a small number that no other connection
has. Every transaction updates some counters. Each slot has its own rows for these counters, so connections do
not wait for each other.

**Round trips.** A transaction goes through a pipeline (session.py), which does not wait for pure writes. So a
transaction costs one round trip for each query and one for the commit.

**Durability.** `synchronous_commit` is on (or stronger), and a server with fsync off is refused. If a standby
must confirm commits, a lost connection or an operator can interrupt the wait for the standby. Then a commit
becomes visible before the standby has it. So each reopened connection first writes a row of its slot, and
waits until the standby has that row. Then the standby also has everything that was committed before.

**Errors.** After an error, the transaction is rolled back. After a lost connection, the outcome of a COMMIT
is unknown, and the COMMIT may still be running on the server. Nothing is retried. The next use opens a new
connection, which first takes the slot of the old session. That slot is free only after the old session has
ended. So the new connection sees whether the COMMIT succeeded.

**Time limits.** TimeLimit is checked before each statement, and also limits each single statement.

**Start.** If a starting daemon cannot reach the server, it retries for up to START_SECONDS.

**Hanging transactions.** A daemon that is stopped or loses its network during a transaction keeps its locks.
The server has no timeout for this, because a session in a pipeline never counts as idle. So each daemon ends
such sessions of other daemons, if they have written something and were silent for `patience_seconds`. This
works only for sessions with the same database role. Sessions of other roles are not touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pensieve.errors import (
    DiskFull,
    StoreCorrupt,
    StoreError,
    StoreLocked,
    StoreUnavailable,
    one_line,
)
from pensieve.extras import need
from pensieve.store.backend import Conflict, TimeLimit, WriteFigures
from pensieve.store.postgres.schema import SCHEMA, migrate, needs_step
from pensieve.store.postgres.session import ReservedNumbers, SqlSession
from pensieve.store.postgres.wire import Wire

VERSION_MIN = 14_00_00
log = logging.getLogger("pensieve")
LOCK_KEY = 0x50656E7300000001  # "Pens"
# First key of a slot's lock. The second key is the slot's number. The database lock has a single key:
# PostgreSQL keeps locks with one key and locks with two keys apart.
SLOTS_KEY = LOCK_KEY >> 32
SLOTS_MAX = 10_000
LOCK_PAUSE_SECONDS = 0.02
START_SECONDS = 30.0  # a starting daemon waits this long for a server that cannot be reached
START_PAUSE_SECONDS = 0.5
OUTDATED = "needs a schema migration, which requires exclusive access, but is "
FREE_SLOT = (
    f"SELECT slot FROM generate_series(0, {SLOTS_MAX}) AS slot"
    f" WHERE pg_try_advisory_lock({SLOTS_KEY}, slot) LIMIT 1"
)
HOLDERS = (
    "SELECT DISTINCT application_name FROM pg_locks JOIN pg_stat_activity USING (pid)"
    " WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND classid::bigint = %s"
    " AND objid::bigint = %s AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " ORDER BY 1"
)
WAIT_FOR_STANDBY = (
    "INSERT INTO tenant_bytes (tenant, slot, stored_bytes) VALUES ('', %s, 0)"
    " ON CONFLICT (tenant, slot) DO UPDATE SET stored_bytes = tenant_bytes.stored_bytes"
)
# Ends sessions of other sharing daemons that hang in a transaction that has written something. Sessions of
# other roles are left out: ending one may be refused, which would fail the whole statement.
END_HANGING_SESSIONS = (
    "WITH stopped AS MATERIALIZED (SELECT pid, application_name"
    " FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE datname = current_database()"
    " AND usename = current_user AND (pid, backend_start::text) NOT IN ({ours})"
    " AND locktype = 'advisory' AND mode = 'ShareLock' AND objsubid = 1"
    f" AND classid::bigint = {LOCK_KEY >> 32} AND objid::bigint = {LOCK_KEY & 0xFFFFFFFF}"
    " AND backend_xid IS NOT NULL AND wait_event = 'ClientRead'"
    " AND state_change < clock_timestamp() - interval '{seconds:.3f} s')"
    " SELECT application_name FROM stopped WHERE pg_terminate_backend(pid)"
)
OWN_BACKEND = "SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()"
SAME_BACKEND = "FROM pg_stat_activity WHERE pid = %s AND backend_start::text = %s"
# Connection parameters by libpq's names. A URL may override them.
CONNECTION_PARAMETERS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "target_session_attrs": "read-write",  # if the URL has several hosts, choose the primary
}
SESSION_SETTINGS = {
    "client_encoding": "UTF8",
    "search_path": SCHEMA,
    "default_transaction_isolation": "repeatable read",
    "idle_in_transaction_session_timeout": "10s",  # effective only outside of a pipeline
    "idle_session_timeout": "0",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
OPTIONAL_SETTINGS = {"client_connection_check_interval": "5s"}  # not supported by servers on macOS
SET_CONFIG = "SELECT set_config(%s, %s, false)"
DISK_FULL = "53100"
# Explanations by SQLSTATE, or by the class of the SQLSTATE (its first two characters).
UNAVAILABLE = {
    "08": "the connection was lost",
    "25006": "the server is a standby, or read-only",
    "25P03": "the server ended an idle transaction",
    "40": "another program changed the same rows",
    "53": "the server lacks memory or connections",
    "53100": "the server's disk is full",
    "55P03": "another program holds a lock",
    "57014": "a statement took too long and was ended",
    "57P01": "the server was stopped",
    "57P02": "the server was stopped",
    "57P03": "the server is starting or stopping",
    "57P05": "the server ended an idle connection",
    "58030": "disk I/O error of the server",
}
CORRUPT = {
    "XX001": "a page of the database is damaged",
    "XX002": "an index of the database is damaged",
    "58P01": "a file of the database is missing",
}
NO_TABLE = {"3F000", "42P01", "42501"}  # tables or permissions were removed
# values of synchronous_commit that are kept; others become "on"
DURABLE_COMMITS = ("on", "remote_apply")
# words in the error of a server that refuses connections for now
STARTING = ("starting up", "shutting down", "not yet accepting", "recovery mode")
# SQLSTATEs: row changed meanwhile, deadlock, duplicate key, row still referenced.
CONFLICTS = {"40001", "40P01", "23505", "23503"}


class Address:
    """The address of the history. `shown` is the address without the password, for messages."""

    def __init__(self, url: str, driver: Any = None) -> None:
        self.driver = driver or need("postgres", "psycopg", "a history in PostgreSQL")
        # psycopg's warnings are either raised as errors here, or expected
        logging.getLogger("psycopg").setLevel(logging.CRITICAL)
        try:
            self._parts = {**CONNECTION_PARAMETERS, **self.driver.conninfo.conninfo_to_dict(url)}
        except self.driver.Error:
            raise StoreError("--store is not a valid PostgreSQL address") from None
        parts = self._parts
        host = parts.get("host") or parts.get("hostaddr") or ""
        port = f":{parts['port']}" if parts.get("port") else ""
        user = f"{parts['user']}@" if parts.get("user") else ""
        self.shown = f"postgresql://{user}{host}{port}/{parts.get('dbname') or ''}"

    def connect(self, name: str, statement_seconds: float, lock_seconds: float) -> Any:
        """Open a connection in autocommit mode, with the session settings that the history needs."""
        conn = self.driver.Connection.connect(
            autocommit=True, **{"application_name": name, **self._parts}
        )
        try:
            if conn.info.server_version < VERSION_MIN:
                raise StoreError(
                    f"{self.shown} is PostgreSQL {conn.info.server_version // 10000};"
                    f" {VERSION_MIN // 10000} is needed"
                )
            times = {
                "statement_timeout": f"{max(1, round(1000 * statement_seconds))}ms",
                "lock_timeout": f"{max(1, round(1000 * lock_seconds))}ms",
            }
            for setting, value in {**SESSION_SETTINGS, **times}.items():
                conn.execute(SET_CONFIG, [setting, value])
            for setting, value in OPTIONAL_SETTINGS.items():
                with contextlib.suppress(self.driver.DataError):
                    conn.execute(SET_CONFIG, [setting, value])
        except BaseException:
            conn.close()
            raise
        return conn


class PostgresLanes:
    """The writing connections of a process. A thread has one of them while it is inside `writing()`."""

    def __init__(
        self,
        address: Address,
        holder: str,
        busy_timeout_seconds: float,
        statement_seconds: float,
        num_lanes: int,
        is_exclusive: bool,
        patience_seconds: float,
    ) -> None:
        """`is_exclusive`: no other process may have the database open at the same time.

        `patience_seconds`: how long a transaction of another daemon may hang before it is ended.
        """
        self.address = address
        self.figures = WriteFigures()
        self.num_lanes = num_lanes
        self.has_wiped = False
        name = f"{holder}, pid {os.getpid()} on {socket.gethostname()}"
        self._claim = _DatabaseClaim(name, is_exclusive, patience_seconds)
        self._seconds = busy_timeout_seconds, statement_seconds
        self._freed = threading.Condition()
        self._thread_state = threading.local()
        self.writers: list[PostgresWriter] = []
        self._idle: list[PostgresWriter] = []  # last in, first out

    @contextlib.contextmanager
    def writing(self, is_serializable: bool = False) -> Iterator[Any]:
        """Run one transaction. At the end of the block it is committed and on the disk, or rolled back."""
        with self._writer() as writer, writer.writing(is_serializable) as session:
            yield session

    @contextlib.contextmanager
    def reading(self, is_snapshot: bool = False) -> Iterator[Any]:
        """Run statements outside a write transaction. With `is_snapshot`, all of them see one snapshot."""
        with self._writer() as writer, writer.reading(is_snapshot) as session:
            yield session

    def settle(self) -> None:
        """Wait until the old session of each lost connection has ended."""
        end = time.monotonic() + self._seconds[0]
        while True:
            with self._freed:
                lost = [writer for writer in self.writers if writer.is_lost]
                if not lost:
                    return
                writer = next((each for each in lost if each in self._idle), None)
                if writer is None:  # other threads are reopening the lost connections
                    if time.monotonic() > end:
                        raise StoreUnavailable(
                            f"the history {self.address.shown}: a lost connection is not open again yet"
                        )
                    self._freed.wait(LOCK_PAUSE_SECONDS)
                    continue
                self._idle.remove(writer)
            try:
                writer.settle()
            finally:
                self._give_back(writer)
            end = time.monotonic() + self._seconds[0]

    def close(self) -> None:
        """A second call does nothing."""
        for writer in self.writers:
            writer.close()

    def lease_connection(self) -> PostgresWriter:
        """Return another writing connection, for another thread. A server crash may undo its commits."""
        busy, statement = self._seconds
        return PostgresWriter(
            self.address,
            self._claim,
            min(busy, self._claim.patience_seconds),
            statement,
            WriteFigures(),
            self.note_wiped,
            is_durable=False,
        )

    def note_wiped(self) -> None:
        """Record that bodies were wiped. PostgresErasure then deletes their rows (backend.py)."""
        self.has_wiped = True

    @contextlib.contextmanager
    def _writer(self) -> Iterator[PostgresWriter]:
        if getattr(self._thread_state, "is_busy", False):
            raise RuntimeError("the history is being used by this thread already")
        with self._freed:
            if not self._freed.wait_for(self._provide_writer, self._seconds[0]):
                raise RuntimeError("the history is being used by another thread")
            writer = self._idle.pop()
        self._thread_state.is_busy = True
        try:
            yield writer
        finally:
            self._thread_state.is_busy = False
            self._give_back(writer)

    def _give_back(self, writer: PostgresWriter) -> None:
        with self._freed:
            self._idle.append(writer)
            self._freed.notify_all()

    def _provide_writer(self) -> bool:
        """Create a connection if none is idle and the limit allows that. Return whether one is idle now."""
        if not self._idle and len(self.writers) < self.num_lanes:
            made = PostgresWriter(
                self.address, self._claim, *self._seconds, self.figures, self.note_wiped
            )
            self.writers.append(made)
            self._idle.append(made)
        return bool(self._idle)


class _DatabaseClaim:
    """Facts about this process's lock on the database. All its connections share this object."""

    def __init__(self, name: str, is_exclusive: bool, patience_seconds: float) -> None:
        self.name, self.is_exclusive = name, is_exclusive
        self.patience_seconds = patience_seconds
        self.token = secrets.token_hex(16)
        self.is_made = False  # a connection of this process has already taken the lock
        self.backends: set[tuple[int, str]] = set()  # server processes of our open connections
        self.opening = threading.Lock()  # one connection at a time opens the database


class PostgresWriter:
    """A connection for one thread at a time. It is reopened after an error."""

    def __init__(
        self,
        address: Address,
        claim: _DatabaseClaim,
        busy_timeout_seconds: float,
        statement_seconds: float,
        figures: WriteFigures,
        note_wiped: Callable[[], None],
        *,
        is_durable: bool = True,
    ) -> None:
        self.address = address
        self.figures = figures
        self._is_durable = is_durable
        self.limit = TimeLimit(statement_seconds)
        self._claim = claim
        self._busy_timeout_seconds = busy_timeout_seconds
        self._note_wiped = note_wiped
        self._backend: tuple[int, str] | None = None  # the server process of the latest session
        self._slot: int | None = None
        self._wire: Wire | None = None
        self._reserve = ReservedNumbers()
        self._warning = ""  # the server's warning at a commit

    @contextlib.contextmanager
    def writing(self, is_serializable: bool = False) -> Iterator[Any]:
        """Run one transaction. At the end of the block it is committed and on the disk, or rolled back."""
        with self._operation() as session:
            session.begin("ISOLATION LEVEL SERIALIZABLE" if is_serializable else "")
            yield session
            self._warning = ""
            began = time.perf_counter()
            command = session.commit()
            if command != "COMMIT":  # ROLLBACK: a caller has ignored the error of a statement
                raise StoreUnavailable(f"{self.address.shown} rolled a transaction back")
            if self._warning:  # the standby may not have the commit
                self.close()
                raise StoreUnavailable(f"{self.address.shown}: {self._warning}")
            self.figures.record_commit(time.perf_counter() - began)

    @contextlib.contextmanager
    def reading(self, is_snapshot: bool = False) -> Iterator[Any]:
        """Run statements outside a write transaction. With `is_snapshot`, all of them see one snapshot."""
        with self._operation() as session:
            if is_snapshot:
                session.begin("READ ONLY")
            yield session

    def close(self) -> None:
        """A second call does nothing."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
            if self._backend is not None:
                self._claim.backends.discard(self._backend)

    @property
    def is_lost(self) -> bool:
        """Whether the connection is lost. Its session on the server may still commit something."""
        return self._wire is None and self._backend is not None

    def settle(self) -> None:
        """Reopen a lost connection. This waits until the old session has ended (see `_take_slot`)."""
        if self.is_lost:
            with self._operation():
                pass

    def end_hanging_transactions(self) -> None:
        """End hanging transactions of other daemons that share the database."""
        with self.reading() as session:
            self._end_hanging_transactions(session)

    def _end_hanging_transactions(self, conn: Any) -> None:
        ours = ", ".join(f"({pid}, '{start}')" for pid, start in list(self._claim.backends))
        query = END_HANGING_SESSIONS.format(seconds=self._claim.patience_seconds, ours=ours)
        for (name,) in conn.execute(query).fetchall():
            log.warning("the history: ended a hanging transaction of %s", name)

    def _pensieve_error(self, error: Any) -> Exception:
        failure = pensieve_error(error, self.address.shown)
        if isinstance(failure, DiskFull):
            self.figures.on_full()
        return failure

    @contextlib.contextmanager
    def _operation(self) -> Iterator[SqlSession]:
        try:
            if self._wire is not None and is_lost(self._wire.conn):
                self.close()
            if self._wire is None:
                self._wire = self._open()
            with self.limit.counting():
                yield SqlSession(
                    self._wire, self.limit, self._reserve, self._note_wiped, self._slot or 0
                )
        except self.address.driver.Error as error:
            # not stored in a variable, which would make a reference cycle with the traceback
            raise self._pensieve_error(error) from error
        finally:
            if self._wire is not None and not end_transaction(self._wire):
                self.close()

    def _open(self) -> Wire:
        conn = self._connect()
        backend: tuple[int, str] | None = None
        try:
            backend = conn.execute(OWN_BACKEND).fetchone()
            assert backend is not None
            # Add the session first. Otherwise this process could mistake it for a hanging session of another
            # daemon.
            self._claim.backends.add(backend)
            self._check(conn)
            self._take_slot(conn)
            with self._claim.opening:
                self._take_database(conn)
            self._backend = backend
            conn.add_notice_handler(self._notice)
            self._reserve = ReservedNumbers()
            return Wire(conn, self.address.driver)
        except BaseException:
            conn.close()
            if backend is not None:
                self._claim.backends.discard(backend)
            raise

    def _connect(self) -> Any:
        """Connect. If a starting daemon cannot reach the server, retry."""
        seconds = self.limit.seconds, self._busy_timeout_seconds
        is_start = not self._claim.is_made and not self._claim.is_exclusive
        end, is_waiting = time.monotonic() + START_SECONDS, False
        while True:
            try:
                return self.address.connect(self._claim.name, *seconds)
            except self.address.driver.OperationalError as error:
                # There are at least two tries, because a slow one may take the whole time.
                is_over = is_waiting and time.monotonic() >= end
                if is_over or not (is_start and _is_server_down(error)):
                    raise
                if not is_waiting:
                    log.warning(
                        "cannot reach the database, retrying for %.0f s: %s",
                        START_SECONDS,
                        pensieve_error(error, self.address.shown),
                    )
                is_waiting = True
            time.sleep(START_PAUSE_SECONDS)

    def _notice(self, notice: Any) -> None:
        if notice.severity_nonlocalized == "WARNING":
            self._warning = one_line(notice.message_primary)

    def _check(self, conn: Any) -> None:
        """Raise StoreError if the server could lose acknowledged commits or has the wrong encoding."""

        def setting(name: str) -> str:
            value: str = conn.execute("SELECT current_setting(%s)", [name]).fetchone()[0]
            return value

        if setting("server_encoding") != "UTF8":
            raise StoreError(f"{self.address.shown} must have the encoding UTF8")
        for name in ("fsync", "full_page_writes"):
            if setting(name) != "on":
                raise StoreError(
                    f"{self.address.shown} runs with {name} = off, and could lose committed data"
                )
        if not self._is_durable:
            conn.execute("SET synchronous_commit = off")
        elif setting("synchronous_commit") not in DURABLE_COMMITS:
            conn.execute("SET synchronous_commit = on")

    def _take_slot(self, conn: Any) -> None:
        """Take the lock of a slot.

        If this connection had a session before, wait until that session has ended, and take its slot if the
        slot is free. Otherwise take any free slot.
        """
        end = time.monotonic() + self._busy_timeout_seconds
        has_terminated_session = False
        while self._slot is not None and self._backend is not None:
            try_lock = "SELECT pg_try_advisory_lock(%s, %s)"
            if conn.execute(try_lock, [SLOTS_KEY, self._slot]).fetchone()[0]:
                return
            if not conn.execute(f"SELECT 1 {SAME_BACKEND}", self._backend).fetchall():
                break  # our old session has ended, and another connection took its slot
            # The server has not yet noticed that the old connection is lost.
            if not has_terminated_session:
                conn.execute(f"SELECT pg_terminate_backend(pid) {SAME_BACKEND}", self._backend)
                has_terminated_session = True
            if time.monotonic() > end:
                raise StoreUnavailable(
                    f"the history {self.address.shown}: an earlier session of this process has not ended"
                )
            time.sleep(LOCK_PAUSE_SECONDS)
        (self._slot,) = conn.execute(FREE_SLOT).fetchone()

    def _take_database(self, conn: Any) -> None:
        """Take the lock of the database, or raise StoreLocked, and migrate the schema."""
        claim, has_it_alone = self._claim, False
        if claim.is_exclusive:
            self._lock(conn, "pg_try_advisory_lock", OUTDATED if needs_step(conn) else "is ")
        else:
            try:
                # Hanging transactions may hold locks that we need now.
                self._end_hanging_transactions(conn)
            except self.address.driver.Error as error:
                log.warning("cannot end hanging transactions of other daemons: %s", one_line(error))
            has_it_alone = self._lock(conn, "pg_try_advisory_lock", OUTDATED, needs_step)
            self._lock(conn, "pg_try_advisory_lock_shared")
        migrate(conn, self.address.shown)
        if has_it_alone:
            conn.execute("SELECT pg_advisory_unlock(%s)", [LOCK_KEY])
        # READ COMMITTED never fails with a conflict, although others may change the same rows now.
        conn.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        conn.execute(WAIT_FOR_STANDBY, [self._slot])
        found = conn.execute("SELECT token, name FROM owner").fetchone()
        if not claim.is_made:
            conn.execute(
                "UPDATE owner SET token = %s, name = %s, taken_at = now()",
                [claim.token, claim.name],
            )
        conn.execute("COMMIT")
        if claim.is_made and claim.is_exclusive and found[0] != claim.token:
            raise StoreLocked(
                f"the history {self.address.shown} was taken over by {found[1]}; this process no longer"
                " writes to it"
            )
        claim.is_made = True

    def _lock(
        self,
        conn: Any,
        function: str,
        reason: str = "is ",
        is_needed: Callable[[Any], bool] = lambda conn: True,
    ) -> bool:
        """Take the lock if `is_needed`. Return whether the lock was taken.

        Waits a while, because the lock may belong to a session that is ending.
        """
        end = time.monotonic() + self._busy_timeout_seconds
        while is_needed(conn):
            if conn.execute(f"SELECT {function}(%s)", [LOCK_KEY]).fetchone()[0]:
                return True
            if time.monotonic() > end:
                message = f"the history {self.address.shown} {reason}in use by {_holders(conn)}"
                raise StoreUnavailable(message) if self._claim.is_made else StoreLocked(message)
            time.sleep(LOCK_PAUSE_SECONDS)
        return False


class PostgresSnapshots:
    """A read connection, separate from the writers. For one thread at a time.

    Each read sees the state that was committed when the read began.
    """

    def __init__(
        self, address: Address, statement_seconds: float, name: str, seconds: float | None = None
    ) -> None:
        """`seconds`: time limit of a read. The default is `statement_seconds`."""
        self._address = address
        self._statement_seconds = statement_seconds
        self._limit = TimeLimit(statement_seconds if seconds is None else seconds)
        self._name = name
        self._wire: Wire | None = None

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Any]:
        try:
            if self._wire is not None and is_lost(self._wire.conn):
                self.close()
            if self._wire is None:
                conn = self._address.connect(self._name, self._statement_seconds, 5.0)
                self._wire = Wire(conn, self._address.driver)
            session = SqlSession(self._wire, self._limit)
            with self._limit.counting():
                session.begin("ISOLATION LEVEL REPEATABLE READ READ ONLY")
                yield session
        except self._address.driver.Error as error:
            raise pensieve_error(error, self._address.shown) from error
        finally:
            if self._wire is not None and not end_transaction(self._wire):
                self.close()

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


@contextlib.contextmanager
def short_connection(address: Address, name: str, statement_seconds: float) -> Iterator[SqlSession]:
    """Open a short-lived connection, in autocommit mode. Any thread may open one."""
    try:
        conn = address.connect(name, statement_seconds, 5.0)
        try:
            yield SqlSession(Wire(conn, address.driver))
        finally:
            conn.close()
    except address.driver.Error as error:
        raise pensieve_error(error, address.shown) from error


def end_transaction(wire: Wire) -> bool:
    """Roll back an open transaction. Return whether the connection has no transaction now."""
    for _ in range(2):  # after an error, the server may skip the first ROLLBACK
        if wire.is_idle:
            return True
        with contextlib.suppress(Exception):
            wire.send("ROLLBACK")
            wire.sync()
    return wire.is_idle


def is_lost(conn: Any) -> bool:
    """Return whether the server has ended the connection. Checks only the socket."""
    if conn.closed:
        return True
    try:
        poll = select.poll()  # `select` takes no descriptors above 1023
        poll.register(conn.fileno(), select.POLLIN)
        for _ in range(4):  # the server may send a last message before it closes the connection
            if not poll.poll(0):
                return False
            conn.pgconn.consume_input()
            if conn.pgconn.status.name != "OK":
                return True
    except Exception:  # after any error, reopen; a new connection gives a clearer error
        return True
    return False


def _holders(conn: Any) -> str:
    """Return the names of the processes that have the lock of the database now."""
    with contextlib.suppress(Exception):
        found = conn.execute(HOLDERS, [LOCK_KEY >> 32, LOCK_KEY & 0xFFFFFFFF]).fetchall()
        return ", ".join(name for (name,) in found) or "another process"
    return "another process"


def pensieve_error(error: Any, shown: str) -> Exception:
    """Return the PensieveError for a driver's error. Unexpected errors are returned unchanged.

    The message never contains a password. `shown` has none, and libpq's messages contain only host, port and
    user. (config/parsing.py rejects an address in which the password could be mistaken for another part.)
    """
    code = error.sqlstate or ""
    if code == DISK_FULL:
        return DiskFull(f"the history {shown}: {UNAVAILABLE[code]}")
    if code in CONFLICTS:
        first = str(error).partition("\n")[0]  # other lines may contain values
        return Conflict(f"the history {shown}: another transaction changed the same rows: {first}")
    for table, kind in ((CORRUPT, StoreCorrupt), (UNAVAILABLE, StoreUnavailable)):
        words = table.get(code) or table.get(code[:2])
        if words is not None:
            return kind(f"the history {shown}: {words}")
    if code in NO_TABLE or (not code and _is_operational(error)):
        return StoreUnavailable(f"the history {shown}: {one_line(error)}")
    assert isinstance(error, Exception)
    return error


def _is_server_down(error: Any) -> bool:
    """Return whether a connection failed because the server is down or starting.

    libpq has no error code for this, so the message is parsed. A rejected login has FATAL in its message.
    """
    text = str(error)
    if "FATAL" in text:
        return any(each in text for each in STARTING)
    return "SSL" not in text


def _is_operational(error: Any) -> bool:
    """Return whether the server did not answer, or disconnected. Such errors have no SQLSTATE."""
    return any(each.__name__ == "OperationalError" for each in type(error).__mro__)
