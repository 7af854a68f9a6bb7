"""The policy that learns who comes back: what it learns, how fast, and what it forgets."""

from __future__ import annotations

import random

import pytest

from pensieve.core.cost import CostProfile
from pensieve.core.returning import (
    COST_STEPS,
    EDGES,
    PRIOR_RETURN,
    ReturnPolicy,
    Turned,
    _worth,
    group_of,
)

COST = CostProfile.analytic(10**9, 16, 8, 64)
SMALL = Turned(50, 300, 4000)


def policy() -> ReturnPolicy:
    return ReturnPolicy(COST, 32)


def worth(learnt: ReturnPolicy, group: int, idle: float) -> float:
    return learnt.value(group * COST_STEPS, idle)


def live(learnt: ReturnPolicy, now: float, seconds: float, returns: float, gap: float) -> float:
    """First turns, one a second; so many of them return after about so long."""
    draw = random.Random(int(now))
    due: list[tuple[float, str]] = []
    end = now + seconds
    while now < end:
        now += 1.0
        name = f"{now}"
        learnt.rested(name, SMALL, now)
        if draw.random() < returns:
            due.append((now + gap * draw.uniform(0.5, 1.5), name))
        due.sort()
        while due and due[0][0] <= now:
            learnt.returned(due.pop(0)[1], now)
    return now


def test_groups_tell_turns_sizes_and_gaps_apart() -> None:
    assert group_of(1, Turned(100, 300, 400), 0.0) == 0
    assert group_of(1, Turned(5000, 20, 5020), 0.0) == 0
    assert group_of(1, SMALL, 0.0) == 1
    assert group_of(1, Turned(20_000, 300, 20_300), 0.0) == 2
    assert group_of(2, Turned(3000, 300, 9000), 5.0) == 3
    assert (group_of(2, SMALL, 300.0), group_of(2, SMALL, 5.0)) == (4, 5)
    assert (group_of(3, SMALL, 5.0), group_of(9, SMALL, 5.0)) == (6, 7)


def test_what_keeping_yields_is_the_best_moment_to_give_up() -> None:
    """Half return in the third stretch and nobody ever after: waiting beyond its end only costs."""
    n = len(EDGES)
    at_risk = [100.0] * 3 + [50.0] * (n - 3)
    returned = [0.0, 0.0, 50.0] + [0.0] * (n - 3)
    found = _worth(at_risk, returned)
    waited = EDGES[1] + (EDGES[2] - EDGES[1]) * 0.75
    assert found[0] == pytest.approx(0.5 / waited)
    assert found[3] == 0.0
    assert len(found) == n + 1
    assert found == sorted(found, reverse=True)


def test_it_learns_who_returns_and_when() -> None:
    eager, tired = policy(), policy()
    live(eager, 0.0, 1200.0, 0.9, 30.0)
    live(tired, 0.0, 1200.0, 0.02, 30.0)
    before = worth(policy(), 1, 10.0)
    assert worth(eager, 1, 10.0) > 2 * before
    assert worth(tired, 1, 10.0) < before / 2
    assert worth(eager, 1, 200.0) < worth(eager, 1, 10.0) / 5, "who is away for so long is gone"
    assert worth(eager, 7, 10.0) == worth(policy(), 7, 10.0), "nothing was seen of these"


def test_what_costs_more_is_worth_more() -> None:
    learnt = policy()
    values = [learnt.value(COST_STEPS + step, 60.0) for step in range(COST_STEPS)]
    assert values == sorted(values)
    assert values[-1] > 4 * values[0]


def test_it_follows_a_workload_that_shifts() -> None:
    learnt = policy()
    now = live(learnt, 0.0, 1800.0, 0.8, 30.0)
    eager = worth(learnt, 1, 10.0)
    live(learnt, now, 3 * 3600.0, 0.02, 30.0)
    assert worth(learnt, 1, 10.0) < eager / 5


def test_it_learns_of_those_whose_kv_is_gone_and_counts_a_return_once() -> None:
    learnt = policy()
    learnt.rested("a", SMALL, 0.0)
    learnt.returned("a", 50.0)
    learnt.returned("a", 55.0)
    learnt.returned("b", 55.0)
    prior = policy()
    seen = sum(learnt._returned[1]) - sum(prior._returned[1])
    assert seen == pytest.approx(1.0)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pensieve.core.returning.RECORDS_MAX", 100)
    learnt = policy()
    for number in range(1000):
        learnt.rested(f"c{number}", SMALL, float(number))
    assert len(learnt._rests) == 100
    learnt.rested("last", SMALL, 1e6)
    assert sum(map(len, learnt._stretches)) == 1, "records end behind the last stretch"


def test_priors_are_sensible() -> None:
    first = policy()
    young = [worth(first, group, 5.0) for group in range(len(PRIOR_RETURN))]
    assert young[7] > young[6] > young[4] > young[0]
    for group in range(len(PRIOR_RETURN)):
        values = [worth(first, group, idle) for idle in (0.0, 1.0, 60.0, 600.0, 1e4, 1e6)]
        assert values == sorted(values, reverse=True)
        assert values[0] > 0
