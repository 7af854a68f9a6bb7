"""Capacity: what a replica carries, what host memory brings, how turns are routed to replicas."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.cli.simulate_plan import text
from pensieve.core.cache import CacheConfig
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler import SchedulerConfig
from pensieve.sim.cost import CostModel, instant
from pensieve.sim.plan import capacity as capacity_module
from pensieve.sim.plan.capacity import (
    RATE_MOST,
    HostMemory,
    budget_within,
    capacity,
    first_guess,
    host_memories,
    recommended,
)
from pensieve.sim.plan.fleet import (
    AFFINITY,
    RANDOM,
    RandomRouting,
    fleet,
    needed_at_random,
    needed_with_affinity,
)
from pensieve.sim.plan.load import Drawn, Recorded
from pensieve.sim.plan.replica import Impossible, Replica, Row, Slo, run_replica
from pensieve.sim.plan.routing import (
    Families,
    at_random_of_few,
    at_random_of_many,
    fullest_over_mean,
    replica_of,
    with_affinity,
    with_times,
)
from pensieve.sim.simulator import Counts, Simulator
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import Habits

# A machine so slow that minutes of it are simulated in a moment.
COST = CostModel(0.0002, 0.01, 1e-8, 2.5e-7, 0.0005, 20, 400_000, 20e9, "made up")
SMALL = Replica(COST, 16_000, 0, "value", 256, 64)
CHAT = Habits(5.0, 150.0, 20.0, 10.0, 8000)  # short replies are simulated faster
LOAD = Drawn(CHAT, seconds=30.0)
SLO = Slo(0.08, 0.3)


@pytest.fixture(scope="module")
def carried() -> tuple[float, Row]:
    return capacity(trial, SLO, first_guess(SMALL, LOAD.typical))


@cache
def trial(rate: float, replica: Replica = SMALL) -> Row:
    return run_replica(replica, LOAD.arrivals(rate), LOAD.window(rate))


# -- routing --


def test_another_replica_takes_its_share_of_names_and_moves_no_others() -> None:
    names = [f"conversation {i}" for i in range(4000)]
    before, after = ([replica_of(name, count) for name in names] for count in (7, 8))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {7}
    assert len(moved) == pytest.approx(len(names) / 8, rel=0.15)
    assert min(Counter(before).values()) > 0.85 * len(names) / 7


def test_a_fork_of_a_fork_stays_with_the_first() -> None:
    families = Families()
    arrivals = [
        Arrival("a", 0.0, 1, 1),
        Arrival("b", 1.0, 1, 1, 0.0, 1, "a"),
        Arrival("c", 2.0, 1, 1, 0.0, 1, "b"),
    ]
    assert [families.root(arrival) for arrival in arrivals] == ["a", "a", "a"]
    for count in (2, 5):
        served = [list(with_affinity(arrivals, index, count)) for index in range(count)]
        assert sorted(map(len, served)) == [0] * (count - 1) + [3]


def test_times_and_logs_of_turns_that_were_not_simulated() -> None:
    arrivals = [
        Arrival("a", 0.0, 100, 10),
        Arrival("a", None, 5, 10, 3.0),
        Arrival("b", 1.0, 7, 1),
        Arrival("a", 9.0, 5, 1, 0.0, 60),
        Arrival("c", 9.5, 5, 1, 0.0, 66, "a"),
    ]
    found = [(v.conversation, v.at, v.log_tokens) for v in with_times(arrivals, 0.1)]
    assert found == [("a", 0.0, 0), ("b", 1.0, 0), ("a", 4.0, 110), ("a", 9.0, 60), ("c", 9.5, 66)]


def test_every_turn_has_one_replica() -> None:
    arrivals = list(with_times(LOAD.arrivals(0.5), 0.05))
    served = [list(at_random_of_few(arrivals, index, 3)) for index in range(3)]
    assert sum(map(len, served)) == len(arrivals)
    assert min(map(len, served)) > len(arrivals) / 4
    again = sorted(
        (arrival for part in served for arrival in part), key=lambda arrival: arrival.at or 0.0
    )
    assert [v.log_tokens for v in again] == [v.log_tokens for v in arrivals]


@pytest.mark.parametrize(("count", "met_again"), [(1, 1.0), (4, 0.25), (1000, 0.001)])
def test_one_of_many_serves_as_much_and_holds_little(count: int, met_again: float) -> None:
    arrivals = list(with_times(LOAD.arrivals(3.0), 0.05))
    served = list(at_random_of_many(arrivals, count))
    assert [v.at for v in served] == sorted(v.at for v in served if v.at is not None)
    assert len(served) == pytest.approx(len(arrivals), rel=0.08)
    if count == 1:
        assert [(v.at, v.log_tokens) for v in served] == [(v.at, v.log_tokens) for v in arrivals]
    met: set[str] = set()
    later = again = 0
    for arrival in served:
        if arrival.log_tokens:
            later += 1
            again += arrival.conversation in met
        met.add(arrival.conversation)
    if count > 1:  # of the turns before, each was here with probability 1 / count
        lengths = Counter(v.conversation for v in arrivals)
        mean = sum(n * (n - 1) / 2 for n in lengths.values()) / sum(n - 1 for n in lengths.values())
        assert again / later < 1.5 * (1 - (1 - met_again) ** mean) + 0.02
    else:
        assert again == later


def simulated(arrivals: list[Arrival]) -> Counts:
    free, recompute = instant(32)
    cache, scheduler = CacheConfig(400, 0), SchedulerConfig(512, 16)
    one = Simulator(free, policy_named("lru", recompute, 32), cache, scheduler)
    counts = one.run(arrivals)
    one.scheduler.check(one.clock.now())
    return counts


def test_what_another_replica_served_is_computed_again() -> None:
    counts = simulated([Arrival("a", 0.0, 100, 5), Arrival("a", 10.0, 7, 2, log_tokens=300)])
    assert counts.history_tokens == 300
    assert counts.device_tokens == 104
    assert counts.recomputed_tokens == 300 - 1 - 104


def test_what_another_replica_cut_is_not_taken_for_the_log() -> None:
    arrivals = [
        Arrival("a", 0.0, 100, 5),
        Arrival("a", 5.0, 10, 5, 0.0, 64),  # served elsewhere
        Arrival("a", 9.0, 200, 5),  # as well
        Arrival("a", 10.0, 7, 2),
    ]
    wheres = {tuple(routed_to(seed)): seed for seed in range(64)}
    served = list(at_random_of_few(with_times(arrivals, 0.0), 0, 2, wheres[(0, 1, 1, 0)]))
    assert [(v.history_tokens, v.log_tokens) for v in served] == [(None, 0), (64, 284)]
    counts = simulated(served)
    assert counts.device_tokens == 64
    assert counts.recomputed_tokens == 284 - 1 - 64


def routed_to(seed: int) -> Iterator[int]:
    import random

    draw = random.Random(seed)
    return (draw.randrange(2) for _ in range(4))


def test_the_fullest_replica_has_more_than_the_mean() -> None:
    assert fullest_over_mean(100.0, 1) == 1.0
    for each in (20.0, 500.0):
        assert fullest_over_mean(each, 50) == pytest.approx(1 + 2.33 / each**0.5, rel=0.12)
    assert fullest_over_mean(50.0, 1000) == pytest.approx(fullest_over_mean(50.0, 400), rel=0.1)


# -- loads --


def test_a_load_that_has_gone_on_for_long() -> None:
    """Every conversation is in progress that would be, and as many turns come at first as later."""
    arrivals = list(with_times(LOAD.arrivals(30.0), LOAD.seconds_per_token))
    free_until, counts, ends = LOAD.window(30.0)
    assert free_until < counts < ends
    assert ends - counts == 30.0
    times = [arrival.at or 0.0 for arrival in arrivals]
    assert times == sorted(times)
    width = (ends - free_until) / 3
    turns = Counter(int((at - free_until) // width) for at in times if free_until <= at < ends)
    assert turns[0] == pytest.approx(turns[2], rel=0.06)
    assert turns[0] == pytest.approx(30.0 * 5.0 * width, rel=0.1)
    in_progress = [arrival for arrival in arrivals if (arrival.at or 0.0) < free_until]
    assert all(arrival.output_tokens == 1 for arrival in in_progress)
    left = (CHAT.turns_mean - 1) / CHAT.turns_mean  # none is in progress before its first turn
    assert len(in_progress) == pytest.approx(left * LOAD.conversations_at_once(30.0), rel=0.1)
    assert len({arrival.conversation for arrival in in_progress}) == len(in_progress)


def test_a_trace_is_thinned_or_runs_several_times() -> None:
    arrivals = [
        Arrival(f"c{number}", 100.0 + number + 40.0 * turn, 100, 10)
        for turn in range(3)
        for number in range(200)
    ]
    arrivals.sort(key=lambda arrival: arrival.at or 0.0)
    trace = Recorded(arrivals)
    assert trace.rate == pytest.approx(200 / 279)
    assert trace.typical == (3.0, 100, 10)
    assert trace.window(1.0) == (0.0, 139.5, 279.0)
    assert Recorded(arrivals, 20.0).window(1e-3) == (0.0, 20.0, 40.0)
    assert [v.at for v in trace.arrivals(trace.rate)] == [(v.at or 0.0) - 100.0 for v in arrivals]
    half = list(trace.arrivals(trace.rate / 2))
    assert len({v.conversation for v in half}) == pytest.approx(100, rel=0.2)
    assert {v.conversation for v in trace.arrivals(trace.rate / 4)} < {v.conversation for v in half}
    assert all(count == 3 for count in Counter(v.conversation for v in half).values())
    more = list(trace.arrivals(2.5 * trace.rate))
    assert len(more) == 2 * len(arrivals) + len(half)
    assert [v.at for v in more] == sorted(v.at for v in more if v.at is not None)
    pauses = {
        name: [v.at or 0.0 for v in more if v.conversation == name] for name in ("c7", "c7+1")
    }
    assert pauses["c7"] == [7.0, 47.0, 87.0]
    assert pauses["c7+1"][2] - pauses["c7+1"][0] == pytest.approx(80.0)
    assert "2.50 copies" in trace.description(2.5 * trace.rate)
    with pytest.raises(ValueError, match="two times"):
        Recorded(arrivals[:1])


def test_copies_of_a_fork_are_forks_of_copies() -> None:
    arrivals = [
        Arrival("a", 0.0, 9, 9),
        Arrival("b", 50.0, 9, 9, 0.0, 18, "a"),
        Arrival("b", None, 9, 9, 1.0),
    ]
    trace = Recorded(arrivals)
    found = {(v.conversation, v.fork_of) for v in trace.arrivals(2 * trace.rate)}
    assert found == {("a", ""), ("b", ""), ("b", "a"), ("a+1", ""), ("b+1", "a+1"), ("b+1", "")}


# -- what a replica carries --


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
    with pytest.raises(Impossible, match="still: median first token 2000 ms"):
        capacity(lambda rate: row_of(0.0, 2.0), Slo(1.0, 1.0), 1.0)


def test_a_lone_turn_that_is_too_slow_is_refused_before_anything_is_simulated() -> None:
    with pytest.raises(Impossible, match=r"a token takes 10.5 ms even without other turns"):
        SMALL.check(Slo(0.01, 1.0), 40)
    with pytest.raises(Impossible, match="first token after 4,000 new ones takes 8"):
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
    assert any("ms" in line for line in lines)
    rates = {0: 1.0, 10: 1.95, 20: 2.0, 40: 2.02}
    assert recommended([HostMemory(*each, {}) for each in rates.items()]).host_tokens == 10


# -- several --


def test_affinity_recomputes_no_more_and_more_replicas_at_random_know_less() -> None:
    replica = replace(SMALL, host_tokens=30_000)
    shares = []
    for count in (2, 16):
        together, apart = (
            fleet(replica, LOAD, 0.6, count, routing, 0.03) for routing in (AFFINITY, RANDOM)
        )
        assert together["scaled"] == apart["scaled"] == (count > 4)
        assert together["recomputed_share"] <= apart["recomputed_share"]
        assert together["rate"] == pytest.approx(0.6 * count)
        shares.append(apart["recomputed_share"])
    assert shares == sorted(shares)
    assert shares[0] > 0.1
    assert shares[-1] > 0.6


def test_random_routing_needs_more_replicas(carried: tuple[float, Row]) -> None:
    replica = replace(SMALL, host_tokens=30_000)
    rate, row = capacity(lambda rate: trial(rate, replica), SLO, carried[0])
    pace = row["seconds_per_token"]

    carries = RandomRouting(replica, LOAD, SLO, rate, pace).carries
    together = needed_with_affinity(rate, 12.0)
    apart = needed_at_random(carries, rate, 12.0)
    assert apart is not None
    assert together.num_replicas * together.rate_each >= 12.0
    assert apart.num_replicas > together.num_replicas
    assert apart.num_replicas * apart.rate_each >= 12.0 * 0.96
    assert carries(1, rate) == rate


def test_one_replica_is_one_however_turns_are_routed() -> None:
    assert needed_with_affinity(5.0, 4.0).num_replicas == 1
    assert needed_at_random(lambda count, guess: guess, 5.0, 4.0) == (1, 5.0)
    assert needed_at_random(lambda count, guess: 0.0, 5.0, 40.0) is None
    assert needed_at_random(lambda count, guess: 5.0 / count, 5.0, 40.0) is None


# -- the command --


PLAN = [
    *("simulate", "--plan", "--workload", "sharegpt", "--reaction", "5", "--plan-seconds", "15"),
    *("--device-tokens", "6k", "--turns-max", "32", "--token-budget", "256"),
]


@pytest.fixture
def costs(tmp_path: Path) -> str:
    given = {"version": 1, "source": "made up", "cost": {**vars(COST)}}
    del given["cost"]["source"]
    (tmp_path / "costs.json").write_text(json.dumps(given))
    return str(tmp_path / "costs.json")


def test_the_command_plans(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--tbt-p99", "0.4", "--ttft-p50", "2", "--host-tokens", "12k", "--rate", "1"]
    assert main([*PLAN, *limits, "--cost", costs, "--replicas", "64", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert "costs: made up; 6,000 tokens of KV on the device; policy value" in err
    assert "a second: carried" in err
    assert result["slo"] == {
        "tbt_p99_seconds": 0.4,
        "ttft_p50_seconds": 2.0,
        "queue_p50_seconds": 2.0,
    }
    assert sum(row["recommended"] for row in result["host_memory"]) == 1
    assert (
        result["needed"]["affinity"]["num_replicas"] <= result["needed"]["random"]["num_replicas"]
    )
    assert {row["replicas"] for row in result["fleets"]} >= {64}
    for row in result["fleets"]:
        assert row["scaled"] == (row["replicas"] > 4)
    shown = "\n".join(text(result, LOAD))
    for count in (result["needed"]["affinity"]["num_replicas"], 64):
        assert re.search(rf"^ +{count} (replicas? with )?affinity", shown, re.MULTILINE)
    assert shown.count("scaled from one of them, thinned load") >= 2
    assert "1,000 replicas are not enough" in "\n".join(
        text({**result, "needed": {**result["needed"], "random": None}}, LOAD)
    )


def test_the_command_plans_for_a_trace(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {
            "conversation": f"c{i}",
            "at": 3.0 * i + 8.0 * turn,
            "input_tokens": 60,
            "output_tokens": 20,
        }
        for i in range(40)
        for turn in range(3)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "\n".join(json.dumps(each) for each in sorted(lines, key=lambda each: each["at"]))
    )  # type: ignore[arg-type, return-value]
    given = ["simulate", "--plan", str(trace), "--cost", costs, "--device-tokens", "6k"]
    assert (
        main(
            [
                *given,
                "--host-tokens",
                "0",
                "--ttft-p50",
                "0.1",
                "--plan-seconds",
                "8",
                "--replicas",
                "8",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "load: a trace of 0.3" in err
    assert "copies of the trace at once" in out
    assert "scaled from one of them, thinned load" in out
    assert "1 replica with affinity" in out


def test_costs_from_a_file_give_times_whatever_the_hardware(
    costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["simulate", "--workload", "sharegpt", "--seconds", "5", "--hardware", "instant"]
    separate = ["--phases", "separate", "--cost", costs, "--policy"]
    assert main([*given, *separate, "return"]) == 0
    assert "assumed: made up; return weighs copies against" in capsys.readouterr().err
    assert main([*given, *separate, "lru"]) == 0
    assert "weighs" not in capsys.readouterr().err
    assert main([*given, "--policy", "return"]) == 0
    assert "weighs" not in capsys.readouterr().err


def test_the_command_says_why_it_does_not_plan(
    costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong, why in (
        (["--cost", costs, "--tbt-p99", "0.01"], "a token takes 10.5 ms even without other turns"),
        (["--cost", costs, "--ttft-p50", "0.005"], "no load is low enough"),
        (["--cost", costs, "--tbt-p99", "0"], "above 0"),
        (["--cost", costs, "--rate", "1,2"], "one is planned for"),
        (["--cost", costs, "--policy", "lru,value"], "one is planned with"),
        (["--cost", costs, "--stateless"], "not for --plan"),
        (["--cost", costs, "--seconds", "60"], "are --plan-seconds"),
        (["--cost", costs, "--device-tokens", "6k,7k"], "one is planned with"),
        (["--hardware", "instant"], "nothing to plan"),
    ):
        assert main([*PLAN, *wrong]) == 2, wrong
        assert why in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*PLAN, "--replicas", "1001"])
    assert "1 to 1000" in capsys.readouterr().err
