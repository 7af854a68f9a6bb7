"""The store's transactions. They ensure that a turn has a `running` row only while a daemon computes it.

**Live turns.** A turn of this daemon is *live* from the transaction that begins the turn to the call that
ends it. In conversations that this daemon owns (owners.py), only live turns may have a `running` row. If a
turn is not live, its `running` row is called *dead*. Dead rows have two causes:

* A process died and left `running` rows. The transaction that opens a session repairs them.
* A write failed, and it is unknown whether it was committed: an error at COMMIT does not tell. The next call
  of `writing` first waits until no COMMIT is in progress (`settle` of backend.py). Then it sets every dead
  row on the disk to `interrupted`, and only then runs its transaction. A rejected call (NotFound,
  StaleRevision) tries no COMMIT, so no repair is needed.

Turns in conversations of other daemons are not changed.

**Reads** cannot wait for that repair, because there may be no next write: a client that sees a running turn
only waits. So a read returns a dead row as `interrupted`. For reads, a turn of another daemon is dead if that
daemon's session has ended or its lease has expired. After the end of a turn was committed, a read with an
older snapshot may still see the `running` row. The read must not return such a turn as `interrupted`. So the
last ENDED_MAX ended turns are remembered.

**Threads.** Several threads may write concurrently, each in a transaction (PostgreSQL) or in a savepoint of a
shared transaction (shared_commits.py). They share the set of live turns. A turn becomes live before its
`running` row is committed, so no other thread sees the row as dead. While one thread interrupts dead turns,
the other threads wait.

SQLite gives the id of a rolled-back turn to the next turn. So another thread may begin a turn with that id
before the first thread learns of the rollback. `_live` therefore stores a token of the call that began the
turn, and a failed call removes only its own token.

**Conflicts.** A transaction fails with Conflict if another transaction has changed the same rows, or if the
database failed in a transaction that several threads shared. Nothing is committed then. `repeated` calls the
public method again, at most CALLS_MAX times. A turn that the method should end stays live meanwhile.
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


NO_SESSION = 0
TAKEN = "another daemon has taken over the conversation; send the message again"
ENDED_MAX = 10_000  # far more than the turns that end during one read
CALLS_MAX = 10  # how often a method is called if its transactions end with Conflict
PAUSE_SECONDS = 0.002  # approximate pause before the first retry; it grows with each try
P = ParamSpec("P")
T = TypeVar("T")


class _Role(Enum):
    """What a thread's latest transaction does to its turn."""

    BEGINS = auto()
    ENDS = auto()
    LATE = auto()  # the call that ends the turn came too late: a newer attempt is running here
    UNDECIDED = auto()  # ending the turn failed with Conflict; the turn stays live


class _ThreadTurn(NamedTuple):
    turn_id: int
    role: _Role
    token: object = None  # only for BEGINS and UNDECIDED


class _ThreadState(threading.local):
    turn: _ThreadTurn | None = None


