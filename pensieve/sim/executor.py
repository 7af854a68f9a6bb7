"""Replace the model in a simulation: compute nothing, and take the time that the cost model predicts.

An iteration begins when it is launched. Each direction between the tiers is one link, which is busy until its
last copy is complete. The layers of a swap-in arrive one after another. A layer computes when its KV has
arrived and the previous layer is done. An iteration has L layers and a computing time C. Its swap-ins begin
at s and take S. So the iteration ends at

    max(begin + C,  s + S/L + C,  s + S + C/L)

An iteration is one pass through the model. With `phases="separate"` an iteration with prompts and decodes is
two passes, first the prompts and then the decodes, like in engines that batch the phases separately. The
weights are read twice, and generating turns wait for the prompts. Such engines return the first tokens of the
prompts before the second pass. Here all tokens of an iteration come together, so first tokens are late by the
time of the decode pass.

`staged` gives the time of an iteration with `groups` (streamed turns): loads, compute and stores overlap. Its
loads follow the swap-ins on the inward link. Its stores precede the swap-outs on the outward link.

Swap-outs begin when the link is free and delay no iteration. A copy is reported by the first outcome at or
after its end. An iteration without slices ends when one outstanding copy has ended.

Turns end by their length, and all their tokens are token 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pensieve.core.cost import work_of
from pensieve.core.iteration import Iteration, Outcome, PageGroup, SampledToken, Slice
from pensieve.sim.cost import CostModel

PHASES = ("unified", "separate")
Watcher = Callable[[Iteration, float, float], None]  # iteration, begin, end


class VirtualClock:
    """A clock that moves only when it is advanced, and only forward."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not go back"
        self._now += seconds

    def advance_to(self, moment: float) -> None:
        """Advance to this moment, unless it has passed."""
        self._now = max(self._now, moment)


class ModelledExecutor:
    depth = 1

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        watcher: Watcher | None = None,
        phases: str = "unified",
    ) -> None:
        assert phases in PHASES, f"{phases!r} is not one of {PHASES}"
        self._cost = cost
        self._clock = clock
        self._watcher = watcher
        self._separate = phases == "separate"
        self._launched: deque[tuple[Iteration, float, float]] = deque()  # begin, end
        self._turns: dict[int, tuple[int, SampledToken]] = {}  # prompt's end, every sample
        self._inward: deque[tuple[float, int]] = deque()  # (end, copy_id), in order of `end`
        self._outward: deque[tuple[float, int]] = deque()
        self._in_free = self._out_free = 0.0
        self._arenas = (0.0, 0.0)  # when each becomes free

    def use_costs(self, cost: CostModel) -> None:
        """Use other costs from the next iteration on."""
        self._cost = cost

    def launch(self, iteration: Iteration) -> None:
        assert len(self._launched) < self.depth, "an earlier iteration was not collected"
        for start in iteration.started:
            token = SampledToken(start.attempt_id, 0)  # all tokens of a turn are equal
            self._turns[start.attempt_id] = (len(start.context), token)
        now = self._clock.now()
        arrivals = self._swap_in(iteration, now)
        if iteration.groups:
            end = self._staged_end(iteration, now, arrivals)
        else:
            end = self._unstaged_end(iteration, now, arrivals)
        self._swap_out(iteration, now)
        for attempt_id in iteration.ended:
            self._turns.pop(attempt_id, None)
        self._launched.append((iteration, now, end))

    def collect(self) -> Outcome:
        assert self._launched, "no iteration is launched"
        iteration, begun, end = self._launched.popleft()
        if not iteration.slices:
            end = min(
                (queue[0][0] for queue in (self._inward, self._outward) if queue), default=end
            )
        self._clock.advance_to(end)
        now = self._clock.now()
        if self._watcher is not None:
            self._watcher(iteration, begun, now)
        samples = [self._turns[each.attempt_id][1] for each in iteration.slices if each.needs_token]
        return Outcome(tuple(samples), self._take_finished(now))

    def _swap_in(self, iteration: Iteration, now: float) -> LayerArrivals:
        """Begin the swap-ins; return when each layer has arrived."""
        if not iteration.swap_ins:
            return LayerArrivals()
        begun = max(now, self._in_free)
        copying = self._cost.copy_seconds(sum(each.num_slots for each in iteration.swap_ins))
        self._in_free = begun + copying
        self._inward.extend((self._in_free, each.copy_id) for each in iteration.swap_ins)
        layer_seconds = copying / self._cost.layers
        return LayerArrivals(begun + layer_seconds, layer_seconds)

    def _swap_out(self, iteration: Iteration, now: float) -> None:
        if not iteration.swap_outs:
            return
        copying = self._cost.copy_seconds(sum(each.num_slots for each in iteration.swap_outs))
        self._out_free = max(now, self._out_free) + copying
        self._outward.extend((self._out_free, each.copy_id) for each in iteration.swap_outs)

    def _unstaged_end(self, iteration: Iteration, now: float, arrivals: LayerArrivals) -> float:
        compute = self._compute_seconds(iteration.slices)
        end = now + compute
        if arrivals.per_layer and iteration.slices:
            last = arrivals.first + (self._cost.layers - 1) * arrivals.per_layer
            end = max(end, arrivals.first + compute, last + compute / self._cost.layers)
        return end

    def _staged_end(self, iteration: Iteration, now: float, arrivals: LayerArrivals) -> float:
        """Return the end of an iteration with groups. Its stores delay the swap-outs that follow them."""
        assert not self._separate, "separate phases do not support groups"
        cost, slices, groups = self._cost, iteration.slices, iteration.groups
        first = groups[0].first_slice
        streamed = sum(each.num_tokens for each in slices[first:])
        decodes = sum(self._is_decode(each) for each in slices[first:])
        layer_seconds = self._pass_seconds(slices[:first], streamed, decodes) / cost.layers
        times = [self._group_seconds(each, slices) for each in groups]
        links = Links(max(now, self._in_free), self._arenas)
        end, links = staged(now, cost.layers, layer_seconds, times, links, arrivals)
        self._in_free, self._arenas = links
        self._out_free = max(now, self._out_free) + cost.layers * sum(each.store for each in times)
        return end

    def _group_seconds(self, group: PageGroup, slices: Sequence[Slice]) -> GroupSeconds:
        """Return the seconds of a group in one layer."""
        cost = self._cost
        work = work_of(
            (each.start, each.stop) for each in slices[group.first_slice : group.stop_slice]
        )
        return GroupSeconds(
            cost.copy_seconds(sum(group.loaded_slots)) / cost.layers,
            cost.attention_seconds(work.pairs, work.keys) / cost.layers,
            cost.copy_seconds(sum(group.stored_slots)) / cost.layers,
        )

    def _is_decode(self, piece: Slice) -> bool:
        """Return whether a slice is of a generating turn: one token that sees all keys."""
        return piece.stop - piece.start == 1 and piece.start >= self._turns[piece.attempt_id][0]

    def _compute_seconds(self, slices: Sequence[Slice]) -> float:
        return self._pass_seconds(slices)

    def _pass_seconds(
        self, slices: Sequence[Slice], streamed_tokens: int = 0, streamed_decodes: int = 0
    ) -> float:
        """Return the seconds of a pass; the streamed tokens count in the dense part only."""
        cost = self._cost
        tokens, pairs, keys = streamed_tokens - streamed_decodes, 0, 0
        decodes, decode_keys = streamed_decodes, 0
        for piece in slices:
            start, stop = piece.start, piece.stop
            if self._is_decode(piece):
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

    def _take_finished(self, now: float) -> tuple[int, ...]:
        finished = []
        for queue in (self._inward, self._outward):
            while queue and queue[0][0] <= now:
                finished.append(queue.popleft()[1])
        return tuple(finished)


