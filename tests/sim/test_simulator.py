"""Traces run through the real engine: what takes how long, and what is still in memory."""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from pensieve.cli.main import main
from pensieve.core.cache import CacheConfig
from pensieve.core.iteration import Iteration, Slice, SwapIn, SwapOut, TurnStart
from pensieve.core.policies.protocol import EndedTurn
from pensieve.core.policies.registry import POLICIES, policy_named
from pensieve.core.sampling import Sampling
from pensieve.core.scheduler import SchedulerConfig
from pensieve.sim import report
from pensieve.sim.clairvoyant import ClairvoyantPolicy
from pensieve.sim.clock import VirtualClock
from pensieve.sim.cost import HARDWARE, MODELS, CostModel, instant
from pensieve.sim.executor import PHASES, ModelledExecutor
from pensieve.sim.simulator import Counts, Simulator
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import HABITS, drawn

SLOW = CostModel(0.001, 0.01, 0.0, 0.0, 0.0, 10, 1000, 1e6, "made up")  # a token a millisecond


def simulator(
    cost: CostModel | None = None,
    policy: str = "lru",
    device_tokens: int = 3200,
    host_tokens: int = 0,
    *,
    budget: int = 512,
    **options: Any,
) -> Simulator:
    free, recompute = instant(32)
    return Simulator(
        cost or free,
        policy_named(policy, recompute, 32),
        CacheConfig(device_tokens // 32, host_tokens // 32),
        SchedulerConfig(budget, 16),
        **options,
    )


def run_trace(*arrivals: Arrival, **options: object) -> Counts:
    one = simulator(**options)  # type: ignore[arg-type]
    counts = one.run(arrivals)
    one.scheduler.check(one.clock.now())
    assert not one.scheduler.running
    return counts


def test_a_turn_takes_what_its_iterations_take() -> None:
    """Prefill of 100 tokens in 0.1 s, then four iterations that read the weights in 0.01 s each."""
    one = simulator(SLOW, keep_gaps=True)
    counts = one.run([Arrival("a", 5.0, 100, 5)])
    assert one.clock.now() == pytest.approx(5.0 + 0.1 + 4 * 0.01)
    assert (counts.first_tokens.count, counts.first_tokens.total) == (1, pytest.approx(0.1))
    assert (counts.latencies.count, counts.latencies.total) == (1, pytest.approx(0.14 / 5))
    assert (counts.gaps.count, counts.gaps.total) == (4, pytest.approx(4 * 0.01))
    assert counts.gaps.quantile(0.99) == pytest.approx(0.01, rel=0.003)
    assert (counts.turns, counts.input_tokens, counts.output_tokens) == (1, 100, 5)


def test_a_message_waits_for_the_iteration_that_runs_when_it_comes() -> None:
    """Half of 0.1 s is left of it, and 50 tokens take 0.05 s."""
    counts = simulator(SLOW).run([Arrival("a", 0.0, 100, 1), Arrival("b", 0.05, 50, 1)])
    assert counts.first_tokens.total == pytest.approx(0.1 + 0.05 + 0.05)
    assert counts.latencies.total == pytest.approx(0.1 + 0.05 + 0.05)


def test_a_later_turn_waits_for_the_reply_and_finds_its_history() -> None:
    arrivals = (Arrival("a", 0.0, 100, 5), Arrival("a", 0.01, 10, 2), Arrival("a", None, 7, 2, 3.0))
    one = simulator(SLOW)
    counts = one.run(arrivals)
    assert counts.turns == 3
    assert counts.history_tokens == 105 + 117
    assert counts.device_tokens == 104 + 116, "all but the last token of each reply"
    assert counts.recomputed_tokens == 0
    ends = 0.1 + 4 * 0.01 + 0.011 + 0.01
    assert one.clock.now() == pytest.approx(ends + 3.0 + 0.01 + 0.01)


def test_what_was_evicted_is_computed_again_and_costs_more_the_longer_its_context_is() -> None:
    first, second = Arrival("a", 0.0, 1600, 1), Arrival("b", 10.0, 2880, 1)
    counts = run_trace(first, second, Arrival("a", 20.0, 1, 1))
    assert counts.history_tokens == 1601
    assert counts.recomputed_tokens == 1280, "40 of its 50 chunks made room, the leading ones"
    assert counts.recompute_cost == pytest.approx(1280 / 32 * (1 + 640 / 32_000), rel=0.01)


def test_the_host_tier_brings_it_back_instead() -> None:
    first, second = Arrival("a", 0.0, 1600, 1), Arrival("b", 10.0, 2880, 1)
    counts = run_trace(first, second, Arrival("a", 20.0, 1, 1), host_tokens=6400)
    assert counts.recomputed_tokens == 0
    assert counts.host_tokens > 0
    assert counts.recompute_cost == 0.0


def a_prompt(num_tokens: int) -> tuple[TurnStart, Slice]:
    """A turn without history, and all of its prompt."""
    tokens = array("I", bytes(4 * num_tokens))
    return TurnStart(1, tokens, Sampling()), Slice(1, 0, num_tokens, tokens, array("i"), True)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (100, 1.0 + 0.1 / 10),  # computing takes longer: it waits for the first layer only
        (5000, 5.0 + 1.0 / 10),  # copying does: the last layer computes when it is there
    ],
)
def test_a_swap_in_hides_behind_the_compute_but_for_a_layer(tokens: int, ends: float) -> None:
    """A thousand new tokens take a second; a thousand of the history take one on this link."""
    clock = VirtualClock()
    executor = ModelledExecutor(SLOW, clock)
    start, prompt = a_prompt(1000)
    ins = (SwapIn(5, 0, 0, tokens),)
    executor.launch(Iteration(1, (prompt,), (), ins, started=(start,)))
    outcome = executor.collect()
    assert clock.now() == pytest.approx(ends)
    assert outcome.finished_copies == (5,)
    assert [token.turn_id for token in outcome.samples] == [1]