class StoreTransactions:
    """Used in the store threads, of which there are `num_lanes` (backend.py).

    `as_read` and `turn_as_read` may run in any thread.
    """

    def __init__(self, writer: Transactions, now: Callable[[], float]) -> None:
        self._writer = writer
        self._now = now
        self._live: dict[int, object] = {}  # token by turn
        self._ended: dict[int, None] = {}  # turns whose end was written, oldest first
        self._lock = threading.Lock()  # guards both dicts
        self._thread_state = _ThreadState()
        # The number of failures that may have left dead rows, and how many of them were repaired.
        self._num_failures, self._num_repaired = 1, 0
        self._repairing = threading.Lock()
        self.session = NO_SESSION  # the number of this daemon's session, when it is open

    # -- transactions --

    @contextlib.contextmanager
    def writing(self, is_serializable: bool = False) -> Iterator[Connection]:
        """Repair dead rows if necessary, then run one transaction. `is_serializable`: see backend.py."""
        self.interrupt_dead()
        self._thread_state.turn = None
        is_refused = False
        try:
            with self._writer.writing(is_serializable) as conn:
                try:
                    yield conn
                except PensieveError:
                    is_refused = True
                    raise
        except BaseException as error:
            turn = self._thread_state.turn
            if turn is not None and turn.role is _Role.BEGINS:
                self._end_life(turn.turn_id, turn.token)
            if not is_refused and not isinstance(error, Conflict):
                self._note_failure()
            raise

    @contextlib.contextmanager
    def opening(self) -> Iterator[Connection]:
        """Run the transaction that opens this daemon's session and interrupts dead turns."""
        with self._writer.writing() as conn:
            yield conn
        self._num_repaired = self._num_failures

    @contextlib.contextmanager
    def ending(self, turn_id: int) -> Iterator[Connection]:
        """Run the transaction that ends a turn. Afterwards the turn is not live, even if the write failed.

        There are two exceptions. After a Conflict, the turn stays live until the last retry (`repeat`). If
        this daemon has begun the turn again, the newer attempt stays live. The block must call `may_end`.
        """
        stays_live, was_written = False, False
        new_token = object()
        # make the turn live again if an earlier call that should end it has failed
        with self._lock:
            token = self._live.setdefault(turn_id, new_token)
        was_live = token is not new_token
        self._thread_state.turn = None
        try:
            with self.writing() as conn:
                yield conn
            was_written = True
            with self._lock:
                if self._thread_state.turn == _ThreadTurn(turn_id, _Role.ENDS):
                    self._ended[turn_id] = None
                if len(self._ended) > ENDED_MAX:
                    del self._ended[next(iter(self._ended))]
        except Conflict:
            if self._thread_state.turn != _ThreadTurn(turn_id, _Role.LATE):
                stays_live = True
                self._thread_state.turn = _ThreadTurn(turn_id, _Role.UNDECIDED, token)
            raise
        except BaseException:
            with self._lock:
                self._ended.pop(turn_id, None)
            raise
        finally:
            is_late = self._thread_state.turn == _ThreadTurn(turn_id, _Role.LATE)
            if not stays_live and not (is_late and was_live):
                self._end_life(turn_id, token)
                if not was_written:
                    # only after `_end_life`: a live turn would not be repaired
                    self._note_failure()

    def may_end(self, turn_id: int, attempt: int, fence: TurnFence | TurnProgress) -> bool:
        """Return whether this daemon may end the turn, i.e. no other daemon has claimed the conversation.

        Raises NotFound if this daemon has begun the turn again since `attempt` (0: any attempt).
        """
        if fence.owner != self.session:
            return False
        if attempt and attempt != fence.attempt:
            self._thread_state.turn = _ThreadTurn(turn_id, _Role.LATE)
            raise NotFound(f"turn {turn_id} was begun again since its attempt {attempt}")
        self._thread_state.turn = _ThreadTurn(turn_id, _Role.ENDS)
        return True

    @contextlib.contextmanager
    def reading(self, is_snapshot: bool = False) -> Iterator[Connection]:
        """Run statements outside a write transaction. `is_snapshot`: see backend.py."""
        with self._writer.reading(is_snapshot) as conn:
            yield conn

    def repeat(self, call: Callable[[], T]) -> T:
        """Call `call` until it does not raise Conflict. After CALLS_MAX calls, raise Conflict."""
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
        """Remove the turn that the call should have ended from the live turns, as after any other error."""
        turn, self._thread_state.turn = self._thread_state.turn, None
        if turn is not None and turn.role is _Role.UNDECIDED:
            self._end_life(turn.turn_id, turn.token)
            with self._lock:
                self._ended.pop(turn.turn_id, None)
            self._note_failure()

    def _note_failure(self) -> None:
        with self._lock:
            self._num_failures += 1

    # -- live turns --

    def note_begun(self, turn_id: int) -> None:
        """Note that the current transaction begins a turn. The turn is live unless the transaction fails."""
        token = object()
        self._thread_state.turn = _ThreadTurn(turn_id, _Role.BEGINS, token)
        with self._lock:
            self._live[turn_id] = token
            self._ended.pop(turn_id, None)

    def _end_life(self, turn_id: int, token: object) -> None:
        """Remove a turn from the live turns, unless another call has begun it since."""
        with self._lock:
            if self._live.get(turn_id) is token:
                del self._live[turn_id]

    def is_dead(self, conn: Connection, turn_id: int) -> bool:
        """Return whether a turn with a `running` row is dead: no daemon computes it."""
        if turn_id in self._live:
            return False
        return not turn_rows.runs_elsewhere(conn, turn_id, self.session)

    def interrupt_dead(self) -> list[int]:
        """Interrupt every dead turn. Return the ids of these turns."""
        if self._num_repaired == self._num_failures:
            return []
        with self._repairing:
            num_failures = self._num_failures
            if self._num_repaired == num_failures:
                return []
            self._writer.settle()  # a failed write may still be committed by the server
            with self._writer.writing() as conn:
                running = turn_rows.running_turns(conn, self.session)
                dead = [turn for turn in running if turn not in self._live]
                for turn_id in dead:  # raises Conflict if the turn has ended since
                    turn_rows.interrupt_turn(conn, turn_id, self._now())
            self._num_repaired = num_failures
        return dead

    # -- for reads --

    def as_read(self, conn: Connection, conversation: StoredConversation) -> StoredConversation:
        """Return the conversation without a dead running turn."""
        turn_id = conversation.running_turn_id
        if turn_id is None or not self._is_dead_for_reads(conn, turn_id):
            return conversation
        return replace(conversation, running_turn_id=None)

    def turn_as_read(self, conn: Connection, turn: StoredTurn) -> StoredTurn:
        """Return the turn, as `interrupted` if it is dead."""
        if turn.state is not StoredTurnState.RUNNING or not self._is_dead_for_reads(
            conn, turn.turn_id
        ):
            return turn
        return replace(turn, state=StoredTurnState.INTERRUPTED)

    def _is_dead_for_reads(self, conn: Connection, turn_id: int) -> bool:
        return turn_id not in self._ended and self.is_dead(conn, turn_id)


class Writes(Protocol):
    """A part of the store with public methods that write."""

    _transactions: StoreTransactions


W = TypeVar("W", bound=Writes)


def repeated(method: Callable[Concatenate[W, P], T]) -> Callable[Concatenate[W, P], T]:
    """Decorate a public method so that it is called again if it raises Conflict."""

    @functools.wraps(method)
    def call(self: W, /, *arguments: P.args, **named: P.kwargs) -> T:
        return self._transactions.repeat(lambda: method(self, *arguments, **named))

    return call
