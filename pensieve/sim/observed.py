"""Collect the work and the duration of a replayed journal's iterations, in a sample of bounded size.

There are three kinds of iterations. The sample keeps evenly spaced iterations of each kind. At first, it
keeps all iterations. Whenever it has too many iterations of a kind, it drops every second one. From then on,
it takes only half as many of this kind.
"""

from __future__ import annotations

from typing import NamedTuple

from pensieve.core.cost import work_of
from pensieve.engine.journal import Replayed
from pensieve.sim.cost import CostModel

KINDS = ("decode only", "with prompts", "with copies")
KEPT_MAX = 4000  # iterations of each kind


class Observation(NamedTuple):
    """What one iteration did, and how long it took."""

    tokens: int
    pairs: int
    keys: int
    slots_in: int
    seconds: float
    decodes: int = 0


class Observations:
    """A bounded sample of a replay, and the rates of its copies over the link."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Observation]] = {kind: [] for kind in KINDS}
        self.counts = dict.fromkeys(KINDS, 0)
        self.rates: list[float] = []  # slots per second, of copies that an iteration waited for
        self._strides = dict.fromkeys(KINDS, 1)
        self._slots: dict[int, int] = {}  # by copy_id: slots of the copies in progress
        self._prompt_ends: dict[int, int] = {}  # prompt ends of turns that have not ended

    def add(self, replayed: Replayed) -> None:
        iteration, begun, ended, finished = replayed
        for start in iteration.started:
            self._prompt_ends[start.attempt_id] = len(start.context)
        prefills = any(each.stop <= self._prompt_ends[each.attempt_id] for each in iteration.slices)
        for attempt_id in iteration.ended:
            self._prompt_ends.pop(attempt_id, None)
        link_was_idle, has_swaps = not self._slots, bool(iteration.swap_ins or iteration.swap_outs)
        self._slots.update((copy.copy_id, copy.num_slots) for copy in iteration.swap_ins)
        self._slots.update((copy.copy_id, copy.num_slots) for copy in iteration.swap_outs)
        moved = sum(self._slots.pop(copy_id, 0) for copy_id in finished)
        seconds = ended - begun
        if seconds <= 0:
            return
        if not iteration.slices:
            if moved and link_was_idle:
                self.rates.append(moved / seconds)
                del self.rates[:-KEPT_MAX]
            return
        kind = KINDS[0]
        if has_swaps or iteration.copies:
            kind = KINDS[2]
        elif prefills:
            kind = KINDS[1]
        if self.counts[kind] % self._strides[kind] == 0:
            kept = self.kept[kind]
            work = work_of((piece.start, piece.stop) for piece in iteration.slices)
            slots_in = sum(copy.num_slots for copy in iteration.swap_ins)
            kept.append(
                Observation(work.tokens, work.pairs, work.keys, slots_in, seconds, work.decodes)
            )
            if len(kept) > KEPT_MAX:
                del kept[1::2]
                self._strides[kind] *= 2
        self.counts[kind] += 1


def expected_seconds(cost: CostModel, seen: Observation) -> float:
    """Return the time that the simulated executor would take if the link is free."""
    compute = cost.pass_seconds(seen.tokens, seen.pairs, seen.keys, seen.decodes)
    copying, layers = cost.copy_seconds(seen.slots_in), cost.layers
    return max(compute, copying / layers + compute, copying + compute / layers)
