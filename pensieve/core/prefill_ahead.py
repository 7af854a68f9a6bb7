"""Prompts that are computed before there is a place for their replies.

Where only so many turns may run at once (`turns_max`, or an objective for the time between tokens), those
that wait stand with nothing computed, and whoever takes a place that falls free first fills it with a prompt.
With `prefill_ahead` turns, so many new ones are admitted beyond the places:

    QUEUED ──ahead of a place──> RUNNING, `ahead` ──all but its last token──> READY ──a place──> RUNNING

One that is `ahead` is a prefill like the others, in their order: prompts of like length, the shortest first,
are computed side by side, beside the turns that generate.  It has pages and no place.  A READY turn has
neither: its chunks rest like those of a suspended turn, where they are or by the policy on the host, and it
comes before new turns of its level.  Then one token of its prompt is left, so its first token comes with the
next iteration, whatever its length.

Nobody goes ahead while a turn that has a place lacks pages, or others give way to one (preemption.py), nor
into the pages that are kept available (`swap_out_mark_pages`, as for a warm).  It gives its own up to a turn
of its share that lacks some.  It has a place when there is one that no turn goes before it for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from pensieve.core.fair_queue import FairQueue
from pensieve.core.prefill_order import next_waiting
from pensieve.core.turn import QUEUE_ORDER, Turn, TurnState


class PrefillAhead:
    def __init__(
        self,
        turns_max: int,
        has_place: Callable[[Turn, Collection[Turn]], bool],
        running: Mapping[int, Turn],
        suspended: Collection[Turn],
        queued: FairQueue,
    ) -> None:
        """Up to so many turns are ahead or ready; `has_place` says whether one may run beside these."""
        self._turns_max, self._has_place = turns_max, has_place
        self._running, self._suspended, self._queued = running, suspended, queued

    @property
    def has_room(self) -> bool:
        """For another turn without a place."""
        if not self._turns_max:
            return False
        num_ahead = sum(each.ahead for each in self._running.values())
        num_ready = sum(each.state is TurnState.READY for each in self._suspended)
        return num_ahead + num_ready < self._turns_max

    def give_places(self, keeps_pages: Callable[[Turn], bool]) -> list[Turn]:
        """To turns that run ahead, as far as there are places, and nobody goes before them."""
        if not self._turns_max:
            return []
        taken: list[Turn] = []
        ahead = [each for each in self._running.values() if each.ahead and keeps_pages(each)]
        for turn in sorted(ahead, key=QUEUE_ORDER):
            if self._has_place(turn, self._running.values()) and self._is_next(turn):
                turn.take_place()
                taken.append(turn)
        return taken

    def _is_next(self, turn: Turn) -> bool:
        """Of those that wait for a place; among equals one that is ready, or was suspended, goes first."""
        first = next_waiting(
            self._suspended, self._queued, lambda each: not (each.warm or each.is_background)
        )
        if first is None:
            return True
        own, other = ((self._queued.used(each), -each.level) for each in (turn, first))
        return own < other or (own == other and first.state is TurnState.QUEUED)


def with_places(running: Collection[Turn]) -> list[Turn]:
    return [turn for turn in running if not turn.ahead]
