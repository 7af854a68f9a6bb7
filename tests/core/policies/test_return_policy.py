"""The policy that learns which conversations return: what it learns, how fast, and what it forgets."""

from __future__ import annotations

import math
import random

import pytest

from pensieve.core.cost import CostProfile
from pensieve.core.policies.protocol import EndedTurn
from pensieve.core.policies.return_model import (
    EDGES,
    PRIOR_CERTAINTY,
    PRIOR_SHARE,
    PRIOR_WEIGHTS,
    ReturnModel,
    traits_of,
)
from pensieve.core.policies.return_policy import UNIT_VALUE_CLASS, ReturnPolicy
from pensieve.core.policies.shadow_cache import Order
from pensieve.core.prefix_tree import Branch, CachedConversation
from tests.core.world import ScriptedWorld

COST = CostProfile.analytic(10**9, 16, 8, 64)
MESSAGE = EndedTurn(1500, 250, 2000)


def policy(**cost: float) -> ReturnPolicy:
    return ReturnPolicy(
        CostProfile(COST.attention_seconds, COST.other_seconds, **cost),  # type: ignore[arg-type]
        32,
    )


def simulate(
    model: ReturnModel,
    now: float,
    seconds: float,
    returns: float,
    gap: float,
    ended: EndedTurn = MESSAGE,
) -> float:
    """Simulate one first turn per second. A fraction `returns` of the conversations returns after `gap`."""
    draw = random.Random(int(now))
    due: list[tuple[float, str]] = []
    end = now + seconds
    while now < end:
        now += 1.0
        name = f"{now}"
        model.turn_ended(name, ended, now)
        if draw.random() < returns:
            due.append((now + gap * draw.uniform(0.5, 1.5), name))
        due.sort()
        while due and due[0][0] <= now:
            model.turn_began(due.pop(0)[1], now)
    return now


def expected(model: ReturnModel, now: float, idle: float = 0.0) -> float:
    """Return the value of keeping a conversation that has just had a typical first turn."""
    return model.turn_ended("just now", MESSAGE, now) * model.worth(idle)


def branch_of(*holders: tuple[float, float]) -> Branch:
    """Return a branch with holders (idle since, ratio). The last holder was used most recently."""
    branch = Branch(None, 0, holders[-1][0], 3)
    for number, (since, ratio) in enumerate(holders):
        conversation = CachedConversation(f"c{number}", since)
        conversation.return_ratio = ratio
        branch.holders[conversation] = None
    return branch


