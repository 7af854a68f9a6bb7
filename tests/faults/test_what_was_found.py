"""Bugs that the search has found, each in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.disk import IO_ERROR, Fault, shelf
from tests.faults.kinds import NO_FAULTS, Shape
from tests.faults.process import quiet
from tests.faults.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A conversation with one turn, whose next turn's end the disk refuses."""
    with quiet(), shelf() as place:
        world = World(0, place, shape=Shape(), rates=NO_FAULTS)
        world.start()
        world.people.create("tea", "")
        world.rest()
        world.people.say("tea", 3)
        world.rest()
        world.people.say("tea", 3)
        world.move_until_begun()
        world.disk.arm(Fault("the end is refused", IO_ERROR), 1)
        world.rest(say_again=False)
        assert world.disk.fired is not None
        yield world
        world.reckon()


def test_a_message_whose_answer_could_not_be_stored_is_answered_when_it_is_said_again(
    world: World,
) -> None:
    """The turn was found running by its id, then interrupted by the transaction that looked closer."""
    request = world.people.requests[1]
    assert request.reply is None
    world.people.say_again(request)
    world.rest(say_again=False)
    assert request.reply is not None


def test_another_message_is_answered_after_one_whose_answer_could_not_be_stored(
    world: World,
) -> None:
    """Nobody wrote, so the dead turn's row went on saying that it runs."""
    world.people.requests[1].is_open = False
    request = world.people.say("tea", 3)
    world.rest(say_again=False)
    assert request.reply is not None


def test_an_answer_that_could_not_be_stored_is_in_no_reply_after_it(world: World) -> None:
    """A turn cancelled in the queue joins the log; the KV of the lost one lay at its positions."""
    people = world.people
    people.requests[1].is_open = False
    daemon = people.daemon
    assert daemon is not None
    request = people.say("tea", 3)
    for _ in range(3):  # submitted, and not read from the pipe yet
        assert world.process is not None
        while world.process.loop.store_jobs:
            world.process.work(other=False)
        world.process.loop.spin()
    assert people.cancel()
    world.rest(say_again=False)
    assert request.reply is not None
    assert request.reply[0] == []
    after = people.say("tea", 3)
    world.rest(say_again=False)
    assert after.reply is not None