def test_a_direction_is_busy_until_its_last_copy_and_the_other_is_not() -> None:
    clock = VirtualClock()
    executor = ModelledExecutor(SLOW, clock)
    executor.launch(Iteration(1, (), (), (), (SwapOut(1, 0, 0, 1000),)))
    assert (executor.collect().finished_copies, clock.now()) == ((1,), 1.0)
    executor.launch(Iteration(2, (), (), (), (SwapOut(2, 0, 0, 3000), SwapOut(3, 1, 1, 1000))))
    start, prompt = a_prompt(100)
    assert (executor.collect().finished_copies, clock.now()) == ((2, 3), 5.0)
    executor.launch(Iteration(3, (), (), (), (SwapOut(4, 0, 0, 2000),)))
    assert executor.collect().finished_copies == (4,)
    executor.launch(Iteration(4, (prompt,), (), (SwapIn(5, 0, 0, 50),), started=(start,)))
    assert executor.collect().finished_copies == (5,)
    assert clock.now() == pytest.approx(7.0 + 0.1 + 0.05 / 10)


def test_forks_and_cuts_keep_what_they_share() -> None:
    counts = run_trace(
        Arrival("a", 0.0, 320, 8),
        Arrival("b", 1.0, 10, 1, 0.0, 328, "a"),
        Arrival("a", 2.0, 10, 1, 0.0, 200),
    )
    assert counts.recomputed_tokens == 0
    assert counts.history_tokens == 328 + 200


def test_a_turn_that_is_too_large_is_refused_and_the_next_goes_on() -> None:
    counts = run_trace(Arrival("a", 0.0, 5000, 1), Arrival("a", 1.0, 10, 1))
    assert (counts.refused, counts.turns) == (1, 1)


def test_what_comes_before_is_simulated_and_not_counted() -> None:
    arrivals = [Arrival("a", 0.0, 100, 5), Arrival("b", 50.0, 100, 5), Arrival("a", 60.0, 10, 5)]
    counts = run_trace(*arrivals, count_from=30.0)
    assert (counts.turns, counts.history_tokens, counts.input_tokens) == (2, 105, 110)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host_tokens", [0, 20_000])
