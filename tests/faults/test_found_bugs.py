"""Bugs that the fault search has found, one test each."""

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
    """A conversation with one turn, and a second turn whose end could not be stored."""
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
        world.final_check()


def test_a_message_whose_reply_could_not_be_stored_is_answered_when_it_is_sent_again(
    world: World,
) -> None:
    """Before the fix, the request found its turn running; a second look then called it interrupted."""
    request = world.people.requests[1]
    assert request.reply is None
    world.people.say_again(request)
    world.rest(say_again=False)
    assert request.reply is not None


def test_a_new_message_is_answered_after_a_reply_that_could_not_be_stored(
    world: World,
) -> None:
    """Before the fix, nothing updated the row of the dead turn, so it stayed "running"."""
    world.people.requests[1].is_open = False
    request = world.people.say("tea", 3)
    world.rest(say_again=False)
    assert request.reply is not None


def test_a_reply_that_could_not_be_stored_does_not_affect_later_replies(world: World) -> None:
    """Before the fix, a turn cancelled in the queue was given positions that held KV of the lost turn."""
    people = world.people
    people.requests[1].is_open = False
    daemon = people.daemon
    assert daemon is not None
    request = people.say("tea", 3)
    for _ in range(3):  # the turn is submitted, but the engine has not read it from the pipe
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


@pytest.fixture
def sound_world() -> Iterator[World]:
    """A conversation with one turn, without faults."""
    with quiet(), shelf() as place:
        world = World(0, place, shape=Shape(), rates=NO_FAULTS)
        world.start()
        world.people.create("tea", "")
        world.rest()
        world.people.say("tea", 3)
        world.rest()
        yield world
        world.final_check()


def test_a_turn_whose_log_cannot_be_read_ends(sound_world: World) -> None:
    """Before the fix, the engine waited for the log for ever, and all other turns waited for the engine."""
    world = sound_world
    world.kill_engine()
    world.rest()
    request = world.people.say("tea", 3)
    world.move_until_begun()
    world.disk.arm(Fault("the log is refused", IO_ERROR), 1)
    world.rest(say_again=False)
    assert world.disk.fired is not None
    assert request.reply is None
    world.people.say_again(request)
    world.rest(say_again=False)
    assert request.reply is not None


def test_a_failed_deletion_does_not_end_a_turn_that_is_being_committed(sound_world: World) -> None:
    """Before the fix, the client was told that its turn was given up, and then the turn was committed."""
    world, process = sound_world, sound_world.process
    assert process is not None
    assert process.machine is not None
    request = world.people.say("tea", 1)
    world.move_until_begun()
    world.people.delete("tea")
    process.loop.spin()  # the deletion's job waits
    process.machine.read(100)
    while process.machine.step():
        world.clock.advance(0.01)
    process.machine.flush()
    process.deliver(100)
    process.loop.spin()  # the commit's job waits behind the deletion's job
    assert len(process.loop.store_jobs) == 2
    world.disk.arm(Fault("the interruption is refused", IO_ERROR), 2)
    world.rest(say_again=False)
    assert world.disk.fired is not None
    assert request.reply is not None
