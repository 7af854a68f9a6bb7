"""Which of the turns that wait is admitted next: suspended ones, those that are ready, and new ones.

Whoever others gave way to is next (preemption.py); else the order of prefill_order.py decides, among those
that go before what their share has begun.  A turn for which there is no place may run ahead of it
(prefill_ahead.py).  Background turns are asked for apart, when the iteration has all that interactive ones
have; they wait for nothing but their own kind, and run ahead of nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from pensieve.core.fair_queue import FairQueue
from pensieve.core.iteration_draft import IterationDraft
from pensieve.core.lacking import Lacking
from pensieve.core.preemption import Preemption
from pensieve.core.prefill_ahead import PrefillAhead
from pensieve.core.prefill_order import earlier, may_join, next_waiting
from pensieve.core.turn import Turn


class Waiting:
    def __init__(
        self,
        suspended: Collection[Turn],
        queued: FairQueue,
        running: Mapping[int, Turn],
        preemption: Preemption,
        ahead: PrefillAhead,
        has_place: Callable[[Turn, Collection[Turn]], bool],
    ) -> None:
        """`has_place` says whether a turn may run beside these."""
        self._suspended, self._queued, self._running = suspended, queued, running
        self._preemption, self._ahead, self._has_place = preemption, ahead, has_place

    def next(
        self, started: Collection[Turn], draft: IterationDraft, lacking: Lacking
    ) -> tuple[Turn | None, bool]:
        """A turn that has a place, and goes before the prefills of its share that have started.

        Or a new one that runs ahead of its place; then True.
        """
        background = lacking.background
        if not lacking.may_admit:
            return None, False

        def may_come(turn: Turn) -> bool:
            return (
                turn.is_background == background
                and may_join(turn, started)
                and draft.has_room(earlier(turn, started))
            )

        claimant = self._preemption.claimant
        if claimant is not None and background:
            return None, False
        turn = claimant or next_waiting(self._suspended, self._queued, may_come, lacking.turns)
        if turn is None or self._has_place(turn, self._running.values()):
            return turn, False
        if background or lacking.turns or claimant is not None or not self._ahead.has_room:
            return None, False
        return next_waiting((), self._queued, lambda turn: not turn.warm and may_come(turn)), True

    def who_may_preempt(self, started: Collection[Turn]) -> Turn | None:
        """The next that others may have to give way to."""
        return next_waiting(
            self._suspended,
            self._queued,
            lambda turn: not (turn.warm or turn.is_background) and may_join(turn, started),
        )
