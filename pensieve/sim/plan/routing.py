"""Which of several replicas serves which turn.

* **affinity**: a conversation stays with one replica, found from its name (`replica_of`, a consistent hash:
  one more replica takes over its even share of the names and moves no others).  A fork stays with its
  source.
* **random**: each turn goes to any replica.  What a replica holds of a conversation ends where it last
  served a turn of it; the rest of the history is a hole that it computes again.

To route turns one by one their times must be known, and those depend on replies of other replicas.  So
`with_times` supposes that a turn takes `seconds_per_token` for each token of its reply, as it did where all
turns were simulated.

Of a few replicas all are simulated (`at_random_of_few`).  Of many, one is (`at_random_of_many`): with N times
the conversations, each of its turns is of one that it served before with probability 1/N.  So N copies of one
replica's load are supposed, and of each turn those copies are kept that are routed to this replica.  The work
is that of one replica, however large N is.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pensieve.sim.trace import Arrival

APART_SECONDS = 30.0  # between copies of a conversation, at most
NAMES_MAX = 100_000


def replica_of(name: str, num_replicas: int) -> int:
    """Jump consistent hash (Lamping and Veach, 2014)."""
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    index, ahead = -1, 0
    while ahead < num_replicas:
        index = ahead
        key = (key * 2862933555777941757 + 1) & ((1 << 64) - 1)
        ahead = int((index + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return index


class Families:
    """The conversation at the root of each fork: they share KV, so one replica serves them all."""

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}

    def root(self, arrival: Arrival) -> str:
        if arrival.fork_of:
            source = self._roots.get(arrival.fork_of, arrival.fork_of)
            self._roots[arrival.conversation] = source
        return self._roots.get(arrival.conversation, arrival.conversation)


def with_affinity(
    arrivals: Iterable[Arrival], replica_index: int, num_replicas: int
) -> Iterator[Arrival]:
    """The arrivals of one replica with affinity."""
    families = Families()
    for arrival in arrivals:
        if replica_of(families.root(arrival), num_replicas) == replica_index:
            yield arrival


def with_times(arrivals: Iterable[Arrival], seconds_per_token: float) -> Iterator[Arrival]:
    """The same in the order of their times, each with a time and the length of its log."""
    lengths: dict[str, int] = {}
    ends: dict[str, float] = {}
    pending: list[tuple[float, int, Arrival]] = []
    for number, arrival in enumerate(arrivals):
        name = arrival.conversation
        known = lengths.get(arrival.fork_of or name, 0)
        length = known if arrival.history_tokens is None else min(arrival.history_tokens, known)
        length = arrival.log_tokens if arrival.log_tokens is not None else length
        begin = arrival.at or 0.0
        if name in ends and (arrival.at is None or ends[name] > begin):
            begin = max(begin, ends[name] + arrival.after)
        lengths[name] = length + arrival.input_tokens + arrival.output_tokens
        ends[name] = begin + seconds_per_token * arrival.output_tokens
        while arrival.at is not None and pending and pending[0][0] <= arrival.at:
            yield heapq.heappop(pending)[2]
        heapq.heappush(
            pending, (begin, number, replace(arrival, at=begin, after=0.0, log_tokens=length))
        )
    while pending:
        yield heapq.heappop(pending)[2]


def at_random_of_few(
    arrivals: Iterable[Arrival], replica_index: int, num_replicas: int, seed: int = 0
) -> Iterator[Arrival]:
    """The arrivals of one of a few replicas, of arrivals `with_times` that are routed at random."""
    draw, held = random.Random(seed), _HeldPrefixes()
    for arrival in arrivals:
        if draw.randrange(num_replicas) == replica_index:
            yield held.served(arrival, arrival.conversation)
        else:
            held.routed_elsewhere(arrival, arrival.conversation)


def at_random_of_many(
    arrivals: Iterable[Arrival], num_replicas: int, seed: int = 0
) -> Iterator[Arrival]:
    """The arrivals of one of many replicas, each with a load like these, `with_times`, routed at random."""
    draw, held, chance = random.Random(seed), _HeldPrefixes(), 1 / num_replicas
    copies: dict[str, dict[int, float]] = {}  # that this replica served: how much later they are
    pending: list[tuple[float, int, Arrival]] = []
    num_copies = num_served = 0
    for arrival in arrivals:
        name = arrival.conversation
        known = copies.setdefault(name, {})
        others = {**(copies.get(arrival.fork_of, {}) if arrival.fork_of else {}), **known}
        here = [copy for copy in others if draw.random() < chance]
        for copy in others.keys() - set(here):
            held.routed_elsewhere(arrival, f"{name}#{copy}")
        for _ in range(_binomial(draw, num_replicas - len(others), chance)):
            num_copies += 1
            here.append(num_copies)
            others[num_copies] = draw.uniform(0, APART_SECONDS) if num_replicas > 1 else 0.0
        at = arrival.at or 0.0
        while pending and pending[0][0] <= at:
            yield heapq.heappop(pending)[2]
        for copy in here:
            num_served += 1
            known[copy] = others[copy]
            later = at + others[copy]
            fork_of = f"{arrival.fork_of}#{copy}" if arrival.fork_of else ""
            served = held.served(replace(arrival, at=later, fork_of=fork_of), f"{name}#{copy}")
            heapq.heappush(pending, (later, num_served, served))
    while pending:
        yield heapq.heappop(pending)[2]


class _HeldPrefixes:
    """How much of what a replica holds is still valid: turns of other replicas may have rewound a log."""

    def __init__(self) -> None:
        self._cuts: dict[str, int] = {}

    def routed_elsewhere(self, arrival: Arrival, name: str) -> None:
        if arrival.history_tokens is not None and not arrival.fork_of:
            self._cuts[name] = min(
                self._cuts.get(name, arrival.history_tokens), arrival.history_tokens
            )

    def served(self, arrival: Arrival, name: str) -> Arrival:
        cut = self._cuts.pop(name, None)
        kept = arrival.history_tokens
        if cut is not None:
            kept = cut if kept is None else min(cut, kept)
        return replace(arrival, conversation=name, history_tokens=kept)


def _binomial(draw: random.Random, trials: int, chance: float) -> int:
    """By waiting for the next success: as many draws as there are."""
    if chance >= 1:
        return trials
    found, trial = 0, 0
    while (trial := trial + 1 + int(math.log(1 - draw.random()) / math.log(1 - chance))) <= trials:
        found += 1
    return found


def fullest_over_mean(conversations_each: float, num_replicas: int, share: float = 0.99) -> float:
    """The P99 of the replicas' loads over their mean, for names that are hashed.

    For many replicas fewer are sampled: how many names meet in one depends on their mean number alone.
    """
    sampled = max(min(num_replicas, int(NAMES_MAX / max(conversations_each, 1.0))), 2)
    if num_replicas == 1:
        return 1.0
    counts = [0] * sampled
    for number in range(max(round(conversations_each * sampled), 1)):
        counts[replica_of(f"name {number}", sampled)] += 1
    counts.sort()
    return counts[min(int(share * sampled), sampled - 1)] * sampled / sum(counts)
