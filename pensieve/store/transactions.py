"""The store's transactions: they keep `running` rows to turns that this process computes.

A turn is *live* from the return of `begin_turn` to the call that ends it, and only live turns may have a
`running` row.  Two things break the rule: a process that died left `running` rows behind, and a write that
failed may or may not have been committed (an error at COMMIT does not say).  Both lead to one state,
*unsure*: there may be `running` rows of turns that are not live, here called *dead*.  So before the next
transaction every dead row on the disk becomes `interrupted`, and only once that is committed is the store
sure again.  A new process starts unsure, without live turns: that is recovery.

Where other processes compute the turns (the history service), `keep` takes those that are running at the
start for live until it is known whether their process goes on, and `abandon` makes those dead whose does not.

Reads come before that transaction and cannot wait for one, because a client that learns that a turn is
running sends nothing that would write.  So they return a dead row as the interrupted turn that it will be.
A turn whose end was written is not live either, but a reader's snapshot may be older than the commit (several
calls may be in one commit): there it runs.  So the last ENDED_MAX of those are remembered.

**Groups.**  A commit costs a sync of the disk, which is most of what a turn costs the history.  Whoever has
several calls at hand (the history service, for many daemons) runs them in one group:

    with transactions.group():        BEGIN
        store.begin_turn(...)             SAVEPOINT, its statements, RELEASE
        store.finish_turn(...)            SAVEPOINT, its statements, RELEASE
                                      COMMIT

A call that fails is rolled back to its savepoint and leaves the others as they are; it fails with an error of
ours (NotFound, TurnRunning, …), raised by the code between the statements.  An error of the database itself
(a full disk, a lost connection) says nothing about which of them is to blame, so it ends the group, and all
of it is rolled back.  Nothing of a group is on the disk before `group` returns, so nobody may be told before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pensieve.errors import NotFound, PensieveError
from pensieve.store import turn_rows
from pensieve.store.backend import Transactions
from pensieve.store.records import Conversation, StoredTurn, StoredTurnState

if TYPE_CHECKING:
    from sqlite3 import Connection


ENDED_MAX = 10_000  # many more than end while a reader has a snapshot


class StoreTransactions:
    """Used in one thread at a time, like the connection beneath; `as_read` and `turn_as_read` in any."""

    def __init__(self, writer: Transactions, now: Callable[[], float]) -> None:
        self._writer = writer
        self._now = now
        self._live: set[int] = set()
        self._ended: dict[int, None] = {}  # turns whose end was written, the oldest first
        self._unsure = True
        self._group: Connection | None = None  # that of the group that runs
        self._depth = 0  # savepoints inside of each other

    # -- transactions --

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction, in which every `running` row is live."""
        self.interrupt_dead()
        try:
            with self._transaction() as conn:
                yield conn
        except BaseException:
            self._unsure = True
            raise

    @contextlib.contextmanager
    def ending(self, turn_id: int, attempt: int = 0) -> Iterator[Connection]:
        """The transaction that ends a turn, which is not live afterwards, even if the write failed.

        NotFound, and the turn is what it was, if that is not the attempt that it is at.
        """
        was_live, is_late = turn_id in self._live, False
        self._live.add(turn_id)  # also when an earlier attempt to end it has failed
        try:
            with self.writing() as conn:
                if attempt and turn_rows.attempts_of(conn, turn_id) not in (None, attempt):
                    is_late = True
                    raise NotFound(f"turn {turn_id} was begun again since its attempt {attempt}")
                yield conn
            self._ended[turn_id] = None
            if len(self._ended) > ENDED_MAX:
                del self._ended[next(iter(self._ended))]
        except BaseException:
            self._unsure = True
            self._ended.pop(turn_id, None)
            raise
        finally:
            if not (is_late and was_live):
                self._live.discard(turn_id)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """Statements outside a transaction, or in the group that runs."""
        if self._group is not None:
            yield self._group
            return
        with self._writer.reading() as conn:
            yield conn

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """One transaction around the calls of the block."""
        with self._writer.writing() as conn:
            self._group, self._depth = conn, 0
            try:
                yield
            finally:
                self._group = None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Connection]:
        conn = self._group
        if conn is None:
            with self._writer.writing() as alone:
                yield alone
            return
        self._depth += 1
        name = f"call_{self._depth}"
        conn.execute(f"SAVEPOINT {name}")
        try:
            yield conn
        except PensieveError:
            conn.execute(f"ROLLBACK TO SAVEPOINT {name}")
            conn.execute(f"RELEASE SAVEPOINT {name}")
            raise
        else:
            conn.execute(f"RELEASE SAVEPOINT {name}")
        finally:
            self._depth -= 1

    # -- live turns --

    def add(self, turn_id: int) -> None:
        """A turn has begun, perhaps again; it is live from now on."""
        self._live.add(turn_id)
        self._ended.pop(turn_id, None)

    def keep(self) -> None:
        """Every turn that is `running` now is live."""
        with self.reading() as conn:
            self._live.update(turn_rows.running_turns(conn))

    @property
    def live(self) -> frozenset[int]:
        """The turns that are live now."""
        return frozenset(self._live)

    def restore(self, turn_ids: Iterable[int]) -> None:
        """These are live again: what has ended them since was rolled back, or perhaps so."""
        for turn_id in turn_ids:
            self.add(turn_id)
        self._unsure = True

    def abandon(self, turn_ids: Iterable[int]) -> None:
        """These are not live any more, if they were; also where the commit that began them failed."""
        gone = tuple(turn_ids)
        self._live.difference_update(gone)
        for turn_id in gone:
            self._ended.pop(turn_id, None)
        self._unsure = True

    def is_dead(self, turn_id: int) -> bool:
        """Whether the next transaction would interrupt this turn if its row is `running`."""
        return turn_id not in self._live

    def interrupt_dead(self) -> list[int]:
        """Interrupt every turn with a dead row; returns their ids."""
        if not self._unsure:
            return []
        with self._transaction() as conn:
            dead = [turn for turn in turn_rows.running_turns(conn) if turn not in self._live]
            for turn_id in dead:
                turn_rows.interrupt_turn(conn, turn_id, self._now())
        self._unsure = False
        return dead

    # -- for reads --

    def as_read(self, conversation: Conversation) -> Conversation:
        """The conversation as the next transaction will find it."""
        turn_id = conversation.running_turn_id
        if turn_id is None or not self._reads_dead(turn_id):
            return conversation
        return replace(conversation, running_turn_id=None)

    def turn_as_read(self, turn: StoredTurn) -> StoredTurn:
        """The turn as the next transaction will find it."""
        if turn.state is not StoredTurnState.RUNNING or not self._reads_dead(turn.turn_id):
            return turn
        return replace(turn, state=StoredTurnState.INTERRUPTED)

    def _reads_dead(self, turn_id: int) -> bool:
        return self.is_dead(turn_id) and turn_id not in self._ended
