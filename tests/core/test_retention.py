"""Victims against brute force, and what a chunk is worth."""

from __future__ import annotations

import random

import pytest

from pensieve.core.chunk import Branch, Chunk, Conversation
from pensieve.core.cost import CostProfile
from pensieve.core.retention import (
    CLASS_RATIO,
    LruPolicy,
    RetentionPolicy,
    RetentionQueue,
    Role,
    ValuePolicy,
)

COST = CostProfile(((32, 1.0), (64, 2.0), (1024, 32.0)), other_seconds=8.0)
ROLES = len(Role)


def branch_of(holders: list[Conversation], start: int, length: int) -> Branch:
    """A branch of clean chunks on both tiers."""
    branch = Branch(None, start, max(h.idle_since for h in holders), ROLES)
    branch.holders = dict.fromkeys(sorted(holders, key=lambda h: h.idle_since))
    for index in range(start, start + length):
        chunk = Chunk(index, branch)
        chunk.filled = chunk.host_filled = 32
        chunk.device_page = chunk.host_page = index
        branch.chunks.append(chunk)
    return branch


def true_value(chunk: Chunk, now: float) -> float:
    assert chunk.branch is not None
    seconds = COST.chunk_seconds((chunk.index + 1) * 32)
    return sum(seconds / max(now - holder.idle_since, 1.0) for holder in chunk.branch.holders)


def give_up(chunk: Chunk) -> None:
    chunk.device_page = None


def test_cost_is_interpolated_between_powers_of_two() -> None:
    assert COST.chunk_seconds(32) == 9.0
    assert COST.chunk_seconds(48) == 9.5
    assert COST.chunk_seconds(64) == 10.0
    assert COST.chunk_seconds(544) == pytest.approx(8.0 + 17.0)
    assert COST.chunk_seconds(2048) == pytest.approx(8.0 + 64.0)  # along the last segment
    assert COST.chunk_seconds(0) == 8.0


@pytest.mark.parametrize(
    ("points", "other", "problem"),
    [
        (((32, 1.0),), 1.0, "two or more"),
        (((64, 1.0), (32, 1.0)), 1.0, "ascending"),
        (((32, 1.0), (48, 1.0)), 1.0, "powers of two"),
        (((32, 1.0), (64, 1.0)), 0.0, "positive"),
        (((32, -1.0), (64, 1.0)), 1.0, "positive"),
    ],
)
def test_a_cost_profile_that_makes_no_sense_is_refused(
    points: tuple[tuple[int, float], ...], other: float, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        CostProfile(points, other)


def test_an_analytic_profile_says_that_it_was_not_measured() -> None:
    profile = CostProfile.analytic(1_000_000, num_layers=4, num_heads=4, head_size=32)
    assert not profile.measured
    assert profile.chunk_seconds(4096) > profile.chunk_seconds(32) > 0
    assert CostProfile.measured_at({64: 2.0, 32: 1.0}, 8.0).measured


def test_the_weight_of_a_branch_is_a_sum_over_its_holders() -> None:
    holders = [Conversation("a", 90.0), Conversation("b", 80.0), Conversation("c", 60.0)]
    branch = branch_of(holders, 0, 1)
    assert branch.weight(100.0) == pytest.approx(1 + 10 / 20 + 10 / 40)
    assert branch_of(holders[:1], 0, 1).weight(100.0) == 1.0
    assert branch.weight(200.0) > branch.weight(100.0)  # towards the number of holders


def test_more_than_64_holders_are_a_lower_bound() -> None:
    holders = [Conversation(str(i), float(i)) for i in range(200)]
    branch = branch_of(holders, 0, 1)
    exact = sum(301 / (500 - h.idle_since) for h in holders)
    assert 64 < branch.weight(500.0) <= exact


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("policy", [ValuePolicy(COST, 32), LruPolicy()], ids=lambda p: p.name)
def test_the_victim_is_the_least_valuable_up_to_one_class(
    policy: RetentionPolicy, seed: int
) -> None:
    choose = random.Random(seed)
    queue, now = RetentionQueue(Role.RECLAIM, policy), 200.0
    conversations = [Conversation(str(i), choose.uniform(0, 190)) for i in range(12)]
    branches = []
    for _ in range(15):
        holders = choose.sample(conversations, choose.choice((1, 1, 1, 2, 5)))
        branches.append(branch_of(holders, choose.randint(0, 20), choose.randint(1, 6)))
        queue.offer(branches[-1], now)
    while True:
        left = [c for branch in branches for c in branch.chunks if c.reclaimable]
        found = queue.least(now)
        if found is None:
            assert not left
            return
        _, victim = found
        if policy.name == "lru":
            assert victim.branch is not None
            assert victim.branch.idle_since == min(c.branch.idle_since for c in left if c.branch)
        else:
            least = min(true_value(chunk, now) for chunk in left)
            assert true_value(victim, now) <= least * CLASS_RATIO * (1 + 1e-9)
        give_up(victim)
        if choose.random() < 0.3:  # a holder comes back and rests again
            now += choose.uniform(0, 50)
            branch = choose.choice(branches)
            holder = choose.choice(list(branch.holders))
            holder.idle_since = now
            for each in branches:
                if holder in each.holders:
                    each.touch(holder, now)
                    queue.offer(each, now)
        now += choose.uniform(0, 5)
        queue.check(branches, now)


def test_a_conversation_loses_its_leading_end_first() -> None:
    queue = RetentionQueue(Role.RECLAIM, ValuePolicy(COST, 32))
    branch = branch_of([Conversation("a", 0.0)], 0, 4)
    queue.offer(branch, 10.0)
    order = []
    while (found := queue.least(10.0)) is not None:
        order.append(found[1].index)
        give_up(found[1])
    assert order == [0, 1, 2, 3]


def test_a_shared_prompt_outlives_the_private_chunks_behind_it() -> None:
    queue = RetentionQueue(Role.RECLAIM, ValuePolicy(COST, 32))
    holders = [Conversation(name, 0.0) for name in "abcd"]
    prompt = branch_of(holders, 0, 2)
    private = [branch_of([holder], 2, 2) for holder in holders]
    for branch in (prompt, *private):
        queue.offer(branch, 100.0)
    first = []
    for _ in range(8):
        found = queue.least(100.0)
        assert found is not None
        first.append(found[1].branch)
        give_up(found[1])
    assert prompt not in first


def test_a_branch_in_use_is_no_candidate_and_comes_back_when_it_rests() -> None:
    queue = RetentionQueue(Role.RECLAIM, LruPolicy())
    old, young = (branch_of([Conversation(n, t)], 0, 1) for n, t in (("a", 1.0), ("b", 2.0)))
    queue.offer(old, 5.0)
    queue.offer(young, 5.0)
    old.num_running = 1
    found = queue.least(5.0)
    assert found is not None
    assert found[1].branch is young
    old.num_running = 0
    queue.offer(old, 6.0)
    found = queue.least(6.0)
    assert found is not None
    assert found[1].branch is old


def test_stale_entries_do_not_pile_up() -> None:
    queue = RetentionQueue(Role.RECLAIM, LruPolicy())
    branch = branch_of([Conversation("a", 1.0)], 0, 1)
    for _ in range(1000):
        queue.offer(branch, 5.0)
        queue.withdraw(branch)
    assert sum(len(heap) for heap in queue._heaps) < 100
