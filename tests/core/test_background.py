"""Background turns of batch jobs use only what interactive turns leave free."""

from __future__ import annotations

from statistics import quantiles
from typing import Any

import pytest

from pensieve.core.background_room import QUIET_SECONDS, SECONDS
from pensieve.core.iteration_builder import TOKENS_MIN
from pensieve.core.turn import TurnState
from tests.core.world import Shape, Stage, run

# An iteration takes 10 ms, plus 1 ms per token. So one job token makes a decode about 10 % longer.
DEAR: dict[str, Any] = {"batch_tokens_max": 256, "token_seconds": 0.001, "turns_max": 64}
CHEAP = {**DEAR, "token_seconds": 0.00001}


def job(stage: Stage, number: int, num_prompt: int = 8, num_reply: int = 40) -> None:
    for index in range(number):
        stage.ask(f"job {index}", num_prompt, num_reply, background=True, share="~batch")


def num_of_job(stage: Stage) -> int:
    """Return the job's tokens in the last iteration."""
    return sum(stop - start for name, start, stop in stage.slices() if name.startswith("job"))


def test_a_job_alone_has_the_whole_machine() -> None:
    stage = Stage(400, 0, **DEAR)
    job(stage, 20, num_prompt=20)
    stage.next()
    assert num_of_job(stage) == 256


def test_a_job_pauses_while_a_prompt_is_computed() -> None:
    stage = Stage(400, 0, **DEAR)
    job(stage, 4)
    stage.next()
    stage.next()
    assert num_of_job(stage) == 4
    stage.ask("person", 300, 1)
    stage.next()
    assert [name for name, _, _ in stage.slices()] == ["person"]
    stage.next()
    assert [name for name, _, _ in stage.slices()] == ["person"]


def test_a_job_pauses_for_a_prompt_while_other_turns_generate() -> None:
    """The scheduler has already learned that a job token costs little."""
    stage = Stage(900, 0, **{**CHEAP, "batch_tokens_max": 64})
    stage.ask("generating", 4, 300)
    stage.next()
    job(stage, 20, num_prompt=30, num_reply=200)
    taken = []
    for _ in range(60):
        stage.next()
        taken.append(num_of_job(stage))
    assert max(taken) >= 5
    person = stage.ask("person", 150, 2)
    while not person.num_output_tokens:
        stage.next()
        assert {name for name, _, _ in stage.slices()} == {"generating", "person"}
    taken.clear()
    for _ in range(4):
        stage.next()
        taken.append(num_of_job(stage))
    assert max(taken) >= 5


def test_an_interactive_turn_runs_before_an_earlier_job() -> None:
    stage = Stage(400, 0, **DEAR)
    job(stage, 3, num_prompt=200)
    stage.ask("person", 4, 1)
    stage.next()
    assert stage.slices()[0] == ("person", 0, 4)


def test_with_expensive_tokens_a_job_waits_until_no_turn_generates() -> None:
    stage = Stage(400, 0, **DEAR)
    person = stage.ask("person", 4, 600)
    stage.next()
    job(stage, 8)
    taken = []
    while person.finish is None:
        stage.next()
        taken.append(num_of_job(stage))
    assert max(taken) == 1
    assert sum(taken) <= 4  # a job token is tried now and then, to measure its cost
    stage.next()
    assert num_of_job(stage) >= 8


def test_with_cheap_tokens_a_job_grows_beside_generating_turns() -> None:
    stage = Stage(400, 0, **CHEAP)
    person = stage.ask("person", 4, 200)
    stage.next()
    job(stage, 60)
    taken, seconds = [], []
    while person.finish is None:
        before = stage.now
        stage.next()
        taken.append(num_of_job(stage))
        seconds.append(stage.now - before)
    assert max(taken[60:]) > 30
    assert quantiles(seconds, n=100)[98] <= 1.1 * 0.01001
    stage.run_until_idle()


def test_iterations_of_a_lone_job_stay_short_until_quiet_seconds_have_passed() -> None:
    stage = Stage(900, 0, **DEAR)
    stage.say("person", 4, 2)
    job(stage, 6, num_prompt=250, num_reply=2)
    seconds = []
    for _ in range(12):
        before = stage.now
        stage.next()
        seconds.append(stage.now - before)
    assert num_of_job(stage) > TOKENS_MIN
    assert max(seconds) < 1.2 * SECONDS
    stage.wait(QUIET_SECONDS)
    stage.next()
    assert num_of_job(stage) == 256


def test_a_job_gives_its_pages_to_an_interactive_turn_and_loses_no_tokens() -> None:
    stage = Stage(24, 60, **DEAR)
    job(stage, 5, num_prompt=15, num_reply=4)
    stage.next()
    running = [stage.turns[f"job {index}"] for index in range(5)]
    assert all(turn.state is TurnState.RUNNING for turn in running)
    person = stage.ask("person", 60, 2)
    while not person.num_output_tokens:
        stage.next()
        stage.land()
    assert any(turn.state is TurnState.SUSPENDED for turn in running)
    stage.run_until_idle()
    assert stage.num_replies == 6


def test_a_job_gives_its_place_to_an_interactive_turn() -> None:
    stage = Stage(400, 0, **{**DEAR, "turns_max": 3})
    job(stage, 5)
    stage.next()
    stage.ask("person", 4, 2)
    stage.next()
    assert stage.slices()[0] == ("person", 0, 4)
    stage.run_until_idle()


def test_interactive_turns_that_arrive_together_all_replace_jobs_at_once() -> None:
    stage = Stage(900, 0, **{**CHEAP, "turns_max": 16})
    job(stage, 16, num_reply=200)
    stage.next()
    stage.next()
    people = [stage.ask(f"person {number}", 4, 2) for number in range(12)]
    stage.next()
    stage.next()
    assert all(person.num_output_tokens for person in people)
    stage.run_until_idle()


def test_small_iterations_do_not_reduce_the_token_budget_of_jobs() -> None:
    stage = Stage(900, 0, **{**DEAR, "batch_tokens_max": 512})
    stage.say("person", 4, 2)
    job(stage, 1, num_prompt=300, num_reply=2)
    stage.run_until_idle()
    stage.ask("few", 4, 12, background=True, share="~batch")
    for _ in range(10):
        stage.next()
    stage.ask("more", 300, 2, background=True, share="~batch")
    stage.next()
    assert sum(stop - start for _, start, stop in stage.slices()) > 4 * TOKENS_MIN


def test_tokens_used_by_jobs_give_no_interactive_share_an_advantage() -> None:
    """A share that starts to wait is treated like the other interactive shares, whatever a job has used."""
    stage = Stage(400, 0, **{**DEAR, "turns_max": 1, "batch_tokens_max": 16})
    job(stage, 1, num_prompt=4)
    stage.ask("a", 40, 1, share="a")
    stage.ask("b", 4, 1, share="b")
    stage.until_ended(stage.turns["b"])
    stage.run_until_idle()
    assert stage.scheduler.queued.tokens_by_share["~batch"] == 4 + 40
    late = stage.ask("c", 4, 1, share="c")
    stage.ask("d", 4, 1, share="a")
    stage.next()
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
