"""Which turn is admitted next, and how many free pages it needs."""

from __future__ import annotations

from pensieve.core.fair_queue import TURNS_A_PRIORITY
from pensieve.core.scheduler import PASSES_MAX
from pensieve.core.turn import TurnState
from tests.core.world import Stage

# -- order of the turns --


def test_a_higher_priority_is_admitted_before_turns_that_wait_longer() -> None:
    stage = Stage(3, 0)
    first = stage.ask("a", 5)
    stage.next()
    low, high = stage.ask("b", 5), stage.ask("c", 5, priority=1)
    assert [turn.conversation_id for turn in stage.scheduler.queued] == ["c", "b"]
    stage.until_ended(low)
    assert first.usage.finished_at is not None
    assert high.usage.admitted_at is not None
    assert low.usage.admitted_at is not None
    assert first.usage.finished_at <= high.usage.admitted_at < low.usage.admitted_at


def test_a_low_priority_turn_is_overtaken_a_bounded_number_of_times() -> None:
    stage = Stage(3, 0)
    low = stage.ask("low", 2)
    high = [stage.ask(f"high{number}", 2, priority=1) for number in range(70)]
    stage.until_ended(low)
    assert sum(turn.finish is not None for turn in high) in (TURNS_A_PRIORITY, TURNS_A_PRIORITY + 1)
    stage.run_until_idle()


# -- admission --


def test_admission_keeps_the_reserve_except_when_nothing_runs() -> None:
    """The device has 20 pages, 2 of them in reserve."""
    stage = Stage(20, 0, batch_tokens_max=100)
    running = stage.ask("a", 8, 4)
    stage.next()
    assert stage.cache.available == 18
    large = stage.ask("b", 61)  # needs 16 pages; `a` generates and takes one of the 18
    stage.next()
    assert large.state is TurnState.QUEUED
    stage.until_ended(running)
    stage.until_ended(large)

    stage = Stage(20, 0, batch_tokens_max=100)
    stage.ask("a", 8, 4)
    stage.next()
    fits = stage.ask("b", 60)  # needs 15 pages
    stage.next()
    assert fits.state is not TurnState.QUEUED

    alone = Stage(20, 0, batch_tokens_max=100)
    alone.ask("c", 75)
    alone.next()
    assert alone.slices() == [("c", 0, 75)]


def test_all_pages_of_a_context_are_reserved_at_once() -> None:
    stage = Stage(12, 0, batch_tokens_max=4)
    stage.ask("a", 30)
    stage.next()
    assert stage.slices() == [("a", 0, 4)]
    assert stage.cache.device.num_empty == 12 - 8


def test_a_turn_without_room_is_passed_a_bounded_number_of_times() -> None:
    """A message whose history fills two thirds of the device waits in front of short messages."""
    stage = Stage(100, 400, batch_tokens_max=64, turns_max=64, late=0.0)
    stage.say("long", 260)
    stage.run_until_idle()
    running = stage.ask("running", 220, 120)
    for _ in range(8):
        stage.next()
    blocked = stage.ask("long", 4, 2)
    small = [stage.ask(f"small{number}", 4, 2) for number in range(20)]
    for _ in range(40):
        stage.next()
    assert blocked.state is TurnState.QUEUED
    assert sum(turn.finish is not None for turn in small) == PASSES_MAX
    stage.until_ended(blocked)
    assert running.finish is not None
    stage.run_until_idle()


def test_a_turn_that_needs_swap_ins_passes_no_waiting_turn() -> None:
    """`away` stays behind `long`, because its swap-ins would delay the swap-outs that `long` waits for."""
    stage = Stage(100, 400, batch_tokens_max=64, turns_max=64, late=0.0)
    stage.say("away", 20)
    stage.cache.move_to_host("away", stage.now)
    stage.run_until_idle()
    stage.say("long", 260)
    stage.ask("running", 220, 60)
    for _ in range(8):
        stage.next()
    assert set(stage.where("away")) == {"h"}
    blocked, away = stage.ask("long", 4, 2), stage.ask("away", 4, 2)
    here = stage.ask("here", 4, 2)
    for _ in range(6):
        stage.next()
    assert here.finish is not None
    assert away.state is blocked.state is TurnState.QUEUED
    stage.run_until_idle()
