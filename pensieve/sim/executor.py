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

An iteration with `groups` takes as long as its lanes do (`staged`), behind the swap-ins on the one link and
before the swap-outs on the other.

Swap-outs begin when the link is free and delay no iteration.  A copy is reported by the first outcome at or
after its end; an iteration without slices ends when one outstanding copy has.

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
Watcher = Callable[[Iteration, float, float], None]  # iteration, begun, ended


class VirtualClock:
    """It moves only when it is advanced, and only forward."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not go back"
        self._now += seconds

    def advance_to(self, moment: float) -> None:
        """To that moment, or not at all if it has passed."""
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
        assert phases in PHASES, f"{phases!r} is none of {PHASES}"
        self._cost = cost
        self._clock = clock
        self._watcher = watcher
        self._separate = phases == "separate"
        self._launched: deque[tuple[Iteration, float, float]] = deque()  # begun, ends
        self._turns: dict[int, tuple[int, SampledToken]] = {}  # end of the prompt, all its tokens
        self._inward: deque[tuple[float, int]] = deque()  # (end, copy_id), in order
        self._outward: deque[tuple[float, int]] = deque()
        self._in_free = self._out_free = 0.0
        self._arenas = (0.0, 0.0)  # from when on each is free

    def use_costs(self, cost: CostModel) -> None:
        """From the next iteration on, other costs."""
        self._cost = cost

    def launch(self, iteration: Iteration) -> None:
        assert len(self._launched) < self.depth, "an earlier iteration was not collected"
        for start in iteration.started:
            token = SampledToken(start.turn_id, 0)  # all of a turn's tokens are alike
            self._turns[start.turn_id] = (len(start.context), token)
        now = self._clock.now()
        arrivals = self._swap_in(iteration, now)
        if iteration.groups:
            ends = self._staged_end(iteration, now, arrivals)
        else:
            ends = self._unstaged_end(iteration, now, arrivals)
        self._swap_out(iteration, now)
        for turn_id in iteration.ended:
            self._turns.pop(turn_id, None)
        self._launched.append((iteration, now, ends))

    def collect(self) -> Outcome:
        assert self._launched, "no iteration is launched"
        iteration, begun, ends = self._launched.popleft()
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

    def _swap_in(self, iteration: Iteration, now: float) -> LayerArrivals:
        """When they are there, layer by layer."""
        if not iteration.swap_ins:
            return LayerArrivals()
        begun = max(now, self._in_free)
        copying = self._cost.copy_seconds(sum(each.num_slots for each in iteration.swap_ins))
        self._in_free = begun + copying
        self._inward.extend((self._in_free, each.copy_id) for each in iteration.swap_ins)
        of_a_layer = copying / self._cost.layers
        return LayerArrivals(begun + of_a_layer, of_a_layer)

    def _swap_out(self, iteration: Iteration, now: float) -> None:
        if not iteration.swap_outs:
            return
        copying = self._cost.copy_seconds(sum(each.num_slots for each in iteration.swap_outs))
        self._out_free = max(now, self._out_free) + copying
        self._outward.extend((self._out_free, each.copy_id) for each in iteration.swap_outs)

    def _unstaged_end(self, iteration: Iteration, now: float, arrivals: LayerArrivals) -> float:
        compute = self._compute_seconds(iteration.slices)
        ends = now + compute
        if arrivals.each and iteration.slices:
            last = arrivals.first + (self._cost.layers - 1) * arrivals.each
            ends = max(ends, arrivals.first + compute, last + compute / self._cost.layers)
        return ends

    def _staged_end(self, iteration: Iteration, now: float, arrivals: LayerArrivals) -> float:
        """Stores go before swap-outs, which are through later by as long as those take."""
        assert not self._separate, "groups are of one pass"
        cost, slices, groups = self._cost, iteration.slices, iteration.groups
        first = groups[0].first_slice
        streamed = sum(each.num_tokens for each in slices[first:])
        decodes = sum(self._is_decode(each) for each in slices[first:])
        layer_seconds = self._pass_seconds(slices[:first], streamed, decodes) / cost.layers
        times = [self._group_seconds(each, slices) for each in groups]
        links = Links(max(now, self._in_free), self._arenas)
        ends, links = staged(now, cost.layers, layer_seconds, times, links, arrivals)
        self._in_free, self._arenas = links
        self._out_free = max(now, self._out_free) + cost.layers * sum(each.store for each in times)
        return ends

    def _group_seconds(self, group: PageGroup, slices: Sequence[Slice]) -> GroupSeconds:
        """In one layer."""
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
        """Of a turn that generates: one token, which sees all the keys."""
        return piece.stop - piece.start == 1 and piece.start >= self._turns[piece.turn_id][0]

    def _compute_seconds(self, slices: Sequence[Slice]) -> float:
        return self._pass_seconds(slices)

    def _pass_seconds(
        self, slices: Sequence[Slice], streamed_tokens: int = 0, streamed_decodes: int = 0
    ) -> float:
        """With so many tokens beside them in the dense part alone."""
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

    def _finished(self, now: float) -> tuple[int, ...]:
        found = []
        for queue in (self._inward, self._outward):
            while queue and queue[0][0] <= now:
                found.append(queue.popleft()[1])
        return tuple(found)


class GroupSeconds(NamedTuple):
    """Of one group in one layer."""

    load: float
    attend: float
    store: float


class LayerArrivals(NamedTuple):
    """When each layer's swap-ins are there."""

    first: float = 0.0
    each: float = 0.0  # from one layer's to the next


class Links(NamedTuple):
    """From when on the link inward is free, and each arena; the one outward is when both of them are."""

    inward: float = 0.0
    arenas: tuple[float, float] = (0.0, 0.0)


def staged(
    begun: float,
    num_layers: int,
    layer_seconds: float,  # of a layer without its groups
    groups: Sequence[GroupSeconds],
    links: Links,
    arrivals: LayerArrivals,
) -> tuple[float, Links]:
    """When the iteration ends that began then, and how it leaves the links.

    A group of streamed turns (`Iteration.groups`) takes a staging arena in every layer: its pages are copied
    in, its slices attend, what they wrote is copied out.  Three lanes work at once, each at one thing at a
    time:

        inward    loads, in the order of the steps
        compute   a layer's dense part and its resident slices, then its groups one after another
        outward   stores, in the order of the steps

    Step n is the n-th pair of a layer and a group.  Its arena is n % 2, so

        load n    begins when load n - 1 is through, and store n - 2, which has freed the arena
        attend n  begins when load n is through, and what the device computed before
        store n   begins when attend n is done, and store n - 1 is through

    and load n goes on while step n - 1 attends: the copier is one group ahead, also from a layer's last group
    to the first of the next layer.  All layers are alike.  So with C of computing, I of loads and O of stores
    in one layer, each layer takes about the largest of C, I and O where there are two or more groups.  One
    group, whose steps take both arenas in turn, is loaded while the layer before it attends as well.

    A layer begins when its swap-ins are there, too: those of layer l (from 0) arrive at `first + l * each`.
    They were begun before, so the loads come behind all of them on the link.
    """
    compute, inward = begun, max(begun, links.inward)
    arenas = list(links.arenas)
    outward = max(arenas)
    step = 0
    for layer in range(num_layers):
        compute = max(compute, arrivals.first + layer * arrivals.each) + layer_seconds
        for load, attend, store in groups:
            arena = step % 2
            inward = max(inward, arenas[arena]) + load
            compute = max(compute, inward) + attend
            outward = arenas[arena] = max(outward, compute) + store
            step += 1
    return compute, Links(inward, (arenas[0], arenas[1]))
