"""KV from another engine becomes ordinary chunks of the host tier.

test_cache.py explains the letters of `where`.
"""

from __future__ import annotations

from array import array

import pytest

from pensieve.core.adoption import Adoption
from tests.core.world import ScriptedWorld


def add_without_kv(world: ScriptedWorld, name: str, num_tokens: int) -> None:
    """Add a conversation with a known log and without KV in this engine."""
    world.logs[name] = list(range(num_tokens))
    world.commits[name] = [0, num_tokens]


def adopt_chunks(world: ScriptedWorld, name: str, first: int, slots: list[int]) -> list[int]:
    """Adopt chunks. Return the indexes of the chunks that were accepted."""
    return [each.chunk_index for each in world.adopt(name, first, slots)]


def test_a_turn_behind_adopted_chunks_recomputes_nothing() -> None:
    world = ScriptedWorld(8, 8)
    add_without_kv(world, "a", 11)
    assert adopt_chunks(world, "a", 0, [4, 4, 2]) == [2, 1, 0]
    assert world.where("a") == "hhh"
    turn = world.say("a", 3)
    assert (turn.usage.host_tokens, turn.usage.recomputed_tokens) == (10, 0)
    assert world.cache.counters.adopted == 3


def test_parts_are_adopted_from_the_end_and_missing_chunks_are_holes() -> None:
    world = ScriptedWorld(12, 8)
    add_without_kv(world, "a", 17)
    assert adopt_chunks(world, "a", 3, [4]) == [3]
    assert adopt_chunks(world, "a", 1, [4, 4]) == [2, 1]
    assert world.where("a") == "-hhh"
    turn = world.say("a", 2)
    assert (turn.usage.host_tokens, turn.usage.recomputed_tokens) == (12, 4)


def test_a_damaged_chunk_becomes_a_hole_between_adopted_chunks() -> None:
    world = ScriptedWorld(12, 8)
    add_without_kv(world, "a", 17)
    assert adopt_chunks(world, "a", 0, [4, 0, 4, 4]) == [3, 2, 0]
    assert world.where("a") == "h-hh"
    turn = world.say("a", 2)
    assert (turn.usage.host_tokens, turn.usage.recomputed_tokens) == (12, 4)


def test_a_small_host_tier_adopts_only_the_last_chunks() -> None:
    world = ScriptedWorld(12, 2)
    add_without_kv(world, "a", 17)
    assert adopt_chunks(world, "a", 0, [4, 4, 4, 4]) == [3, 2]
    assert world.where("a") == "--hh"
    assert adopt_chunks(world, "a", 0, [4, 4]) == []  # they would evict later chunks
    turn = world.say("a", 2)
    assert (turn.usage.host_tokens, turn.usage.recomputed_tokens) == (8, 8)


def test_without_a_host_tier_no_chunk_is_adopted() -> None:
    world = ScriptedWorld(8, 0)
    add_without_kv(world, "a", 9)
    assert adopt_chunks(world, "a", 0, [4, 4]) == []
    assert "a" not in world.cache.conversations
    assert world.say("a", 2).usage.recomputed_tokens == 8


def test_adopted_chunks_evict_only_less_valuable_chunks() -> None:
    world = ScriptedWorld(8, 2)
    world.say("old", 8)
    world.cache.move_to_host("old", world.now)
    world.run_until_idle()
    add_without_kv(world, "young", 9)
    world.wait(30.0)
    assert adopt_chunks(world, "young", 0, [4, 4]) == [1, 0]
    assert world.where("young") == "hh"
    assert "old" not in world.cache.conversations
    add_without_kv(world, "twin", 9)
    assert adopt_chunks(world, "twin", 0, [4, 4]) == []  # as old as the chunks that it would evict


def test_adoption_takes_no_host_pages_of_a_running_turn() -> None:
    world = ScriptedWorld(8, 2, swap_out_below=1.0)
    world.say("busy", 7)
    world.run_until_idle()  # now clean: the host has copies of both pages
    world.wait(30.0)
    running = world.ask("busy", 1, 3)
    world.next()
    add_without_kv(world, "a", 9)
    assert adopt_chunks(world, "a", 0, [4, 4]) == []
    assert running.finish is None
    world.until_ended(running)


def test_a_conversation_with_a_running_turn_adopts_no_chunks() -> None:
    world = ScriptedWorld(12, 8)
    add_without_kv(world, "a", 9)
    running = world.ask("a", 2, 4)
    world.next()
    assert Adoption(world.cache).adopt("a", array("I", world.logs["a"]), 0, [4, 4], world.now) == []
    world.until_ended(running)


def test_chunks_already_in_the_cache_are_not_adopted_again() -> None:
    world = ScriptedWorld(12, 8)
    add_without_kv(world, "a", 13)
    assert adopt_chunks(world, "a", 1, [4, 4]) == [2, 1]
    before = world.cache.locations("a")
    assert adopt_chunks(world, "a", 1, [4, 4]) == []
    assert world.cache.locations("a") == before
    assert adopt_chunks(world, "a", 0, [4, 4, 4]) == [0]


def test_adopted_chunks_are_shared_by_forks_and_evicted_like_others() -> None:
    world = ScriptedWorld(12, 8)
    add_without_kv(world, "a", 13)
    adopt_chunks(world, "a", 2, [4])
    world.fork_at("a", 10, "b")
    assert adopt_chunks(world, "a", 0, [4, 4]) == [1, 0]
    assert (world.where("a"), world.where("b")) == ("hhh", "hhh")
    assert world.say("b", 2).usage.recomputed_tokens == 0
    assert world.say("a", 2).usage.recomputed_tokens == 0
    world.cache.rewind("b", 0, world.now)
    assert world.cache.evict("a", world.now) == 4
    assert world.cache.host.num_empty == 8


@pytest.mark.parametrize("copy_share", [0.5, 2.0])
def test_chunks_that_are_faster_to_recompute_are_not_adopted(copy_share: float) -> None:
    world = ScriptedWorld(12, 8, policy="return", copy_share=copy_share)
    add_without_kv(world, "a", 9)
    assert adopt_chunks(world, "a", 0, [4, 4]) == ([1, 0] if copy_share < 1 else [])
