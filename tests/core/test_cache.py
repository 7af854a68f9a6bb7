"""Where chunks are, and how they move. Chunks have 4 tokens, and tiers have a few pages.

The KV of a reply's last token is computed in the next turn, so a log of 9 tokens has KV for 8.
`where` returns a letter for each chunk: d(irty), c(lean), x (marked to drop), h(ost), - (missing).
"""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.core.cache import CacheConfig, KVCache
from pensieve.core.policies.lru import LruPolicy
from pensieve.core.prefix_tree import Branch
from tests.core.world import ScriptedWorld

AHEAD: dict[str, Any] = {"swap_out_below": 1.0}  # all idle chunks are copied to the host


def test_a_conversation_that_returns_before_reclaim_needs_no_swap_in() -> None:
    world = ScriptedWorld(8, 8, **AHEAD)
    world.say("a", 8)
    world.run_until_idle()
    assert world.where("a") == "cc"
    assert world.cache.available == 8
    again = world.say("a", 3)
    assert (again.usage.device_tokens, again.usage.host_tokens) == (8, 0)
    assert (again.usage.recomputed_tokens, again.usage.new_tokens) == (0, 4)
    assert world.cache.counters.reclaim_hits == 2
    assert world.cache.counters.swapped_in == 0


def test_swapping_out_begins_below_the_mark_and_stops_at_it() -> None:
    world = ScriptedWorld(8, 8)  # swap-outs start below 2 available pages
    world.say("a", 8)
    world.run_until_idle()
    assert world.where("a") == "dd"  # 6 pages are available
    world.say("b", 20)
    world.run_until_idle()
    assert world.cache.available == 2
    assert (world.where("a"), world.where("b")) == ("cd", "ddddd")


def test_lazy_reclaim_takes_the_least_valuable_clean_page() -> None:
    world = ScriptedWorld(8, 8, **AHEAD)
    world.say("a", 8)
    world.wait(1.0)
    world.say("b", 8)
    world.run_until_idle()
    world.ask("c", 19)
    world.next()
    assert (world.where("a"), world.where("b")) == ("hc", "cc")
    assert world.cache.counters.reclaimed == 1
    assert world.cache.counters.dropped == 0


def test_reclaimed_chunks_are_swapped_in() -> None:
    world = ScriptedWorld(8, 16, **AHEAD)
    world.say("a", 8)
    world.run_until_idle()
    world.say("b", 27)
    world.run_until_idle()
    assert world.where("a") == "hc"
    again = world.ask("a", 3)
    world.next()
    assert world.latest is not None
    assert [each.num_slots for each in world.latest.swap_ins] == [4]
    assert world.slices() == [("a", 8, 12)]
    assert (again.usage.host_tokens, again.usage.device_tokens) == (4, 4)
    world.run_until_idle()


def test_only_the_filled_slots_of_a_chunk_are_swapped_out() -> None:
    world = ScriptedWorld(8, 8, **AHEAD)
    world.say("a", 6)
    world.next()
    assert world.latest is not None
    assert [each.num_slots for each in world.latest.swap_outs] == [4, 2]
    world.run_until_idle()
    world.say("a", 1)  # fills one more slot of the second chunk, which its host copy lacks
    assert world.where("a") == "cd"
    world.next()
    assert [each.num_slots for each in world.latest.swap_outs] == [4]
    world.run_until_idle()
    assert world.where("a") == "cc"


def test_no_swap_out_starts_before_all_swap_ins_have_finished() -> None:
    world = ScriptedWorld(12, 12)
    world.say("a", 8)
    world.run_until_idle()
    world.say("filler", 43)
    world.run_until_idle()
    world.delete("filler")
    world.say("b", 24)
    assert (world.where("a"), world.where("b")) == ("hc", "dddddd")
    cache = world.cache
    world.ask("a", 3)
    world.ask("c", 31)  # needs 8 pages, more than are empty
    iteration = world.scheduler.plan(world.now)
    assert iteration is not None
    assert (len(iteration.swap_ins), iteration.swap_outs) == (1, ())
    assert cache.plan_swap_outs(world.now, required_pages=12) == []
    world.executor.launch(iteration)
    outcome = world.executor.collect()
    assert outcome.finished_copies == (iteration.swap_ins[0].copy_id,)
    world.scheduler.commit(iteration, outcome, world.now)
    assert len(cache.plan_swap_outs(world.now, required_pages=12)) == 7  # the last one is of `a`


