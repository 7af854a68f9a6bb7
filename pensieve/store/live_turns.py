"""A `running` row is a live turn: the rule, and how it is kept when a write fails.

A turn is live from the return of `begin_turn` to the call that ends it.  Two things break the rule:
a process that died left `running` rows behind, and a write that failed may or may not have got
through (an error at COMMIT says nothing).  Both are one state, *unsure*: there may be `running` rows
of turns that nobody computes.  So before the next transaction every such row becomes `interrupted`,
by what the disk then says, and only when that is committed is the store sure again.  A new process
starts unsure, without live turns: that is recovery.

Readers come before that transaction and must not wait for one: whoever is told that a turn runs does
not write.  So they are shown such rows as what they will become.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pensieve.store import turn_rows
from pensieve.store.connection import Writer

if TYPE_CHECKING:
    from sqlite3 import Connection


class LiveTurns:
    def __init__(self, writer: Writer, now: Callable[[], float]) -> None:
        self._writer = writer
        self._now = now
        self._live: set[int] = set()
        self._unsure = True

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction; in it, whatever is `running` is live."""
        self.settle()
        try:
            with self._writer.writing() as conn:
                yield conn
        except BaseException:
            self._unsure = True
            raise

    @contextlib.contextmanager
    def ending(self, turn_id: int) -> Iterator[Connection]:
        """The transaction that ends a turn; afterwards it is not live, whether that was written."""
        self._live.add(turn_id)  # also when an earlier attempt to end it has failed
        try:
            with self.writing() as conn:
                yield conn
        except BaseException:
            self._unsure = True
            raise
        finally:
            self._live.discard(turn_id)

    def add(self, turn_id: int) -> None:
        self._live.add(turn_id)

    def is_dead(self, turn_id: int) -> bool:
        """Should its row say `running`, the next transaction interrupts it."""
        return turn_id not in self._live

    def settle(self) -> list[int]:
        """Interrupt every `running` turn that is not live; returns which."""
        if not self._unsure:
            return []
        with self._writer.writing() as conn:
            dead = [turn for turn in turn_rows.running_turns(conn) if turn not in self._live]
            for turn_id in dead:
                turn_rows.interrupt_turn(conn, turn_id, self._now())
        self._unsure = False
        return dead
