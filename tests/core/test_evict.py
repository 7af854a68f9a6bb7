"""EvictConversation drops the chunks that only this conversation holds, or moves them to the host.

test_cache.py explains the letters of `where`.
"""

from __future__ import annotations

from tests.core.test_cache import AHEAD
from tests.core.world import Stage


def test_evict_drops_chunks_that_only_this_conversation_holds() -> None:
    stage = Stage(12, 0)
    stage.say("a", 8)
    stage.fork_at("a", 8, "b")
    stage.say("a", 4)
    assert stage.cache.evict("a", stage.now) == 2
    assert (stage.where("a"), stage.where("b")) == ("dd", "dd")
    assert stage.cache.evict("nobody", stage.now) == 0
    running = stage.ask("b", 4, 3)
    stage.next()
    assert stage.cache.evict("b", stage.now) == 0  # `b` is in use
    stage.until_ended(running)


def test_a_chunk_moved_to_the_host_leaves_the_device_after_its_copy() -> None:
    stage = Stage(8, 8)
    stage.say("a", 10)
    assert stage.where("a") == "ddd"
    assert stage.cache.move_to_host("a", stage.now) == 3
    stage.run_until_idle()
    assert stage.where("a") == "hhh"
    assert (stage.cache.available, stage.cache.device.num_empty) == (8, 8)
    again = stage.say("a", 2)
    assert (again.usage.host_tokens, again.usage.recomputed_tokens) == (10, 0)


def test_a_chunk_with_a_host_copy_leaves_the_device_at_once() -> None:
    stage = Stage(8, 8, **AHEAD)
    stage.say("a", 8)
    stage.run_until_idle()
    assert stage.where("a") == "cc"
    assert stage.cache.move_to_host("a", stage.now) == 2
    assert stage.where("a") == "hh"
    assert stage.cache.move_to_host("a", stage.now) == 0


def test_chunks_that_are_shared_or_in_use_or_less_valuable_stay_on_the_device() -> None:
    stage = Stage(12, 2)
    stage.say("a", 8)
    stage.cache.fork("a", 8, "b", stage.now)
    assert stage.cache.move_to_host("a", stage.now) == 0
    stage.cache.rewind("b", 0, stage.now)
    stage.wait(10.0)
    stage.say("c", 8)
    assert stage.cache.move_to_host("c", stage.now) == 2
    stage.run_until_idle()
    assert (stage.where("a"), stage.where("c")) == ("dd", "hh")
    assert (
        stage.cache.move_to_host("a", stage.now) == 2
    )  # the move was tried, but this chunk is older than the host's chunks
    stage.run_until_idle()
    assert (stage.where("a"), stage.where("c")) == ("dd", "hh")
    running = stage.ask("a", 3, 5)
    stage.next()
    assert stage.cache.move_to_host("a", stage.now) == 0
    stage.until_ended(running)


def test_a_conversation_that_returns_during_its_move_keeps_its_pages() -> None:
    stage = Stage(8, 8)
    stage.say("a", 8)
    assert stage.cache.move_to_host("a", stage.now) == 2
    again = stage.ask("a", 2)
    stage.until_ended(again)
    assert again.usage.device_tokens == 8
    stage.run_until_idle()
    assert stage.where("a") == "ddd"


def test_evicting_behind_a_hole_leaves_the_shared_prefix_alone() -> None:
    """Chunks 0 and 1 are shared with `system`. Of the other four, 2 and 3 (the hole) are already lost."""
    stage = Stage(16, 0, policy="value")
    stage.say("system", 8)
    stage.fork_at("system", 8, "a")
    stage.say("a", 8, 9)
    stage.fork_at("a", 16, "b")
    stage.delete("b")
    assert stage.where("a") == "dddddd"
    stage.wait(1000.0)
    stage.say("system", 1)
    stage.say("filler", 43)  # evicts two pages
    assert stage.where("a") == "xx--xx"
    stage.cache.evict("a", stage.now)
    stage.cache.check(stage.now)
    assert stage.where("a") == "xx"
    stage.run_until_idle()
