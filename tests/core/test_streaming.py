"""Turns whose KV stays on the host while they run: which turns, what they hold, when they return."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pensieve.core import stream_groups
from pensieve.core.cost import IterationCost
from pensieve.core.iteration import Iteration
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.streamed_pages import StreamedPages
from pensieve.core.streaming import PAUSE_MIN, TRIED_FOR, StreamCost, Streaming, StreamLoad
from pensieve.core.tiers import CacheConfig
from pensieve.core.turn import Turn, TurnState
from tests.core.world import ScriptedWorld


def make_world(device_pages: int = 10, host_pages: int = 60, **shape: Any) -> ScriptedWorld:
    """Return a world with chunks of 4 tokens. A turn of 24 tokens and its reply fill most of the device."""
    settings = {"staging_pages": 16, "reserve": 0.0, "batch_tokens_max": 64, **shape}
    return ScriptedWorld(device_pages, settings.pop("host_pages", host_pages), **settings)


def ask_two(world: ScriptedWorld, said_by_a: int = 10, said_by_b: int = 10) -> tuple[Turn, Turn]:
    """Ask two turns that do not fit on the device together."""
    return world.ask("a", 24, said_by_a), world.ask("b", 20, said_by_b)


def streamed_ids(iteration: Iteration) -> list[int]:
    """Return the ids of the streamed turns, group by group."""
    return [
        piece.attempt_id
        for group in iteration.groups
        for piece in iteration.slices[group.first_slice : group.stop_slice]
    ]


def test_a_turn_without_room_on_the_device_streams() -> None:
    world = make_world()
    a, b = ask_two(world)
    c = world.ask("c", 20, 6)
    world.next()
    assert not a.streamed
    assert b.streamed
    assert c.streamed
    iteration = world.next()
    assert world.where("b") == "h" * len(b.chunks)
    assert sorted(streamed_ids(iteration)) == [b.attempt_id, c.attempt_id]
    assert iteration.slices[0].attempt_id == a.attempt_id
    world.run_until_idle()
    assert world.scheduler.counters.suspensions == 0


@pytest.mark.parametrize("settings", [{"stream": "off"}, {"staging_pages": 0}, {"host_pages": 0}])
def test_without_streaming_a_turn_waits_for_the_device(settings: dict[str, Any]) -> None:
    world = make_world(**settings)
    a, b = ask_two(world)
    for _ in range(4):
        world.next()
    assert a.usage.admitted_at is not None
    assert b.usage.admitted_at is None
    world.run_until_idle()
    assert world.scheduler.counters.streamed == 0


def test_a_group_lists_each_page_once_with_its_loaded_and_stored_slots() -> None:
    world = make_world()
    _, b = ask_two(world)
    [group] = world.next().groups
    assert group.loaded_slots.tolist() == [0] * 5  # the pages of its prompt
    assert group.stored_slots.tolist() == [4] * 5
    iteration = world.next()
    [group] = iteration.groups
    [piece] = iteration.slices[group.first_slice : group.stop_slice]
    assert (piece.attempt_id, piece.start, piece.stop) == (b.attempt_id, 20, 21)
    assert piece.page_table.tolist() == [0, 1, 2, 3, 4, 5]
    assert group.host_pages == b.page_table
    assert group.loaded_slots.tolist() == [4, 4, 4, 4, 4, 0]
    assert group.stored_slots.tolist() == [0, 0, 0, 0, 0, 1]
    world.run_until_idle()


def test_turns_with_a_shared_prefix_stage_it_once() -> None:
    world = make_world(staging_pages=24)
    world.say("root", 17, 1)
    for name in "bcd":
        world.fork_at("root", 16, name)
    world.ask("big", 24, 9)
    world.next()
    turns = [world.ask(name, 15, 5) for name in "bcd"]
    while not all(turn.streamed and not turn.is_prefill for turn in turns):
        world.next()
        world.land()
    iteration = world.next()
    [group] = iteration.groups
    pieces = iteration.slices[group.first_slice : group.stop_slice]
    assert len(pieces) == 3
    assert len({tuple(piece.page_table[:4]) for piece in pieces}) == 1
    assert len(group.host_pages) == 4 + sum(len(turn.chunks) - 4 for turn in turns)
    world.run_until_idle()


def test_groups_are_repacked_only_when_they_no_longer_fit() -> None:
    world = make_world(host_pages=100, staging_pages=8)
    world.ask("big", 30, 5)
    turns = [world.ask(name, 9, 15) for name in "abcde"]
    seen: list[list[list[int]]] = []
    for _ in range(12):
        iteration = world.next()
        assert all(len(group.host_pages) <= 8 for group in iteration.groups)
        seen.append(
            [
                [each.attempt_id for each in iteration.slices[group.first_slice : group.stop_slice]]
                for group in iteration.groups
            ]
        )
    assert sum(turn.streamed for turn in turns) >= 3
    kept = [one == other for one, other in pairwise(seen) if any(map(len, one))]
    assert True in kept
    assert False in kept
    world.run_until_idle()


def test_arriving_and_ending_turns_do_not_repack_all_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packings, pack = [], stream_groups.pack
    monkeypatch.setattr(stream_groups, "pack", lambda *given: packings.append(1) or pack(*given))
    monkeypatch.setattr(stream_groups, "CHANGED_SHARE", 100.0)  # few turns quickly change by half
    world = make_world(host_pages=400, staging_pages=12)
    world.ask("big", 30, 60)
    turns = [world.ask(f"c{number}", 9 + number % 3, 4 + 3 * number) for number in range(14)]
    sets = set()
    while any(turn.finish is None for turn in turns):
        iteration = world.next()
        assert all(len(group.host_pages) <= 12 for group in iteration.groups)
        ids = streamed_ids(iteration)
        assert len(ids) == len(set(ids))
        sets.add(frozenset(ids))
    assert len(sets) > 8
    assert 0 < len(packings) <= 3


def test_a_context_larger_than_an_arena_waits_for_the_device() -> None:
    world = make_world(staging_pages=4)
    _, b = ask_two(world)
    for _ in range(4):
        world.next()
    assert b.usage.admitted_at is None
    world.run_until_idle()


def test_a_turn_that_outgrows_its_arena_is_suspended_and_ends_on_the_device() -> None:
    world = make_world(staging_pages=6)
    _, b = ask_two(world, 12, 9)
    while not b.streamed:
        world.next()
    world.run_until_idle()
    assert b.usage.suspensions == 1
    assert b.usage.output_tokens == 9


def test_chunks_without_a_host_copy_are_copied_out_before_streaming() -> None:
    world = make_world()
    world.say("b", 12, 3)
    assert world.where("b") == "dddd"
    world.ask("a", 24, 12)
    world.next()
    b = world.ask("b", 2, 6)
    while not b.streamed:
        world.next()
        world.land()
    assert b.usage.host_tokens == 14
    assert b.usage.recomputed_tokens == 0
    assert world.where("b") == "h" * len(b.chunks)
    world.run_until_idle()


def test_a_chunk_is_not_copied_out_in_the_iteration_whose_decode_fills_it() -> None:
    """`b` asks to stream, then gets the device after all. Its last chunk still waits to be copied out."""
    world = make_world(swap_out_below=0.0, swap_outs_max=1)
    world.say("b", 9)
    a = world.ask("a", 28, 5)
    while len(a.chunks) < 8:
        world.next()
        world.land()
    assert world.where("b") == "hdd"
    world.ask("b", 1, 5)
    assert len(world.next().swap_outs) == 1  # its second chunk; the third has to wait
    world.cancel_at(a, 0)
    world.next()
    assert world.slices() == [("b", 9, 11)]
    last = world.next()
    assert world.slices() == [("b", 11, 12)]
    assert not last.swap_outs
    world.run_until_idle()


def test_a_chunk_that_a_resident_turn_uses_is_in_both_tiers() -> None:
    world = make_world()
    world.say("root", 17, 1)
    world.fork_at("root", 16, "b")
    root = world.ask("root", 6, 12)
    world.next()
    b = world.ask("b", 18, 2)
    while not b.streamed:
        world.next()
        world.land()
    assert not root.streamed
    assert world.where("b")[:4] == "cccc"
    world.run_until_idle()


def fill_a_shared_chunk_while_another_wants_it() -> bool:
    """`b` begins with two chunks of `a`. Their host copies are damaged. `a` streams and recomputes them."""
    world = make_world(batch_tokens_max=4)
    world.say("a", 27, 1)
    world.cache.move_to_host("a", world.now)
    while world.step():
        world.land()
    assert world.where("a") == "h" * 7
    world.fork_at("a", 8, "b")
    world.ask("filler", 20, 12)
    for _ in range(6):
        world.next()
    assert world.cache.streamed is not None
    world.cache.streamed._is_intact = lambda page: False
    a = world.ask("a", 2, 3)
    while not a.streamed:
        world.next()
        world.land()
    b = world.ask("b", 1, 3)
    world.next()
    is_filling = a.frontier < 8 and b.usage.admitted_at is None
    world.run_until_idle()
    return is_filling


def test_no_turn_uses_a_chunk_that_a_streamed_turn_still_fills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert fill_a_shared_chunk_while_another_wants_it()
    monkeypatch.setattr(StreamedPages, "is_clear_of_streamed", lambda *a: True)
    with pytest.raises(AssertionError):
        fill_a_shared_chunk_while_another_wants_it()


def test_a_streamed_turn_returns_to_the_device_when_no_turn_waits() -> None:
    world = make_world()
    a, b = ask_two(world, 3, 12)
    while a.finish is None:
        world.next()
    assert b.streamed
    while b.streamed:
        world.next()
        world.land()
    assert b.finish is None
    assert world.scheduler.counters.returned == 1
    assert b.usage.suspensions == 0
    assert "h" not in world.where("b")
    world.run_until_idle()


def test_a_waiting_turn_gets_the_device_before_a_streamed_turn() -> None:
    world = make_world(turns_max=2)
    a, b = ask_two(world, 3, 12)
    c = world.ask("c", 24, 3)
    while a.finish is None:
        world.next()
    world.cache.evict("a", world.now)
    world.next()
    assert b.streamed
    assert c.usage.admitted_at is not None
    assert not c.streamed
    world.run_until_idle()


def test_streaming_evicts_idle_conversations_from_a_full_host() -> None:
    world = make_world(host_pages=9)
    world.say("old", 28, 1)
    world.wait(100.0)
    _, b = ask_two(world)
    while not b.streamed:
        world.next()
        world.land()
    world.run_until_idle()
    assert b.usage.output_tokens == 10


def test_on_a_host_full_of_streamed_turns_a_growing_turn_is_suspended() -> None:
    world = make_world(host_pages=12)
    _, b = ask_two(world)
    c = world.ask("c", 20, 10)
    while not (b.streamed and c.streamed):
        world.next()
    world.run_until_idle()
    assert b.usage.suspensions + c.usage.suspensions >= 1
    assert b.usage.output_tokens == c.usage.output_tokens == 10


def test_a_streamed_fork_recomputes_its_partly_shared_last_chunk() -> None:
    world = make_world()
    world.say("root", 9, 5)
    world.fork_at("root", 11, "b")
    world.ask("a", 24, 12)
    world.next()
    b = world.ask("b", 3, 6)
    while not b.streamed:
        world.next()
        world.land()
    assert b.usage.host_tokens == 8
    assert (
        b.usage.recomputed_tokens == 2
    )  # the slots of the third chunk; its last token comes with the turn
    world.run_until_idle()


def test_a_streamed_turn_returns_before_batch_turns_get_the_device() -> None:
    world = make_world()
    a, b = ask_two(world, 3, 12)
    while not b.streamed:
        world.next()
    for number in range(6):
        world.ask(f"batch-{number}", 20, 12, background=True)
    while b.streamed:
        world.next()
        world.land()
    assert a.finish is not None
    assert b.finish is None
    assert world.scheduler.counters.returned == 1
    world.run_until_idle()


def test_a_streamed_turn_returns_although_a_batch_turn_was_suspended() -> None:
    world = make_world()
    batch = world.ask("batch", 20, 12, background=True)
    world.next()
    a, b = ask_two(world, 3, 12)
    while a.finish is None:
        world.next()
        world.land()
    assert batch.state is TurnState.SUSPENDED
    assert b.streamed
    while b.streamed:
        world.next()
        world.land()
    assert b.finish is None
    assert batch.state is TurnState.SUSPENDED
    assert world.scheduler.counters.returned == 1
    world.run_until_idle()


def test_no_turn_is_preempted_if_a_streamed_turn_leaves_no_place() -> None:
    """The objective does not allow the new turn beside the streamed turn, even with enough pages."""
    world = make_world(
        device_pages=20,
        host_pages=200,
        staging_pages=20,
        late=0.0,
        key_seconds=1e-3,
        iteration_seconds=0.0,
        tbt_seconds=0.125,
    )
    low = world.ask("low", 48, 30)
    for _ in range(2):
        world.next()
    streams = world.ask("streams", 60, 30)
    while not streams.streamed:
        world.next()
    streams.level, streams.queue_order = 5, (-5, streams.arrival)
    world.ask("high", 66, 5, priority=3)
    for _ in range(5):
        world.next()
        assert streams.streamed
        assert low.usage.suspensions == 0
    world.run_until_idle()


def test_background_turns_stream_only_while_no_interactive_turn_runs() -> None:
    world = make_world()
    a = world.ask("a", 24, 10, background=True)
    b = world.ask("b", 20, 10, background=True)
    while not b.streamed:
        world.next()
    c = world.ask("c", 4, 3)
    world.next()
    assert (a.streamed, b.streamed) == (False, False)
    while c.finish is None:
        world.next()
        assert (a.streamed, b.streamed) == (False, False)
    world.run_until_idle()
    assert a.usage.output_tokens == b.usage.output_tokens == 10


# -- whether streaming pays --


def streaming_of(world: ScriptedWorld) -> Streaming:
    assert world.scheduler.streaming is not None
    return world.scheduler.streaming


def auto_world(**seconds: float) -> ScriptedWorld:
    """Return a world with iterations of 10 ms, in which `auto` expects the given times."""
    cost = IterationCost(1e-4, 1e-2, 0.0, 1e-6, 0.0)
    config = SchedulerConfig(cost=cost, **{"group_seconds": 1e-4, **seconds})  # type: ignore[arg-type]
    world = make_world(stream="auto")
    streaming_of(world).cost = StreamCost(config, 16)
    return world


def freeze(world: ScriptedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent the cost model from learning."""
    monkeypatch.setattr(streaming_of(world).cost, "learn", lambda *a: None)


