"""The order of eviction: compare every decision of the queues with a search through all chunks.

retention_value = cost of recomputing the chunk / idle seconds (at least one), summed over its holders.
A queue puts chunks into value classes. Values in one class differ by at most a factor of 1.1. So the
chosen chunk may be up to 1.1 times as valuable as the least valuable chunk.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from pensieve.core.cost import CostProfile
from pensieve.core.policies.lru import LruPolicy
from pensieve.core.policies.protocol import EvictionPolicy
from pensieve.core.policies.queue import QUALIFIES, EvictionQueue, Role
from pensieve.core.policies.registry import POLICIES
from pensieve.core.policies.value import NUM_VALUE_CLASSES, VALUE_CLASS_RATIO, ValuePolicy
from pensieve.core.prefix_tree import Branch, CachedConversation, Chunk
from tests.core.world import ScriptedWorld

SIZE = 32
COST = CostProfile.measured_at({32: 0.1, 1024: 1.0, 2048: 2.0}, other_seconds=0.9)
QUEUE_ROLE = Role.SWAP_OUT


@dataclass
class Forest:
    """Idle branches of dirty chunks, and a queue that must name the least valuable chunk."""

    policy: EvictionPolicy
    now: float = 0.0
    branches: list[Branch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = EvictionQueue(QUEUE_ROLE, self.policy)

    def grow(self, start: int, num_chunks: int, idle_since: list[float]) -> Branch:
        """Add a branch whose holders have been idle since these times."""
        branch = Branch(None, start, max(idle_since), len(Role))
        for index in range(start, start + num_chunks):
            chunk = Chunk(index, branch)
            chunk.device_page, chunk.filled = 0, SIZE
            branch.chunks.append(chunk)
        for number, since in enumerate(sorted(idle_since)):
            holder = CachedConversation(f"c{len(self.branches)}.{number}", since)
            branch.holders[holder] = None
        self.branches.append(branch)
        self.queue.offer(branch, self.now)
        return branch

    def candidates(self) -> list[Chunk]:
        return [
            chunk for branch in self.branches for chunk in branch if QUALIFIES[QUEUE_ROLE](chunk)
        ]

    def exact_value(self, chunk: Chunk) -> float:
        assert chunk.branch is not None
        cost = COST.chunk_seconds((chunk.index + 1) * SIZE)
        return sum(cost / max(self.now - holder.idle_since, 1.0) for holder in chunk.branch.holders)

    def take_least(self) -> tuple[float, Chunk] | None:
        """Return the queue's choice, and mark the chunk as copied to the host."""
        found = self.queue.least(self.now)
        if found is not None:
            found[1].host_filled = SIZE
        return found


def value_forest() -> Forest:
    return Forest(ValuePolicy(COST, SIZE))


# -- against brute force --


@pytest.mark.parametrize("seed", range(8))
def test_the_victim_is_the_least_valuable_up_to_one_value_class(seed: int) -> None:
    """Private and shared branches are added, become idle, are used again, lose holders and are evicted."""
    rng, forest = random.Random(seed), value_forest()
    num_victims = 0
    for _ in range(150):
        forest.now += rng.choice((0.5, 3.0, 40.0))
        roll = rng.random()
        if roll < 0.35:
            holders = rng.choice((1, 1, 1, 2, 5))
            since = [forest.now - rng.expovariate(1 / 50) for _ in range(holders)]
            forest.grow(rng.choice((0, 3, 40)), rng.randint(1, 4), [*since[1:], forest.now])
        elif roll < 0.5 and forest.branches:
            branch = rng.choice(forest.branches)
            holder = rng.choice(list(branch.holders))
            holder.idle_since = forest.now
            branch.touch(holder)
        elif roll < 0.6 and forest.branches:
            branch = rng.choice(forest.branches)
            if len(branch.holders) > 1:
                del branch.holders[rng.choice(list(branch.holders))]
                branch.idle_since = next(reversed(branch.holders)).idle_since
                forest.queue.offer(branch, forest.now)
        elif roll < 0.7 and forest.branches:
            chunk = rng.choice(rng.choice(forest.branches).chunks)
            chunk.host_filled = 0
            assert chunk.branch is not None
            forest.queue.requalify(chunk, chunk.branch, forest.now)
        else:
            forest.now += 1.0  # idle times below one second count as one second
            candidates = forest.candidates()
            found = forest.take_least()
            assert (found is None) == (not candidates)
            if found is None:
                continue
            num_victims += 1
            believed, victim = found
            least = min(map(forest.exact_value, candidates))
            assert believed <= least * (1 + 1e-9), f"seed {seed}"
            assert forest.exact_value(victim) <= least * VALUE_CLASS_RATIO * (1 + 1e-9), (
                f"seed {seed}"
            )
        forest.queue.check(forest.branches, forest.now)
    assert num_victims > 30


