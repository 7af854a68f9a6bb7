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

Who has a place comes first.  A turn goes ahead only where nobody with a place lacks pages, and leaves as many
as a warm does; it gives its own up to whoever lacks some (preemption.py).  It has a place as soon as there is
one and nobody waits who began before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from pensieve.core.turn import QUEUE_ORDER, Turn, TurnState


class PrefillAhead:
    def __init__(
        self,
        turns_max: int,
        has_place: Callable[[Turn, Collection[Turn]], bool],
        running: Mapping[int, Turn],
        suspended: Collection[Turn],
    ) -> None:
        """Up to so many turns are ahead or ready; `has_place` says whether one may run beside these."""
        self._turns_max, self._has_place = turns_max, has_place
        self._running, self._suspended = running, suspended

    @property
    def has_room(self) -> bool:
        """For another turn without a place."""
        if not self._turns_max:
            return False
        num_ahead = sum(each.ahead for each in self._running.values())
        num_ready = sum(each.state is TurnState.READY for each in self._suspended)
        return num_ahead + num_ready < self._turns_max

    def give_places(self) -> list[Turn]:
        """To turns that run ahead, as far as nobody waits who began before them."""
        if not self._turns_max or self._suspended:
            return []
        ahead = [each for each in self._running.values() if each.ahead and each.finish is None]
        taken = []
        for turn in sorted(ahead, key=QUEUE_ORDER):
            if self._has_place(turn, self._running.values()):
                turn.take_place()
                taken.append(turn)
        return taken


def with_places(running: Collection[Turn]) -> list[Turn]:
    return [turn for turn in running if not turn.ahead]