@pytest.mark.parametrize(("copy_seconds", "pays"), [(1e-4, True), (1e-2, False)])
def test_auto_streams_while_it_expects_a_higher_throughput(
    copy_seconds: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = auto_world(copy_seconds=copy_seconds)
    freeze(world, monkeypatch)
    _, b = ask_two(world)
    for _ in range(4):
        world.next()
    assert b.streamed == pays
    world.run_until_idle()


def test_auto_divides_the_cost_of_a_group_among_all_waiting_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group costs 15 ms, which is too much for one turn but not for three."""
    for num_waiting, pays in ((1, False), (3, True)):
        world = auto_world(copy_seconds=1e-5, group_seconds=15e-3)
        freeze(world, monkeypatch)
        world.ask("a", 24, 10)
        turns = [world.ask(f"b{i}", 20, 6) for i in range(num_waiting)]
        for _ in range(4):
            world.next()
        assert any(turn.streamed for turn in turns) == pays
        world.run_until_idle()


def test_auto_does_not_stream_if_the_objective_would_be_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for tbt_seconds, streams in ((0.5, True), (0.0101, False)):
        world = auto_world(copy_seconds=1e-4)
        freeze(world, monkeypatch)
        streaming_of(world)._tbt = tbt_seconds
        _, b = ask_two(world)
        for _ in range(6):
            world.next()
        assert b.streamed == streams
        world.run_until_idle()


def test_auto_stops_streaming_that_does_not_pay_and_retries_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = auto_world(copy_seconds=1e-4)
    freeze(world, monkeypatch)
    _, b = ask_two(world)
    while not b.streamed:
        world.next()
    monkeypatch.undo()
    streaming = streaming_of(world)
    streaming._num_streamed = TRIED_FOR
    for _ in range(20):
        streaming.cost.learn(StreamLoad(1, 30, 0), 0.01)
        streaming.cost.learn(StreamLoad(2, 60, 6), 0.03)  # the copies slow everything down
    world.next()
    assert not b.streamed
    assert b.usage.suspensions == 1
    assert streaming._paused == PAUSE_MIN
    assert streaming._pause == 2 * PAUSE_MIN
    assert streaming._num_streamed == 0  # starts at zero for the next attempt
    world.run_until_idle()
    assert 0 < streaming._paused < PAUSE_MIN


def test_turns_beyond_the_objective_stop_streaming_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = auto_world(copy_seconds=1e-4)
    freeze(world, monkeypatch)
    world.ask("a", 24, 8)
    turns = [world.ask(name, 20, 8) for name in "bc"]
    while not all(turn.streamed for turn in turns):
        world.next()
    streaming_of(world)._tbt = 0.0108  # the copies of two contexts take longer
    world.next()
    assert [turn.streamed for turn in turns] == [True, False]
    world.run_until_idle()


def test_invalid_streaming_options_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        CacheConfig(4, 4, staging_pages=-1)
    with pytest.raises(ValueError, match="stream must be one of auto, on, off"):
        SchedulerConfig(stream="maybe")
