"""EvictConversation drops the chunks that only this conversation holds, or moves them to the host.

test_cache.py explains the letters of `where`.
"""

from __future__ import annotations

from tests.core.test_cache import AHEAD
from tests.core.world import ScriptedWorld


def test_evict_drops_chunks_that_only_this_conversation_holds() -> None:
    world = ScriptedWorld(12, 0)
    world.say("a", 8)
    world.fork_at("a", 8, "b")
    world.say("a", 4)
    assert world.cache.evict("a", world.now) == 2
    assert (world.where("a"), world.where("b")) == ("dd", "dd")
    assert world.cache.evict("nobody", world.now) == 0
    running = world.ask("b", 4, 3)
    world.next()
    assert world.cache.evict("b", world.now) == 0  # `b` is in use
    world.until_ended(running)


def test_a_chunk_moved_to_the_host_leaves_the_device_after_its_copy() -> None:
    world = ScriptedWorld(8, 8)
    world.say("a", 10)
    assert world.where("a") == "ddd"
    assert world.cache.move_to_host("a", world.now) == 3
    world.run_until_idle()
    assert world.where("a") == "hhh"
    assert (world.cache.available, world.cache.device.num_empty) == (8, 8)
    again = world.say("a", 2)
    assert (again.usage.host_tokens, again.usage.recomputed_tokens) == (10, 0)


def test_a_chunk_with_a_host_copy_leaves_the_device_at_once() -> None:
    world = ScriptedWorld(8, 8, **AHEAD)
    world.say("a", 8)
    world.run_until_idle()
    assert world.where("a") == "cc"
    assert world.cache.move_to_host("a", world.now) == 2
    assert world.where("a") == "hh"
    assert world.cache.move_to_host("a", world.now) == 0


def test_chunks_that_are_shared_or_in_use_or_less_valuable_stay_on_the_device() -> None:
    world = ScriptedWorld(12, 2)
    world.say("a", 8)
    world.cache.fork("a", 8, "b", world.now)
    assert world.cache.move_to_host("a", world.now) == 0
    world.cache.rewind("b", 0, world.now)
    world.wait(10.0)
    world.say("c", 8)
    assert world.cache.move_to_host("c", world.now) == 2
    world.run_until_idle()
    assert (world.where("a"), world.where("c")) == ("dd", "hh")
    # both chunks of `a` were tried, but stay: the host is full of more valuable chunks
    assert world.cache.move_to_host("a", world.now) == 2
    world.run_until_idle()
    assert (world.where("a"), world.where("c")) == ("dd", "hh")
    running = world.ask("a", 3, 5)
    world.next()
    assert world.cache.move_to_host("a", world.now) == 0
    world.until_ended(running)


def test_a_conversation_that_returns_during_its_move_keeps_its_pages() -> None:
    world = ScriptedWorld(8, 8)
    world.say("a", 8)
    assert world.cache.move_to_host("a", world.now) == 2
    again = world.ask("a", 2)
    world.until_ended(again)
    assert again.usage.device_tokens == 8
    world.run_until_idle()
    assert world.where("a") == "ddd"


def test_evicting_behind_a_hole_leaves_the_shared_prefix_alone() -> None:
    """Chunks 0 and 1 are shared with `system`. Of the other four, 2 and 3 (the hole) are already lost."""
    world = ScriptedWorld(16, 0, policy="value")
    world.say("system", 8)
    world.fork_at("system", 8, "a")
    world.say("a", 8, 9)
    world.fork_at("a", 16, "b")
    world.delete("b")
    assert world.where("a") == "dddddd"
    world.wait(1000.0)
    world.say("system", 1)
    world.say("filler", 43)  # evicts two pages
    assert world.where("a") == "xx--xx"
    world.cache.evict("a", world.now)
    world.cache.check(world.now)
    assert world.where("a") == "xx"
    world.run_until_idle()
