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
from dataclasses import replace

from pensieve.engine.messages import SubmitTurn
from pensieve.engine.ports import Preparer


class HeldTurns:
    """The engine's main thread calls; `wake` is called by others when one may be ready."""

    def __init__(self, preparer: Preparer | None, wake: Callable[[], None]) -> None:
        self._preparer = preparer
        self._wake = wake
        self._turns: dict[int, SubmitTurn] = {}  # by turn_id, in the order of arrival
        self._changed = threading.Event()

    def __len__(self) -> int:
        return len(self._turns)

    def hold(self, message: SubmitTurn) -> bool:
        """Whether it is held from now on; else it may be taken."""
        constraint = message.options.constraint
        if self._preparer is None or constraint is None:
            return False
        if self._preparer.prepare(message.turn_id, constraint, self._on_ready):
            return False
        self._turns[message.turn_id] = message
        return True

    def released(self) -> list[SubmitTurn]:
        """Those that are ready, and held no longer."""
        if not self._turns:
            return []
        assert self._preparer is not None
        self._changed.clear()
        ready = [each for each in self._turns if self._preparer.is_ready(each)]
        return [self._turns.pop(each) for each in ready]

    def wait(self) -> None:
        """Until one is ready, if any is held."""
        while self._turns and not self._any_ready():
            self._changed.wait()
            self._changed.clear()

    def has(self, conversation_id: str) -> bool:
        return any(each.conversation_id == conversation_id for each in self._turns.values())

    def give_up(self, turn_id: int) -> SubmitTurn | None:
        """The turn, if it is held; it is no longer."""
        return self._turns.pop(turn_id, None)

    def give_up_all(self, conversation_id: str | None = None) -> list[SubmitTurn]:
        """The same, of one conversation or of all."""
        found = [
            turn_id
            for turn_id, each in self._turns.items()
            if conversation_id is None or each.conversation_id == conversation_id
        ]
        return [self._turns.pop(each) for each in found]

    def share_no_more(self, conversation_id: str) -> None:
        """They begin without this prefix: another one may have its name when they are taken."""
        for turn_id, message in self._turns.items():
            if message.prefix_of == conversation_id:
                self._turns[turn_id] = replace(message, prefix_of="", prefix_tokens=0)

    def ended(self, turn_id: int) -> None:
        """A turn has ended, held or not: what was prepared for it is not needed."""
        if self._preparer is not None:
            self._preparer.forget(turn_id)

    def _any_ready(self) -> bool:
        assert self._preparer is not None
        return any(map(self._preparer.is_ready, self._turns))

    def _on_ready(self) -> None:
        self._changed.set()
        self._wake()
