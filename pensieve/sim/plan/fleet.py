"""Who among several replicas hears which turn.

* **affinity**: a conversation stays with one replica, found from its name (`home`, a consistent hash: another
  replica takes over its even share of names and moves no others).  A fork stays with its source.
* **random**: each turn goes to any replica.  What a replica holds of a conversation ends where it last heard
  of it; the rest of the history is a hole that it computes again.

To route turns one by one one must know when they come, and that depends on replies of other replicas: `timed`
supposes that a turn takes `seconds_per_token` for each token of its reply, as it did where all was simulated.

Of a few replicas all are played (`routed`).  Of many, one (`scattered`): with N times the conversations, each
of its turns is from one that it heard before with probability 1/N.  So N copies of one replica's load are
supposed, and of each turn those copies are kept that come here.  The work is that of one replica, whatever N.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pensieve.sim.trace import Visit

APART_SECONDS = 30.0  # between copies of a conversation, at most
NAMES_MAX = 100_000


def home(name: str, num_replicas: int) -> int:
    """Jump consistent hash (Lamping and Veach, 2014)."""
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    place, ahead = -1, 0
    while ahead < num_replicas:
        place = ahead
        key = (key * 2862933555777941757 + 1) & ((1 << 64) - 1)
        ahead = int((place + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return place


class Families:
    """The conversation at the root of a fork: they share KV, so they live together."""

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}

    def root(self, visit: Visit) -> str:
        if visit.fork_of:
            source = self._roots.get(visit.fork_of, visit.fork_of)
            self._roots[visit.conversation] = source
        return self._roots.get(visit.conversation, visit.conversation)


def at_home(visits: Iterable[Visit], replica: int, num_replicas: int) -> Iterator[Visit]:
    """What one replica hears with affinity."""
    families = Families()
    for visit in visits:
        if home(families.root(visit), num_replicas) == replica:
            yield visit


def timed(visits: Iterable[Visit], seconds_per_token: float) -> Iterator[Visit]:
    """The same with a time for each, in their order, and the length of each log."""
    lengths: dict[str, int] = {}
    ends: dict[str, float] = {}
    pending: list[tuple[float, int, Visit]] = []
    for number, visit in enumerate(visits):
        name = visit.conversation
        known = lengths.get(visit.fork_of or name, 0)
        length = known if visit.history_tokens is None else min(visit.history_tokens, known)
        length = visit.log_tokens if visit.log_tokens is not None else length
        begin = visit.at or 0.0
        if name in ends and (visit.at is None or ends[name] > begin):
            begin = max(begin, ends[name] + visit.after)
        lengths[name] = length + visit.input_tokens + visit.output_tokens
        ends[name] = begin + seconds_per_token * visit.output_tokens
        while visit.at is not None and pending and pending[0][0] <= visit.at:
            yield heapq.heappop(pending)[2]
        heapq.heappush(
            pending, (begin, number, replace(visit, at=begin, after=0.0, log_tokens=length))
        )
    while pending:
        yield heapq.heappop(pending)[2]


def routed(
    visits: Iterable[Visit], replica: int, num_replicas: int, seed: int = 0
) -> Iterator[Visit]:
    """What one of a few replicas hears, of `timed` visits that are routed at random."""
    draw, kept = random.Random(seed), _Kept()
    for visit in visits:
        if draw.randrange(num_replicas) == replica:
            yield kept.heard(visit, visit.conversation)
        else:
            kept.missed(visit, visit.conversation)


def scattered(visits: Iterable[Visit], num_replicas: int, seed: int = 0) -> Iterator[Visit]:
    """What one of many replicas hears, if each has a load like these `timed` visits, routed at random."""
    draw, kept, chance = random.Random(seed), _Kept(), 1 / num_replicas
    copies: dict[str, dict[int, float]] = {}  # that were here: how much later they are
    pending: list[tuple[float, int, Visit]] = []
    num_copies = num_heard = 0
    for visit in visits:
        name = visit.conversation
        known = copies.setdefault(name, {})
        others = {**(copies.get(visit.fork_of, {}) if visit.fork_of else {}), **known}
        here = [copy for copy in others if draw.random() < chance]
        for copy in others.keys() - set(here):
            kept.missed(visit, f"{name}#{copy}")
        for _ in range(_binomial(draw, num_replicas - len(others), chance)):
            num_copies += 1
            here.append(num_copies)
            others[num_copies] = draw.uniform(0, APART_SECONDS) if num_replicas > 1 else 0.0
        at = visit.at or 0.0
        while pending and pending[0][0] <= at:
            yield heapq.heappop(pending)[2]
        for copy in here:
            num_heard += 1
            known[copy] = others[copy]
            later = at + others[copy]
            fork_of = f"{visit.fork_of}#{copy}" if visit.fork_of else ""
            heard = kept.heard(replace(visit, at=later, fork_of=fork_of), f"{name}#{copy}")
            heapq.heappush(pending, (later, num_heard, heard))
    while pending:
        yield heapq.heappop(pending)[2]


class _Kept:
    """How much of what a replica holds is still true: other replicas may have cut a conversation."""

    def __init__(self) -> None:
        self._cuts: dict[str, int] = {}

    def missed(self, visit: Visit, name: str) -> None:
        if visit.history_tokens is not None and not visit.fork_of:
            self._cuts[name] = min(self._cuts.get(name, visit.history_tokens), visit.history_tokens)

    def heard(self, visit: Visit, name: str) -> Visit:
        cut = self._cuts.pop(name, None)
        kept = visit.history_tokens
        if cut is not None:
            kept = cut if kept is None else min(cut, kept)
        return replace(visit, conversation=name, history_tokens=kept)


def _binomial(draw: random.Random, trials: int, chance: float) -> int:
    """By waiting for the next success: as many draws as there are."""
    if chance >= 1:
        return trials
    found, place = 0, 0
    while (place := place + 1 + int(math.log(1 - draw.random()) / math.log(1 - chance))) <= trials:
        found += 1
    return found


def crowding(conversations_each: float, num_replicas: int, share: float = 0.99) -> float:
    """How many times the mean load a replica has that all but 1 % stay below, by names that are hashed.

    For many replicas fewer are sampled: how many names meet in one depends on their mean number alone.
    """
    sampled = max(min(num_replicas, int(NAMES_MAX / max(conversations_each, 1.0))), 2)
    if num_replicas == 1:
        return 1.0
    counts = [0] * sampled
    for number in range(max(round(conversations_each * sampled), 1)):
        counts[home(f"name {number}", sampled)] += 1
    counts.sort()
    return counts[min(int(share * sampled), sampled - 1)] * sampled / sum(counts)
