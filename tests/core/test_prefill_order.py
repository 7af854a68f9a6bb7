"""Which prompt is computed first, among running and waiting prompts."""

from __future__ import annotations

import pytest

from pensieve.core.fair_queue import SHORT_TURNS
from pensieve.core.scheduler import PASSES_MAX
from pensieve.core.turn import Turn, TurnState
from tests.core.world import Stage

BUDGET = 128


def stage_of_prompts() -> Stage:
    return Stage(2000, 0, batch_tokens_max=BUDGET, turns_max=64)


def tokens_of(stage: Stage, turn: Turn) -> int:
    """Return the turn's tokens in the last iteration."""
    assert stage.latest is not None
    return sum(
        each.num_tokens for each in stage.latest.slices if each.attempt_id == turn.attempt_id
    )


def test_the_shortest_prompt_goes_first_and_the_oldest_prompt_keeps_progressing() -> None:
    stage = stage_of_prompts()
    long = stage.ask("long", 1000, 2)
    stage.next()
    assert tokens_of(stage, long) == BUDGET
    short = stage.ask("short", 30, 2)
    shorter = stage.ask("shorter", 20, 2)
    stage.next()
    assert [name for name, _, _ in stage.slices()] == ["short", "shorter", "long"]
    assert tokens_of(stage, long) == BUDGET - 50
    middle = stage.ask("middle", 200, 2)
    stage.next()
    assert tokens_of(stage, middle) > tokens_of(stage, long) == (BUDGET - 2) // 4
    stage.run_until_idle()
    assert short.usage.first_token_at == shorter.usage.first_token_at


def test_first_come_first_served_computes_prompts_in_the_order_of_arrival() -> None:
    stage = Stage(2000, 0, batch_tokens_max=BUDGET, turns_max=64, first_come=True)
    stage.ask("long", 200, 2)
    stage.next()
    stage.ask("longer", 300, 2)
    stage.ask("short", 30, 2)
    seen = []
    for _ in range(4):
        stage.next()
        seen.append(stage.slices())
    assert seen == [
        [("long", 128, 200), ("longer", 0, 56)],
        [("long", 200, 201), ("longer", 56, 183)],
        [("longer", 183, 300), ("short", 0, 11)],
        [("longer", 300, 301), ("short", 11, 30)],
    ]
    stage.run_until_idle()


def test_the_oldest_prompt_gets_at_least_a_quarter_of_the_budget() -> None:
    """A prompt of 1,000 tokens ends in a bounded number of iterations, however many shorter ones come."""
    stage = stage_of_prompts()
    long = stage.ask("long", 1000, 1)
    stage.next()
    for number in range(400):
        stage.ask(f"short{number}", 60, 1)
    num_iterations = 0
    while long.finish is None:
        stage.next()
        num_iterations += 1
        if long.num_output_tokens == 0:
            assert tokens_of(stage, long) >= BUDGET // 4
    assert num_iterations <= 4 * 1000 / BUDGET + 1
    stage.run_until_idle(checks_every=50)


def test_with_room_for_one_tile_the_shortest_and_oldest_prompts_alternate() -> None:
    """In every fourth iteration the oldest prompt gets the tile, in the others the shortest."""
    stage = Stage(2000, 0, batch_tokens_max=16, turns_max=8)
    long = stage.ask("long", 400, 1)
    stage.next()
    short = stage.ask("short", 50, 1)
    got = []
    while short.finish is None:
        stage.next()
        got.append((tokens_of(stage, short), tokens_of(stage, long)))
    assert got.count((16, 0)) == 3, got
    assert got.count((0, 16)) <= 2, got
    stage.run_until_idle()


@pytest.mark.parametrize("tbt", [0.0275, 0.0435])
def test_a_higher_level_prompt_does_not_wait_if_pieces_are_small(tbt: float) -> None:
    """An iteration takes 10 ms, plus 1 ms per token. Beside a reply, one or two tiles of a prompt fit."""
    stage = Stage(
        2000,
        0,
        batch_tokens_max=BUDGET,
        turns_max=64,
        iteration_seconds=0.010,
        token_seconds=0.001,
        tbt_seconds=tbt,
    )
    stage.ask("writer", 4, 300)
    for _ in range(4):
        stage.next()
    stage.ask("document", 2000, 1, priority=-8)
    for _ in range(10):
        stage.next()
    high, equal = stage.ask("high", 10, 1, priority=8), stage.ask("equal", 10, 1, priority=-8)
    for _ in range(2):
        stage.next()
    assert high.usage.first_token_at is not None
    for _ in range(6):
        stage.next()
    assert equal.usage.first_token_at is not None


def test_a_higher_level_goes_before_a_shorter_prompt() -> None:
    stage = stage_of_prompts()
    stage.ask("long", 1000, 1)
    stage.next()
    high = stage.ask("high", 300, 1, priority=1)
    stage.next()
    short = stage.ask("short", 20, 1)
    stage.next()
    assert tokens_of(stage, high) == BUDGET, "no budget is reserved for lower levels"
    assert short.state is TurnState.QUEUED
    stage.run_until_idle()


def test_short_prompts_pass_a_long_one_a_bounded_number_of_times() -> None:
    """A document waits for the messages before it, and for at most SHORT_TURNS later messages."""
    stage = Stage(2000, 0, batch_tokens_max=BUDGET, turns_max=1)
    stage.ask("first", 4, 2)
    stage.next()
    long = stage.ask("long", BUDGET + 1, 1)
    short = [stage.ask(f"short{number}", 4, 1) for number in range(SHORT_TURNS + 5)]
    stage.until_ended(long)
    assert sum(turn.finish is not None for turn in short) == SHORT_TURNS
    stage.run_until_idle()


def test_short_messages_pass_a_turn_that_does_not_fit_into_memory() -> None:
    stage = Stage(100, 0, batch_tokens_max=BUDGET, turns_max=64)
    running = stage.ask("running", 200, 150)
    for _ in range(4):
        stage.next()
    large = stage.ask("large", 300, 1)
    for number in range(SHORT_TURNS + PASSES_MAX):
        stage.until_ended(stage.ask(f"small{number}", 4, 2))
    assert large.state is TurnState.QUEUED
    last = stage.ask("last", 4, 2)
    stage.until_ended(large)
    assert running.finish is not None
    assert large.usage.first_token_at is not None
    stage.until_ended(last)
    assert last.usage.first_token_at is not None
    assert large.usage.admitted_at is not None
    assert last.usage.admitted_at is not None
    assert large.usage.admitted_at <= last.usage.admitted_at
