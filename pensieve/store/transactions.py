"""The store's transactions: they keep `running` rows to turns that somebody computes.

A turn of ours is *live* from the transaction that begins it to the call that ends it.  In conversations
that are ours (owners.py) only live turns may have a `running` row.  Two things break the rule.  A process
that died left `running` rows behind: the transaction that opens a session mends that.  And a write that
failed may or may not have been committed (an error at COMMIT does not say).  Then the store is *unsure*:
there may be `running` rows of ours that are not live, here called *dead*.  So before the next transaction
no COMMIT may be under way any more (`settle` of backend.py) and every dead row on the disk becomes
`interrupted`, and only once that is committed is the store sure again.  A call that is refused (NotFound,
StaleRevision) tries no COMMIT, so the store stays sure.
Turns in conversations of other daemons are left alone.

Reads come before that transaction and cannot wait for one, because a client that learns that a turn is
running sends nothing that would write.  So they return a dead row as the interrupted turn that it will be.
A turn of another daemon is dead for them if the daemon's session has ended or its lease has expired.
A turn whose end was written is not live either, but a reader's snapshot may be older than the commit: there
it runs.  So the last ENDED_MAX of those are remembered.

**Lanes.**  Several threads may write at the same time, each in a transaction of its own (PostgreSQL), or in a
savepoint of one that they commit together (shared_commits.py).  They share what is known of turns: a turn is
live before its `running` row is committed, so no other thread takes it for dead, and while one thread
interrupts what is dead, the others wait.

SQLite gives the id of a turn that was rolled back to the next turn.  So another thread may begin a turn with
that id before the first thread hears of the rollback.  `_live` therefore keeps a token of the call that began
the turn, and a call that fails removes only its own token.

**Conflicts.**  Where another transaction came first, or took this one with it when it failed, nothing is
committed, and `repeated` calls the public method again, at most CALLS_MAX times.  A turn that such a call was
to end stays live meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from pensieve.errors import NotFound, PensieveError
from pensieve.store import turn_rows
from pensieve.store.backend import Conflict, Transactions
from pensieve.store.records import StoredConversation, StoredTurn, StoredTurnState
from pensieve.store.turn_rows import TurnFence, TurnProgress

if TYPE_CHECKING:
    from sqlite3 import Connection


NOBODY = 0  # no session
TAKEN = "the conversation was served elsewhere meanwhile; say it again"
ENDED_MAX = 10_000  # many more than end while a reader has a snapshot
CALLS_MAX = 10  # of a method whose transactions lose every race
PAUSE_SECONDS = 0.002  # before a call is repeated, about; longer each time
P = ParamSpec("P")
T = TypeVar("T")


class _Role(Enum):
    """What the latest transaction of a thread is to its turn."""

    BEGINS = auto()
    ENDS = auto()
    LATE = auto()  # to end it came late: another attempt of ours runs
    UNDECIDED = auto()  # its end has lost a race; it is live


class _TurnOfThread(NamedTuple):
    turn_id: int
    role: _Role
    token: object = None  # of a turn that BEGINS or is UNDECIDED


class _OfThread(threading.local):
    turn: _TurnOfThread | None = None


class StoreTransactions:
    """Used in as many threads as the connections beneath allow; `as_read` and `turn_as_read` in any."""

    def __init__(self, writer: Transactions, now: Callable[[], float]) -> None:
        self._writer = writer
        self._now = now
        self._live: dict[int, object] = {}  # the token of each
        self._ended: dict[int, None] = {}  # turns whose end was written, the oldest first
        self._lock = threading.Lock()  # of these two
        self._here = _OfThread()
        # Unsure while they differ: failures that may have left dead rows, and of them those that were mended.
        self._num_failures, self._num_mended = 1, 0
        self._mending = threading.Lock()
        self.session = NOBODY  # ours, once it is open

    # -- transactions --

    @contextlib.contextmanager
    def writing(self, is_serializable: bool = False) -> Iterator[Connection]:
        """One transaction, in which every `running` row is live; `is_serializable` as in backend.py."""
        self.interrupt_dead()
        self._here.turn = None
        is_refused = False
        try:
            with self._writer.writing(is_serializable) as conn:
                try:
                    yield conn
                except PensieveError:
                    is_refused = True
                    raise
        except BaseException as error:
            turn = self._here.turn
            if turn is not None and turn.role is _Role.BEGINS:
                self._end_life(turn.turn_id, turn.token)
            if not is_refused and not isinstance(error, Conflict):
                self._note_failure()
            raise

    @contextlib.contextmanager
    def opening(self) -> Iterator[Connection]:
        """The transaction that opens our session, and interrupts what is dead by then."""
        with self._writer.writing() as conn:
            yield conn
        self._num_mended = self._num_failures

    @contextlib.contextmanager
    def ending(self, turn_id: int) -> Iterator[Connection]:
        """The transaction that ends a turn, which is not live afterwards, even if the write failed.

        It asks `may_end`.
        """
        stays_live, was_written = False, False
        new = object()
        with self._lock:  # an earlier attempt to end it may have failed; then it is live again
            token = self._live.setdefault(turn_id, new)
        was_live = token is not new
        self._here.turn = None
        try:
            with self.writing() as conn:
                yield conn
            was_written = True
            with self._lock:
                if self._here.turn == _TurnOfThread(turn_id, _Role.ENDS):
                    self._ended[turn_id] = None
                if len(self._ended) > ENDED_MAX:
                    del self._ended[next(iter(self._ended))]
        except Conflict:
            if self._here.turn != _TurnOfThread(turn_id, _Role.LATE):
                stays_live = True
                self._here.turn = _TurnOfThread(turn_id, _Role.UNDECIDED, token)
            raise
        except BaseException:
            with self._lock:
                self._ended.pop(turn_id, None)
            raise
        finally:
            is_late = self._here.turn == _TurnOfThread(turn_id, _Role.LATE)
            if not stays_live and not (is_late and was_live):
                self._end_life(turn_id, token)
                if not was_written:
                    self._note_failure()  # after it is not live any more

    def may_end(self, turn_id: int, attempt: int, fence: TurnFence | TurnProgress) -> bool:
        """Whether the turn is ours to end; no other daemon has claimed its conversation.

        NotFound, and the turn is what it was, if it was begun again here since this attempt (0: any).
        """
        if fence.owner != self.session:
            return False
        if attempt and attempt != fence.attempt:
            self._here.turn = _TurnOfThread(turn_id, _Role.LATE)
            raise NotFound(f"turn {turn_id} was begun again since its attempt {attempt}")
        self._here.turn = _TurnOfThread(turn_id, _Role.ENDS)
        return True

    @contextlib.contextmanager
    def reading(self, is_snapshot: bool = False) -> Iterator[Connection]:
        """Statements outside a transaction; `is_snapshot` as in backend.py."""
        with self._writer.reading(is_snapshot) as conn:
            yield conn

    def repeat(self, call: Callable[[], T]) -> T:
        """Call it until it has lost no race, at most CALLS_MAX times; then Conflict."""
        for number in range(1, CALLS_MAX + 1):
            try:
                return call()
            except Conflict:
                if number == CALLS_MAX:
                    self._give_up()
                    raise
                time.sleep(random.uniform(0.5, 1.5) * number * PAUSE_SECONDS)
        raise AssertionError

    def _give_up(self) -> None:
        """The turn that was to end is live no more, as after any other error."""
        turn, self._here.turn = self._here.turn, None
        if turn is not None and turn.role is _Role.UNDECIDED:
            self._end_life(turn.turn_id, turn.token)
            with self._lock:
                self._ended.pop(turn.turn_id, None)
            self._note_failure()

    def _note_failure(self) -> None:
        with self._lock:
            self._num_failures += 1

    # -- live turns --

    def add(self, turn_id: int) -> None:
        """The transaction that runs begins a turn, perhaps again; it is live unless that fails."""
        token = object()
        self._here.turn = _TurnOfThread(turn_id, _Role.BEGINS, token)
        with self._lock:
            self._live[turn_id] = token
            self._ended.pop(turn_id, None)

    def _end_life(self, turn_id: int, token: object) -> None:
        """The turn is live no more, unless another call has begun it since."""
        with self._lock:
            if self._live.get(turn_id) is token:
                del self._live[turn_id]

    def is_dead(self, conn: Connection, turn_id: int) -> bool:
        """Whether nobody computes this turn, if its row is `running`."""
        if turn_id in self._live:
            return False
        return not turn_rows.runs_elsewhere(conn, turn_id, self.session)

    def interrupt_dead(self) -> list[int]:
        """Interrupt every turn with a dead row; returns their ids."""
        if self._num_mended == self._num_failures:
            return []
        with self._mending:
            num_failures = self._num_failures
            if self._num_mended == num_failures:
                return []
            self._writer.settle()  # a failed write may still be committed by another connection
            with self._writer.writing() as conn:
                running = turn_rows.running_turns(conn, self.session)
                dead = [turn for turn in running if turn not in self._live]
                for turn_id in dead:  # Conflict for one that has ended since
                    turn_rows.interrupt_turn(conn, turn_id, self._now())
            self._num_mended = num_failures
        return dead

    # -- for reads --

    def as_read(self, conn: Connection, conversation: StoredConversation) -> StoredConversation:
        """The conversation as the next transaction will find it."""
        turn_id = conversation.running_turn_id
        if turn_id is None or not self._reads_dead(conn, turn_id):
            return conversation
        return replace(conversation, running_turn_id=None)

    def turn_as_read(self, conn: Connection, turn: StoredTurn) -> StoredTurn:
        """The turn as the next transaction will find it."""
        if turn.state is not StoredTurnState.RUNNING or not self._reads_dead(conn, turn.turn_id):
            return turn
        return replace(turn, state=StoredTurnState.INTERRUPTED)

    def _reads_dead(self, conn: Connection, turn_id: int) -> bool:
        return turn_id not in self._ended and self.is_dead(conn, turn_id)


class Writes(Protocol):
    """A part of the store that has public methods."""

    _transactions: StoreTransactions


W = TypeVar("W", bound=Writes)


def repeated(method: Callable[Concatenate[W, P], T]) -> Callable[Concatenate[W, P], T]:
    """Make a public method of the store one that is called again where its transaction has lost a race."""

    @functools.wraps(method)
    def call(self: W, /, *arguments: P.args, **named: P.kwargs) -> T:
        return self._transactions.repeat(lambda: method(self, *arguments, **named))

    return call
