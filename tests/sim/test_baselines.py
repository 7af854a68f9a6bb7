"""Simulated baselines: separate phases, whole prompts first, and a stateless server."""

from __future__ import annotations

import pytest

from pensieve.core.iteration import Iteration
from pensieve.sim import report
from pensieve.sim.executor import PHASES, ModelledExecutor, VirtualClock
from pensieve.sim.simulator import SimulationFigures
from pensieve.sim.trace import Arrival
from tests.sim.world import SLOW, a_prompt, simulator


def test_separate_phases_read_the_weights_twice_and_decodes_wait_for_the_prompt() -> None:
    """A prompt of 100 tokens takes 0.1 s, and a pass of decodes 0.01 s. One joint pass takes 0.101 s."""
    arrivals = [Arrival("a", 0.0, 100, 5), Arrival("b", 0.11, 100, 1)]
    unified, separate = (simulator(SLOW, keep_gaps=True, phases=each) for each in PHASES)
    gaps = unified.run(arrivals).gaps
    assert gaps.total == pytest.approx(3 * 0.01 + 0.101)
    gaps = separate.run(arrivals).gaps
    assert gaps.total == pytest.approx(3 * 0.01 + 0.11)
    assert gaps.quantile(0.99) == pytest.approx(0.11, rel=0.003)
    assert separate.clock.now() - unified.clock.now() == pytest.approx(0.009)


def test_whole_prompts_first_stall_generating_turns() -> None:
    """A prompt of 2000 tokens is computed in slices of 100, or in one slice of two seconds."""
    arrivals = [Arrival("a", 0.0, 100, 30), Arrival("b", 0.11, 2000, 1)]
    longest = []
    for budget, phases in ((101, "unified"), (1_000_000, "separate")):
        one = simulator(SLOW, budget=budget, keep_gaps=True, phases=phases)
        longest.append(one.run(arrivals).gaps.quantile(0.999))
    assert longest[0] == pytest.approx(0.101, rel=0.003)
    assert longest[1] == pytest.approx(2.01, rel=0.003)


def test_a_recomputed_token_counts_as_prompt_and_not_as_decode() -> None:
    """A recomputed hole of one token counts as prompt work."""
    clock = VirtualClock()
    executor = ModelledExecutor(SLOW, clock, phases="separate")
    start, prompt = a_prompt(40)
    hole = prompt._replace(start=3, stop=4, needs_token=False)
    decode = prompt._replace(start=40, stop=41)
    executor.launch(Iteration(1, (hole, decode), started=(start,)))
    executor.collect()
    assert clock.now() == pytest.approx(0.02)


def test_a_stateless_server_recomputes_the_history_of_every_turn() -> None:
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


def test_a_simulation_can_stop_before_its_load_ends() -> None:
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


def test_the_hit_rate_is_zero_without_hits_and_none_without_history() -> None:
    assert report.figures("lru", SimulationFigures(recomputed_tokens=10))["hit_rate"] == 0.0
    assert report.figures("lru", SimulationFigures())["hit_rate"] is None
