"""Stands for the model in a simulation, on a virtual clock.

It computes nothing and takes as long as the cost model says.

An iteration begins when it is launched and ends after what `CostModel` says.  Each direction between the
tiers is one link, busy until its last copy is through.  The layers of a swap-in arrive one after another, and
a layer computes when it is there and the one before is done, so with C the time of computing, S that of
copying, begun at s, and L layers the iteration ends at

    max(begin + C,  s + S/L + C,  s + S + C/L)

An iteration is one pass through the model.  With `phases="separate"` one with both kinds of work is two,
the prompts' pass and then the one of the turns that generate: the weights are read twice, and turns that
generate wait for the prompts, as in engines that batch the phases apart.  (There the prompts' first tokens
are out before the second pass; here the iteration's tokens come together, so they are late by a pass of
decodes.)

Swap-outs begin when the link is free and delay no iteration.  A copy is reported by the first outcome at or
after its end; an iteration without slices ends when one outstanding copy has.

Turns end by their length, and all their tokens are token 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pensieve.core.iteration import Iteration, Outcome, SampledToken, Slice
from pensieve.sim.clock import VirtualClock
from pensieve.sim.cost import CostModel

PHASES = ("unified", "separate")
Watcher = Callable[[Iteration, float, float], None]  # iteration, begun, ended


class ModelledExecutor:
    depth = 1

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        watcher: Watcher | None = None,
        phases: str = "unified",
    ) -> None:
        assert phases in PHASES, f"{phases!r} is none of {PHASES}"
        self._cost = cost
        self._clock = clock
        self._watcher = watcher
        self._separate = phases == "separate"
        self._launched: tuple[Iteration, float, float] | None = None  # begun, ends
        self._turns: dict[int, tuple[int, SampledToken]] = {}  # end of the prompt, all its tokens
        self._inward: deque[tuple[float, int]] = deque()  # (end, copy_id), in order
        self._outward: deque[tuple[float, int]] = deque()
        self._in_free = self._out_free = 0.0

    def use_costs(self, cost: CostModel) -> None:
        """From the next iteration on, other costs."""
        self._cost = cost

    def launch(self, iteration: Iteration) -> None:
        assert self._launched is None, "an earlier iteration was not collected"
        for start in iteration.started:
            token = SampledToken(start.turn_id, 0)  # all of a turn's tokens are alike
            self._turns[start.turn_id] = (len(start.context), token)
        cost, now = self._cost, self._clock.now()
        compute = self._compute_seconds(iteration.slices)
        for turn_id in iteration.ended:
            self._turns.pop(turn_id, None)
        ends = now + compute
        if iteration.swap_ins:
            begun = max(now, self._in_free)
            copying = cost.copy_seconds(sum(each.num_slots for each in iteration.swap_ins))
            self._in_free = begun + copying
            self._inward.extend((self._in_free, each.copy_id) for each in iteration.swap_ins)
            if iteration.slices:
                layers = cost.layers
                ends = max(
                    ends, begun + copying / layers + compute, begun + copying + compute / layers
                )
        if iteration.swap_outs:
            begun = max(now, self._out_free)
            copying = cost.copy_seconds(sum(each.num_slots for each in iteration.swap_outs))
            self._out_free = begun + copying
            self._outward.extend((self._out_free, each.copy_id) for each in iteration.swap_outs)
        self._launched = (iteration, now, ends)

    def collect(self) -> Outcome:
        assert self._launched is not None, "no iteration is launched"
        (iteration, begun, ends), self._launched = self._launched, None
        if not iteration.slices:
            ends = min(
                (queue[0][0] for queue in (self._inward, self._outward) if queue), default=ends
            )
        self._clock.advance_to(ends)
        now = self._clock.now()
        if self._watcher is not None:
            self._watcher(iteration, begun, now)
        samples = [self._turns[each.turn_id][1] for each in iteration.slices if each.needs_token]
        return Outcome(tuple(samples), self._finished(now))

    def _compute_seconds(self, slices: Sequence[Slice]) -> float:
        cost = self._cost
        tokens = pairs = keys = 0
        decodes = decode_keys = 0  # of turns that generate: one token each, which sees all the keys
        for piece in slices:
            start, stop = piece.start, piece.stop
            if stop - start == 1 and start >= self._turns[piece.turn_id][0]:
                decodes += 1
                decode_keys += stop
            else:
                tokens += stop - start
                pairs += (stop - start) * (start + stop + 1) // 2
                keys += stop
        if self._separate:
            return cost.pass_seconds(tokens, pairs, keys) + cost.pass_seconds(
                decodes, decode_keys, decode_keys, decodes
            )
        return cost.pass_seconds(tokens + decodes, pairs + decode_keys, keys + decode_keys, decodes)

    def _finished(self, now: float) -> tuple[int, ...]:
        found = []
        for queue in (self._inward, self._outward):
            while queue and queue[0][0] <= now:
                found.append(queue.popleft()[1])
        return tuple(found)