@pytest.mark.parametrize("seed", range(4))
def test_with_more_than_64_holders_the_value_is_a_lower_bound(seed: int) -> None:
    """The queue weighs 64 of n holders. Values are never too high, and at most n / 64 times too low."""
    rng, forest = random.Random(seed), value_forest()
    forest.now = 10_000.0
    for _ in range(12):
        count = rng.choice((1, 5, 64, 65, 128, 300))
        ages = [1.0 + rng.random() * rng.choice((5, 5000)) for _ in range(count)]
        forest.grow(rng.choice((0, 1, 9)), 2, [forest.now - age for age in ages])
    while candidates := forest.candidates():
        found = forest.take_least()
        assert found is not None
        believed, victim = found
        assert victim.branch is not None
        slack = max(len(victim.branch.holders) / 64, 1.0)
        least = min(map(forest.exact_value, candidates))
        assert believed <= least * (1 + 1e-9)
        assert forest.exact_value(victim) <= least * VALUE_CLASS_RATIO * slack * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_lru_evicts_the_leading_chunk_of_the_least_recently_used_branch(seed: int) -> None:
    rng, forest = random.Random(seed), Forest(LruPolicy())
    for _ in range(120):
        forest.now += rng.choice((0.5, 3.0))
        roll = rng.random()
        if roll < 0.4:
            forest.grow(0, rng.randint(1, 4), [forest.now] * rng.choice((1, 3)))
        elif roll < 0.6 and forest.branches:
            branch = rng.choice(forest.branches)
            holder = rng.choice(list(branch.holders))
            holder.idle_since = forest.now
            branch.touch(holder)
        elif candidates := forest.candidates():
            found = forest.take_least()
            assert found is not None
            victim = found[1]

            def order(chunk: Chunk) -> tuple[float, int]:
                assert chunk.branch is not None
                return chunk.branch.idle_since, chunk.index

            assert order(victim) == min(map(order, candidates)), f"seed {seed}"


def test_lru_evicts_a_conversations_leading_branch_first() -> None:
    """After a fork was deleted, its source has two branches that were last used at the same time."""
    world = ScriptedWorld(16, 0)
    world.say("a", 16)
    world.fork_at("a", 8, "b")
    world.delete("b")
    world.say("a", 1)
    world.wait(1.0)
    world.say("filler", 55)
    world.cache.evict("filler", world.now)
    assert world.where("a").replace("x", "d") == "---dd"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_chunk_is_evicted_eventually(policy: str) -> None:
    """No chunk is passed over for ever, however young or expensive the other chunks are."""
    forest = Forest(POLICIES[policy](COST, SIZE))
    old = forest.grow(60, 1, [0.0] * 60)  # expensive, and shared by 60 holders
    forest.now = 1.0
    taken: list[Chunk] = []
    for _ in range(3000):
        forest.now += 60.0
        forest.grow(0, 1, [forest.now - 2.0])
        found = forest.take_least()
        assert found is not None
        taken.append(found[1])
        if found[1].branch is old:
            break
    else:
        pytest.fail("the oldest chunk was never chosen")
    num_left = len(forest.candidates())
    for _ in range(num_left):
        found = forest.take_least()
        assert found is not None
        taken.append(found[1])
    assert forest.take_least() is None
    assert len(set(taken)) == len(taken) == sum(len(branch.chunks) for branch in forest.branches)


