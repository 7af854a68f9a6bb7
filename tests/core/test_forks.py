"""Forks and rewinds share chunks. If they cut a chunk, they copy only the slots before the cut.

test_cache.py explains the letters of `where`.
"""

from __future__ import annotations

from pensieve.core.iteration import PageCopy
from tests.core.world import ScriptedWorld


def test_a_fork_inside_a_chunk_copies_the_first_slots_at_its_next_turn() -> None:
    world = ScriptedWorld(8, 0)
    world.say("a", 6)
    world.fork_at("a", 5, "b")
    assert world.cache.device.num_empty == 6  # a fork copies nothing yet
    assert world.chunks("b") == world.chunks("a")
    turn = world.ask("b", 2)
    world.next()
    ours, theirs = world.chunks("b"), world.chunks("a")
    assert ours[0] is theirs[0]
    assert ours[1] is not theirs[1]
    assert world.latest is not None
    source, target = theirs[1].device_page, ours[1].device_page
    assert world.latest.copies == (PageCopy(source, target, num_slots=1),)  # type: ignore[arg-type]
    assert world.slices() == [("b", 5, 7)]
    assert (turn.usage.device_tokens, turn.usage.new_tokens) == (4, 3)


def test_a_fork_inside_a_host_chunk_swaps_its_first_slots_into_a_new_page() -> None:
    world = ScriptedWorld(12, 40)
    world.say("a", 3)
    world.run_until_idle()
    world.say("filler", 43)
    world.run_until_idle()
    world.say("filler2", 43)
    world.run_until_idle()
    assert world.where("a") == "h"
    world.fork_at("a", 2, "b")
    world.delete("filler2")
    world.ask("b", 4)
    first = world.next()
    assert [each.num_slots for each in first.swap_ins] == [2]
    assert world.slices() == [("b", 2, 6)]
    assert world.where("a") == "h"
    world.run_until_idle()


def test_a_rewind_inside_a_chunk_gives_it_a_new_identity() -> None:
    world = ScriptedWorld(8, 0)
    world.say("a", 2)
    world.say("a", 3)  # lengths of the prompts and replies: 2 + 1, 3 + 1
    old = world.chunks("a")
    world.rewind("a", 3)
    assert world.chunks("a") == old[:1]
    assert world.cache.device.num_empty == 7
    world.ask("a", 3)
    first = world.next()
    assert world.slices() == [("a", 3, 6)]
    assert [copy.num_slots for copy in first.copies] == [3]
    assert world.chunks("a")[0] is not old[0]
    world.run_until_idle()
    assert world.cache.device.num_empty == 6  # the old page is free again


def test_a_rewind_to_a_chunks_end_copies_nothing() -> None:
    world = ScriptedWorld(8, 0)
    world.say("a", 3)
    world.say("a", 4)
    world.rewind("a", 4)
    old = world.chunks("a")
    world.say("a", 2)
    assert world.cache.counters.copied_on_write == 0
    assert world.chunks("a")[:1] == old


def test_a_turn_appends_in_place_if_no_other_conversation_holds_its_last_chunk() -> None:
    world = ScriptedWorld(8, 0)
    world.say("a", 2)
    old = world.chunks("a")
    world.fork_at("a", 3, "b")
    world.delete("b")
    world.say("a", 1)
    assert world.chunks("a") == old
    assert world.cache.counters.copied_on_write == 0


def test_a_fork_keeps_its_chunks_when_the_source_is_deleted() -> None:
    world = ScriptedWorld(8, 0)
    world.say("a", 8)
    world.fork_at("a", 8, "b")
    world.delete("a")
    assert world.where("b") == "dd"
    turn = world.say("b", 1)
    assert (turn.usage.device_tokens, turn.usage.new_tokens) == (7, 2)
    assert turn.usage.recomputed_tokens == 0


def test_a_fork_of_a_running_conversation_holds_committed_positions_only() -> None:
    world = ScriptedWorld(12, 0)
    world.say("a", 5)
    running = world.ask("a", 4, 6)
    world.next()
    world.fork_at("a", 6, "b")
    world.ask("b", 1)
    world.next()
    assert world.slices() == [("a", 10, 11), ("b", 6, 7)]
    assert world.latest is not None
    assert [copy.num_slots for copy in world.latest.copies] == [2]
    world.until_ended(running)
    world.run_until_idle()
