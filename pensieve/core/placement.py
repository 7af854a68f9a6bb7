"""Which replica a conversation is at home with: consistent hashing with bounded load.

Whoever routes turns asks `Placement.home`, and so does the simulation of a cluster: the answer follows from
the names of the replicas, the key and the loads alone.  No clock, no random number, no hash of Python's own
(it differs between processes): two processes that know the same replicas give the same answer.

**A ring.**  A replica has `POINTS` points on a circle of 64 bits, and a key belongs to the first point at or
after its own.  Finding it is a binary search, O(log n) of n replicas; rendezvous hashing, the other usual
way, computes a hash for each replica and key, and jump hashing can only take away the replica that came
last.  The more points, the more alike the replicas' arcs: they vary by about 1 / sqrt(POINTS) of their mean,
9 % with 128 points.  A replica that comes takes its arcs from all others, one that goes leaves its arcs to
all others, and no other key moves.

**Bounded load.**  With many conversations a few replicas are always far over the mean, whose arcs are wide
and whose conversations are many at a time.  So a replica takes no new conversation while it has `bound` times
the mean (`most`, rounded up); the key goes on along the ring to the next replica that has room.  There always
is one: not all can be over the mean.  (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded
loads", 2016: about 1 / (bound - 1)² replicas are looked at, however many there are.)

**Who has it keeps it.**  Where a key belongs by hash changes with the loads, so hashing alone would move
conversations all the time.  An owner is asked first: it keeps what it has until it is gone, drains or has
more than `keep_bound` times the mean, which is higher than `bound`, or a replica that is just full would give
away with every change of the mean.  A fork, or a conversation with a prefix that a replica has, names that
replica as `parent`: it goes there while that one has room, like any new conversation, or more room than for
those (`parent_bound`): what needs no recompute there is worth some unevenness.

State: the names that serve, their points in order, and the names that drain.  `Loads` are the caller's: it
counts what it wants to be even (conversations that were active of late, as a rule), for all replicas that
have any, also those that drain or are gone: what those have comes to the others.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from hashlib import blake2b

POINTS = 128  # of a replica on the ring
BOUND = 1.25  # of the mean load: no new conversation at or above it
KEEP_BOUND = 1.5  # of the mean load: above it a replica hands conversations over
POINT_BYTES = 8
POINTS_PER_DIGEST = 8  # a digest of 64 bytes is eight points


class Loads:
    """How many conversations each replica has; their sum is kept, so that a mean costs O(1)."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts: dict[str, int] = dict(counts or {})
        self.total = sum(self._counts.values())

    def of(self, name: str) -> int:
        return self._counts.get(name, 0)

    def add(self, name: str, count: int = 1) -> None:
        """So many more, or fewer if negative."""
        self._counts[name] = self._counts.get(name, 0) + count
        self.total += count

    def forget(self, name: str) -> None:
        """It is gone, and what it had is counted no more."""
        self.total -= self._counts.pop(name, 0)


NOTHING = Loads()


class Placement:
    """The replicas, and where a conversation belongs."""

    def __init__(
        self,
        names: Iterable[str] = (),
        *,
        bound: float = BOUND,
        parent_bound: float = 0.0,
        keep_bound: float = KEEP_BOUND,
        points: int = POINTS,
    ) -> None:
        """`parent_bound` counts where it is above `bound`."""
        assert bound >= 1, "a bound below the mean cannot hold"
        assert keep_bound >= max(bound, parent_bound), "what was just taken would be given away"
        assert points >= 1, "a replica without points is never found"
        self.bound, self.parent_bound = bound, max(bound, parent_bound)
        self.keep_bound = keep_bound
        self._points_each = points
        self._serving: dict[str, None] = {}
        self._draining: dict[str, None] = {}
        self._points: list[int] = []  # in order
        self._names: list[str] = []  # of each point
        self.add(*names)

    @property
    def serving(self) -> tuple[str, ...]:
        return tuple(self._serving)

    @property
    def draining(self) -> tuple[str, ...]:
        return tuple(self._draining)

    # -- membership: O(n · points) each, however many names --

    def add(self, *names: str) -> None:
        """They take conversations from now on, also those that drained."""
        new = [name for name in dict.fromkeys(names) if name not in self._serving]
        if not new:
            return
        for name in new:
            self._draining.pop(name, None)
            self._serving[name] = None
        ring = list(zip(self._points, self._names, strict=True))
        ring += [(point, name) for name in new for point in points_of(name, self._points_each)]
        ring.sort()  # by name where points are equal: the order of joining does not matter
        self._points = [point for point, _ in ring]
        self._names = [name for _, name in ring]

    def remove(self, *names: str) -> None:
        """They are gone; unknown names are no error, since two may report the same."""
        for name in names:
            self._draining.pop(name, None)
        self._take_off(names)

    def drain(self, *names: str) -> None:
        """They take nothing more, and what they have moves when it is next asked for."""
        known = [name for name in names if name in self._serving]
        self._take_off(known)
        self._draining.update(dict.fromkeys(known))

    def _take_off(self, names: Iterable[str]) -> None:
        gone = {name for name in names if name in self._serving}
        if not gone:
            return
        for name in gone:
            del self._serving[name]
        ring = [
            (point, name)
            for point, name in zip(self._points, self._names, strict=True)
            if name not in gone
        ]
        self._points = [point for point, _ in ring]
        self._names = [name for _, name in ring]

    # -- where a conversation belongs --

    def most(self, loads: Loads) -> int:
        """With so many conversations a replica takes no new one; counted with the one that comes."""
        return self._times_mean(self.bound, loads)

    def _times_mean(self, factor: float, loads: Loads) -> int:
        return math.ceil(factor * (loads.total + 1) / len(self._serving))

    def home(
        self, key: str, loads: Loads | None = None, *, owner: str = "", parent: str = ""
    ) -> str:
        """The replica for this conversation; LookupError where none serves.

        Without `loads` nothing bounds them.  `owner` is the one that has it, and is counted in `loads`;
        `parent` has what it begins with.  Neither needs to be known here any more.
        O(log n), and a number of steps along the ring that does not grow with n.
        """
        if not self._serving:
            raise LookupError("no replica serves")
        if owner in self._serving and (
            loads is None or loads.of(owner) <= self._times_mean(self.keep_bound, loads)
        ):
            return owner
        most = math.inf if loads is None else self.most(loads)
        counts = NOTHING if loads is None else loads
        if parent in self._serving and (
            loads is None or loads.of(parent) < self._times_mean(self.parent_bound, loads)
        ):
            return parent
        names = self._names
        first = bisect_left(self._points, point_of(key))
        for step in range(len(names)):
            name = names[(first + step) % len(names)]
            if counts.of(name) < most:
                return name
        raise AssertionError("every replica is over the mean")


def point_of(key: str) -> int:
    """Where a key lies on the circle."""
    return int.from_bytes(blake2b(key.encode(), digest_size=POINT_BYTES, person=b"key").digest())


def points_of(name: str, count: int = POINTS) -> list[int]:
    """Where a replica's points lie, eight from each digest."""
    points: list[int] = []
    for number in range(math.ceil(count / POINTS_PER_DIGEST)):
        digest = blake2b(name.encode(), salt=number.to_bytes(8), person=b"replica").digest()
        points += [
            int.from_bytes(digest[at : at + POINT_BYTES])
            for at in range(0, len(digest), POINT_BYTES)
        ]
    return points[:count]
