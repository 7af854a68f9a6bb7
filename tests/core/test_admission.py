"""Which turn is admitted next, and how many free pages it needs."""

from __future__ import annotations

from pensieve.core.fair_queue import TURNS_A_PRIORITY
from pensieve.core.scheduler import PASSES_MAX
from pensieve.core.turn import TurnState
from tests.core.world import ScriptedWorld

# -- order of the turns --


def test_a_higher_priority_is_admitted_before_turns_that_wait_longer() -> None:
    world = ScriptedWorld(3, 0)
    first = world.ask("a", 5)
    world.next()
    low, high = world.ask("b", 5), world.ask("c", 5, priority=1)
    assert [turn.conversation_id for turn in world.scheduler.queued] == ["c", "b"]
    world.until_ended(low)
    assert first.usage.finished_at is not None
    assert high.usage.admitted_at is not None
    assert low.usage.admitted_at is not None
    assert first.usage.finished_at <= high.usage.admitted_at < low.usage.admitted_at


def test_a_low_priority_turn_is_overtaken_a_bounded_number_of_times() -> None:
    world = ScriptedWorld(3, 0)
    low = world.ask("low", 2)
    high = [world.ask(f"high{number}", 2, priority=1) for number in range(70)]
    world.until_ended(low)
    assert sum(turn.finish is not None for turn in high) in (TURNS_A_PRIORITY, TURNS_A_PRIORITY + 1)
    world.run_until_idle()


# -- admission --


def test_admission_keeps_the_reserve_except_when_nothing_runs() -> None:
    """The device has 20 pages, 2 of them in reserve."""
    world = ScriptedWorld(20, 0, batch_tokens_max=100)
    running = world.ask("a", 8, 4)
    world.next()
    assert world.cache.available == 18
    large = world.ask("b", 61)  # needs 16 pages; `a` generates and takes one of the 18
    world.next()
    assert large.state is TurnState.QUEUED
    world.until_ended(running)
    world.until_ended(large)

    world = ScriptedWorld(20, 0, batch_tokens_max=100)
    world.ask("a", 8, 4)
    world.next()
    fits = world.ask("b", 60)  # needs 15 pages
    world.next()
    assert fits.state is not TurnState.QUEUED

    alone = ScriptedWorld(20, 0, batch_tokens_max=100)
    alone.ask("c", 75)
    alone.next()
    assert alone.slices() == [("c", 0, 75)]


def test_all_pages_of_a_context_are_reserved_at_once() -> None:
    world = ScriptedWorld(12, 0, batch_tokens_max=4)
    world.ask("a", 30)
    world.next()
    assert world.slices() == [("a", 0, 4)]
    assert world.cache.device.num_empty == 12 - 8


def test_a_turn_without_room_is_passed_a_bounded_number_of_times() -> None:
    """A message whose history fills two thirds of the device waits in front of short messages."""
    world = ScriptedWorld(100, 400, batch_tokens_max=64, turns_max=64, late=0.0)
    world.say("long", 260)
    world.run_until_idle()
    running = world.ask("running", 220, 120)
    for _ in range(8):
        world.next()
    blocked = world.ask("long", 4, 2)
    small = [world.ask(f"small{number}", 4, 2) for number in range(20)]
    for _ in range(40):
        world.next()
    assert blocked.state is TurnState.QUEUED
    assert sum(turn.finish is not None for turn in small) == PASSES_MAX
    world.until_ended(blocked)
    assert running.finish is not None
    world.run_until_idle()


def test_a_turn_that_needs_swap_ins_passes_no_waiting_turn() -> None:
    """`away` stays behind `long`, because its swap-ins would delay the swap-outs that `long` waits for."""
    world = ScriptedWorld(100, 400, batch_tokens_max=64, turns_max=64, late=0.0)
    world.say("away", 20)
    world.cache.move_to_host("away", world.now)
    world.run_until_idle()
    world.say("long", 260)
    world.ask("running", 220, 60)
    for _ in range(8):
        world.next()
    assert set(world.where("away")) == {"h"}
    blocked, away = world.ask("long", 4, 2), world.ask("away", 4, 2)
    here = world.ask("here", 4, 2)
    for _ in range(6):
        world.next()
    assert here.finish is not None
    assert away.state is blocked.state is TurnState.QUEUED
    world.run_until_idle()
