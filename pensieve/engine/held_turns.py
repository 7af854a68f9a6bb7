"""Turns that are held back while what they need is made ready: a constraint compiles in a thread.

    SubmitTurn ──prepare──> ready      the engine takes it
                            not ready  it is held; a thread wakes the mailbox, and the next step takes it

To the scheduler, the observers and a journal the message of a held turn comes when it is taken, so it delays
nobody, and a replay, whose turns have no constraints, holds none.  Until then

    CancelTurn, DeleteConversation      end it
    another turn of its conversation    is refused, as where one runs
    its prefix is deleted               it begins without it
    turns_queued_max                    counts it
    a closed mailbox                    the engine waits for it
    a fork, a rewind, an eviction       are what they were before it came

A conversation has one held turn at most; those of different ones do not wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pensieve.engine.messages import SubmitTurn
from pensieve.engine.ports import Preparer


class HeldTurns:
    """Called by the engine's main thread, for turns with a constraint; other threads call `wake` when one of
    them may be ready."""

    def __init__(self, preparer: Preparer | None, wake: Callable[[], None]) -> None:
        self._preparer = preparer
        self._wake = wake
        self.turns: dict[int, SubmitTurn] = {}  # held, by turn_id, in the order of arrival
        self.prepared: set[int] = set()  # turns that have not ended, held or not
        self._changed = threading.Event()

    def hold(self, message: SubmitTurn) -> bool:
        """Hold a turn back if its constraint is not ready; False: the engine may take it."""
        constraint = message.options.constraint
        if self._preparer is None or constraint is None:
            return False
        self.prepared.add(message.turn_id)
        if self._preparer.prepare(message.turn_id, constraint, self._on_ready):
            return False
        self.turns[message.turn_id] = message
        return True

    def released(self) -> list[SubmitTurn]:
        """Return the turns that are ready, which are held no longer."""
        assert self._preparer is not None
        self._changed.clear()
        ready = [each for each in self.turns if self._preparer.is_ready(each)]
        return [self.turns.pop(each) for each in ready]

    def wait(self) -> None:
        """Wait until a turn is ready, if any is held."""
        while self.turns and not self._any_ready():
            self._changed.wait()
            self._changed.clear()

    def ended(self, turn_id: int) -> None:
        """A turn has ended, held or not: forget what was prepared for it."""
        if turn_id in self.prepared:
            assert self._preparer is not None
            self.prepared.remove(turn_id)
            self._preparer.forget(turn_id)

    def _any_ready(self) -> bool:
        assert self._preparer is not None
        return any(map(self._preparer.is_ready, self.turns))

    def _on_ready(self) -> None:
        self._changed.set()
        self._wake()
