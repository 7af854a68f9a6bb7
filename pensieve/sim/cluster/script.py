"""What happens to the replicas of a simulated cluster, and when.

`60:fail:1,150:fail:5%` are two happenings: after a minute one replica dies, after two and a half a twentieth
of those that serve dies at once, as when a rack loses its power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


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