def test_an_eviction_evaluates_few_branches_even_among_thousands() -> None:
    class Counting(ValuePolicy):
        num_asked = 0

        def value_class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
            self.num_asked += 1
            return super().value_class_of(branch, chunk_index, now)

    asked = []
    for num_branches in (100, 3000):
        policy = Counting(COST, SIZE)
        forest = Forest(policy)
        for number in range(num_branches):
            forest.now = float(number)
            forest.grow(number % 5, 2, [forest.now])
        policy.num_asked = 0
        for _ in range(50):
            forest.now += 1.0
            assert forest.take_least() is not None
        asked.append(policy.num_asked)
    assert max(asked) <= 2 * 50


def test_the_queue_drops_stale_entries() -> None:
    forest = Forest(LruPolicy())
    branch = forest.grow(0, 1, [0.0])
    for _ in range(1000):
        forest.queue.withdraw(branch)
        forest.queue.offer(branch, 0.0)
    assert sum(map(len, forest.queue._heaps)) < 100


def test_a_branch_in_use_is_skipped_until_it_is_offered_again() -> None:
    forest = Forest(LruPolicy())
    branch = forest.grow(0, 1, [0.0])
    branch.num_running = 1
    assert forest.queue.least(1.0) is None
    branch.num_running = 0
    forest.queue.offer(branch, 1.0)
    found = forest.queue.least(1.0)
    assert found is not None
    assert found[1] is branch.chunks[0]


# -- the value of a chunk --


def test_a_cost_profile_interpolates_between_powers_of_two() -> None:
    profile = CostProfile.measured_at({32: 1.0, 64: 3.0, 128: 4.0}, other_seconds=10.0)
    seconds = [profile.chunk_seconds(tokens) for tokens in (32, 40, 48, 64, 96, 128, 256)]
    assert seconds == [11.0, 11.5, 12.0, 13.0, 13.5, 14.0, 16.0]
    assert profile.chunk_seconds(0) == 10.0  # the line through 32 and 64 would be negative here
    assert profile.measured


def test_an_analytic_profile_counts_operations_and_is_marked_as_not_measured() -> None:
    profile = CostProfile.analytic(
        num_parameters=1_000_000, num_layers=2, num_heads=4, head_size=16, chunk_tokens=32
    )
    assert not profile.measured
    attention, others = 4 * 2 * 4 * 16 * 32 / 1e12, 2 * 1_000_000 * 32 / 1e12
    for context in (32, 1000, 1024, 100_000, 200_000):
        assert profile.chunk_seconds(context) == pytest.approx(others + attention * context)


