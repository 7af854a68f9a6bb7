"""A turn that must give up its pages resumes first, and its reply is the same."""

from __future__ import annotations

from pensieve.core.policies.return_policy import ReturnPolicy
from pensieve.core.policies.shadow_cache import Order
from pensieve.core.turn import FinishReason, Turn, TurnState
from tests.core.world import Stage


def crowded(host_pages: int) -> tuple[Stage, Turn, Turn, Turn]:
    """Return a stage of 6 pages, two turns of 5 pages each, and a waiting turn of 4 pages."""
    stage = Stage(6, host_pages, prompt_max=1)
    a, b = stage.ask("a", 4, 15), stage.ask("b", 4, 15)
    stage.next()
    return stage, a, b, stage.ask("c", 13, 1)


def test_the_latest_turn_is_suspended_and_resumes_ahead_of_the_queue() -> None:
    stage, a, b, c = crowded(host_pages=20)
    ended: list[Turn] = []
    while len(ended) < 3:
        stage.next()
        ended += [turn for turn in (a, b, c) if turn.finish and turn not in ended]
        if c.state is TurnState.RUNNING:
            assert b.state is TurnState.FINISHED
    assert ended == [a, b, c]
    assert (a.usage.suspensions, c.usage.suspensions) == (0, 0)
    assert b.usage.suspensions == stage.scheduler.counters.suspensions == 1
    assert stage.scheduler.counters.resumptions == 1


def test_suspension_recomputes_no_position_that_is_still_held() -> None:
    """The host has room for everything, so each position of `a`, `b` and `c` is computed once."""
    stage, a, b, c = crowded(host_pages=20)
    stage.run_until_idle()
    assert b.usage.suspensions == 1
    assert stage.cache.counters.swapped_in >= 1
    positions = sum(len(turn.tokens) - 1 for turn in (a, b, c))
    assert stage.scheduler.counters.tokens == positions == 18 + 18 + 13
    assert stage.scheduler.counters.recomputed_tokens == 0


def test_a_suspended_turn_recomputes_lost_chunks_and_its_reply_is_the_same() -> None:
    stage, a, b, c = crowded(host_pages=0)
    stage.run_until_idle()
    assert b.usage.suspensions >= 1
    again = stage.scheduler.counters.recomputed_tokens
    positions = sum(len(turn.tokens) - 1 for turn in (a, b, c))
    assert again > 0
    assert stage.scheduler.counters.tokens == positions + again


def test_a_cancelled_suspended_turn_keeps_its_delivered_tokens() -> None:
    stage, _, b, _ = crowded(host_pages=20)
    while b.state is not TurnState.SUSPENDED:
        stage.next()
    stage.cancel_at(b, 6)
    assert b.finish is FinishReason.CANCELLED
    assert stage.cache.conversations["b"].num_tokens == 6
    stage.run_until_idle()


def test_a_turn_waits_for_swap_outs_instead_of_being_suspended() -> None:
    stage = Stage(6, 20)
    stage.say("old", 8)  # dirty: it must be copied to the host when its pages are needed
    a = stage.ask("a", 4, 16)
    stage.run_until_idle()
    assert a.usage.suspensions == 0
    assert stage.where("old") in ("hc", "ch")  # depends on which copy finished first


def test_a_suspended_turn_has_the_highest_value_factor_in_a_scan() -> None:
    stage = Stage(6, 20, prompt_max=1, policy="return")
    policy = stage.cache.policy
    assert isinstance(policy, ReturnPolicy)
    stage.say("x", 2)  # so that "b" does not have the first serial number
    policy.trial.followed = Order.RANDOM
    stage.say("b", 2)
    assert stage.cache.conversations["b"].value_factor < 1.0
    a, b = stage.ask("a", 4, 15), stage.ask("b", 2, 12)
    while b.state is not TurnState.SUSPENDED:
        policy.trial.followed = Order.RANDOM
        stage.next()
    assert a.state is TurnState.RUNNING
    assert stage.cache.conversations["b"].value_factor == 1.0
    stage.run_until_idle()
