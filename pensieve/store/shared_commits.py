"""A SQLite connection for several threads, whose transactions share a commit.

SQLite has one writer at a time, and a commit costs a disk sync. So waiting threads join the open transaction,
each in a savepoint. One COMMIT ends the transaction for all of them:

    first thread     BEGIN, its statements ─┐                                  ┌─ COMMIT ─┬─ returns
    second thread    waits                  └─ SAVEPOINT … RELEASE ─┐          │          ├─ returns
    third thread     waits                                          └─ … ──────┘          └─ returns

* The first thread is the leader. If no other thread waits, its transaction has no savepoint and no delay.
* Only a thread that is already waiting may join, and only until GROUP_SECONDS after BEGIN. So another daemon
  can write soon.
* If a call fails, its savepoint is rolled back, and the other calls are unaffected. The error may depend on a
  row that the group has not committed yet. So the call raises its error only after the commit. If the commit
  fails, the call raises Conflict instead of its error, and the store repeats the call.
* If the database fails at a statement, SQLite may have rolled back the whole transaction. The call with that
  statement fails, and the connection is closed. The other calls raise Conflict, and the store repeats them
  (transactions.py).
* If COMMIT fails, all calls that had succeeded raise the error of the COMMIT.

`writing` returns when the writes of its block are on the disk. So whatever a caller does after the block
happens after the commit.

These operations never share a transaction:

    reads               They run between transactions and see only committed data. When a group ends, the
                        waiting reads run before the next group. Most of these reads look up a conversation
                        for a new turn. The transaction that begins this turn can then join the next group.
    `is_serializable`   Deletions, rewinds, forks, compaction and forgetting. They are rare and may be
                        large, so other calls should not wait for them in a group. Also, a deletion on a
                        full disk is repeated after the reserve was freed.
    truncating the log  No transaction may be open.
    leases              They have a separate connection (`SqliteBackend.lease_connection`).

A claim may join a group. Before the commit, it calls `on_stale`, which drops what this daemon has in memory
about the conversation. owners.py explains why that is safe.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pensieve.errors import StoreUnavailable
from pensieve.store.backend import Conflict
from pensieve.store.connection import CONSTRAINT, WriterConnection, primary_code
from pensieve.store.shared_file import SLICE_SECONDS

if TYPE_CHECKING:
    from sqlite3 import Connection

GROUP_SECONDS = SLICE_SECONDS  # how long after BEGIN threads may join
LOST = "the transaction was lost because another call's transaction failed"
INTERRUPTED = "the call that should have committed this one was interrupted"
NO_THREAD = 0


class Waiter:
    """A thread that waits until another thread wakes it, once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self) -> None:
        """Wait until woken. Return immediately if `wake` was already called."""
        with self._lock:
            pass

    def wake(self) -> None:
        self._lock.release()


class ConnectionQueue:
    """A queue of threads that use the connection one after the other."""

    def __init__(self, pass_on: Callable[[], None]) -> None:
        """`pass_on` is called by a thread that gets the connection but was interrupted while waiting."""
        self._lock = threading.Lock()
        self._pass_on = pass_on
        self._is_taken = False
        self._user = NO_THREAD  # the thread that has the connection
        self._alone: deque[Waiter] = deque()
        self._joining: deque[Waiter] = deque()
        self._num_first = 0  # how many waiters of `_alone` run before the next group

    @property
    def is_mine(self) -> bool:
        return self._user == threading.get_ident()

    @property
    def has_joining(self) -> bool:
        """Whether a thread is waiting to join."""
        return bool(self._joining)

    def take_alone(self) -> None:
        """Wait for the connection, to use it when no transaction is open."""
        self._take(self._alone)

    def take(self) -> None:
        """Wait for the connection, to begin a transaction or to join the open transaction."""
        self._take(self._joining)

    def leave(self, *, is_group: bool = False) -> None:
        """Release the connection. Called when no transaction is open."""
        with self._lock:
            self._user = NO_THREAD
            if is_group:
                self._num_first = len(self._alone)
            waiter = self._next() if self._alone or self._joining else None
            self._is_taken = waiter is not None
        if waiter is not None:
            waiter.wake()

    def pop_joining(self) -> Waiter | None:
        """Remove and return the next thread to join, if any. Waking this thread gives it the connection."""
        with self._lock:
            return self._joining.popleft() if self._joining else None

    def note_user(self) -> None:
        """Record that the calling thread was woken and now uses the connection."""
        self._user = threading.get_ident()

    def hand_over(self, waiter: Waiter) -> None:
        """Give the connection to another thread in the middle of a transaction."""
        self._user = NO_THREAD
        waiter.wake()

    def _take(self, queue: deque[Waiter]) -> None:
        thread = threading.get_ident()
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                self._user = thread
                return
            if self._user == thread:
                raise RuntimeError("the history is being used by this thread already")
            waiter = Waiter()
            queue.append(waiter)
        try:
            waiter.wait()
            self.note_user()
        except BaseException:  # such as KeyboardInterrupt
            self._withdraw(queue, waiter)
            raise

    def _withdraw(self, queue: deque[Waiter], waiter: Waiter) -> None:
        """Remove the calling thread from the queue. If it already has the connection, pass it on."""
        with self._lock:
            if waiter in queue:
                queue.remove(waiter)
                self._num_first = min(self._num_first, len(self._alone))
                return
        waiter.wait()
        self.note_user()
        self._pass_on()

    def _next(self) -> Waiter | None:
        if self._num_first or not self._joining:
            self._num_first = max(self._num_first - 1, 0)
            return self._alone.popleft() if self._alone else None
        return self._joining.popleft()