def test_a_crowd_under_pressure_loses_nothing(policy: str, host_tokens: int) -> None:
    """Every turn ends, every history is found or computed again, and the cache's invariants hold."""
    arrivals = list(drawn(HABITS["sharegpt"], 0.3, 300.0, 3, reaction_seconds=20.0))
    one = simulator(
        CostModel.of(MODELS["llama3-8b"], HARDWARE["a100-80gb"]),
        policy,
        device_tokens=12_800,
        host_tokens=host_tokens,
    )
    counts = one.run(arrivals)
    one.scheduler.check(one.clock.now())
    assert counts.turns + counts.refused == len(arrivals)
    assert counts.history_tokens > 10 * counts.input_tokens / 2
    known = counts.device_tokens + counts.host_tokens + counts.recomputed_tokens
    with_history = counts.history_tokens - known
    assert 0 <= with_history <= counts.turns, "the last token of a log is not yet computed"
    assert (counts.host_tokens > 0) == (host_tokens > 0)
    assert counts.recomputed_tokens > 0


def test_the_same_trace_gives_the_same_figures() -> None:
    arrivals = list(drawn(HABITS["sharegpt"], 0.5, 100.0, 5, reaction_seconds=10.0))
    cost = CostModel.of(MODELS["mistral-7b"], HARDWARE["h200"])
    one, other = (simulator(cost, "return", 6400, 6400) for _ in range(2))
    assert one.run(arrivals) == other.run(arrivals)


def test_published_shapes() -> None:
    assert MODELS["llama3-8b"].kv_bytes_per_token == 131_072
    assert MODELS["opt-13b"].kv_bytes_per_token == 819_200
    assert MODELS["llama2-70b"].kv_bytes_per_token == 327_680


# -- the command --


