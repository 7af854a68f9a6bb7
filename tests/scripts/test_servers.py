"""Simulate one load with several schedules, and check the assumptions of the presets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pensieve.sim.cost import (
    HARDWARE,
    MODELS,
    CostModel,
    device_tokens_of,
    host_tokens_of,
)
from pensieve.sim.simulator import SimulationFigures
from scripts.measurements.servers import (
    MEAN_CONTEXT,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SYSTEMS,
    ServingSetting,
    requests_of,
    simulated_figures,
    streamed_run,
)

CARD = HARDWARE["rtx-4090"]
MODEL = MODELS["opt-6.7b"]
COST = CostModel.of(MODEL, CARD)
SETTING = ServingSetting(COST, device_tokens_of(MODEL, CARD), host_tokens_of(MODEL, CARD))


def test_the_presets_are_the_published_ones() -> None:
    """KV bytes per token: 2 x layers x heads x head size x two bytes."""
    assert {
        name: MODELS[name].kv_bytes_per_token for name in MODELS if name.startswith("opt-")
    } == {
        "opt-125m": 36_864,
        "opt-1.3b": 196_608,
        "opt-6.7b": 524_288,
        "opt-13b": 819_200,
        "opt-66b": 2_359_296,
    }
    assert HARDWARE["rtx-4090"].memory_bytes == 24e9
    assert replace(HARDWARE["rtx-4090"], devices=4).memory_bytes == 96e9
    assert replace(HARDWARE["a100-40gb"], devices=4).memory_bytes == 160e9


def test_first_rounds_have_the_published_means() -> None:
    drawn = list(requests_of(2.0, 20_000, 0))
    assert sum(each.input_tokens for each in drawn) / 20_000 == pytest.approx(
        PROMPT_TOKENS, rel=0.03
    )
    assert sum(each.output_tokens for each in drawn) / 20_000 == pytest.approx(
        OUTPUT_TOKENS, rel=0.03
    )
    running = sum((one.input_tokens + one.output_tokens / 2) * one.output_tokens for one in drawn)
    assert running / sum(one.output_tokens for one in drawn) == pytest.approx(
        MEAN_CONTEXT, rel=0.03
    )
    assert max(each.input_tokens + each.output_tokens for each in drawn) < SETTING.context_max
    assert drawn[-1].at == pytest.approx(20_000 / 2.0 / 0.97, rel=0.03)


def figures(counts: SimulationFigures) -> tuple[float | None, ...]:
    return (
        counts.turns,
        counts.output_tokens,
        counts.iterations,
        counts.latencies.total,
        counts.gaps.total,
        counts.gaps.quantile(1.0),
        counts.seconds,
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_seed_has_the_same_figures_again_and_everybody_is_served(system: str) -> None:
    runs = []
    for seed in (0, 0, 1):
        arrivals = list(requests_of(4.0, 60, seed))
        counts = simulated_figures(system, SETTING, iter(arrivals))
        assert counts.turns == 60
        assert counts.output_tokens == sum(each.output_tokens for each in arrivals)
        runs.append(figures(counts))
    assert runs[0] == runs[1] != runs[2]


def test_alone_a_request_takes_the_same_with_every_system() -> None:
    taken = []
    for system in SYSTEMS:
        counts = simulated_figures(system, SETTING, requests_of(0.0001, 5, 0))
        taken.append(counts.latencies.total / counts.latencies.count)
    assert taken == pytest.approx([taken[0]] * len(SYSTEMS), rel=1e-6)
    assert taken[0] == pytest.approx(SETTING.unloaded_seconds, rel=0.1)


def test_paged_kv_carries_more_than_reserved_kv() -> None:
    """At half the rate that memory allows, servers that reserve whole contexts already have a queue."""
    mean = {}
    for system in SYSTEMS:
        counts = simulated_figures(system, SETTING, requests_of(0.5 * SETTING.rate_held, 100, 0))
        mean[system] = counts.latencies.total / counts.latencies.count
    assert mean["resident"] < 2 * SETTING.unloaded_seconds
    assert mean["vllm"] < 2 * SETTING.unloaded_seconds
    assert mean["orca"] > 4 * SETTING.unloaded_seconds
    assert mean["fastserve"] > 3 * SETTING.unloaded_seconds


def test_what_memory_carries_is_little_work() -> None:
    assert SETTING.turns_held == 15_640 // 465 == 33
    assert replace(SETTING, turns_max=10).turns_held == 10


def test_streaming_pays_where_the_link_is_as_fast_as_the_paper_takes_it_to_be() -> None:
    """With that link, copying takes as long as attending. By the data sheet it takes 24 times as long."""
    link = COST.kv_bytes_per_token / COST.attention_seconds_per_key
    as_assumed = replace(SETTING, cost=replace(COST, link_bytes_per_second=link))
    rate = 2.5 * SETTING.rate_held
    delivered: dict[tuple[str, str], float] = {}
    latency: dict[tuple[str, str], float] = {}
    for system in ("resident", "streamed"):
        for name, setting in (("data sheet", SETTING), ("as assumed", as_assumed)):
            counts = simulated_figures(system, setting, requests_of(rate, 200, 0))
            delivered[system, name] = counts.output_tokens / counts.seconds
            latency[system, name] = counts.latencies.total / counts.latencies.count
    assert delivered["streamed", "as assumed"] > 1.15 * delivered["resident", "as assumed"]
    assert latency["streamed", "as assumed"] < 0.5 * latency["resident", "as assumed"]
    # With the data sheet's link, turns are not streamed. But the arenas take a tenth of the device tier.
    assert delivered["streamed", "data sheet"] > 0.9 * delivered["resident", "data sheet"]


def test_without_copies_the_link_makes_no_difference() -> None:
    """So the load is simulated only once."""
    slow = replace(SETTING, cost=replace(COST, link_bytes_per_second=1e6))
    few, copied = streamed_run(SETTING, requests_of(1e6, 10, 0))
    assert not copied
    assert figures(few) == figures(streamed_run(slow, requests_of(1e6, 10, 0))[0])
    assert streamed_run(SETTING, requests_of(1e6, 60, 0))[1]
