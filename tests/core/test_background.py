"""Background turns of batch jobs use only what interactive turns leave free."""

from __future__ import annotations

from statistics import quantiles
from typing import Any

import pytest

from pensieve.core.background_room import QUIET_SECONDS, SECONDS
from pensieve.core.iteration_builder import TOKENS_MIN
from pensieve.core.turn import TurnState
from tests.core.world import ScriptedWorld, Shape, run

# An iteration takes 10 ms, plus 1 ms per token. So one job token makes a decode about 10 % longer.
DEAR: dict[str, Any] = {"batch_tokens_max": 256, "token_seconds": 0.001, "turns_max": 64}
CHEAP = {**DEAR, "token_seconds": 0.00001}


def start_job(world: ScriptedWorld, number: int, num_prompt: int = 8, num_reply: int = 40) -> None:
    for index in range(number):
        world.ask(f"job {index}", num_prompt, num_reply, background=True, share="~batch")


def num_job_tokens(world: ScriptedWorld) -> int:
    """Return the job's tokens in the last iteration."""
    return sum(stop - start for name, start, stop in world.slices() if name.startswith("job"))


def test_a_job_alone_has_the_whole_machine() -> None:
    world = ScriptedWorld(400, 0, **DEAR)
    start_job(world, 20, num_prompt=20)
    world.next()
    assert num_job_tokens(world) == 256


def test_a_job_pauses_while_a_prompt_is_computed() -> None:
    world = ScriptedWorld(400, 0, **DEAR)
    start_job(world, 4)
    world.next()
    world.next()
    assert num_job_tokens(world) == 4
    world.ask("person", 300, 1)
    world.next()
    assert [name for name, _, _ in world.slices()] == ["person"]
    world.next()
    assert [name for name, _, _ in world.slices()] == ["person"]


def test_a_job_pauses_for_a_prompt_while_other_turns_generate() -> None:
    """The scheduler has already learned that a job token costs little."""
    world = ScriptedWorld(900, 0, **{**CHEAP, "batch_tokens_max": 64})
    world.ask("generating", 4, 300)
    world.next()
    start_job(world, 20, num_prompt=30, num_reply=200)
    taken = []
    for _ in range(60):
        world.next()
        taken.append(num_job_tokens(world))
    assert max(taken) >= 5
    person = world.ask("person", 150, 2)
    while not person.num_output_tokens:
        world.next()
        assert {name for name, _, _ in world.slices()} == {"generating", "person"}
    taken.clear()
    for _ in range(4):
        world.next()
        taken.append(num_job_tokens(world))
    assert max(taken) >= 5


def test_an_interactive_turn_runs_before_an_earlier_job() -> None:
    world = ScriptedWorld(400, 0, **DEAR)
    start_job(world, 3, num_prompt=200)
    world.ask("person", 4, 1)
    world.next()
    assert world.slices()[0] == ("person", 0, 4)


def test_with_expensive_tokens_a_job_waits_until_no_turn_generates() -> None:
    world = ScriptedWorld(400, 0, **DEAR)
    person = world.ask("person", 4, 600)
    world.next()
    start_job(world, 8)
    taken = []
    while person.finish is None:
        world.next()
        taken.append(num_job_tokens(world))
    assert max(taken) == 1
    assert sum(taken) <= 4  # a job token is tried now and then, to measure its cost
    world.next()
    assert num_job_tokens(world) >= 8


def test_with_cheap_tokens_a_job_grows_beside_generating_turns() -> None:
    world = ScriptedWorld(400, 0, **CHEAP)
    person = world.ask("person", 4, 200)
    world.next()
    start_job(world, 60)
    taken, seconds = [], []
    while person.finish is None:
        before = world.now
        world.next()
        taken.append(num_job_tokens(world))
        seconds.append(world.now - before)
    assert max(taken[60:]) > 30
    assert quantiles(seconds, n=100)[98] <= 1.1 * 0.01001
    world.run_until_idle()