def test_a_full_host_evicts_its_oldest_chunk() -> None:
    """A host of 2 pages: an older chunk on the host makes room for a younger chunk of the device."""
    world = ScriptedWorld(12, 2)
    world.say("a", 8)
    world.wait(1.0)
    world.say("b", 8)
    cache = world.cache
    first = cache.plan_swap_outs(world.now, required_pages=10)
    assert len(first) == 2
    for copy in first:
        cache.finish_copy(copy.copy_id, world.now)
    assert (world.where("a"), world.where("b")) == ("cc", "dd")
    assert len(cache.plan_swap_outs(world.now, required_pages=11)) == 1
    assert (world.where("a"), world.where("b")) == ("xc", "dd")
    assert (cache.counters.marked_to_drop, cache.counters.dropped) == (1, 0)


def test_a_device_chunk_worth_less_than_a_full_hosts_is_marked_to_drop() -> None:
    """The only chunk of `b` is cheap. The host holds the most expensive chunk of `a`. Both are long idle."""
    world = ScriptedWorld(12, 1, policy="value")
    world.say("a", 32)
    world.wait(100.0)
    world.say("b", 4)
    cache = world.cache
    for required in range(5, 12):
        for copy in cache.plan_swap_outs(world.now, required):
            cache.finish_copy(copy.copy_id, world.now)
    assert (world.where("a"), world.where("b")) == ("xxxxxxxc", "d")
    world.wait(10_000.0)
    assert cache.plan_swap_outs(world.now, required_pages=12) == []
    assert (world.where("a"), world.where("b")) == ("xxxxxxxc", "x")
    assert cache.available == 12


def test_a_full_host_keeps_chunks_that_are_worth_a_little_more() -> None:
    """`new` has been idle for 20 seconds and `old` for 30, so `new` is worth 1.5 times as much."""
    world = ScriptedWorld(12, 2, policy="lru")
    world.say("old", 8)
    world.wait(10.0)
    world.say("new", 8)
    assert world.cache.move_to_host("new", world.now) == 2
    world.run_until_idle()
    world.wait(20.0)
    assert world.cache.plan_swap_outs(world.now, required_pages=12) == []
    assert (world.where("old"), world.where("new")) == ("xx", "hh")


def test_without_host_pages_chunks_are_dropped_and_recomputed() -> None:
    world = ScriptedWorld(6, 0)
    world.say("a", 8)
    world.say("b", 12)
    world.run_until_idle()
    assert (world.where("a"), world.where("b")) == ("xd", "ddd")  # 2 pages must be available
    world.say("c", 8)
    assert (world.where("a"), world.where("b")) == ("-x", "xdd")
    again = world.say("a", 3)
    assert (again.usage.recomputed_tokens, again.usage.device_tokens) == (4, 4)
    assert world.cache.counters.swapped_out == 0


def test_a_chunk_marked_to_drop_stays_when_its_conversation_returns_first() -> None:
    world = ScriptedWorld(6, 0, **AHEAD)
    world.say("a", 8)
    world.run_until_idle()
    assert world.where("a") == "xx"
    again = world.say("a", 1)
    assert (again.usage.device_tokens, again.usage.recomputed_tokens) == (8, 0)
    assert world.where("a") == "ddd"


def test_deleting_during_a_copy_frees_the_pages_only_after_it() -> None:
    world = ScriptedWorld(8, 8, **AHEAD)
    world.say("a", 8)
    world.next()
    assert world.cache.tiers.num_swapping_out == 1  # of two swap-outs, one has finished
    world.delete("a")
    assert (world.cache.device.num_empty, world.cache.host.num_empty) == (7, 7)
    assert world.cache.conversations == {}
    world.run_until_idle()
    assert (world.cache.device.num_empty, world.cache.host.num_empty) == (8, 8)