def test_the_command_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"conversation": name, "at": at, "input_tokens": 1500, "output_tokens": 3}
        for at in range(0, 60, 10)
        for name in "abc"
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)) + "\nbroken\n")
    given = ["simulate", str(trace), "--hardware", "instant", "--device-tokens", "20k"]
    assert main([*given, "--host-tokens", "0", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert [row["policy"] for row in result["rows"]] == ["lru", "value", "return"]
    assert len({row["history_tokens"] for row in result["rows"]}) == 1
    assert result["problems"] == 1
    assert "line 19 (" in err
    assert main([*given, "--policy", "lru"]) == 0
    assert "recomputed" in capsys.readouterr().out


def test_the_command_draws_and_explains(capsys: pytest.CaptureFixture[str]) -> None:
    drawn_ones = ["--workload", "sharegpt", "--rate", "0.5", "--seconds", "20", "--reaction", "5"]
    assert main(["simulate", *drawn_ones, "--model", "qwen2-7b", "--policy", "value"]) == 0
    out, err = capsys.readouterr()
    assert "qwen2-7b on 1 x h200" in err
    assert "P90 ms/token" in out
    for wrong, text in (
        (["--policy", "best"], "none of lru, value, return"),
        (["--workload", "sharegpt", "x.jsonl"], "not both"),
        ([], "name files"),
        (["missing.jsonl"], "cannot read missing.jsonl"),
        (["--workload", "sharegpt", "--rate", "0"], "above 0"),
    ):
        assert main(["simulate", *wrong]) in (2, 3)
        assert text in capsys.readouterr().err


# -- baselines --


def test_separate_phases_read_the_weights_twice_and_decodes_wait_for_the_prompt() -> None:
    """Prompt of 100 tokens 0.1 s, a pass of decodes 0.01 s: together 0.101 s, apart 0.11 s."""
    arrivals = [Arrival("a", 0.0, 100, 5), Arrival("b", 0.11, 100, 1)]
    unified, separate = (simulator(SLOW, keep_gaps=True, phases=each) for each in PHASES)
    gaps = unified.run(arrivals).gaps
    assert gaps.total == pytest.approx(3 * 0.01 + 0.101)
    gaps = separate.run(arrivals).gaps
    assert gaps.total == pytest.approx(3 * 0.01 + 0.11)
    assert gaps.quantile(0.99) == pytest.approx(0.11, rel=0.003)
    assert separate.clock.now() - unified.clock.now() == pytest.approx(0.009)


def test_whole_prompts_first_stall_whoever_generates() -> None:
    """A prompt of 2000 tokens in slices of 100, or in one of two seconds."""
    arrivals = [Arrival("a", 0.0, 100, 30), Arrival("b", 0.11, 2000, 1)]
    longest = []
    for budget, phases in ((101, "unified"), (1_000_000, "separate")):
        one = simulator(SLOW, budget=budget, keep_gaps=True, phases=phases)
        longest.append(one.run(arrivals).gaps.quantile(0.999))
    assert longest[0] == pytest.approx(0.101, rel=0.003)
    assert longest[1] == pytest.approx(2.01, rel=0.003)


def test_a_turn_computed_again_is_no_decode() -> None:
    """One token of a hole is work of a prompt, although it is one token."""
    clock = VirtualClock()
    executor = ModelledExecutor(SLOW, clock, phases="separate")
    start, prompt = a_prompt(40)
    hole = prompt._replace(start=3, stop=4, needs_token=False)
    decode = prompt._replace(start=40, stop=41)
    executor.launch(Iteration(1, (hole, decode), started=(start,)))
    executor.collect()
    assert clock.now() == pytest.approx(0.02)


def test_without_state_every_turn_computes_its_history_again() -> None:
    arrivals = [
        Arrival("a", 0.0, 100, 5),
        Arrival("a", None, 10, 5, 3.0),
        Arrival("a", None, 10, 5, 3.0),
        Arrival("b", 30.0, 10, 5, 0.0, 105, "a"),
    ]
    one = simulator(SLOW, stateless=True)
    counts = one.run(arrivals)
    one.scheduler.check(one.clock.now())
    assert counts.history_tokens == 105 + 120 + 105
    assert counts.recomputed_tokens == 104 + 119 + 104, "all but the last token, which is new"
    assert counts.device_tokens == counts.host_tokens == 0
    assert one.scheduler.cache.device.num_empty == one.scheduler.cache.device.num_pages
    second_prompt = counts.first_tokens.total - 0.1 - 0.13 - 0.115
    assert second_prompt == pytest.approx(0.115), "history and message in the same batch"


def test_the_clock_may_stop_while_the_load_goes_on() -> None:
    one = simulator(SLOW, until=0.125)
    counts = one.run([Arrival("a", 0.0, 100, 50), Arrival("b", 7.0, 100, 5)])
    assert (counts.turns, counts.delivered_tokens) == (0, 4)
    assert one.clock.now() == pytest.approx(0.13), "the iteration that was under way ended"
    assert counts.seconds == 0.125
    idle = simulator(SLOW, until=5.0)
    assert idle.run([Arrival("b", 7.0, 100, 5)]).turns == 0
    assert idle.clock.now() == 5.0
    early = simulator(SLOW, until=5.0, count_from=1.0)
    assert early.run([Arrival("a", 1.0, 100, 5), Arrival("b", 7.0, 100, 5)]).seconds == 4.0, (
        "a conversation that is idle is idle in it"
    )


def test_nothing_found_is_no_hit_and_no_history_is_neither() -> None:
    assert report.figures("lru", Counts(recomputed_tokens=10))["hit_rate"] == 0.0
    assert report.figures("lru", Counts())["hit_rate"] is None


# -- sweeps and plots --


def test_sweeps_and_their_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept = ["--rate", "0.5,2", "--host-tokens", "0,50k", "--device-tokens", "10k"]
    given = ["--workload", "sharegpt", "--seconds", "40", "--reaction", "5", "--policy", "value"]
    folder = tmp_path / "drawn" / "here"
    plotted = ["--plot", str(folder), "--json"]
    assert main(["simulate", *given, *swept, "--model", "opt-13b", *plotted]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)["rows"]
    places = [(row["rate"], row["host_size"]) for row in rows]
    assert places == [(0.5, 0), (0.5, 50_000), (2.0, 0), (2.0, 50_000)]
    assert all(row["device_size"] == 10_000 and row["seconds"] <= 40.1 for row in rows)
    assert rows[0]["series"]["tokens"]
    assert "4 of 4, value" in err
    names = {path.name for path in folder.iterdir()}
    assert {"latency.png", "hits-host.png", "tiers-01-value.png"} <= names
    assert len(names) == 2 * 4 + 2
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())
    assert main(["simulate", *given, *swept]) == 0
    assert "host size" in capsys.readouterr().out


def test_tiers_are_as_large_as_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["simulate", "--workload", "sharegpt", "--seconds", "5", "--json", "--stateless"]
    assert main([*given, "--model", "opt-13b", "--hardware", "a100-80gb"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["device_size"] == int((0.9 * 80e9 - 26e9) / 819_200)
    assert row["host_size"] == int(220e9 / 819_200)
    assert (row["stateless"], row["phases"]) == (True, "unified")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("--model opt-66b", "the weights of opt-66b are 132 GB"),
        ("--model opt-13b --hardware a100-80gb --device-tokens 80k", "room for 65,917"),
        ("--token-budget 100", "fewer than the 256 turns"),
        ("--devices 0", "1 or more"),
        ("--hardware instant --phases separate", "there is none"),
        ("--count-from 700", "nothing is counted"),
        ("--until 3 --count-from 5", "nothing is counted"),
    ],
)
def test_what_cannot_be_simulated_is_explained(
    wrong: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--workload", "sharegpt", *wrong.split()]) == 2
    assert text in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    given = ["simulate", "--workload", "sharegpt", "--plot", str(tmp_path)]
    assert main(given) == 3
    assert "install the extra `bench`" in capsys.readouterr().err


def test_who_knows_the_trace_keeps_what_is_used_next() -> None:
    """Room for three: lru gives up `a`, which returns; clairvoyance `b`, which does not."""
    arrivals = [Arrival(name, at, 900, 1) for name, at in (("a", 0.0), ("b", 100.0), ("c", 200.0))]
    arrivals += [Arrival("d", 300.0, 900, 1), Arrival("a", 400.0, 1, 1), Arrival("c", 500.0, 1, 1)]
    found = {}
    for policy in (policy_named("lru", instant(32)[1], 32), ClairvoyantPolicy(arrivals)):
        one = Simulator(
            instant(32)[0], policy, CacheConfig(110, 0, 32, 0.0, 0.0), SchedulerConfig(2000, 16)
        )
        found[policy.name] = one.run(arrivals).recomputed_tokens
        one.scheduler.check(one.clock.now())
    assert found["clairvoyant"] == 0 < found["lru"]


def test_clairvoyance_counts_forks_as_use_and_forgets_what_was_refused() -> None:
    arrivals = [
        Arrival("a", 0.0, 10, 1),
        Arrival("f", 50.0, 10, 1, 0.0, 11, "a"),
        Arrival("b", 5.0, 10, 1),
    ]
    policy = ClairvoyantPolicy([*arrivals, Arrival("b", 10.0, 10, 1), Arrival("b", 900.0, 10, 1)])
    policy.turn_began("a", 0.0)
    policy.turn_ended("a", EndedTurn(10, 1), 1.0)
    policy.turn_began("b", 5.0)
    policy.turn_ended("b", EndedTurn(10, 1), 6.0)
    assert policy._next == {"a": 50.0, "b": 10.0}
    policy.turn_ended("a", EndedTurn(10, 1), 60.0)
    policy.turn_ended("b", EndedTurn(10, 1), 700.0)
    assert policy._next == {"a": float("inf"), "b": 900.0}