def test_iterations_of_a_lone_job_stay_short_until_quiet_seconds_have_passed() -> None:
    world = ScriptedWorld(900, 0, **DEAR)
    world.say("person", 4, 2)
    start_job(world, 6, num_prompt=250, num_reply=2)
    seconds = []
    for _ in range(12):
        before = world.now
        world.next()
        seconds.append(world.now - before)
    assert num_job_tokens(world) > TOKENS_MIN
    assert max(seconds) < 1.2 * SECONDS
    world.wait(QUIET_SECONDS)
    world.next()
    assert num_job_tokens(world) == 256


def test_a_job_gives_its_pages_to_an_interactive_turn_and_loses_no_tokens() -> None:
    world = ScriptedWorld(24, 60, **DEAR)
    start_job(world, 5, num_prompt=15, num_reply=4)
    world.next()
    running = [world.turns[f"job {index}"] for index in range(5)]
    assert all(turn.state is TurnState.RUNNING for turn in running)
    person = world.ask("person", 60, 2)
    while not person.num_output_tokens:
        world.next()
        world.land()
    assert any(turn.state is TurnState.SUSPENDED for turn in running)
    world.run_until_idle()
    assert world.num_replies == 6


def test_a_job_gives_its_place_to_an_interactive_turn() -> None:
    world = ScriptedWorld(400, 0, **{**DEAR, "turns_max": 3})
    start_job(world, 5)
    world.next()
    world.ask("person", 4, 2)
    world.next()
    assert world.slices()[0] == ("person", 0, 4)
    world.run_until_idle()


def test_interactive_turns_that_arrive_together_all_replace_jobs_at_once() -> None:
    world = ScriptedWorld(900, 0, **{**CHEAP, "turns_max": 16})
    start_job(world, 16, num_reply=200)
    world.next()
    world.next()
    people = [world.ask(f"person {number}", 4, 2) for number in range(12)]
    world.next()
    world.next()
    assert all(person.num_output_tokens for person in people)
    world.run_until_idle()


def test_small_iterations_do_not_reduce_the_token_budget_of_jobs() -> None:
    world = ScriptedWorld(900, 0, **{**DEAR, "batch_tokens_max": 512})
    world.say("person", 4, 2)
    start_job(world, 1, num_prompt=300, num_reply=2)
    world.run_until_idle()
    world.ask("few", 4, 12, background=True, share="~batch")
    for _ in range(10):
        world.next()
    world.ask("more", 300, 2, background=True, share="~batch")
    world.next()
    assert sum(stop - start for _, start, stop in world.slices()) > 4 * TOKENS_MIN


def test_tokens_used_by_jobs_give_no_interactive_share_an_advantage() -> None:
    """A share that starts to wait is treated like the other interactive shares, whatever a job has used."""
    world = ScriptedWorld(400, 0, **{**DEAR, "turns_max": 1, "batch_tokens_max": 16})
    start_job(world, 1, num_prompt=4)
    world.ask("a", 40, 1, share="a")
    world.ask("b", 4, 1, share="b")
    world.until_ended(world.turns["b"])
    world.run_until_idle()
    assert world.scheduler.queued.tokens_by_share["~batch"] == 4 + 40
    late = world.ask("c", 4, 1, share="c")
    world.ask("d", 4, 1, share="a")
    world.next()
    assert late.state is not TurnState.QUEUED


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "shape",
    [
        Shape(background=0.5),
        Shape(background=0.6, restless=True, overlap=True, conversations=10, device_pages=14),
        Shape(background=0.4, policy="return", turns_max=3, device_pages=20),
        Shape(
            background=0.5, tbt_seconds=0.03, token_seconds=0.001, prompt_max=60, device_pages=60
        ),
        Shape(background=0.8, host_pages=0, device_pages=9, failing=0.02),
    ],
)
def test_random_traffic_beside_a_job_ends_with_correct_replies(shape: Shape, seed: int) -> None:
    run(seed, shape, checks_every=2)
