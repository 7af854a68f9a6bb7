"""Inject a fault at every statement of the store, one statement in each run of a short story.

The fault comes before or after the statement takes effect. It is a single error, a lasting error, or the
death of the process. Afterwards the disk works again. No acknowledged operation may be lost, no operation may
be half done, and the story must reach its end.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.disk import STORE_FAULTS, Fault, shelf
from tests.faults.kinds import NO_FAULTS, Shape
from tests.faults.machine import EngineShape
from tests.faults.process import quiet
from tests.faults.world import World

SHAPE = Shape(EngineShape(checks_every=10), reply_max=4, prompt_words_max=2)
NEVER = 10**9
FAULTS = [fault for fault in STORE_FAULTS if fault.kind != "the service dies after a statement"]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with shelf() as path:
        yield path


def story(world: World) -> None:
    """Use every operation of the store. At the end, send unanswered requests again."""
    people = world.people
    world.start()
    people.create("tea", "w5 w6 w7", "brief")
    people.create("pot", "w5 w6 w7", "brief")
    world.rest(say_again=False)
    people.say("tea", 3)
    people.say("pot", 2)
    world.rest(say_again=False)
    people.say("tea", 4)
    world.move_until_begun()
    people.cancel()
    people.fork("tea", target="cup")
    world.rest(say_again=False)
    people.say("cup", 2)
    people.warm("tea")
    people.rewind("pot", 0)
    world.rest(say_again=False)
    people.say_again(people.requests[0])
    people.say("pot", 2)
    people.delete("tea")
    world.rest(say_again=False)


def run_story(place: Path, fault: Fault, countdown: int) -> World:
    """Run the story with this fault, `countdown` statements after the start, and the final check."""
    world = World(countdown, place, shape=SHAPE, rates=NO_FAULTS)
    try:
        world.disk.arm(fault, countdown)
        story(world)
        world.settle()
        world.final_check()
    except BaseException as error:
        error.add_note(f"{fault.kind}, statement {countdown}")
        raise
    finally:
        shutil.rmtree(place / f"world-{countdown}")
    return world


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_the_story_completes_whichever_store_statement_fails(fault: Fault, place: Path) -> None:
    countdown = 0
    with quiet():
        while True:
            countdown += 1
            world = run_story(place, fault, countdown)
            if world.disk.fired is None:
                break
    assert countdown > 150, "the story executes too few statements"
    assert all(request.reply is not None for request in world.people.requests)
