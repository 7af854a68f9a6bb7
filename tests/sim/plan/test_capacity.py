"""The highest rate that a replica carries within its limits, and what host memory brings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pensieve.sim.plan import capacity as capacity_module
from pensieve.sim.plan.capacity import (
    RATE_MOST,
    HostMemory,
    budget_within,
    capacity,
    host_memories,
    recommended,
)
from pensieve.sim.plan.fleet import (
    needed_with_affinity,
)
from pensieve.sim.plan.load import Drawn
from pensieve.sim.plan.replica import Impossible, Replica, Row, Slo
from pensieve.sim.trace import Arrival
from tests.sim.plan.world import CHAT, COST, LOAD, SLO, SMALL, trial


def row_of(tbt: float, ttft: float = 0.0) -> Row:
    return {"tbt_p99": tbt, "ttft_p50": ttft, "queue_p50": None}


@pytest.mark.parametrize("limit", [0.003, 0.9, 17.0, 400.0])
@pytest.mark.parametrize("guess", [0.01, 1.0, 50.0])
def test_the_highest_rate_is_found_from_any_guess(limit: float, guess: float) -> None:
    tried: list[float] = []

    def one(rate: float) -> Row:
        tried.append(rate)
        return row_of(rate / limit)

    rate, row = capacity(one, Slo(1.0, 1.0), guess)
    assert limit / 1.04 <= rate <= limit
    assert row == row_of(rate / limit)
    assert len(tried) < 25


def test_a_guess_above_every_rate_is_tried_as_the_highest() -> None:
    assert capacity(lambda rate: row_of(0.0), Slo(1.0, 1.0), 1e9) == (RATE_MOST, row_of(0.0))


def test_a_rate_that_more_memory_does_not_carry_is_sought_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Still(Drawn):
        def arrivals(self, rate: float) -> Iterator[Arrival]:
            yield Arrival("a", 0.0, 1, 1, after=rate)

    def one(replica: Replica, arrivals: Iterator[Arrival], window: object) -> Row:
        slower = 1.5 if replica.host_tokens else 1.0
        return {
            **row_of(slower * next(arrivals).after),
            "host_full": True,
            "asked": 1,
            "refused": 0,
        }

    monkeypatch.setattr(capacity_module, "run_replica", one)
    tried = host_memories(SMALL, Still(CHAT), Slo(1.0, 1.0), 0.3, 30_000)
    for each in tried:
        assert 0.9 < each.row["tbt_p99"] <= 1.0
    assert tried[1].rate < 0.7 * tried[0].rate


def test_turns_that_the_device_cannot_hold_are_not_carried_by_refusing_them() -> None:
    long = Drawn(replace(CHAT, input_tokens=400.0), seconds=30.0)
    with pytest.raises(
        Impossible, match=r"% of the turns are longer .* device tier of 2,000 tokens"
    ):
        host_memories(replace(SMALL, device_tokens=2000), long, SLO, 0.3, 0)


def test_no_rate_at_all_is_reported() -> None:
    with pytest.raises(Impossible, match="still: median first token 2 s"):
        capacity(lambda rate: row_of(0.0, 2.0), Slo(1.0, 1.0), 1.0)


def test_a_lone_turn_that_is_too_slow_is_refused_before_anything_is_simulated() -> None:
    with pytest.raises(Impossible, match=r"a token takes 10.5 ms even without other turns"):
        SMALL.check(Slo(0.01, 1.0), 40)
    with pytest.raises(Impossible, match=r"first token after 4,000 new ones takes 0\.8"):
        SMALL.check(Slo(0.1, 0.3), 4000)
    SMALL.check(SLO, 40)


def test_an_iteration_of_prompts_fits_between_two_tokens() -> None:
    assert budget_within(COST, Slo(10.0, 1.0), 2048, 64) == 2048
    assert budget_within(COST, Slo(0.08, 1.0), 2048, 64) == 256
    assert budget_within(COST, Slo(0.012, 1.0), 2048, 64) == 64


def test_the_rate_that_was_found_is_carried_and_more_is_not(carried: tuple[float, Row]) -> None:
    rate, row = carried
    assert not SLO.violations(row)
    assert not SLO.violations(trial(rate))
    assert SLO.violations(trial(1.3 * rate))
    assert row["turns_per_second"] == pytest.approx(rate * 5.0, rel=0.3)
    assert row["history_tokens"] > 0


def test_a_tighter_limit_never_needs_fewer_replicas(carried: tuple[float, Row]) -> None:
    needed = []
    for slo in (Slo(0.2, 2.0), SLO, Slo(0.08, 0.06), Slo(0.056, 0.06)):
        rate = carried[0] if slo is SLO else capacity(trial, slo, carried[0])[0]
        needed.append(needed_with_affinity(rate, 20.0).num_replicas)
    assert needed == sorted(needed)
    assert needed[0] < needed[-1]


def test_host_memory_is_bought_as_long_as_it_brings_something() -> None:
    lines: list[str] = []
    tried = host_memories(SMALL, LOAD, SLO, 0.8, 30_000, lines.append)
    assert [each.host_tokens for each in tried] == [0, 8000, 16_000, 30_000][: len(tried)]
    assert [each.rate for each in tried] == sorted(each.rate for each in tried)
    assert tried[-1].rate > 1.1 * tried[0].rate
    assert tried[0].row["host_share"] == 0.0 < tried[-1].row["host_share"]
    assert any("carried" in line for line in lines)
    assert any("P99 between tokens 0." in line or "median first token" in line for line in lines)
    rates = {0: 1.0, 10: 1.95, 20: 2.0, 40: 2.02}
    assert recommended([HostMemory(*each, {}) for each in rates.items()]).host_tokens == 10
