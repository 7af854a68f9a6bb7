"""Prompts that are computed before there is a place for their replies."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import Turn, TurnState
from tests.core.world import Stage


def full(ahead: int, places: int = 2, reply: int = 60, **shape: Any) -> Stage:
    """So many turns generate, and no other has a place."""
    settings = {"batch_tokens_max": 32, "turns_max": places, "late": 0.0, **shape}
    stage = Stage(settings.pop("device_pages", 400), 400, prefill_ahead=ahead, **settings)
    for number in range(places):
        stage.ask(f"t{number}", 4, reply)
    for _ in range(3):
        stage.next()
    return stage


def first_tokens_after(stage: Stage, turns: list[Turn]) -> list[int]:
    """How many iterations lie between the end of `t0` and each turn's first token."""
    stage.until_ended(stage.turns["t0"])
    found: dict[int, int] = {}
    for number in range(200):
        stage.next()
        for turn in turns:
            if turn.num_output_tokens:
                found.setdefault(turn.turn_id, number)
        if len(found) == len(turns):
            break
    return [found[turn.turn_id] for turn in turns]


@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_is_ready_says_its_first_token_at_once(overlap: bool) -> None:
    """A prompt of seven iterations."""
    later, at_once = (
        first_tokens_after(stage, [stage.ask("next", 200, 5)])[0]
        for stage in (full(0, overlap=overlap), full(1, overlap=overlap))
    )
    assert later >= 6
    assert at_once <= int(overlap)


def test_replies_go_on_beside_prompts_that_are_computed_ahead() -> None:
    stage = full(3)
    waiting = [stage.ask(f"w{number}", 50 + number, 4) for number in range(5)]
    for _ in range(12):
        stage.next()
        decoded = {name for name, start, stop in stage.slices() if stop - start == 1}
        assert decoded >= {"t0", "t1"}
    states = [turn.state for turn in waiting]
    assert states == [TurnState.READY] * 3 + [TurnState.QUEUED] * 2
    assert stage.scheduler.counters.readied == 3
    assert all(turn.num_output_tokens == 0 for turn in waiting)
    stage.run_until_idle()
    counters = stage.scheduler.counters
    assert counters.suspensions == counters.resumptions == counters.recomputed_tokens == 0
    firsts = [turn.usage.first_token_at or 0.0 for turn in waiting]
    assert firsts == sorted(firsts)


def test_no_prompt_is_finished_before_there_is_a_place() -> None:
    """Its last token is the one that samples."""
    stage = full(2)
    turn = stage.ask("next", 33, 4)
    computed = []
    while turn.state is not TurnState.READY:
        stage.next()
        computed += [(start, stop) for name, start, stop in stage.slices() if name == "next"]
    assert computed[0][0] == 0
    assert computed[-1][1] == 32
    stage.until_ended(stage.turns["t0"])
    stage.next()
    assert ("next", 32, 33) in stage.slices()


def test_one_that_runs_ahead_has_the_place_that_falls_free() -> None:
    stage = full(2, reply=8)
    turn = stage.ask("next", 400, 4)
    while stage.turns.get("t0"):
        stage.next()
    assert turn.state is TurnState.RUNNING
    stage.until_ended(turn)
    assert stage.scheduler.counters.readied == 0


def test_what_is_ready_moves_to_the_host_and_back_uncomputed() -> None:
    stage = full(2, device_pages=100)
    turn = stage.ask("next", 60, 4)
    while turn.state is not TurnState.READY:
        stage.next()
    other = stage.ask("other", 8, 2)
    assert stage.cache.move_to_host("next", stage.now)
    for _ in range(8):
        stage.next()
    assert set(stage.where("next")) == {"h"}
    stage.until_ended(turn)
    assert stage.scheduler.counters.recomputed_tokens == 0
    stage.run_until_idle()
    assert other.num_output_tokens == 2


def test_nothing_is_computed_ahead_where_pages_are_short() -> None:
    """Those that generate take them all."""
    stage = full(1, 4, device_pages=32, reply=24)
    turn = stage.ask("next", 80, 2)
    stage.next()
    assert turn.state is TurnState.QUEUED
    stage.run_until_idle()
    assert stage.scheduler.counters.suspensions == 0


def test_who_runs_ahead_gives_its_pages_to_who_has_a_place() -> None:
    stage = full(1, device_pages=40, reply=80, reserve=0.0)
    turn = stage.ask("next", 90, 2)
    stage.next()
    assert turn.ahead
    urgent = stage.ask("urgent", 70, 2, priority=1)
    stage.next()
    while urgent.state is not TurnState.RUNNING:
        stage.next()
    assert turn.state is TurnState.SUSPENDED
    assert not turn.ahead
    stage.run_until_idle()
    assert stage.scheduler.counters.recomputed_tokens <= 90


def test_a_higher_level_does_not_wait_behind_what_is_ready() -> None:
    stage = full(2)
    ready = [stage.ask(f"w{number}", 8, 4) for number in range(2)]
    for _ in range(3):
        stage.next()
    high = stage.ask("high", 8, 4, priority=1)
    stage.next()
    assert high.state is TurnState.RUNNING
    assert all(turn.state is TurnState.READY for turn in ready)
    stage.run_until_idle()


@pytest.mark.parametrize("keep", [0, 40])
def test_turns_end_that_are_ahead_or_ready(keep: int) -> None:
    stage = full(2)
    one, two = stage.ask("one", 40, 4), stage.ask("two", 300, 4)
    while one.state is not TurnState.READY:
        stage.next()
    assert two.ahead
    for turn in (one, two):
        stage.cancel_at(turn, min(keep, turn.prompt_end))
    stage.run_until_idle()
    stage.say("one", 5, 3)


