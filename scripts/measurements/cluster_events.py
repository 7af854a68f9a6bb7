"""What happens to the replicas of a simulated cluster and when, and what is counted between two happenings.

`60:fail:1,150:fail:5%` are two happenings: after a minute one replica dies, after two and a half a twentieth
of those that serve dies at once, as when a rack loses its power.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pensieve.core.placement import Loads
from pensieve.sim.series import Distribution


class Kind(StrEnum):
    FAIL = "fail"  # gone at once, with its KV and the turns that run
    DRAIN = "drain"  # takes nothing more, hands over what is wanted, and is gone for good
    RESTART = "restart"  # the same, and comes back empty by the same name: an upgrade
    JOIN = "join"  # a new one


@dataclass(frozen=True)
class Happening:
    at: float  # seconds
    kind: Kind
    count: float  # of replicas; below 1: a share of those that serve

    def replicas(self, serving: int) -> int:
        """How many it concerns, of so many; one is always left to serve."""
        count = max(round(self.count * serving), 1) if self.count < 1 else round(self.count)
        return count if self.kind is Kind.JOIN else min(count, serving - 1)

    def __str__(self) -> str:
        count = f"{self.count:g}" if self.count >= 1 else f"{100 * self.count:g} %"
        return f"{self.kind} {count}"


def parse(text: str) -> tuple[Happening, ...]:
    """In the order of their times; ValueError with the part that is none."""
    found = [_happening(part.strip()) for part in text.split(",") if part.strip()]
    return tuple(sorted(found, key=lambda each: each.at))


def _happening(text: str) -> Happening:
    try:
        at, kind, count = text.split(":")
        share = float(count[:-1]) / 100 if count.endswith("%") else float(count)
        happening = Happening(float(at), Kind(kind), share)
    except ValueError:
        raise ValueError(
            f"{text!r} is no SECONDS:KIND:COUNT, like 60:fail:1 or 90:join:10%"
        ) from None
    is_share = count.endswith("%") and 0 < share < 1
    is_whole = not count.endswith("%") and share >= 1 and share == int(share)
    if not (is_share or is_whole) or not 0 <= happening.at < math.inf:
        raise ValueError(f"{text!r}: a time of 0 or more, and 1, 2, … replicas or below 100 %")
    return happening


def phases(script: Sequence[Happening], ends: float) -> list[tuple[str, float, float]]:
    """The times between happenings: a name, from, to.  What happens at one time is one."""
    found: list[tuple[str, float, float]] = []
    name, since = "before", 0.0
    for happening in script:
        if happening.at > since:
            found.append((name, since, happening.at))
            name = ""
        name = f"{name}, {happening}" if name and name != "before" else f"after {happening}"
        since = happening.at
    if since < ends:
        found.append((name, since, ends))
    return found


@dataclass
class Phase:
    """The time between two happenings.  A turn counts in the phase in which its message came."""

    name: str
    since: float
    until: float
    replicas: int = 0  # that serve at its end
    turns: int = 0
    turns_of: Counter[str] = field(default_factory=Counter)  # by replica
    tokens_of: Counter[str] = field(default_factory=Counter)  # new, and computed again
    load_ratios: list[float] = field(default_factory=list)  # fullest over mean, at each look
    recomputed: int = 0  # tokens, because conversations moved
    first_tokens: Distribution = field(default_factory=Distribution)  # of simulated replicas
    first_tokens_moved: Distribution = field(default_factory=Distribution)
    history_tokens: int = 0  # of turns of simulated replicas
    history_recomputed: int = 0  # of those, for whatever reason
    conversations: float = 0.0

    def look(self, serving: Iterable[str], loads: Loads) -> None:
        names = list(serving)
        self.replicas = len(names)
        if loads.total:
            self.load_ratios.append(max(map(loads.of, names)) * len(names) / loads.total)
        self.conversations = loads.total

    def spread(self, counts: Counter[str]) -> float | None:
        """The fullest replica over the mean."""
        total = sum(counts.values())
        return max(counts.values()) * self.replicas / total if total else None


@dataclass
class Cause:
    """What came of one happening, however long after it."""

    name: str
    at: float = 0.0
    replicas: int = 0  # it concerned
    owned: int = 0  # active conversations that these had
    running: int = 0  # turns that were running there and are run again
    moved: int = 0  # conversations that came to another replica because of it
    recomputed_tokens: int = 0  # because they did
    handed_over: int = 0  # of them, whose KV was sent
    handed_over_bytes: float = 0.0


class Tally:
    """All phases and causes of a run."""

    def __init__(self, phases: Iterable[tuple[str, float, float]]) -> None:
        self.phases = [Phase(*each) for each in phases]
        self.causes: dict[str, Cause] = {}
        self.refused = 0

    def phase_at(self, at: float) -> Phase | None:
        """None outside of all: before the time that counts."""
        for phase in self.phases:
            if phase.since <= at < phase.until:
                return phase
        return None

    def cause(self, name: str) -> Cause:
        return self.causes.setdefault(name, Cause(name))
