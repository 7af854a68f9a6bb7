"""A turn that must give up its pages resumes first, and its reply is the same."""

from __future__ import annotations

from pensieve.core.policies.return_policy import ReturnPolicy
from pensieve.core.policies.shadow_cache import Order
from pensieve.core.turn import FinishReason, Turn, TurnState
from tests.core.world import ScriptedWorld


def crowded(host_pages: int) -> tuple[ScriptedWorld, Turn, Turn, Turn]:
    """Return a world of 6 pages, two turns of 5 pages each, and a waiting turn of 4 pages."""
    world = ScriptedWorld(6, host_pages, prompt_max=1)
    a, b = world.ask("a", 4, 15), world.ask("b", 4, 15)
    world.next()
    return world, a, b, world.ask("c", 13, 1)


def test_the_latest_turn_is_suspended_and_resumes_ahead_of_the_queue() -> None:
    world, a, b, c = crowded(host_pages=20)
    ended: list[Turn] = []
    while len(ended) < 3:
        world.next()
        ended += [turn for turn in (a, b, c) if turn.finish and turn not in ended]
        if c.state is TurnState.RUNNING:
            assert b.state is TurnState.FINISHED
    assert ended == [a, b, c]
    assert (a.usage.suspensions, c.usage.suspensions) == (0, 0)
    assert b.usage.suspensions == world.scheduler.counters.suspensions == 1
    assert world.scheduler.counters.resumptions == 1


def test_suspension_recomputes_no_position_that_is_still_held() -> None:
    """The host has room for everything, so each position of `a`, `b` and `c` is computed once."""
    world, a, b, c = crowded(host_pages=20)
    world.run_until_idle()
    assert b.usage.suspensions == 1
    assert world.cache.counters.swapped_in >= 1
    positions = sum(len(turn.tokens) - 1 for turn in (a, b, c))
    assert world.scheduler.counters.tokens == positions == 18 + 18 + 13
    assert world.scheduler.counters.recomputed_tokens == 0


def test_a_suspended_turn_recomputes_lost_chunks_and_its_reply_is_the_same() -> None:
    world, a, b, c = crowded(host_pages=0)
    world.run_until_idle()
    assert b.usage.suspensions >= 1
    num_recomputed = world.scheduler.counters.recomputed_tokens
    positions = sum(len(turn.tokens) - 1 for turn in (a, b, c))
    assert num_recomputed > 0
    assert world.scheduler.counters.tokens == positions + num_recomputed


def test_a_cancelled_suspended_turn_keeps_its_delivered_tokens() -> None:
    world, _, b, _ = crowded(host_pages=20)
    while b.state is not TurnState.SUSPENDED:
        world.next()
    world.cancel_at(b, 6)
    assert b.finish is FinishReason.CANCELLED
    assert world.cache.conversations["b"].num_tokens == 6
    world.run_until_idle()


def test_a_turn_waits_for_swap_outs_instead_of_being_suspended() -> None:
    world = ScriptedWorld(6, 20)
    world.say("old", 8)  # dirty: it must be copied to the host when its pages are needed
    a = world.ask("a", 4, 16)
    world.run_until_idle()
    assert a.usage.suspensions == 0
    assert world.where("old") in ("hc", "ch")  # depends on which copy finished first


def test_a_suspended_turn_has_the_highest_value_factor_in_a_scan() -> None:
    world = ScriptedWorld(6, 20, prompt_max=1, policy="return")
    policy = world.cache.policy
    assert isinstance(policy, ReturnPolicy)
    world.say("x", 2)  # so that "b" does not have the first serial number
    policy.trial.followed = Order.RANDOM
    world.say("b", 2)
    assert world.cache.conversations["b"].value_factor < 1.0
    a, b = world.ask("a", 4, 15), world.ask("b", 2, 12)
    while b.state is not TurnState.SUSPENDED:
        policy.trial.followed = Order.RANDOM
        world.next()
    assert a.state is TurnState.RUNNING
    assert world.cache.conversations["b"].value_factor == 1.0
    world.run_until_idle()
