"""The store's transactions: they keep `running` rows to turns that somebody computes.

A turn of ours is *live* from the return of `begin_turn` to the call that ends it.  In conversations that are
ours (owners.py) only live turns may have a `running` row.  Two things break the rule.  A process that died
left `running` rows behind: the transaction that opens a session mends that.  And a write that failed may or
may not have been committed (an error at COMMIT does not say).  Then the store is *unsure*: there may be
`running` rows of ours that are not live, here called *dead*.  So before the next transaction every dead row
on the disk becomes `interrupted`, and only once that is committed is the store sure again.  Turns in
conversations of other daemons are left alone.

Reads come before that transaction and cannot wait for one, because a client that learns that a turn is
running sends nothing that would write.  So they return a dead row as the interrupted turn that it will be.
A turn of another daemon is dead for them if the daemon's session has ended or its lease has expired.
A turn whose end was written is not live either, but a reader's snapshot may be older than the commit: there
it runs.  So the last ENDED_MAX of those are remembered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pensieve.errors import NotFound
from pensieve.store import turn_rows
from pensieve.store.backend import Transactions
from pensieve.store.records import Conversation, StoredTurn, StoredTurnState
from pensieve.store.turn_rows import TurnFence, TurnProgress

if TYPE_CHECKING:
    from sqlite3 import Connection


NOBODY = 0  # no session
TAKEN = "the conversation was served elsewhere meanwhile; say it again"
ENDED_MAX = 10_000  # many more than end while a reader has a snapshot


class StoreTransactions:
    """Used in one thread at a time, like the connection beneath; `as_read` and `turn_as_read` in any."""

    def __init__(self, writer: Transactions, now: Callable[[], float]) -> None:
        self._writer = writer
        self._now = now
        self._live: set[int] = set()
        self._ended: dict[int, None] = {}  # turns whose end was written, the oldest first
        self._unsure = True
        self.session = NOBODY  # ours, once it is open
        self._late = NOBODY  # a turn whose end came late: another attempt of ours runs

    # -- transactions --

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction, in which every `running` row is live."""
        self.interrupt_dead()
        try:
            with self._writer.writing() as conn:
                yield conn
        except BaseException:
            self._unsure = True
            raise

    @contextlib.contextmanager
    def opening(self) -> Iterator[Connection]:
        """The transaction that opens our session, and interrupts what is dead by then."""
        with self._writer.writing() as conn:
            yield conn
        self._unsure = False

    @contextlib.contextmanager
    def ending(self, turn_id: int) -> Iterator[Connection]:
        """The transaction that ends a turn, which is not live afterwards, even if the write failed.

        It asks `may_end`.
        """
        was_live = turn_id in self._live
        self._live.add(turn_id)  # also when an earlier attempt to end it has failed
        self._late = NOBODY
        try:
            with self.writing() as conn:
                yield conn
            self._ended[turn_id] = None
            if len(self._ended) > ENDED_MAX:
                del self._ended[next(iter(self._ended))]
        except BaseException:
            self._unsure = True
            self._ended.pop(turn_id, None)
            raise
        finally:
            if not (self._late == turn_id and was_live):
                self._live.discard(turn_id)

    def may_end(self, turn_id: int, attempt: int, fence: TurnFence | TurnProgress) -> bool:
        """Whether the turn is ours to end; no other daemon has claimed its conversation.

        NotFound, and the turn is what it was, if it was begun again here since this attempt (0: any).
        """
        if fence.owner != self.session:
            return False
        if attempt and attempt != fence.attempt:
            self._late = turn_id
            raise NotFound(f"turn {turn_id} was begun again since its attempt {attempt}")
        return True

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """Statements outside a transaction."""
        with self._writer.reading() as conn:
            yield conn

    # -- live turns --

    def add(self, turn_id: int) -> None:
        """A turn has begun, perhaps again; it is live from now on."""
        self._live.add(turn_id)
        self._ended.pop(turn_id, None)

    def is_dead(self, conn: Connection, turn_id: int) -> bool:
        """Whether nobody computes this turn, if its row is `running`."""
        if turn_id in self._live:
            return False
        return not turn_rows.runs_elsewhere(conn, turn_id, self.session)

    def interrupt_dead(self) -> list[int]:
        """Interrupt every turn with a dead row; returns their ids."""
        if not self._unsure:
            return []
        with self._writer.writing() as conn:
            running = turn_rows.running_turns(conn, self.session)
            dead = [turn for turn in running if turn not in self._live]
            for turn_id in dead:
                turn_rows.interrupt_turn(conn, turn_id, self._now())
        self._unsure = False
        return dead

    # -- for reads --

    def as_read(self, conn: Connection, conversation: Conversation) -> Conversation:
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
