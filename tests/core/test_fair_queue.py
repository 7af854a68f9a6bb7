"""The next turn is from the share with the fewest computed tokens, divided by the share's weight."""

from __future__ import annotations

import random

import pytest

from pensieve.core.turn import Turn, TurnState
from tests.core.world import ScriptedWorld
from tests.scale import SCALE


def sequential_world() -> ScriptedWorld:
    """Return a world that runs one turn at a time, with prompts that fit into an iteration."""
    return ScriptedWorld(64, 0, batch_tokens_max=64, turns_max=1)


def admitted(turns: list[Turn]) -> list[Turn]:
    """Return the admitted turns in the order of their admission."""
    known = [turn for turn in turns if turn.usage.admitted_at is not None]
    return sorted(known, key=lambda turn: (turn.usage.admitted_at, turn.attempt_id))


def test_a_flood_delays_other_shares_by_at_most_one_turn() -> None:
    world = sequential_world()
    flood = [world.ask(f"flood{i}", 4, 2, share="flood") for i in range(200)]
    for _ in range(30):
        world.next()
    before = len(admitted(flood))
    assert 5 < before < 100
    mine = world.ask("mine", 4, 2, share="mine")
    world.until_ended(mine)
    assert len(admitted(flood)) - before <= 1


def test_a_flood_of_high_priority_does_not_delay_other_shares() -> None:
    """A priority orders only the turns of the same share."""
    world = sequential_world()
    mine = [world.ask(f"mine{i}", 4, 1, share="mine") for i in range(4)]
    flood = [world.ask(f"flood{i}", 4, 1, share="flood", priority=8) for i in range(50)]
    world.until_ended(mine[-1])
    assert len(admitted(flood)) <= 5


def test_an_idle_share_saves_up_no_credit() -> None:
    world = sequential_world()
    busy = [world.ask(f"busy{i}", 4, 2, share="busy") for i in range(40)]
    world.until_ended(busy[19])
    late = [world.ask(f"late{i}", 4, 2, share="late") for i in range(20)]
    world.until_ended(late[9])
    assert 9 <= len(admitted(busy)) - 20 <= 11, "the shares must alternate from now on"
    world.run_until_idle()
    again = world.ask("again", 4, 2, share="late")
    other = [world.ask(f"other{i}", 4, 2, share="other") for i in range(3)]
    world.until_ended(again)
    assert other[2].state is TurnState.QUEUED


def test_a_share_is_not_charged_for_use_while_no_other_share_waited() -> None:
    world = sequential_world()
    for number in range(30):
        world.until_ended(world.ask(f"alone{number}", 4, 2, share="alone"))
    new_turns = [world.ask(f"new{i}", 4, 2, share="new") for i in range(20)]
    world.until_ended(world.ask("mine", 4, 2, share="alone"))
    assert len(admitted(new_turns)) <= 2


def test_equal_shares_alternate_even_if_one_has_queued_many_turns() -> None:
    """A tenant who sends its next turn when its last one has ended gets every second admission."""
    world = sequential_world()
    flood = [world.ask(f"flood{i}", 4, 2, share="flood") for i in range(60)]
    for number in range(10):
        world.until_ended(world.ask(f"mine{number}", 4, 2, share="mine"))
    assert len(admitted(flood)) <= 12


@pytest.mark.parametrize("seed", range(20 * SCALE))
def test_waiting_shares_are_served_in_proportion_to_their_weights(seed: int) -> None:
    """While all shares wait, they get equal use per weight. The error is about the size of a turn."""
    draw = random.Random(seed)
    turns_max, prompt_max, reply_max = draw.choice((1, 2, 5)), 20, draw.choice((1, 10))
    world = ScriptedWorld(400, 0, batch_tokens_max=draw.choice((24, 64)), turns_max=turns_max)
    weights = {name: draw.choice((0.5, 1.0, 1.0, 4.0)) for name in ("a", "b", "c")}
    turns: dict[str, list[Turn]] = {name: [] for name in weights}
    for number in range(60):
        for name in draw.sample(list(weights), 3):
            size, reply = draw.randint(1, prompt_max), draw.randint(1, reply_max)
            turns[name].append(
                world.ask(f"{name}{number}", size, reply, share=name, weight=weights[name])
            )
    slack = 2 * (prompt_max + turns_max * reply_max)
    num_looks = 0
    while all(each[-1].state is TurnState.QUEUED for each in turns.values()):
        world.next()
        num_looks += 1
        used = {name: tokens_of(each) / weights[name] for name, each in turns.items()}
        assert max(used.values()) - min(used.values()) <= slack / min(weights.values())
    assert num_looks > 10
    world.run_until_idle()


def tokens_of(turns: list[Turn]) -> int:
    """Return the number of tokens that were computed for these turns."""
    return sum(each.usage.new_tokens + each.usage.output_tokens for each in admitted(turns))


def test_a_changed_weight_applies_from_the_next_turn() -> None:
    world = sequential_world()
    light = [world.ask(f"light{i}", 4, 1, share="a") for i in range(30)]
    heavy = [world.ask(f"heavy{i}", 4, 1, share="b") for i in range(30)]
    world.until_ended(heavy[4])
    assert len(admitted(light)) <= 7
    heavy.append(world.ask("changed", 4, 1, share="b", weight=5.0))
    before = len(admitted(light))
    world.until_ended(heavy[24])
    assert len(admitted(light)) - before <= 5


def test_a_long_prompt_delays_only_its_own_share() -> None:
    """Without shares, the long prompt would delay all turns."""
    world = ScriptedWorld(400, 0, batch_tokens_max=16, turns_max=8)
    long = world.ask("long", 1000, 2, share="noisy")
    for _ in range(10):
        world.next()
    own = world.ask("own", 4, 2, share="noisy")
    other = world.ask("other", 4, 2, share="quiet")
    world.next()
    assert other.usage.admitted_at is not None
    world.until_ended(other)
    assert long.frontier > 150, "the long prompt must progress meanwhile"
    world.until_ended(own)
    assert not long.num_output_tokens, "short prompts of its own share must pass it"
    world.run_until_idle()


def test_long_prompts_of_two_shares_progress_by_their_weights() -> None:
    world = ScriptedWorld(400, 0, batch_tokens_max=16, turns_max=8)
    first = world.ask("first", 400, 1, share="a")
    second = world.ask("second", 400, 1, share="b", weight=3.0)
    third = world.ask("third", 400, 1, share="b", weight=3.0)
    for _ in range(30):
        world.next()
    assert abs(3 * first.frontier - second.frontier) <= 64
    assert not third.frontier
    world.run_until_idle()