class GroupSeconds(NamedTuple):
    """The seconds of one group in one layer."""

    load: float
    attend: float
    store: float


class LayerArrivals(NamedTuple):
    """When the swap-ins of each layer arrive."""

    first: float = 0.0
    per_layer: float = 0.0  # seconds from one layer's arrival to the next


class Links(NamedTuple):
    """When the inward link and each arena become free; the outward link is free when both arenas are free."""

    inward: float = 0.0
    arenas: tuple[float, float] = (0.0, 0.0)


def staged(
    begun: float,
    num_layers: int,
    layer_seconds: float,  # time of a layer without its groups
    groups: Sequence[GroupSeconds],
    links: Links,
    arrivals: LayerArrivals,
) -> tuple[float, Links]:
    """Return the end of an iteration with groups, and when the links become free.

    A group of streamed turns (`Iteration.groups`) takes a staging arena in every layer: its pages are copied
    in, its slices attend, and the written pages are copied out. Three lanes work in parallel, each on one
    thing at a time:

        inward    loads, in the order of the steps
        compute   a layer's dense part and its resident slices, then its groups one after another
        outward   stores, in the order of the steps

    Step n is the n-th pair of a layer and a group. Its arena is n % 2, so

        load n    begins after load n - 1, and after store n - 2, which frees the arena
        attend n  begins after load n, and after all earlier work of the compute lane
        store n   begins after attend n, and after store n - 1

    Load n runs while step n - 1 attends. So the copier is one group ahead, also between the last group of a
    layer and the first group of the next layer. All layers take the same time. Let C, I and O be the times of
    computing, loads and stores in one layer. With two or more groups, a layer takes about the largest of C, I
    and O. With one group, a load overlaps the attention of the previous layer, because the steps alternate
    between the arenas.

    A layer also waits for its swap-ins. The swap-ins of layer l (from 0) arrive at
    `arrivals.first + l * arrivals.per_layer`. They began earlier, so the loads follow all swap-ins on the
    link.
    """
    compute, inward = begun, max(begun, links.inward)
    arenas = list(links.arenas)
    outward = max(arenas)
    step = 0
    for layer in range(num_layers):
        compute = max(compute, arrivals.first + layer * arrivals.per_layer) + layer_seconds
        for load, attend, store in groups:
            arena = step % 2
            inward = max(inward, arenas[arena]) + load
            compute = max(compute, inward) + attend
            outward = arenas[arena] = max(outward, compute) + store
            step += 1
    return compute, Links(inward, (arenas[0], arenas[1]))
