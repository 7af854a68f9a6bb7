"""Which prompt is computed first, among running and waiting prompts."""

from __future__ import annotations

import pytest

from pensieve.core.fair_queue import SHORT_TURNS
from pensieve.core.scheduler import PASSES_MAX
from pensieve.core.turn import Turn, TurnState
from tests.core.world import ScriptedWorld

BUDGET = 128


def world_of_prompts() -> ScriptedWorld:
    return ScriptedWorld(2000, 0, batch_tokens_max=BUDGET, turns_max=64)


def tokens_of(world: ScriptedWorld, turn: Turn) -> int:
    """Return the turn's tokens in the last iteration."""
    assert world.latest is not None
    return sum(
        each.num_tokens for each in world.latest.slices if each.attempt_id == turn.attempt_id
    )


def test_the_shortest_prompt_goes_first_and_the_oldest_prompt_keeps_progressing() -> None:
    world = world_of_prompts()
    long = world.ask("long", 1000, 2)
    world.next()
    assert tokens_of(world, long) == BUDGET
    short = world.ask("short", 30, 2)
    shorter = world.ask("shorter", 20, 2)
    world.next()
    assert [name for name, _, _ in world.slices()] == ["short", "shorter", "long"]
    assert tokens_of(world, long) == BUDGET - 50
    middle = world.ask("middle", 200, 2)
    world.next()
    assert tokens_of(world, middle) > tokens_of(world, long) == (BUDGET - 2) // 4
    world.run_until_idle()
    assert short.usage.first_token_at == shorter.usage.first_token_at


def test_first_come_first_served_computes_prompts_in_the_order_of_arrival() -> None:
    world = ScriptedWorld(2000, 0, batch_tokens_max=BUDGET, turns_max=64, first_come=True)
    world.ask("long", 200, 2)
    world.next()
    world.ask("longer", 300, 2)
    world.ask("short", 30, 2)
    seen = []
    for _ in range(4):
        world.next()
        seen.append(world.slices())
    assert seen == [
        [("long", 128, 200), ("longer", 0, 56)],
        [("long", 200, 201), ("longer", 56, 183)],
        [("longer", 183, 300), ("short", 0, 11)],
        [("longer", 300, 301), ("short", 11, 30)],
    ]
    world.run_until_idle()


def test_the_oldest_prompt_gets_at_least_a_quarter_of_the_budget() -> None:
    """A prompt of 1,000 tokens ends in a bounded number of iterations, however many shorter ones come."""
    world = world_of_prompts()
    long = world.ask("long", 1000, 1)
    world.next()
    for number in range(400):
        world.ask(f"short{number}", 60, 1)
    num_iterations = 0
    while long.finish is None:
        world.next()
        num_iterations += 1
        if long.num_output_tokens == 0:
            assert tokens_of(world, long) >= BUDGET // 4
    assert num_iterations <= 4 * 1000 / BUDGET + 1
    world.run_until_idle(checks_every=50)


def test_with_room_for_one_tile_the_shortest_and_oldest_prompts_alternate() -> None:
    """The oldest prompt gets the tile of every fourth iteration. The shortest prompt gets the others."""
    world = ScriptedWorld(2000, 0, batch_tokens_max=16, turns_max=8)
    long = world.ask("long", 400, 1)
    world.next()
    short = world.ask("short", 50, 1)
    got = []
    while short.finish is None:
        world.next()
        got.append((tokens_of(world, short), tokens_of(world, long)))
    assert got.count((16, 0)) == 3, got
    assert got.count((0, 16)) <= 2, got
    world.run_until_idle()


@pytest.mark.parametrize("tbt", [0.0275, 0.0435])
def test_a_higher_level_prompt_does_not_wait_if_pieces_are_small(tbt: float) -> None:
    """An iteration takes 10 ms, plus 1 ms per token. Beside a reply, one or two tiles of a prompt fit."""
    world = ScriptedWorld(
        2000,
        0,
        batch_tokens_max=BUDGET,
        turns_max=64,
        iteration_seconds=0.010,
        token_seconds=0.001,
        tbt_seconds=tbt,
    )
    world.ask("writer", 4, 300)
    for _ in range(4):
        world.next()
    world.ask("document", 2000, 1, priority=-8)
    for _ in range(10):
        world.next()
    high, equal = world.ask("high", 10, 1, priority=8), world.ask("equal", 10, 1, priority=-8)
    for _ in range(2):
        world.next()
    assert high.usage.first_token_at is not None
    for _ in range(6):
        world.next()
    assert equal.usage.first_token_at is not None


def test_a_higher_level_goes_before_a_shorter_prompt() -> None:
    world = world_of_prompts()
    world.ask("long", 1000, 1)
    world.next()
    high = world.ask("high", 300, 1, priority=1)
    world.next()
    short = world.ask("short", 20, 1)
    world.next()
    assert tokens_of(world, high) == BUDGET, "no budget is reserved for lower levels"
    assert short.state is TurnState.QUEUED
    world.run_until_idle()


def test_short_prompts_pass_a_long_one_a_bounded_number_of_times() -> None:
    """A document waits for the messages before it, and for at most SHORT_TURNS later messages."""
    world = ScriptedWorld(2000, 0, batch_tokens_max=BUDGET, turns_max=1)
    world.ask("first", 4, 2)
    world.next()
    long = world.ask("long", BUDGET + 1, 1)
    short = [world.ask(f"short{number}", 4, 1) for number in range(SHORT_TURNS + 5)]
    world.until_ended(long)
    assert sum(turn.finish is not None for turn in short) == SHORT_TURNS
    world.run_until_idle()


def test_short_messages_pass_a_turn_that_does_not_fit_into_memory() -> None:
    world = ScriptedWorld(100, 0, batch_tokens_max=BUDGET, turns_max=64)
    running = world.ask("running", 200, 150)
    for _ in range(4):
        world.next()
    large = world.ask("large", 300, 1)
    for number in range(SHORT_TURNS + PASSES_MAX):
        world.until_ended(world.ask(f"small{number}", 4, 2))
    assert large.state is TurnState.QUEUED
    last = world.ask("last", 4, 2)
    world.until_ended(large)
    assert running.finish is not None
    assert large.usage.first_token_at is not None
    world.until_ended(last)
    assert last.usage.first_token_at is not None
    assert large.usage.admitted_at is not None
    assert last.usage.admitted_at is not None
    assert large.usage.admitted_at <= last.usage.admitted_at
