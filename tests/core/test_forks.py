"""Forks and rewinds share chunks. If they cut a chunk, they copy only the slots before the cut.

test_cache.py explains the letters of `where`.
"""

from __future__ import annotations

from pensieve.core.iteration import PageCopy
from tests.core.world import Stage


def test_a_fork_inside_a_chunk_copies_the_first_slots_at_its_next_turn() -> None:
    stage = Stage(8, 0)
    stage.say("a", 6)
    stage.fork_at("a", 5, "b")
    assert stage.cache.device.num_empty == 6  # a fork copies nothing yet
    assert stage.chunks("b") == stage.chunks("a")
    turn = stage.ask("b", 2)
    stage.next()
    ours, theirs = stage.chunks("b"), stage.chunks("a")
    assert ours[0] is theirs[0]
    assert ours[1] is not theirs[1]
    assert stage.latest is not None
    source, target = theirs[1].device_page, ours[1].device_page
    assert stage.latest.copies == (PageCopy(source, target, num_slots=1),)  # type: ignore[arg-type]
    assert stage.slices() == [("b", 5, 7)]
    assert (turn.usage.device_tokens, turn.usage.new_tokens) == (4, 3)


def test_a_fork_inside_a_host_chunk_swaps_its_first_slots_into_a_new_page() -> None:
    stage = Stage(12, 40)
    stage.say("a", 3)
    stage.run_until_idle()
    stage.say("filler", 43)
    stage.run_until_idle()
    stage.say("filler2", 43)
    stage.run_until_idle()
    assert stage.where("a") == "h"
    stage.fork_at("a", 2, "b")
    stage.delete("filler2")
    stage.ask("b", 4)
    first = stage.next()
    assert [each.num_slots for each in first.swap_ins] == [2]
    assert stage.slices() == [("b", 2, 6)]
    assert stage.where("a") == "h"
    stage.run_until_idle()


def test_a_rewind_inside_a_chunk_gives_it_a_new_identity() -> None:
    stage = Stage(8, 0)
    stage.say("a", 2)
    stage.say("a", 3)  # lengths of the prompts and replies: 2 + 1, 3 + 1
    old = stage.chunks("a")
    stage.rewind("a", 3)
    assert stage.chunks("a") == old[:1]
    assert stage.cache.device.num_empty == 7
    stage.ask("a", 3)
    first = stage.next()
    assert stage.slices() == [("a", 3, 6)]
    assert [copy.num_slots for copy in first.copies] == [3]
    assert stage.chunks("a")[0] is not old[0]
    stage.run_until_idle()
    assert stage.cache.device.num_empty == 6  # the old page is free again


def test_a_rewind_to_a_chunks_end_copies_nothing() -> None:
    stage = Stage(8, 0)
    stage.say("a", 3)
    stage.say("a", 4)
    stage.rewind("a", 4)
    old = stage.chunks("a")
    stage.say("a", 2)
    assert stage.cache.counters.copied_on_write == 0
    assert stage.chunks("a")[:1] == old


def test_a_turn_appends_in_place_if_no_other_conversation_holds_its_last_chunk() -> None:
    stage = Stage(8, 0)
    stage.say("a", 2)
    old = stage.chunks("a")
    stage.fork_at("a", 3, "b")
    stage.delete("b")
    stage.say("a", 1)
    assert stage.chunks("a") == old
    assert stage.cache.counters.copied_on_write == 0


def test_a_fork_keeps_its_chunks_when_the_source_is_deleted() -> None:
    stage = Stage(8, 0)
    stage.say("a", 8)
    stage.fork_at("a", 8, "b")
    stage.delete("a")
    assert stage.where("b") == "dd"
    turn = stage.say("b", 1)
    assert (turn.usage.device_tokens, turn.usage.new_tokens) == (7, 2)
    assert turn.usage.recomputed_tokens == 0


def test_a_fork_of_a_running_conversation_holds_committed_positions_only() -> None:
    stage = Stage(12, 0)
    stage.say("a", 5)
    running = stage.ask("a", 4, 6)
    stage.next()
    stage.fork_at("a", 6, "b")
    stage.ask("b", 1)
    stage.next()
    assert stage.slices() == [("a", 10, 11), ("b", 6, 7)]
    assert stage.latest is not None
    assert [copy.num_slots for copy in stage.latest.copies] == [2]
    stage.until_ended(running)
    stage.run_until_idle()