@pytest.mark.parametrize(
    ("attention", "other", "problem"),
    [
        ({32: 1.0}, 1.0, "two or more ascending"),
        ({32: 1.0, 48: 2.0}, 1.0, "powers of two"),
        ({32: 1.0, 64: -2.0}, 1.0, "must be positive"),
        ({32: 1.0, 64: 2.0}, 0.0, "must be positive"),
    ],
)
def test_an_invalid_cost_profile_is_refused(
    attention: dict[int, float], other: float, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        CostProfile.measured_at(attention, other)


def test_a_cost_profile_must_be_ascending() -> None:
    with pytest.raises(ValueError, match="ascending"):
        CostProfile(((64, 1.0), (32, 2.0)), 1.0)


def test_a_branch_weight_sums_over_holders_relative_to_the_latest() -> None:
    branch = value_forest().grow(0, 1, [0.0, 60.0, 90.0])
    assert branch.holders_weight(100.0) == pytest.approx(10 / 100 + 10 / 40 + 10 / 10)
    assert branch.holders_weight(1e9) == pytest.approx(3.0)
    assert (
        branch.holders_weight(90.0)
        == branch.holders_weight(91.0)
        == pytest.approx(1 / 91 + 1 / 31 + 1)
    )
    assert value_forest().grow(0, 1, [5.0]).holders_weight(7.0) == 1.0


def test_beyond_64_holders_the_others_count_as_longest_idle() -> None:
    branch = value_forest().grow(0, 1, [0.0, *([10.0] * 10), *([90.0] * 64)])
    assert branch.holders_weight(100.0) == pytest.approx(64 + 11 * 10 / 100)


def test_value_classes_are_steps_of_ten_percent() -> None:
    """The cheapest chunk costs 1.0 s (cost(32)). Class 7 begins at 1.1^7 = 1.95, class 8 at 2.14."""
    cost = CostProfile.measured_at({32: 0.0, 64: 1.0, 128: 3.0}, other_seconds=1.0)
    policy, branch = ValuePolicy(cost, SIZE), value_forest().grow(0, 4, [0.0])
    assert [policy.value_class_of(branch, index, 0.0) for index in range(4)] == [0, 7, 11, 14]
    assert policy.value(0, 10.0) == pytest.approx(0.1)
    assert policy.value(7, 10.0) == pytest.approx(1.1**7 / 10)
    assert policy.value(7, 0.2) == policy.value(7, 1.0)
    shared = value_forest().grow(0, 1, [0.0] * 3)
    assert policy.value_class_of(shared, 0, 100.0) == 11  # log(3) / log(1.1) = 11.5


def test_the_most_valuable_chunks_share_the_last_of_64_value_classes() -> None:
    assert (NUM_VALUE_CLASSES, VALUE_CLASS_RATIO) == (64, 1.1)
    cost = CostProfile.measured_at({32: 0.0, 64: 1e6}, other_seconds=1.0)
    policy, branch = ValuePolicy(cost, SIZE), value_forest().grow(0, 1, [0.0])
    assert policy.value_class_of(branch, 100, 0.0) == 63


# -- consequences --


def test_value_keeps_trailing_chunks_longer_than_leading_ones() -> None:
    """Leading chunks are cheap to recompute, so `a` loses only its first chunks."""
    world = ScriptedWorld(16, 0, policy="value")
    world.say("a", 24)
    world.wait(10.0)
    world.say("b", 8)
    world.wait(10.0)
    world.ask("filler", 39)
    while not world.where("filler"):
        world.next()
    lost = {name: world.where(name).count("-") for name in "ab"}
    assert world.where("a").startswith("--")
    assert not world.where("a").strip("-x")
    assert lost == {"a": 2, "b": 0}


def test_a_shared_system_prompt_outlives_the_private_chunks_behind_it() -> None:
    world = ScriptedWorld(16, 0, policy="value")
    world.say("system", 8)
    for name in "abc":
        world.fork_at("system", 8, name)
        world.say(name, 8)
    world.delete("system")
    world.wait(100.0)
    world.say("filler", 43)
    for name in "abc":
        assert "-" not in world.where(name)[:2]
    assert sum(len(world.where(name).replace("-", "")) - 2 for name in "abc") < 6


@pytest.mark.parametrize("policy", POLICIES)
def test_a_conversation_whose_client_is_away_is_evicted_first(policy: str) -> None:
    """`b` was used last, but its client has said that it will be away. `a` may return at any time."""
    world = ScriptedWorld(16, 0, policy=policy)
    world.say("a", 15)
    world.until_ended(world.ask("b", 15, away_seconds=600.0))
    world.cache.check(world.now)
    world.say("filler", 39)
    assert "-" not in world.where("a")
    assert world.where("b").startswith("--")


def test_an_away_hint_does_not_age_chunks_that_others_share() -> None:
    world = ScriptedWorld(16, 0)
    world.say("a", 8)
    world.fork_at("a", 8, "b")
    world.wait(5.0)
    world.say("a", 1)
    spoke = world.now
    world.wait(5.0)
    world.until_ended(world.ask("b", 1, away_seconds=600.0))
    shared = world.chunks("b")[0].branch
    assert shared is not None
    assert [holder.conversation_id for holder in shared.holders] == ["b", "a"]
    assert shared.idle_since == world.cache.conversations["a"].idle_since >= spoke - 1.0
    world.cache.check(world.now)