def test_a_message_of_one_token_is_ready_at_once() -> None:
    stage = full(1)
    turn = stage.ask("short", 1, 3)
    stage.next()
    assert turn.state is TurnState.READY
    stage.run_until_idle()
    assert turn.num_output_tokens == 3


def test_who_asks_for_nothing_ahead_gets_none() -> None:
    stage = full(0)
    turn = stage.ask("next", 8, 4)
    for _ in range(10):
        stage.next()
    assert turn.state is TurnState.QUEUED
    assert SchedulerConfig().prefill_ahead == 0
    with pytest.raises(ValueError, match="prefill_ahead"):
        SchedulerConfig(prefill_ahead=-1)


# -- who goes before whom --


def test_a_prompt_that_has_its_place_goes_on_though_another_finds_no_pages() -> None:
    """The shorter one would go before it, and needs more than is left over."""
    stage = Stage(30, 0, batch_tokens_max=16, turns_max=1, late=0.0, prefill_ahead=1)
    stage.ask("long", 100, 2)
    stage.next()
    short = stage.ask("short", 8, 2)
    for start in range(16, 96, 16):
        stage.next()
        assert stage.slices() == [("long", start, start + 16)]
    assert short.state is TurnState.QUEUED
    stage.run_until_idle()


def test_beside_others_it_takes_no_longer_than_without() -> None:
    def iterations(ahead: int) -> int:
        stage = Stage(64, 0, batch_tokens_max=16, turns_max=2, late=0.0, prefill_ahead=ahead)
        stage.ask("writer", 4, 60)
        stage.next()
        long = stage.ask("long", 200, 2)
        stage.next()
        stage.ask("short", 8, 2)
        count = 0
        while not long.num_output_tokens:
            stage.next()
            count += 1
        return count

    assert iterations(1) == iterations(0)


def test_nobody_goes_ahead_into_what_others_gave_way_for() -> None:
    """Planned one iteration ahead, the place is not free yet when the next plan is made."""
    stage = Stage(400, 400, batch_tokens_max=32, turns_max=1, overlap=True, prefill_ahead=2)
    low = stage.ask("low", 4, 60)
    for _ in range(4):
        stage.next()
    high = stage.ask("high", 8, 4, priority=1)
    for _ in range(6):
        stage.step()
    assert high.num_output_tokens
    assert not low.finish
    stage.run_until_idle()
    assert stage.scheduler.counters.preemptions == 1


def test_a_free_place_is_for_the_higher_level() -> None:
    stage = Stage(400, 400, batch_tokens_max=32, turns_max=2, late=0.0, prefill_ahead=2)
    short, long = stage.ask("short", 4, 6, priority=1), stage.ask("long", 4, 60, priority=1)
    stage.next()
    low = stage.ask("low", 600, 4)
    stage.until_ended(short)
    assert low.ahead
    high = stage.ask("high", 8, 4, priority=1)
    stage.next()
    assert high.num_output_tokens == 1
    assert low.ahead
    stage.until_ended(long)
    stage.run_until_idle()
    assert stage.scheduler.counters.suspensions == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_free_place_is_for_the_share_that_has_used_less(ahead: int) -> None:
    stage = Stage(400, 400, batch_tokens_max=32, turns_max=1, late=0.0, prefill_ahead=ahead)
    stage.ask("one", 4, 12, share="a")
    stage.next()
    stage.ask("two", 600, 50, share="a")
    stage.next()
    stage.next()
    other = stage.ask("other", 8, 4, share="b")
    for _ in range(12):
        stage.next()
    assert other.num_output_tokens
    stage.run_until_idle()


def test_one_that_gives_its_pages_up_is_not_moved_back() -> None:
    """It had no place, so it neither rises nor goes to the end of the queue, and nothing is counted."""
    stage = full(1, device_pages=40, reply=80, reserve=0.0)
    turn = stage.ask("next", 90, 2)
    stage.next()
    urgent = stage.ask("urgent", 70, 2, priority=1)
    stage.until_ended(urgent)
    assert (turn.level, turn.moved_back, turn.usage.suspensions) == (0, False, 0)
    stage.run_until_idle()


# -- what a plan may not do --


@pytest.mark.parametrize("policy", ["lru", "value", "return"])
def test_a_conversation_whose_own_pages_are_freed_for_it_is_planned_in_a_few_steps(
    policy: str,
) -> None:
    """Of a thousand pages, nearly all idle and none on a host, one more is needed than there is."""
    stage = Stage(
        2600, 0, batch_tokens_max=2048, late=0.0, policy=policy, reserve=0.0, swap_out_below=0.0
    )
    for name, num_pages in (("a", 1400), ("b", 1100)):
        stage.say(name, 4 * num_pages - 2, 1)
        stage.wait(100.0)
    plans = 0
    once = stage.scheduler.plan

    def counted(*arguments: object) -> object:
        nonlocal plans
        plans += 1
        return once(*arguments)  # type: ignore[arg-type]

    stage.scheduler.plan = counted  # type: ignore[assignment]
    turn = stage.ask("a", 404, 1)
    stage.until_ended(turn)
    assert plans < 40


def test_what_a_page_copy_writes_is_not_swapped_out_beside_it() -> None:
    stage = Stage(16, 200, batch_tokens_max=16, turns_max=3, swap_out_below=0.0, reserve=0.0)
    stage.say("source", 10, 6)
    stage.say("other", 30, 2)
    stage.fork_at("source", 10, "fork")
    stage.warm("fork")
    stage.ask("big", 57, 2)
    first = stage.next()
    assert first.copies
    assert not first.swap_outs
    stage.run_until_idle()
