"""Hold turns back while their constraints compile in another thread.

    SubmitTurn ──prepare──> ready      the engine takes the turn
                            not ready  the turn is held; when the constraint is ready, a thread wakes the
                                       mailbox, and the next step takes the turn

The scheduler, the observers and a journal get the message of a held turn when the turn is taken. So a held
turn delays no other turn. A replay holds no turns, because its turns have no constraints. While a turn is
held:

    CancelTurn, DeleteConversation      end the turn
    another turn of its conversation    is refused, as if the held turn were running
    turns_queued_max                    counts the turn
    a closed mailbox                    does not end the engine before the turn is taken
    a fork, a rewind, an eviction       ignores the turn

A conversation has at most one held turn. Held turns of different conversations do not wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pensieve.engine.messages import SubmitTurn
from pensieve.engine.ports import Preparer


class TurnsAwaitingConstraints:
    """Belongs to the engine's main thread. Other threads call only `_on_ready`."""

    def __init__(self, preparer: Preparer | None, wake: Callable[[], None]) -> None:
        self._preparer = preparer
        self._wake = wake
        self.turns: dict[int, SubmitTurn] = {}  # held turns by attempt_id, in order of arrival
        self.prepared: set[int] = set()  # turns with a constraint that have not ended, held or not
        self._changed = threading.Event()

    def hold(self, message: SubmitTurn) -> bool:
        """Hold a turn back if its constraint is not ready; return whether it is held."""
        constraint = message.options.constraint
        if self._preparer is None or constraint is None:
            return False
        self.prepared.add(message.attempt_id)
        if self._preparer.prepare(message.attempt_id, constraint, self._on_ready):
            return False
        self.turns[message.attempt_id] = message
        return True

    def take_ready(self) -> list[SubmitTurn]:
        """Remove and return the turns that are ready."""
        assert self._preparer is not None
        self._changed.clear()
        ready = [each for each in self.turns if self._preparer.is_ready(each)]
        return [self.turns.pop(each) for each in ready]

    def wait(self) -> None:
        """Wait until a turn is ready, if any is held."""
        while self.turns and not self._any_ready():
            self._changed.wait()
            self._changed.clear()

    def forget(self, attempt_id: int) -> None:
        """Forget the constraint of a turn that has ended, held or not."""
        if attempt_id in self.prepared:
            assert self._preparer is not None
            self.prepared.remove(attempt_id)
            self._preparer.forget(attempt_id)

    def _any_ready(self) -> bool:
        assert self._preparer is not None
        return any(map(self._preparer.is_ready, self.turns))

    def _on_ready(self) -> None:
        self._changed.set()
        self._wake()
