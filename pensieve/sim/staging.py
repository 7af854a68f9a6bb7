"""When an iteration with groups ends: its layers on the device, its loads and stores on the links.

A group of streamed turns (`Iteration.groups`) takes a staging arena in every layer: its pages are copied in,
its slices attend, what they wrote is copied out.  Three lanes work at once, each at one thing at a time:

    inward    loads, in the order of the steps
    compute   a layer's dense part and its resident slices, then its groups one after another
    outward   stores, in the order of the steps

Step n is the n-th pair of a layer and a group.  Its arena is n % 2, so

    load n    begins when load n - 1 is through, and store n - 2, which has freed the arena
    attend n  begins when load n is through, and what the device computed before
    store n   begins when attend n is done, and store n - 1 is through

and load n goes on while step n - 1 attends: the copier is one group ahead, also from a layer's last group to
the first of the next layer.  All layers are alike.  So with C of computing, I of loads and O of stores in one
layer, each layer takes about the largest of C, I and O where there are two or more groups.  One group, whose
steps take both arenas in turn, is loaded while the layer before it attends as well.

A layer begins when its swap-ins are there, too: those of layer l (from 0) arrive at `first + l * each`.  They
were begun before, so the loads come behind all of them on the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
    """When the iteration ends that began then, and how it leaves the links."""
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