def test_the_cache_forgets_a_conversation_without_pages() -> None:
    """Memory must not grow with conversations without KV: the log has their tokens."""
    world = ScriptedWorld(6, 0)
    world.say("a", 4)
    world.say("b", 19)
    world.run_until_idle()
    world.say("c", 19)
    assert "a" not in world.cache.conversations
    world.rewind("c", 0)
    assert "c" not in world.cache.conversations


def test_a_rewind_before_the_first_cached_chunk_forgets_the_conversation() -> None:
    world = ScriptedWorld(6, 0)
    world.say("a", 3)
    world.say("a", 4)
    world.say("filler", 18)
    assert world.where("a") == "-x"
    world.rewind("a", 4)
    assert "a" not in world.cache.conversations
    world.run_until_idle()


def test_a_turn_that_does_not_fit_takes_no_pages() -> None:
    world = ScriptedWorld(6, 0)
    running = world.ask("a", 12, 2)
    world.next()
    before = world.cache.device.num_empty
    world.ask("b", 8)
    world.next()
    assert world.cache.device.num_empty == before - 1  # one page that only `a` holds
    assert "b" not in world.cache.conversations
    world.until_ended(running)
    world.run_until_idle()


@pytest.mark.parametrize(
    "wrong",
    [
        {"device_pages": 1},
        {"host_pages": -1},
        {"chunk_tokens": 0},
        {"swap_outs_max": 0},
        {"reserve": 0.5},
        {"swap_out_below": 1.5},
        {"reserve": -0.1},
    ],
)
def test_an_invalid_cache_configuration_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"page|0 <= reserve"):
        CacheConfig(**{"device_pages": 8, "host_pages": 8, **wrong})  # type: ignore[arg-type]


def test_page_thresholds_are_rounded_up_and_one_page_is_reserved() -> None:
    config = CacheConfig(device_pages=21, host_pages=0)
    assert config.swap_out_mark_pages == 6
    assert config.reserve_pages == 3
    assert config.device_tokens_max == 640


@pytest.mark.parametrize(
    ("device_pages", "host_pages", "distinct_pages"), [(20, 0, 20), (20, 3, 20), (20, 50, 65)]
)
def test_distinct_pages_exclude_host_copies_of_device_chunks(
    device_pages: int, host_pages: int, distinct_pages: int
) -> None:
    """A quarter of the device has copies on the host, so that its pages can be taken at once."""
    assert CacheConfig(device_pages, host_pages).distinct_pages == distinct_pages


def test_the_audit_notices_a_lost_page() -> None:
    cache = KVCache(CacheConfig(4, 4), LruPolicy())
    cache.check(0.0)
    cache.device.take()
    with pytest.raises(AssertionError, match="disagree on which pages are taken"):
        cache.check(0.0)


class FixedValuePolicy(LruPolicy):
    """A policy in which a test gives each conversation its value, however long it is idle."""

    num_value_classes = 4

    def __init__(self, **worth: int) -> None:
        self.worth = worth

    def value_class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        return self.worth[next(iter(branch.holders)).conversation_id]

    def value(self, value_class: int, idle_seconds: float) -> float:
        return float(value_class)


@pytest.mark.parametrize(("worth_of_b", "a", "b"), [(1, "xxd", "-x"), (3, "-xx", "dd")])
def test_a_chunk_marked_to_drop_stays_if_a_less_valuable_one_can_be_evicted(
    worth_of_b: int, a: str, b: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of `a` is marked to drop early. Then `b` becomes idle, and `d` needs a page."""
    policy = FixedValuePolicy(a=2, b=worth_of_b, c=3, d=3)
    monkeypatch.setattr("tests.core.world.policy_named", lambda *_: policy)
    world = ScriptedWorld(10, 0)
    for name, num_prompt in (("a", 11), ("c", 11), ("b", 7)):
        world.say(name, num_prompt)
    assert (world.where("a"), world.where("b")) == ("xdd", "dd")
    world.say("d", 11)
    assert (world.where("a"), world.where("b"), world.where("d")) == (a, b, "ddd")
    world.scheduler.check(world.now)