def test_traits_encode_the_number_of_turns_sizes_and_hints() -> None:
    assert traits_of(1, MESSAGE) == (1.0, -math.log(2), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    often, message, *short_and_reply = traits_of(4, EndedTurn(1499, 250))[4:8]
    assert often == math.log(2)
    assert message == pytest.approx(-0.694, abs=1e-3)
    assert short_and_reply == [1, 0]
    assert traits_of(2, EndedTurn(0, 0))[5:8] == (-0.7, 1.0, -3.0), "an empty message and reply"
    assert traits_of(1, EndedTurn(1500, 250, 0, 120.0))[8] == 0.0
    assert traits_of(1, EndedTurn(1500, 250, 0, 12.0))[8] == pytest.approx(-math.log(10))
    assert traits_of(1, EndedTurn(1500, 250, 0, 1e9))[8] == 6.0
    assert all(len(traits_of(turns, MESSAGE)) == len(PRIOR_WEIGHTS) for turns in (1, 2, 9))


def test_the_return_model_starts_with_a_sensible_prior() -> None:
    model = ReturnModel()
    assert model.likelihood(1.0, 0.0) == pytest.approx(PRIOR_SHARE, abs=0.01)
    assert model.turn_ended("often", MESSAGE, 0.0) == model.turn_ended("often", MESSAGE, 1.0) == 1.0
    ratios = [
        model.turn_ended(f"{away}", EndedTurn(1500, 250, 0, away), 3.0)
        for away in (10, 100, 1000, 1e6)
    ]
    assert ratios == sorted(ratios, reverse=True), (
        "a longer announced absence must give a lower ratio"
    )
    assert model.worth(0.0) >= model.worth(60.0) > 3 * model.worth(600.0) > 0


def test_worth_never_rises_with_idle_time() -> None:
    model = ReturnModel()
    simulate(model, 0.0, 900.0, 0.5, 200.0)
    worths = [model.worth(edge) for edge in (0.0, *EDGES)]
    assert worths == sorted(worths, reverse=True)
    assert worths[-1] > 0


def test_the_return_model_learns_how_soon_conversations_return() -> None:
    quick, slow = ReturnModel(), ReturnModel()
    simulate(quick, 0.0, 1800.0, 0.5, 8.0)
    simulate(slow, 0.0, 1800.0, 0.5, 300.0)
    assert expected(quick, 1800.0) > 5 * expected(slow, 1800.0), (
        "quick returns must be worth more, as they free the page sooner"
    )
    assert quick.worth(60.0) < 0.2 * quick.worth(0.0), "after a minute, a return is unlikely"
    assert slow.worth(60.0) > 0.5 * slow.worth(0.0)


def test_the_return_model_learns_which_conversations_return() -> None:
    """After long answers, conversations usually continue. After short answers, they do not."""
    model, now = ReturnModel(), 0.0
    for _ in range(20):
        now = simulate(model, now, 60.0, 0.6, 30.0, EndedTurn(1500, 1000))
        now = simulate(model, now + 100.0, 60.0, 0.02, 30.0, EndedTurn(1500, 30)) + 100.0
    ratios = [model.turn_ended(f"x{size}", EndedTurn(1500, size), now) for size in (30, 1000)]
    assert ratios[1] > 2.5 * ratios[0], ratios


def test_away_hints_count_only_as_far_as_they_prove_true() -> None:
    """Clients say that they will be away for a day, but most return within half a minute."""
    model, now = ReturnModel(), 0.0
    ended = EndedTurn(1500, 250, 0, 86_400.0)
    believed = model.turn_ended("x", ended, now)
    for _ in range(10):
        now = simulate(model, now, 60.0, 0.9, 30.0, ended) + 60.0
        now = simulate(model, now, 60.0, 0.4, 30.0) + 60.0
    without = model.turn_ended("z", MESSAGE, now)
    assert model.turn_ended("y", ended, now) > 0.5 * without
    assert believed < 0.1


def test_the_return_model_adapts_to_a_shifting_workload() -> None:
    model = ReturnModel()
    now = simulate(model, 0.0, 3600.0, 0.5, 200.0)
    before = expected(model, now)
    now = simulate(model, now, 1200.0, 0.3, 6.0)
    quick = expected(model, now)
    assert quick > 4 * before, "within twenty minutes"
    now = simulate(model, now, 1200.0, 0.0, 1.0)
    assert expected(model, now) < 0.75 * quick, "conversations no longer return"


def test_the_return_model_counts_a_return_once_even_without_kv() -> None:
    model = ReturnModel()
    model.turn_ended("a", MESSAGE, 10.0)
    certainty = list(model._certainty)
    model.turn_began("a", 60.0)
    learned = list(model.weights)
    assert learned[0] > PRIOR_WEIGHTS[0] == 0.0
    model.turn_began("a", 61.0)
    model.turn_began("never seen", 61.0)
    assert model.weights == learned
    assert model._certainty[0] > certainty[0]


def test_a_fork_inherits_the_number_of_turns() -> None:
    model = ReturnModel()
    for now in (0.1, 0.2, 0.3):
        model.turn_ended("a", MESSAGE, now)
    model.turn_ended("b", MESSAGE, 0.3)
    model.forked("a", "b", 0.4)
    model.forked("unknown", "c", 0.4)
    model.turn_began("b", 0.5)
    assert model.weights == list(PRIOR_WEIGHTS), "use of a fork must not change the weights"
    for name in ("a", "b", "c"):
        model.turn_ended(name, MESSAGE, 0.6)
    assert [model._gaps[name].num_turns for name in ("a", "b", "c")] == [4, 4, 1]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pensieve.core.policies.return_model.GAPS_MAX", 100)
    model = ReturnModel()
    for number in range(1000):
        model.turn_ended(f"{number}", MESSAGE, float(number))
        model.forked(f"{number}", f"fork of {number}", float(number))
    assert len(model._gaps) == 100
    assert sum(map(len, model._intervals)) == model._num_waiting <= 200
    model.turn_ended("later", MESSAGE, 1e6)
    assert sum(map(len, model._intervals)) == 1, "gaps are forgotten behind the last edge"


def test_forgotten_gaps_do_not_count_as_missed_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All conversations return after a minute, when half of their gaps have been forgotten."""
    monkeypatch.setattr("pensieve.core.policies.return_model.GAPS_MAX", 40)
    model = ReturnModel()
    for number in range(3000):
        model.turn_ended(f"{number}", MESSAGE, float(number))
        model.turn_began(f"{number - 30}", float(number))
        model.turn_began(f"{number - 60}", float(number))
    assert model.likelihood(model.turn_ended("x", MESSAGE, 3000.0), 0.0) > 0.9


def test_a_return_after_hours_does_not_count() -> None:
    model = ReturnModel()
    model.turn_ended("a", MESSAGE, 0.0)
    model.turn_ended("b", MESSAGE, 86_400.0)
    reached = model._reached[-1]
    model.turn_began("a", 86_400.0)
    assert model._reached[-1] == reached, "a return after a day must count as no return"


def test_no_client_hint_raises_the_value_of_a_conversation() -> None:
    model = ReturnModel()
    soon, silent = EndedTurn(1500, 250, 0, 1.0), EndedTurn(1500, 250)
    assert model.turn_ended("a", soon, 0.0) == model.turn_ended("b", silent, 0.0)


def test_learned_return_times_fade_to_the_prior() -> None:
    """The learned times of returns fade to the prior. Weights stay, but new turns can change them easily."""
    model = ReturnModel()
    now = simulate(model, 0.0, 1800.0, 0.9, 10.0)
    assert model.worth(60.0) < 0.1 * model.worth(0.0)
    assert model._certainty[0] > 10 * PRIOR_CERTAINTY
    for minute in range(60 * 20):
        model.turn_began("nobody", now + 60.0 * minute)
    assert model.worth(60.0) > 0.5 * model.worth(0.0)
    assert model.likelihood(1.0, 0.0) == pytest.approx(PRIOR_SHARE, abs=0.05)
    assert model._certainty[0] == pytest.approx(PRIOR_CERTAINTY, abs=1.0)


def test_value_is_cost_times_the_sum_over_the_holders() -> None:
    return_policy = policy()
    one = return_policy.value_class_of(branch_of((0.0, 1.0)), 0, 100.0)
    assert one == UNIT_VALUE_CLASS
    assert return_policy.value_class_of(branch_of((0.0, 1.0)), 1000, 100.0) > one, (
        "later chunks cost more"
    )
    twice = branch_of((0.0, 1.0), (0.0, 1.0))
    assert return_policy.value_class_of(twice, 0, 100.0) == one + int(
        math.log(2, return_policy.value_class_ratio)
    )
    likely = branch_of((0.0, 4.0), (0.0, 2.0))
    assert return_policy.value_class_of(likely, 0, 100.0) == one + int(
        math.log(6, return_policy.value_class_ratio)
    )
    return_policy.trial.followed = Order.LEARNED
    assert return_policy.value(one, 10.0) == pytest.approx(
        COST.chunk_seconds(0) * return_policy.model.worth(10.0)
    )
    return_policy.trial.followed = Order.LRU
    assert (
        return_policy.value(one, 10.0)
        == return_policy.value(one + 9, 10.0)
        == COST.chunk_seconds(0) / 10
    )


def test_chunks_that_are_faster_to_recompute_are_not_swapped_in() -> None:
    seconds = COST.chunk_seconds(320)
    return_policy = policy(copy_seconds=seconds)
    assert [return_policy.worth_swapping_in(index) for index in (0, 8, 9, 100)] == [
        False,
        False,
        True,
        True,
    ]
    assert policy().worth_swapping_in(0), "the time of copies is unknown"


def test_chunks_unlikely_to_be_used_again_are_not_swapped_out() -> None:
    return_policy = policy(copy_seconds=0.2 * COST.chunk_seconds(0))
    assert return_policy.worth_swapping_out(branch_of((0.0, 0.02)), 0, 1.0), (
        "the model has learned nothing yet"
    )
    return_policy.trial.followed = Order.LEARNED
    likely, unlikely = branch_of((0.0, 1.0)), branch_of((0.0, 0.02))
    assert return_policy.worth_swapping_out(likely, 0, 1.0)
    assert not return_policy.worth_swapping_out(unlikely, 0, 1.0)
    assert not return_policy.worth_swapping_out(likely, 0, 5000.0), (
        "the conversation has been idle for too long"
    )
    assert policy().worth_swapping_out(unlikely, 0, 1.0)


def test_with_a_slow_link_the_cache_recomputes_instead_of_swapping_in() -> None:
    """The host copy is dropped, the replies are right, and nothing is swapped in."""
    world = ScriptedWorld(8, 12, policy="return", copy_share=50.0)
    world.cache.policy.worth_swapping_out = lambda *_: True  # type: ignore[method-assign]
    world.say("a", 12, 1)
    world.cache.move_to_host("a", world.now)
    while world.step():
        world.land()
    assert world.where("a") == "hhh"
    turn = world.say("a", 3, 1)
    assert (turn.usage.host_tokens, turn.usage.recomputed_tokens) == (0, 12)
    assert world.cache.counters.swapped_in == 0
    world.scheduler.check(world.now)


def test_random_factors_apply_only_while_the_random_order_is_followed() -> None:
    return_policy = policy()
    return_policy.turn_ended("a", MESSAGE, 0.0)
    return_policy.turn_ended("b", MESSAGE, 0.0)
    assert (return_policy.value_factor_of("a"), return_policy.value_factor_of("job")) == (1.0, 1.0)
    return_policy.trial.followed = Order.RANDOM
    a, b = return_policy.value_factor_of("a"), return_policy.value_factor_of("b")
    assert len({a, b, 1.0}) == 3
    assert return_policy.value_factor_of("job") <= min(a, b), (
        "conversations of batch jobs do not return"
    )
    return_policy.forked("a", "fork", 1.0)
    return_policy.turn_ended("fork", MESSAGE, 2.0)
    return_policy.turn_ended("a", MESSAGE, 2.0)
    assert return_policy.value_factor_of("fork") == return_policy.value_factor_of("a") == a


def test_a_small_factor_lowers_the_value_but_not_the_return_probability() -> None:
    return_policy = policy(copy_seconds=0.2 * COST.chunk_seconds(0))
    return_policy.trial.followed = Order.LEARNED
    branch = branch_of((0.0, 1.0))
    next(iter(branch.holders)).value_factor = 0.1
    assert return_policy.value_class_of(branch, 0, 1.0) < UNIT_VALUE_CLASS
    assert return_policy.worth_swapping_out(branch, 0, 1.0)
