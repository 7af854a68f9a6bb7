"""Traces that run through the real engine: how long everything takes, and what is still in memory."""

from __future__ import annotations

import pytest

from pensieve.core.iteration import Iteration, SwapIn, SwapOut
from pensieve.core.policies.registry import POLICIES
from pensieve.sim.cost import HARDWARE, MODELS, CostModel
from pensieve.sim.executor import ModelledExecutor, VirtualClock
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import WORKLOAD_PRESETS, drawn
from tests.sim.world import SLOW, a_prompt, run_trace, simulator


def test_a_turn_takes_the_time_of_its_iterations() -> None:
    """Prefill of 100 tokens takes 0.1 s. Then four iterations read the weights for 0.01 s each."""
    one = simulator(SLOW, keep_gaps=True)
    counts = one.run([Arrival("a", 5.0, 100, 5)])
    assert one.clock.now() == pytest.approx(5.0 + 0.1 + 4 * 0.01)
    assert (counts.first_tokens.count, counts.first_tokens.total) == pytest.approx((1, 0.1))
    assert (counts.latencies.count, counts.latencies.total) == pytest.approx((1, 0.14 / 5))
    assert (counts.gaps.count, counts.gaps.total) == pytest.approx((4, 4 * 0.01))
    assert counts.gaps.quantile(0.99) == pytest.approx(0.01, rel=0.003)
    assert (counts.turns, counts.input_tokens, counts.output_tokens) == (1, 100, 5)


def test_a_message_waits_for_the_running_iteration() -> None:
    """Half of the running iteration's 0.1 s is left, and the 50 tokens take 0.05 s."""
    counts = simulator(SLOW).run([Arrival("a", 0.0, 100, 1), Arrival("b", 0.05, 50, 1)])
    assert counts.first_tokens.total == pytest.approx(0.1 + 0.05 + 0.05)
    assert counts.latencies.total == pytest.approx(0.1 + 0.05 + 0.05)


def test_a_later_turn_waits_for_the_reply_and_reuses_its_history() -> None:
    arrivals = (Arrival("a", 0.0, 100, 5), Arrival("a", 0.01, 10, 2), Arrival("a", None, 7, 2, 3.0))
    one = simulator(SLOW)
    counts = one.run(arrivals)
    assert counts.turns == 3
    assert counts.history_tokens == 105 + 117
    assert counts.device_tokens == 104 + 116, "all but the last token of each reply"
    assert counts.recomputed_tokens == 0
    ends = 0.1 + 4 * 0.01 + 0.011 + 0.01
    assert one.clock.now() == pytest.approx(ends + 3.0 + 0.01 + 0.01)


def test_evicted_chunks_are_recomputed_at_a_cost_that_grows_with_the_context() -> None:
    first, second = Arrival("a", 0.0, 1600, 1), Arrival("b", 10.0, 2880, 1)
    counts = run_trace(first, second, Arrival("a", 20.0, 1, 1))
    assert counts.history_tokens == 1601
    assert counts.recomputed_tokens == 1280, "the first 40 of its 50 chunks were evicted"
    assert counts.recompute_cost == pytest.approx(1280 / 32 * (1 + 640 / 32_000), rel=0.01)


def test_with_a_host_tier_evicted_chunks_are_swapped_in_instead() -> None:
    first, second = Arrival("a", 0.0, 1600, 1), Arrival("b", 10.0, 2880, 1)
    counts = run_trace(first, second, Arrival("a", 20.0, 1, 1), host_tokens=6400)
    assert counts.recomputed_tokens == 0
    assert counts.host_tokens > 0
    assert counts.recompute_cost == 0.0


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (100, 1.0 + 0.1 / 10),  # computing takes longer: only the first layer waits for its copy
        (5000, 5.0 + 1.0 / 10),  # copying takes longer: the last layer computes after its copy
    ],
)
def test_a_swap_in_overlaps_with_compute_except_for_one_layer(tokens: int, ends: float) -> None:
    """On this machine, 1,000 new tokens take 1 s to compute, and 1,000 history tokens 1 s to copy."""
    clock = VirtualClock()
    executor = ModelledExecutor(SLOW, clock)
    start, prompt = a_prompt(1000)
    ins = (SwapIn(5, 0, 0, tokens),)
    executor.launch(Iteration(1, (prompt,), (), ins, started=(start,)))
    outcome = executor.collect()
    assert clock.now() == pytest.approx(ends)
    assert outcome.finished_copies == (5,)
    assert [token.attempt_id for token in outcome.samples] == [1]


def test_copies_in_one_direction_queue_and_do_not_delay_the_other() -> None:
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


def test_forks_and_cuts_keep_their_shared_history() -> None:
    counts = run_trace(
        Arrival("a", 0.0, 320, 8),
        Arrival("b", 1.0, 10, 1, 0.0, 328, "a"),
        Arrival("a", 2.0, 10, 1, 0.0, 200),
    )
    assert counts.recomputed_tokens == 0
    assert counts.history_tokens == 328 + 200


def test_a_turn_that_is_too_large_is_refused_and_the_next_one_runs() -> None:
    counts = run_trace(Arrival("a", 0.0, 5000, 1), Arrival("a", 1.0, 10, 1))
    assert (counts.refused, counts.turns) == (1, 1)


def test_turns_before_count_from_are_simulated_but_not_counted() -> None:
    arrivals = [Arrival("a", 0.0, 100, 5), Arrival("b", 50.0, 100, 5), Arrival("a", 60.0, 10, 5)]
    counts = run_trace(*arrivals, count_from=30.0)
    assert (counts.turns, counts.history_tokens, counts.input_tokens) == (2, 105, 110)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host_tokens", [0, 20_000])
def test_every_turn_of_many_conversations_ends_under_memory_pressure(
    policy: str, host_tokens: int
) -> None:
    """Every turn ends, every history is found or recomputed, and the cache's invariants hold."""
    arrivals = list(drawn(WORKLOAD_PRESETS["sharegpt"], 0.3, 300.0, 3, reaction_seconds=20.0))
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
    not_computed = counts.history_tokens - known
    assert 0 <= not_computed <= counts.turns, "the last token of a log is not yet computed"
    assert (counts.host_tokens > 0) == (host_tokens > 0)
    assert counts.recomputed_tokens > 0


def test_the_same_trace_gives_the_same_figures() -> None:
    arrivals = list(drawn(WORKLOAD_PRESETS["sharegpt"], 0.5, 100.0, 5, reaction_seconds=10.0))
    cost = CostModel.of(MODELS["mistral-7b"], HARDWARE["h200"])
    one, other = (simulator(cost, "return", 6400, 6400) for _ in range(2))
    assert one.run(arrivals) == other.run(arrivals)


def test_kv_bytes_per_token_match_the_published_models() -> None:
    assert MODELS["llama3-8b"].kv_bytes_per_token == 131_072
    assert MODELS["opt-13b"].kv_bytes_per_token == 819_200
    assert MODELS["llama2-70b"].kv_bytes_per_token == 327_680
