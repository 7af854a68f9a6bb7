"""What is counted in a simulated cluster, by the time between two happenings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pensieve.core.placement import Loads
from pensieve.sim.series import Distribution

Row = dict[str, Any]


@dataclass
class Spread:
    """How even something is over replicas: the mean of maximum / mean, over the times it was looked at."""

    total: float = 0.0
    count: int = 0
    most: float = 0.0

    def add(self, values: Iterable[int]) -> None:
        found = list(values)
        if not found or not sum(found):
            return
        ratio = max(found) * len(found) / sum(found)
        self.total += ratio
        self.count += 1
        self.most = max(self.most, ratio)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class Phase:
    """The time between two happenings.  A turn counts in the phase in which its message came."""

    name: str
    since: float
    until: float
    replicas: int = 0  # that serve at its end
    turns: int = 0
    by_second: Counter[int] = field(default_factory=Counter)  # turns that begin
    turns_of: Counter[str] = field(default_factory=Counter)  # by replica
    tokens_of: Counter[str] = field(default_factory=Counter)  # new, and computed again
    plain_turns_of: Counter[str] = field(default_factory=Counter)  # if placed by hash alone
    plain_tokens_of: Counter[str] = field(default_factory=Counter)
    loads: Spread = field(default_factory=Spread)  # of conversations, with the bound
    plain_loads: Spread = field(default_factory=Spread)
    plain_moved: int = 0  # if placed by hash alone
    recomputed: int = 0  # tokens, because conversations moved
    first_tokens: Distribution = field(default_factory=Distribution)  # of simulated replicas
    first_tokens_moved: Distribution = field(default_factory=Distribution)
    history_tokens: int = 0  # of turns of simulated replicas
    history_recomputed: int = 0  # of those, for whatever reason
    conversations: float = 0.0

    def look(self, serving: Iterable[str], loads: Loads, plain: Loads) -> None:
        names = list(serving)
        self.replicas = len(names)
        self.loads.add(loads.of(name) for name in names)
        self.plain_loads.add(plain.of(name) for name in names)
        self.conversations = loads.total

    def row(self) -> Row:
        seconds = self.until - self.since
        return {
            "phase": self.name,
            "from": self.since,
            "to": self.until,
            "replicas": self.replicas,
            "conversations": self.conversations,
            "turns": self.turns,
            "turns_per_second": self.turns / seconds,
            "turns_per_second_peak": max(self.by_second.values(), default=0),
            "conversations_spread": self.loads.mean,
            "conversations_spread_max": self.loads.most,
            "conversations_spread_plain": self.plain_loads.mean,
            "turns_spread": _spread(self.turns_of, self.replicas),
            "turns_spread_plain": _spread(self.plain_turns_of, self.replicas),
            "tokens_spread": _spread(self.tokens_of, self.replicas),
            "tokens_spread_plain": _spread(self.plain_tokens_of, self.replicas),
            "recomputed_tokens": self.recomputed,
            "plain_moved": self.plain_moved,
            "measured_turns": self.first_tokens.count,
            "ttft_p50": self.first_tokens.quantile(0.5),
            "ttft_p99": self.first_tokens.quantile(0.99),
            "moved_measured": self.first_tokens_moved.count,
            "moved_ttft_p50": self.first_tokens_moved.quantile(0.5),
            "moved_ttft_p99": self.first_tokens_moved.quantile(0.99),
            "recomputed_share": self.history_recomputed / self.history_tokens
            if self.history_tokens
            else 0.0,
        }


def _spread(counts: Counter[str], replicas: int) -> float | None:
    total = sum(counts.values())
    return max(counts.values()) * replicas / total if total and replicas else None


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

    def row(self) -> Row:
        return {
            "cause": self.name,
            "at": self.at,
            "replicas": self.replicas,
            "owned": self.owned,
            "running": self.running,
            "moved": self.moved,
            "recomputed_tokens": self.recomputed_tokens,
            "handed_over": self.handed_over,
            "handed_over_gigabytes": self.handed_over_bytes / 1e9,
        }


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
