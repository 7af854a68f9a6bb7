"""The work ahead of a new turn, and the engine's speed with prompts, without a daemon."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from pensieve.conversations.admission import (
    PromptPace,
    PromptTimes,
    WaitingTurn,
    WorkAhead,
    ahead_of,
    waiting,
)
from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.live_turn import LiveTurn
from pensieve.core.cost import IterationCost
from pensieve.core.turn import TurnOptions
from pensieve.text import Message

NUMBERS = count(1)


def turn(*args: Any, **options: Any) -> WaitingTurn:
    return waiting(live_turn(*args, **options))


def live_turn(
    tenant: str = "",
    seconds: float = 1.0,
    *,
    begun: bool = False,
    weight: float = 1.0,
    priority: int = 0,
) -> LiveTurn:
    ask = TurnRequest("c", (Message("user", "?"),), TurnOptions(priority=priority), tenant, "r")
    return LiveTurn(
        *(1, "c", 0, 5),
        request=ask,
        tenant=tenant,
        attempt_id=next(NUMBERS),
        admitted=begun,
        weight=weight,
        priority=priority,
        prompt_seconds=seconds,
    )


def test_all_turns_of_the_same_tenant_are_ahead() -> None:
    assert ahead_of([], "a", 1.0, 0) == WorkAhead(0, 0)
    turns = [turn("a", 3.0, begun=True), turn("a", 2.0), turn("a", 0.5)]
    assert ahead_of(turns, "a", 1.0, 0) == WorkAhead(2, 5.5)


def test_a_higher_priority_passes_waiting_turns_but_not_begun_turns() -> None:
    turns = [turn("a", 3.0, begun=True), turn("a", 2.0), turn("a", 0.5, priority=2)]
    assert ahead_of(turns, "a", 1.0, 1) == ahead_of(turns, "a", 1.0, 2) == WorkAhead(1, 3.5)
    assert ahead_of(turns, "a", 1.0, 3) == WorkAhead(0, 3.0)
    assert ahead_of(turns, "a", 1.0, 0) == WorkAhead(2, 5.5)


def test_a_flooding_tenant_delays_only_its_own_turns() -> None:
    flood = [turn("noisy", 2.0) for _ in range(1000)]
    assert ahead_of(flood, "noisy", 1.0, 0) == WorkAhead(1000, 2000.0)
    assert ahead_of(flood, "quiet", 1.0, 0) == WorkAhead(0, 0.0)
    one_more = [*flood, turn("quiet", 3.0)]
    assert ahead_of(one_more, "quiet", 1.0, 0) == WorkAhead(1 + 1.5, 3.0 + 3.0)


def test_weights_divide_the_time_between_tenants() -> None:
    turns = [turn("a", 4.0, weight=1.0), *(turn("b", 1.0, weight=2.0) for _ in range(10))]
    assert ahead_of(turns, "a", 1.0, 0) == WorkAhead(1 + 8, 4.0 + 8.0)
    assert ahead_of(turns, "b", 2.0, 0) == WorkAhead(10 + 1, 10.0 + 4.0), (
        "at most the work that tenant a has"
    )


def test_computed_parts_of_prompts_are_not_ahead() -> None:
    turns = [turn("a", 3.0, begun=True), turn("a", 2.0)]
    assert ahead_of(turns, "a", 1.0, 0, seconds_served=1.0).seconds == pytest.approx(4.0)
    assert ahead_of(turns, "a", 1.0, 0, seconds_served=9.0).seconds == pytest.approx(2.0)
    turns.append(turn("b", 3.0, begun=True))
    assert ahead_of(turns, "a", 1.0, 0, seconds_served=1.0).seconds == pytest.approx(4.5 + 2.5)


def test_the_pace_is_measured_time_divided_by_predicted_time() -> None:
    pace = PromptPace()
    assert pace.ratio is None
    pace.begun(10.0, is_only=True)
    assert pace.served_since(11.0) == 0.0, "no prompt has been measured"
    pace.ended(2.0, 13.0)
    assert pace.ratio == pytest.approx(1.5)
    pace.begun(100.0, is_only=True)  # the idle time before does not count
    pace.begun(100.0, is_only=False)
    assert pace.served_since(103.0) == pytest.approx(2.0)
    pace.ended(2.0, 103.0)
    pace.ended(2.0, 106.0)
    assert pace.ratio == pytest.approx(1.5)


def test_prompts_that_end_together_share_the_measured_time() -> None:
    pace = PromptPace()
    for round_at in range(0, 1000, 10):
        for number in range(4):
            pace.begun(float(round_at), is_only=number == 0)
        for _ in range(4):
            pace.ended(1.0, round_at + 2.0)
    assert pace.ratio == pytest.approx(0.5, rel=0.3)


def test_the_pace_adapts_to_a_slower_engine() -> None:
    pace = PromptPace()
    for number in range(60):
        pace.begun(100.0 * number, is_only=True)
        pace.ended(1.0, 100.0 * number + (1.0 if number < 30 else 5.0))
    assert pace.ratio == pytest.approx(5.0, rel=0.05)


def test_a_prompt_is_predicted_from_new_tokens_and_then_from_uncached_tokens() -> None:
    prompts, live = PromptTimes(), live_turn()
    prompts.submitted(live)
    assert live.prompt_seconds == 0.0, "the engine has not reported its costs"
    prompts.cost = IterationCost(0.01, 0.02, 0.0, 0.001, 0.003)
    live.history_tokens, live.prompt_tokens = 100, 50
    prompts.submitted(live)
    assert live.prompt_seconds == pytest.approx(50 * 0.01 + 150 * 0.001 + 0.003)
    prompts.admitted(live, 120, 0.0, is_only=True)
    assert live.prompt_seconds == pytest.approx(120 * 0.01 + 150 * 0.001 + 0.003)
    prompts.ended(live, 2.706)
    assert prompts.wait_seconds(WorkAhead(0, 1.0)) == pytest.approx(2.0)


def test_an_arriving_turn_is_predicted_from_recent_tokens_per_character() -> None:
    prompts, live = PromptTimes(), live_turn()
    ask = TurnRequest("d", (Message("user", "x" * 400),), TurnOptions(priority=3), "b", "r")
    prompts.cost = IterationCost(0.01, 0.0, 0.0, 0.0, 0.5)
    assert prompts.arriving(ask, 2.0) == WaitingTurn("b", 2.0, 3, 0.0), (
        "no prompt has been measured"
    )
    assert live.request is not None
    for num_tokens in (30, 10):
        live.prompt_tokens = num_tokens * live.request.num_characters
        prompts.submitted(live)
    expected = (30 * 7 / 8 + 10) / (7 / 8 + 1)  # the latest prompt counts most
    seconds = prompts.arriving(ask, 2.0).prompt_seconds
    assert seconds == pytest.approx(expected * 400 * 0.01 + 0.5, rel=1e-3)
    assert ahead_of([prompts.arriving(ask, 2.0)], "b", 2.0, 3) == WorkAhead(1, seconds)
    assert ahead_of([prompts.arriving(ask, 2.0)], "b", 2.0, 4) == WorkAhead(0, 0.0)
