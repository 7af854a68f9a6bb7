"""KV from another engine becomes ordinary chunks of the host tier.

test_cache.py explains the letters of `where`.
"""

from __future__ import annotations

from array import array

import pytest

from pensieve.core.adoption import Adoption
from tests.core.world import Stage


def moved(stage: Stage, name: str, num_tokens: int) -> None:
    """Make a conversation with a known log, none of whose KV is in this engine."""
    stage.logs[name] = list(range(num_tokens))
    stage.commits[name] = [0, num_tokens]


def adopted_chunks(stage: Stage, name: str, first: int, slots: list[int]) -> list[int]:
    """Adopt chunks and return the indexes of those that were taken."""
    return [each.chunk_index for each in stage.adopt(name, first, slots)]


def test_a_turn_behind_adopted_chunks_recomputes_nothing() -> None:
    stage = Stage(8, 8)
    moved(stage, "a", 11)
    assert adopted_chunks(stage, "a", 0, [4, 4, 2]) == [2, 1, 0]
    assert stage.where("a") == "hhh"
    turn = stage.say("a", 3)
    assert (turn.usage.host_tokens, turn.usage.recomputed_tokens) == (10, 0)
    assert stage.cache.counters.adopted == 3


def test_parts_are_adopted_from_the_end_and_missing_chunks_are_holes() -> None:
    stage = Stage(12, 8)
    moved(stage, "a", 17)
    assert adopted_chunks(stage, "a", 3, [4]) == [3]
    assert adopted_chunks(stage, "a", 1, [4, 4]) == [2, 1]
    assert stage.where("a") == "-hhh"
    turn = stage.say("a", 2)
    assert (turn.usage.host_tokens, turn.usage.recomputed_tokens) == (12, 4)


def test_a_damaged_chunk_becomes_a_hole_between_adopted_chunks() -> None:
    stage = Stage(12, 8)
    moved(stage, "a", 17)
    assert adopted_chunks(stage, "a", 0, [4, 0, 4, 4]) == [3, 2, 0]
    assert stage.where("a") == "h-hh"
    turn = stage.say("a", 2)
    assert (turn.usage.host_tokens, turn.usage.recomputed_tokens) == (12, 4)


def test_a_small_host_tier_adopts_only_the_last_chunks() -> None:
    stage = Stage(12, 2)
    moved(stage, "a", 17)
    assert adopted_chunks(stage, "a", 0, [4, 4, 4, 4]) == [3, 2]
    assert stage.where("a") == "--hh"
    assert adopted_chunks(stage, "a", 0, [4, 4]) == []  # they would evict later chunks
    turn = stage.say("a", 2)
    assert (turn.usage.host_tokens, turn.usage.recomputed_tokens) == (8, 8)


def test_without_a_host_tier_no_chunk_is_adopted() -> None:
    stage = Stage(8, 0)
    moved(stage, "a", 9)
    assert adopted_chunks(stage, "a", 0, [4, 4]) == []
    assert "a" not in stage.cache.conversations
    assert stage.say("a", 2).usage.recomputed_tokens == 8


def test_adopted_chunks_evict_only_less_valuable_chunks() -> None:
    stage = Stage(8, 2)
    stage.say("old", 8)
    stage.cache.move_to_host("old", stage.now)
    stage.run_until_idle()
    moved(stage, "young", 9)
    stage.wait(30.0)
    assert adopted_chunks(stage, "young", 0, [4, 4]) == [1, 0]
    assert stage.where("young") == "hh"
    assert "old" not in stage.cache.conversations
    moved(stage, "twin", 9)
    assert (
        adopted_chunks(stage, "twin", 0, [4, 4]) == []
    )  # as old as the chunks that it would evict


def test_adoption_takes_no_host_pages_of_a_running_turn() -> None:
    stage = Stage(8, 2, swap_out_below=1.0)
    stage.say("busy", 7)
    stage.run_until_idle()  # now clean: the host has copies of both pages
    stage.wait(30.0)
    running = stage.ask("busy", 1, 3)
    stage.next()
    moved(stage, "a", 9)
    assert adopted_chunks(stage, "a", 0, [4, 4]) == []
    assert running.finish is None
    stage.until_ended(running)


def test_a_conversation_with_a_running_turn_adopts_no_chunks() -> None:
    stage = Stage(12, 8)
    moved(stage, "a", 9)
    running = stage.ask("a", 2, 4)
    stage.next()
    assert Adoption(stage.cache).adopt("a", array("I", stage.logs["a"]), 0, [4, 4], stage.now) == []
    stage.until_ended(running)


def test_chunks_already_in_the_cache_are_not_adopted_again() -> None:
    stage = Stage(12, 8)
    moved(stage, "a", 13)
    assert adopted_chunks(stage, "a", 1, [4, 4]) == [2, 1]
    before = stage.cache.locations("a")
    assert adopted_chunks(stage, "a", 1, [4, 4]) == []
    assert stage.cache.locations("a") == before
    assert adopted_chunks(stage, "a", 0, [4, 4, 4]) == [0]


def test_adopted_chunks_are_shared_by_forks_and_evicted_like_others() -> None:
    stage = Stage(12, 8)
    moved(stage, "a", 13)
    adopted_chunks(stage, "a", 2, [4])
    stage.fork_at("a", 10, "b")
    assert adopted_chunks(stage, "a", 0, [4, 4]) == [1, 0]
    assert (stage.where("a"), stage.where("b")) == ("hhh", "hhh")
    assert stage.say("b", 2).usage.recomputed_tokens == 0
    assert stage.say("a", 2).usage.recomputed_tokens == 0
    stage.cache.rewind("b", 0, stage.now)
    assert stage.cache.evict("a", stage.now) == 4
    assert stage.cache.host.num_empty == 8


@pytest.mark.parametrize("copy_share", [0.5, 2.0])
def test_chunks_that_are_faster_to_recompute_are_not_adopted(copy_share: float) -> None:
    stage = Stage(12, 8, policy="return", copy_share=copy_share)
    moved(stage, "a", 9)
    assert adopted_chunks(stage, "a", 0, [4, 4]) == ([1, 0] if copy_share < 1 else [])
