"""How many prompt tokens an iteration takes while other turns generate."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pensieve.core.iteration import Iteration
from pensieve.core.iteration_builder import TOKENS_MIN
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.time_budget import PROBE_AFTER
from tests.core.world import ScriptedWorld

# An iteration takes 10 ms, and 1 ms more for each token.
TIMES: dict[str, Any] = {"token_seconds": 0.001, "prompt_seconds_max": 0.05}


def make_world(**changes: Any) -> ScriptedWorld:
    made = ScriptedWorld(400, 0, **{"batch_tokens_max": 256, **TIMES, **changes})
    made.say("replies", 4, 3)  # to measure iterations without a prompt
    made.say("reads", 100)  # and with a prompt
    return made


def pieces(world: ScriptedWorld, name: str) -> list[int]:
    """Return the lengths of the prompt's pieces in the next iterations."""
    lengths: list[int] = []
    while name in world.turns and not len(world.turns[name].tokens) > world.turns[name].prompt_end:
        world.next()
        lengths += [stop - start for who, start, stop in world.slices() if who == name]
    return lengths


def test_prompts_add_at_most_the_limit_beside_a_generating_turn() -> None:
    world = make_world()
    world.ask("writer", 4, 100)
    world.next()
    world.next()
    world.ask("reader", 300, 4)
    took = pieces(world, "reader")
    assert sum(took) == 300
    assert took[:-1] == [48] * (len(took) - 1)  # a multiple of 16 within the limit of 50 tokens


def test_two_prompts_share_the_limit() -> None:
    world = make_world()
    world.ask("writer", 4, 100)
    world.next()
    world.next()
    world.ask("a", 30, 1)
    world.ask("b", 40, 1)
    world.next()
    assert world.slices() == [("writer", 5, 6), ("a", 0, 30), ("b", 0, 16)]


def test_a_long_prompt_backlog_gets_up_to_twice_the_limit() -> None:
    """At first, five seconds of prompts wait or run."""
    world = make_world()
    writer = world.ask("writer", 4, 300)
    world.next()
    world.next()
    for number in range(20):
        world.ask(f"reader {number}", 250, 1)
    took, missing = [], [5000]
    while missing[-1] > 100:
        world.next()
        took.append(sum(stop - at for who, at, stop in world.slices() if who != "writer"))
        missing.append(missing[-1] - took[-1])
    assert writer.finish is None
    # Leave out measurements and the last pieces of prompts.
    most = [each for each in took if each and each % 16 == 0]
    assert most[0] == 96
    assert most[-1] == 48
    assert most == sorted(most, reverse=True)


def test_a_prompt_gets_the_whole_budget_if_no_turn_generates() -> None:
    world = make_world()
    world.ask("reader", 300, 4)
    assert pieces(world, "reader") == [256, 44]


def test_without_a_limit_a_prompt_gets_the_budget_that_decodes_leave() -> None:
    world = make_world(prompt_seconds_max=0.0)
    world.ask("writer", 4, 100)
    world.next()
    world.ask("reader", 300, 4)
    assert pieces(world, "reader") == [255, 45]


def test_one_late_iteration_does_not_change_the_pieces() -> None:
    world = make_world()
    world.ask("writer", 4, 200)
    for number in range(6):  # to have several measurements
        world.ask(f"reader {number}", 60, 1)
        pieces(world, f"reader {number}")
    world.ask("reader", 300, 4)
    world.next()
    first = world.slices()[-1]
    planned = world.scheduler.plan(world.now)
    assert planned is not None
    world.executor.launch(planned)
    world.wait(30.0)  # simulates a machine that was busy with something else
    world.scheduler.commit(planned, world.executor.collect(), world.now)
    world.next()
    after = world.slices()[-1]
    assert after[2] - after[1] == first[2] - first[1] == 48


def test_on_a_slow_machine_pieces_are_short_and_prompts_still_end() -> None:
    world = make_world(token_seconds=1.0)
    world.ask("writer", 4, 100)
    world.next()
    world.ask("reader", 100, 4)
    assert pieces(world, "reader") == [TOKENS_MIN] * 6 + [4]


def test_a_machine_that_becomes_slower_gets_shorter_pieces() -> None:
    world = make_world()
    world.ask("writer", 4, 300)
    world.next()
    world.next()
    object.__setattr__(world.shape, "token_seconds", 0.003)
    world.ask("reader", 400, 4)
    took = pieces(world, "reader")
    assert (took[0], took[-2]) == (48, 16), took


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_an_invalid_limit_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="prompt_seconds_max"):
        SchedulerConfig(prompt_seconds_max=wrong)
    with pytest.raises(ValueError, match="tbt_seconds"):
        SchedulerConfig(tbt_seconds=wrong)


