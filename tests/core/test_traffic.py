"""Random traffic over the ledger: every reply is right, every invariant holds, everything ends.

The ledger verifies the positions that each slice attends to. `_take` compares every reply with the reply
that the conversation would get without a cache. `check()` recomputes the bookkeeping: after every commit for
one seed in four, after every fifth commit for the others.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from pensieve.core.iteration_builder import IterationBuilder
from pensieve.core.policies.registry import POLICIES
from pensieve.core.turn import Turn
from tests.core.world import SPOILED, TWINS, Shape, World, run
from tests.scale import SCALE

SHAPES = {
    "two tiers": Shape(),
    "lru, no host": Shape(policy="lru", host_pages=0),
    "return policy": Shape(policy="return"),
    "return policy, restless, planned ahead": Shape(
        policy="return", restless=True, overlap=True, conversations=10, device_pages=14
    ),
    "return policy, switching to a random order": Shape(policy="return", switching=True),
    "return policy, switching to a random order, restless, planned ahead": Shape(
        policy="return",
        switching=True,
        restless=True,
        overlap=True,
        conversations=10,
        device_pages=14,
        background=0.2,
    ),
    "return policy, copies as slow as computing": Shape(policy="return", copy_share=1.0001),
    "return policy, copies that hardly pay": Shape(
        policy="return", copy_share=0.4, conversations=12, host_pages=16
    ),
    "tiny device, large host": Shape(device_pages=8, host_pages=30),
    "large device, tiny host, late copies": Shape(
        device_pages=40, host_pages=12, conversations=12, late=0.9
    ),
    "small budget": Shape(batch_tokens_max=5, turns_max=3),
    "planned ahead": Shape(overlap=True),
    "chunked prefills, limited by seconds": Shape(
        device_pages=60,
        host_pages=60,
        batch_tokens_max=64,
        prompt_max=60,
        overlap=True,
        token_seconds=0.001,
        prompt_seconds_max=0.02,
    ),
    "chunked prefills, limited by tbt": Shape(
        device_pages=60,
        host_pages=60,
        batch_tokens_max=64,
        prompt_max=60,
        token_seconds=0.001,
        key_seconds=0.0001,
        tbt_seconds=0.03,
        foreseen=3.0,
        restless=True,
    ),
    "few turns, limited by tbt, planned ahead, restless": Shape(
        device_pages=24,
        turns_max=3,
        overlap=True,
        restless=True,
        conversations=10,
        token_seconds=0.001,
        key_seconds=0.0001,
        tbt_seconds=0.02,
        time_share=6,
    ),
    "failing turns": Shape(failing=0.03),
    "failing turns, planned ahead": Shape(overlap=True, failing=0.03, device_pages=9),
    "wrong KV in shared holes": Shape(
        spoiling=0.02,
        damaging=0.5,
        restless=True,
        conversations=14,
        chunk_tokens=2,
        device_pages=16,
        host_pages=60,
        swap_out_below=1.0,
        late=0.95,
        turns_max=2,
        time_share=1,
        prompt_max=6,
        reply_max=20,
    ),
    "wrong KV in shared holes, streamed": SPOILED,
    "streamed forks over one hole": TWINS,
    "streamed forks over one hole, planned ahead": replace(TWINS, overlap=True, twins=0.2),
    "damaged host pages": Shape(damaging=0.2, host_pages=20),
    "damaged host pages, planned ahead, restless": Shape(
        damaging=0.3, overlap=True, restless=True, host_pages=30, conversations=10
    ),
    "restless": Shape(restless=True, conversations=8),
    "restless, failing": Shape(
        restless=True, conversations=10, device_pages=14, failing=0.1, reply_max=20
    ),
    "restless, planned ahead, chunks of one slot": Shape(
        restless=True, overlap=True, chunk_tokens=1, device_pages=40, host_pages=20, prompt_max=9
    ),
    "streamed": Shape(staging_pages=8, host_pages=20, device_pages=8),
    "streamed, forks, planned ahead, failing, damaged": Shape(
        staging_pages=12,
        host_pages=40,
        overlap=True,
        restless=True,
        failing=0.05,
        damaging=0.1,
        conversations=10,
    ),
    "streamed, a small host, narrow groups": Shape(
        staging_pages=5, host_pages=12, device_pages=7, late=0.9
    ),
    "streamed where it pays, an objective, background": Shape(
        staging_pages=8,
        stream="auto",
        host_pages=16,
        device_pages=8,
        background=0.4,
        token_seconds=0.001,
        tbt_seconds=0.05,
    ),
    "KV from elsewhere": Shape(adopting=0.5, host_pages=24, conversations=10),
    "KV from elsewhere, restless, planned ahead, a small host": Shape(
        adopting=0.7,
        restless=True,
        overlap=True,
        conversations=10,
        host_pages=9,
        device_pages=14,
        policy="return",
    ),
    "KV from elsewhere, streamed, failing, damaged": Shape(
        adopting=0.5,
        staging_pages=8,
        host_pages=24,
        failing=0.03,
        damaging=0.1,
        conversations=10,
    ),
    "copies one by one, no reserve": Shape(swap_outs_max=1, reserve=0.0, swap_out_below=0.5),
}
SEEDS = 56 * SCALE  # for each shape


def must_happen(shape: Shape) -> set[str]:
    """Return the counters that must be above zero after `SEEDS` worlds of this shape."""
    names = {"dropped", "recomputed_tokens"}
    if shape.chunk_tokens > 1:
        names |= {"copied_on_write"}
    if shape.device_pages < 40 or shape.chunk_tokens == 1:
        names |= {"resumptions", "suspensions"}
    if shape.host_pages:
        names |= {"reclaim_hits", "reclaimed", "swapped_in", "swapped_out"}
    if shape.host_pages < 30:
        names |= {"marked_to_drop"}
    if shape.failing or shape.spoiling:
        names |= {"discarded", "failed"}
    if shape.damaging:
        names |= {"damaged"}
    if shape.overlap:
        names |= {"idle_tokens"}
    if shape.adopting:
        names |= {"adopted"}
    if shape.staging_pages:
        names |= {"streamed", "returned"}
    if shape.prompt_seconds_max or shape.tbt_seconds:
        names |= {"prompts_cut_by_time"}
    return names


def traffic(name: str, seeds: range) -> Counter[str]:
    """Run these worlds and return the sum of their counters. A note on an error names its world."""
    shape, total = SHAPES[name], Counter[str]()
    tokens_allowed = IterationBuilder._tokens_allowed

    def count_cuts(builder: IterationBuilder, start: int, held_for: Turn | None = None) -> int:
        found = tokens_allowed(builder, start, held_for)
        total["prompts_cut_by_time"] += found < builder.num_tokens_left
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IterationBuilder, "_tokens_allowed", count_cuts)
        most_ranges = run_worlds(shape, name, seeds, total)
    total["repaired_ranges_max"] = most_ranges
    return total


def run_worlds(shape: Shape, name: str, seeds: range, total: Counter[str]) -> int:
    """Run a world for each seed and add its counters to `total`.

    Return the largest number of ranges that a turn had to repair at once.
    """
    most_ranges = 0
    for seed in seeds:
        try:
            world = run(seed, shape, actions=30, checks_every=1 if seed % 4 == 0 else 5)
            tiers = world.cache.tiers
            assert tiers.num_swapping_in == tiers.num_swapping_out == 0
        except BaseException as error:
            error.add_note(f"seed {seed} of {name!r}: {shape}")
            raise
        for counters in (world.cache.counters, world.scheduler.counters):
            total.update(vars(counters))
        total["replies"] += world.num_replies
        most_ranges = max(most_ranges, world.scheduler.counters.repaired_ranges_max)
    return most_ranges


def random_shape(seed: int) -> Shape:
    choose = random.Random(seed).choice
    token_seconds = choose((0.0, 0.0, 0.001))
    by_time = token_seconds > 0.0
    return Shape(
        device_pages=choose((8, 12, 16, 24, 40)),
        host_pages=choose((0, 3, 10, 30)),
        chunk_tokens=choose((1, 2, 4, 4)),
        batch_tokens_max=choose((5, 16, 24)),
        turns_max=choose((1, 1, 2, 3, 5)),
        policy=choose(tuple(POLICIES)),
        late=choose((0.0, 0.5, 0.9)),
        failing=choose((0.0, 0.0, 0.03)),
        damaging=choose((0.0, 0.0, 0.2)),
        overlap=choose((False, True)),
        conversations=choose((3, 6, 10, 14)),
        prompt_max=choose((2, 9, 14, 30)),
        reply_max=choose((4, 12, 20)),
        reserve=choose((0.0, 0.1)),
        swap_out_below=choose((0.1, 0.25, 0.5)),
        swap_outs_max=choose((1, 64)),
        token_seconds=token_seconds,
        key_seconds=choose((0.0, 0.0001)) if by_time else 0.0,
        tbt_seconds=choose((0.0, 0.02, 0.04)) if by_time else 0.0,
        prompt_seconds_max=choose((0.0, 0.01)) if by_time else 0.0,
        time_share=choose((0, 0, 1, 4)),
        restless=choose((False, False, True)),
        foreseen=choose((0.5, 1.0, 3.0)),
        roots=choose((0, 1, 2)),
        repeating=choose((0.0, 0.5, 0.8)),
        adopting=choose((0.0, 0.0, 0.3)),
        staging_pages=choose((0, 0, 8)),
    )


@pytest.mark.parametrize("first", range(0, 4 * SEEDS, SEEDS))
def test_every_reply_is_correct_in_worlds_of_random_shape(first: int) -> None:
    total = Counter[str]()
    for seed in range(first, first + SEEDS):
        run_worlds(random_shape(seed), "any shape", range(seed, seed + 1), total)
    assert total["replies"] > 4 * SEEDS


@pytest.mark.parametrize("name", SHAPES)
def test_every_reply_is_correct_in_random_traffic(name: str) -> None:
    total = traffic(name, range(SEEDS))
    never = sorted(each for each in must_happen(SHAPES[name]) if not total[each])
    assert not never, f"never happened: {never} in {dict(total)}"
    assert total["repaired_ranges_max"] >= 2
    assert total["replies"] > 4 * SEEDS
    if not SHAPES[name].overlap:
        assert total["idle_tokens"] == 0
    if not (SHAPES[name].failing or SHAPES[name].spoiling):
        assert total["failed"] == total["discarded"] == 0
    if not SHAPES[name].damaging:
        assert total["damaged"] == 0


def test_planning_ahead_does_not_change_replies() -> None:
    """The replies do not depend on when iterations are planned."""
    for seed in range(20):
        logs = []
        for overlap in (False, True):
            world = World(seed, Shape(overlap=overlap))
            for name, prompt in (("a", [1, 2, 3]), ("b", [7] * 9), ("c", list(range(13)))):
                world.logs[name], world.commits[name] = [], [0]
                world.submit(name, prompt=prompt, reply_max=1 + seed % 12)
            world.run_until_idle()
            logs.append(world.logs)
        assert logs[0] == logs[1], f"seed {seed}"


def test_a_failing_seed_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "run_until_idle", lambda *a: [][0])
    with pytest.raises(IndexError) as caught:
        traffic("restless", range(7, 9))
    assert caught.value.__notes__[0].startswith("seed 7 of 'restless': Shape(")