class Group:
    """A transaction that several threads share. Created when the leader lets others join."""

    def __init__(self, conn: Connection, until: float) -> None:
        self.conn = conn
        self.until = until
        self.leader = Waiter()
        self.joined: list[Waiter] = []  # threads that wait for the commit
        self.is_lost = False  # the database has failed and may have rolled back everything
        # why the group was not committed; raised only as a copy
        self.failure: Exception | None = None


class SharedCommits(WriterConnection):
    """A WriterConnection for any number of threads. Each thread has one transaction or read at a time."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._queue = ConnectionQueue(self._pass_on)
        # the open group; accessed only by the thread with the connection
        self._group: Group | None = None

    @contextlib.contextmanager
    def writing(self, is_serializable: bool = False) -> Iterator[Connection]:
        """Run one transaction. It may share its COMMIT with transactions of other threads."""
        if is_serializable:
            with self._alone(), super().writing(is_serializable) as conn:
                yield conn
            return
        self._queue.take()
        if self._group is not None:
            with self._join(self._group) as conn:
                yield conn
            return
        group: Group | None = None
        try:
            with super().writing() as conn:
                until = time.monotonic() + GROUP_SECONDS
                yield conn  # if the block fails, no other thread is affected: none has joined yet
                if self._queue.has_joining:
                    group = Group(conn, until)
                    self._let_join(group)
        except BaseException as error:
            if group is not None:
                group.failure = _group_error(error)
            raise
        finally:
            if group is not None and group.is_lost:
                self._discard()
            self._queue.leave(is_group=True)
            for waiter in () if group is None else group.joined:
                waiter.wake()

    @contextlib.contextmanager
    def reading(self, is_snapshot: bool = False) -> Iterator[Connection]:
        """Run statements outside a write transaction. With `is_snapshot`, all of them see one snapshot."""
        # `truncate_journal` calls this while it has the connection. If another caller already has the
        # connection, that is a mistake, and `_operation` raises an error.
        if self._queue.is_mine:
            with super().reading(is_snapshot) as conn:
                yield conn
            return
        self._queue.take_alone()
        try:
            with super().reading(is_snapshot) as conn:
                yield conn
        finally:
            self._queue.leave()

    def truncate_journal(self) -> bool:
        with self._alone():
            return super().truncate_journal()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._queue.take_alone()
        try:
            yield
        finally:
            self._queue.leave()

    def _let_join(self, group: Group) -> None:
        """Let waiting threads join until `group.until`, or until none waits.

        Raises Conflict if the transaction is lost.
        """
        first = self._next_to_join(group)
        if first is None:
            return
        self._group = group
        self._queue.hand_over(first)
        try:
            group.leader.wait()
        except BaseException:  # such as KeyboardInterrupt; other threads still use the connection
            group.until = time.monotonic()
            group.leader.wait()
            raise
        finally:
            self._queue.note_user()
            self._group = None
        if group.is_lost:
            raise Conflict(LOST)

    @contextlib.contextmanager
    def _join(self, group: Group) -> Iterator[Connection]:
        waiter = Waiter()
        try:
            try:
                with self._savepoint(group):
                    yield group.conn
            finally:
                if not group.is_lost:
                    group.joined.append(waiter)
                self._pass_on()
        except Exception:
            if waiter in group.joined:
                waiter.wait()
                if group.failure is not None:
                    raise Conflict(LOST) from None
            raise
        waiter.wait()
        if group.failure is not None:
            raise _copied_error(group.failure)

    def _pass_on(self) -> None:
        """Give the connection to the next thread, perhaps in the middle of a transaction."""
        group = self._group
        if group is None:
            self._queue.leave()
        else:
            self._queue.hand_over(self._next_to_join(group) or group.leader)

    @contextlib.contextmanager
    def _savepoint(self, group: Group) -> Iterator[None]:
        conn = group.conn
        group.is_lost = True  # reset below if the block succeeds or is rolled back
        try:
            with self.limit.counting():
                conn.execute("SAVEPOINT call")
                try:
                    yield
                except Exception as error:
                    if not self._is_database_failure(error):
                        conn.execute("ROLLBACK TO SAVEPOINT call")
                        conn.execute("RELEASE SAVEPOINT call")
                        group.is_lost = False
                    raise
                conn.execute("RELEASE SAVEPOINT call")
                group.is_lost = False
        except self.driver.Error as error:
            raise self._pensieve_error(error) from error

    def _is_database_failure(self, error: Exception) -> bool:
        """Return whether the database failed. Constraint errors do not count: they undo one statement."""
        return isinstance(error, self.driver.Error) and primary_code(error) != CONSTRAINT

    def _next_to_join(self, group: Group) -> Waiter | None:
        """Return the next thread to join. None: none waits, the time is over, or the transaction is lost."""
        if group.is_lost or time.monotonic() >= group.until:
            return None
        return self._queue.pop_joining()


def _group_error(error: BaseException) -> Exception:
    """Return the error that the joined threads raise when the leader fails."""
    return error if isinstance(error, Exception) else StoreUnavailable(INTERRUPTED)


def _copied_error(error: Exception) -> Exception:
    """Return a copy of the error, because an object raised in two threads collects both tracebacks."""
    return type(error)(*error.args)