def busy_world(decode_seconds: float) -> tuple[ScriptedWorld, list[int]]:
    """Return a world in which a turn generates, and an empty list for the lengths of pieces."""
    world = make_world()
    world.ask("writer", 4, 390)
    world.next()
    world.next()
    set_iteration_seconds(world, decode_seconds)
    return world, []


def set_iteration_seconds(world: ScriptedWorld, seconds: float) -> None:
    object.__setattr__(world.shape, "iteration_seconds", seconds)


def run_prompts(world: ScriptedWorld, lengths: list[int], iterations: int, name: str) -> None:
    for number in range(iterations):
        if number % 5 == 0:
            world.ask(f"{name} {number}", 255, 1)
        world.next()
        lengths.append(sum(stop - at for who, at, stop in world.slices() if who != "writer"))


def test_endless_prompts_are_not_charged_for_iterations_that_became_slower() -> None:
    """Iterations become slower while every iteration has a prompt."""
    world, lengths = busy_world(0.01)
    run_prompts(world, lengths, 20, "before")
    set_iteration_seconds(world, 0.2)
    run_prompts(world, lengths, 80, "after")
    assert lengths[9] == 48, lengths
    whole = [
        each for each in lengths[-20:] if 48 <= each <= 96
    ]  # two or more seconds of prompts wait
    assert len(whole) > 12  # the other pieces are ends of prompts, or measurements
    assert lengths.count(0) < 12
    assert 48 in lengths[20 + PROBE_AFTER : 40 + PROBE_AFTER]


def test_an_outdated_base_time_does_not_disable_the_limit() -> None:
    """Most turns have ended, so iterations now take less time than the measured base."""
    world, lengths = busy_world(0.5)
    run_prompts(world, lengths, 20, "before")
    set_iteration_seconds(world, 0.01)
    run_prompts(world, lengths, 40, "after")
    assert 48 <= max(lengths[30:]) <= 96


def test_an_initial_burst_is_compared_with_an_iteration_without_prompts() -> None:
    world = ScriptedWorld(400, 0, **{"batch_tokens_max": 256, **TIMES})
    set_iteration_seconds(world, 0.2)
    world.ask("writer", 4, 390)
    lengths: list[int] = []
    run_prompts(world, lengths, 40, "reader")
    assert lengths.index(48) < 10
    assert lengths[10:].count(48) > 20


# -- the objective --


def world_with_objective(**changes: Any) -> ScriptedWorld:
    """Return a world with one generating turn: 10 ms per iteration, 1 ms per token, objective 80 ms."""
    times = {"token_seconds": 0.001, "tbt_seconds": 0.08}
    made = ScriptedWorld(4000, 0, **{"batch_tokens_max": 256, **times, **changes})
    made.ask("writer", 4, 900)
    made.next()
    made.next()
    return made


def gaps(world: ScriptedWorld, name: str) -> list[float]:
    """Return the times of the iterations that have a piece of this prompt."""
    found: list[float] = []
    while name in world.turns and len(world.turns[name].tokens) <= world.turns[name].prompt_end:
        iteration = world.next()
        if any(who == name for who, _, _ in world.slices()):
            found.append(world.seconds_of(iteration))
    return found


def test_an_iteration_is_filled_until_it_is_predicted_to_take_the_objective() -> None:
    world = world_with_objective()
    world.ask("reader", 640, 4)
    took = pieces(world, "reader")
    assert (
        took == [64] * 10
    )  # 10 ms, 1 ms for the decode, and 64 ms; the next multiple of 16 would make it 91 ms


def test_pieces_are_shorter_after_a_long_context() -> None:
    world = world_with_objective(key_seconds=0.0001)
    world.ask("reader", 480, 4)
    times = gaps(world, "reader")
    assert all(each <= 0.08 for each in times), times
    world = world_with_objective(key_seconds=0.0001)
    world.ask("reader", 480, 4)
    took = pieces(world, "reader")
    # An iteration takes 11 ms without the piece. The piece's own context takes 5 ms.
    assert took[0] == 48
    assert took[-2] == TOKENS_MIN  # reading the context takes the rest of the time


@pytest.mark.parametrize("foreseen", [0.2, 5.0])
def test_a_wrong_prediction_is_corrected_by_measurements(foreseen: float) -> None:
    world = world_with_objective(foreseen=foreseen, key_seconds=0.00001)
    world.ask("reader", 1200, 4)
    times = gaps(world, "reader")
    # The first prediction knows only iterations without prompts. Pieces grow in steps of 16 tokens.
    assert all(0.08 - 0.017 <= each <= 0.08 for each in times[1:-1]), times


