"""What runs next: a single turn, and a token budget that all turns share."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from pensieve.core.cost import CostProfile
from pensieve.core.policies.lru import LruPolicy
from pensieve.core.policies.registry import policy_named
from pensieve.core.policies.value import ValuePolicy
from pensieve.core.scheduler import Scheduler
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import FinishReason, Turn, TurnState
from tests.core.world import ScriptedWorld, Shape, World

# -- one turn --


def test_a_first_turn_is_one_prefill_and_then_one_token_at_a_time() -> None:
    world = ScriptedWorld(8, 0)
    turn = world.ask("a", 6, 3)
    seen = []
    while turn.finish is None:
        world.next()
        seen += world.slices()
    assert seen == [("a", 0, 6), ("a", 6, 7), ("a", 7, 8)]
    assert turn.finish is FinishReason.LENGTH
    assert len(turn.tokens) == 9
    assert (turn.usage.output_tokens, turn.usage.new_tokens) == (3, 6)


def test_the_last_sampled_token_is_fed_with_the_next_turn_and_counts_as_new() -> None:
    world = ScriptedWorld(8, 0)
    world.say("a", 4, 3)
    turn = world.ask("a", 2)
    world.next()
    assert world.slices() == [("a", 6, 9)]
    usage = turn.usage
    assert (usage.device_tokens, usage.new_tokens, usage.recomputed_tokens) == (6, 3, 0)


def test_a_turn_that_reaches_length_max_ends() -> None:
    """A single turn may fill all but one page of the device. At the limit it ends with LENGTH."""
    world = ScriptedWorld(6, 0)
    turn = world.say("a", 1, 1000)
    assert len(turn.tokens) == world.cache.config.device_tokens_max == 20
    assert turn.finish is FinishReason.LENGTH
    assert turn.usage.suspensions == 0


def test_usage_times_are_on_the_engines_clock() -> None:
    world = ScriptedWorld(8, 0)
    turn = world.ask("a", 2, 2)
    world.wait(3.0)
    world.until_ended(turn)
    usage = turn.usage
    assert (usage.submitted_at, usage.admitted_at) == (1.0, 4.0)
    assert usage.first_token_at == pytest.approx(4.01)
    assert usage.finished_at == pytest.approx(4.02)


# -- one budget for all --


def test_a_long_prefill_is_cut_and_decodes_ride_along_in_every_iteration() -> None:
    world = ScriptedWorld(20, 0, batch_tokens_max=8)
    world.ask("a", 2, 10)
    world.next()
    world.ask("b", 20, 2)
    seen = []
    for _ in range(4):
        world.next()
        seen.append(world.slices())
    assert seen == [
        [("a", 2, 3), ("b", 0, 7)],
        [("a", 3, 4), ("b", 7, 14)],
        [("a", 4, 5), ("b", 14, 20)],
        [("a", 5, 6), ("b", 20, 21)],
    ]


def test_started_prefills_go_before_new_turns_and_new_turns_come_in_order() -> None:
    world = ScriptedWorld(20, 0, batch_tokens_max=8)
    for name in "abc":
        world.ask(name, 6, 2)
    seen = []
    for _ in range(3):
        world.next()
        seen.append(world.slices())
    assert seen == [
        [("a", 0, 6), ("b", 0, 2)],
        [("a", 6, 7), ("b", 2, 6), ("c", 0, 3)],
        [("b", 6, 7), ("c", 3, 6)],
    ]


def test_no_more_turns_run_than_the_budget_has_tokens() -> None:
    world = ScriptedWorld(20, 0, batch_tokens_max=2, turns_max=8)
    for name in "abc":
        world.ask(name, 1, 4)
    world.next()
    world.next()
    assert world.slices() == [("a", 1, 2), ("b", 1, 2)]
    assert [turn.conversation_id for turn in world.scheduler.queued] == ["c"]


def test_a_turn_that_fits_passes_a_larger_one_at_the_head_of_the_queue() -> None:
    world = ScriptedWorld(10, 0, batch_tokens_max=32)
    world.ask("a", 12, 8)
    world.next()
    large, small = world.ask("large", 24, 1), world.ask("small", 1, 1)
    world.next()
    assert world.slices() == [("a", 12, 13), ("small", 0, 1)]
    assert large.state is TurnState.QUEUED
    world.run_until_idle()
    assert large.finish is small.finish is FinishReason.LENGTH


# -- values --


def test_tokens_are_packed_into_four_bytes() -> None:
    """The pipe, the executor and the journal rely on this size."""
    assert array("I").itemsize == array("i").itemsize == 4


@pytest.mark.parametrize("wrong", [{"batch_tokens_max": 0}, {"turns_max": 0}])
def test_an_invalid_scheduler_configuration_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SchedulerConfig(**wrong)


def test_a_turn_cannot_skip_a_state() -> None:
    turn = Turn(1, "a", array("I", [1]), 0, 1, 2)
    with pytest.raises(AssertionError):
        turn.move_to(TurnState.SUSPENDED)
    turn.move_to(TurnState.RUNNING)
    turn.move_to(TurnState.FINISHED)
    with pytest.raises(AssertionError):
        turn.move_to(TurnState.RUNNING)


def test_eviction_policies_are_found_by_name() -> None:
    cost = CostProfile.measured_at({32: 1.0, 64: 2.0}, 1.0)
    assert isinstance(policy_named("lru", cost, 32), LruPolicy)
    assert isinstance(policy_named("value", cost, 32), ValuePolicy)
    with pytest.raises(ValueError, match="unknown eviction policy 'fifo'"):
        policy_named("fifo", cost, 32)


def test_without_turns_no_iteration_is_planned() -> None:
    assert World(0, Shape()).scheduler.plan(0.0) is None


def test_optional_features_are_created_only_when_enabled() -> None:
    world = ScriptedWorld(12, 12)
    world.say("a", 4, 2)
    scheduler = world.scheduler
    assert scheduler.streaming is None
    assert scheduler.micro_batches is None
    assert scheduler.background is None
    assert world.cache.streamed is None
    world.ask("job", 4, 2, background=True)
    assert scheduler.background is not None
    streams = ScriptedWorld(12, 12, staging_pages=4)
    assert streams.scheduler.streaming is not None
    assert streams.cache.streamed is not None
    pipeline = Scheduler(streams.cache, SchedulerConfig(stages=2))
    assert pipeline.micro_batches is not None
    assert pipeline.streaming is None