def test_a_machine_that_becomes_slower_or_faster_is_noticed_in_a_few_iterations() -> None:
    world = world_with_objective()
    for seconds, expected in ((0.004, 16), (0.0005, 128)):
        object.__setattr__(world.shape, "token_seconds", seconds)
        name = f"reader {seconds}"
        world.ask(name, 1200, 4)
        took = pieces(world, name)
        assert took[8] == expected, took


def test_a_slowdown_is_accepted_after_two_iterations() -> None:
    """Until then, predictions still describe the faster machine."""
    world = world_with_objective()
    world.ask("reader", 640, 4)
    pieces(world, "reader")
    object.__setattr__(world.shape, "token_seconds", 0.002)
    world.ask("next", 640, 4)
    took = pieces(world, "next")
    assert took[:2] == [64, 64]
    assert set(took[2:-1]) == {32}, took


def test_time_between_iterations_counts_toward_the_objective() -> None:
    world = world_with_objective()
    world.ask("reader", 1600, 4)
    for _ in range(12):
        world.wait(0.02)
        world.next()
    (piece,) = [stop - start for who, start, stop in world.slices() if who == "reader"]
    assert piece == 48, "80 ms = 20 between iterations + 11 for the decode + 49 for the prompt"


def test_pieces_double_while_their_tokens_take_no_time() -> None:
    """Up to 40 tokens take no extra time, because reading the weights takes longer than computing them."""
    world = world_with_objective()

    def seconds_of(iteration: Iteration) -> float:
        return 0.01 + max(0.04, 0.001 * iteration.num_tokens)

    world.seconds_of = seconds_of  # type: ignore[method-assign]
    for number in range(8):  # short messages cost no extra time
        world.ask(f"short {number}", 16, 1)
        pieces(world, f"short {number}")
    world.ask("reader", 1600, 4)
    took = pieces(world, "reader")
    assert took[0] <= 32, took
    assert all(after <= 2 * before for before, after in pairwise(took)), took
    assert set(took[17:-1]) == {64}, took  # 75 ms; 80 tokens would make it 91 ms
    assert max(took) == 64


def test_the_smaller_of_objective_and_limit_applies() -> None:
    for limit, expected in ((0.04, 32), (0.5, 64)):
        world = world_with_objective(prompt_seconds_max=limit)
        world.next()
        world.ask("reader", 320, 4)
        assert pieces(world, "reader")[1] == expected


def test_no_limit_applies_if_the_predicted_time_is_zero() -> None:
    world = world_with_objective(foreseen=0.0)
    world.ask("reader", 300, 4)
    assert pieces(world, "reader") == [255, 45]


def test_a_short_prompt_joins_a_long_one_if_time_is_left() -> None:
    world = world_with_objective()
    world.ask("long", 16, 1)
    world.ask("short", 20, 1)
    world.ask("third", 100, 1)
    world.next()
    assert world.slices() == [("writer", 5, 6), ("long", 0, 16), ("short", 0, 20), ("third", 0, 32)]


def test_the_first_prompt_advances_even_if_decodes_exceed_the_objective() -> None:
    world = world_with_objective(iteration_seconds=0.2)
    world.ask("reader", 40, 4)
    world.ask("other", 40, 4)
    assert pieces(world, "reader") == [TOKENS_MIN, TOKENS_MIN, 8]
    world.next()
    assert ("other", 0, TOKENS_MIN) in world.slices() or len(world.turns["other"].tokens) >= 40


def test_a_batch_is_as_large_as_the_objective_allows() -> None:
    """Iterations take 10 ms, and 1 ms a token. 16 turns take 26 ms, so the 17th waits. All turns end."""
    world = ScriptedWorld(
        400,
        0,
        batch_tokens_max=64,
        turns_max=64,
        iteration_seconds=0.010,
        token_seconds=0.001,
        tbt_seconds=0.0265,
    )
    turns = [world.ask(f"t{number}", 4, 12) for number in range(40)]
    most = 0
    while world.turns:
        before = world.now
        world.next()
        assert world.latest is not None
        decodes = [each for each in world.latest.slices if each.num_tokens == 1]
        most = max(most, len(decodes))
        if len(decodes) == len(world.latest.slices):
            assert world.now - before <= 0.0265
    assert most == 16
    assert all(turn.num_output_tokens == 12 for turn in turns)
