"""Random traffic over the ledger: every reply is right, every invariant holds, everything ends."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.core.world import Shape, World, run

SHAPES = {
    "two tiers": Shape(),
    "lru, no host": Shape(policy="lru", host_pages=0),
    "tiny device, large host": Shape(device_pages=8, host_pages=30),
    "large device, tiny host, late copies": Shape(
        device_pages=40, host_pages=12, conversations=12, late=0.9
    ),
    "small budget": Shape(batch_tokens_max=5, turns_max=3),
    "planned ahead": Shape(overlap=True),
    "failing turns": Shape(failing=0.03),
    "failing turns, planned ahead": Shape(overlap=True, failing=0.03, device_pages=9),
}
SEEDS = 130


@pytest.mark.parametrize("name", SHAPES)
def test_every_reply_is_right_whatever_happens(name: str) -> None:
    shape = SHAPES[name]
    total: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            world = run(seed, shape, actions=40)
        except BaseException as error:
            error.add_note(f"seed {seed} of {shape}")
            raise
        for counters in (world.cache.counters, world.scheduler.counters):
            total.update(vars(counters))
        total["replies"] += world.num_replies
        total["ranges"] = max(total["ranges"], world.scheduler.counters.repaired_ranges_max)
        assert world.cache.swap_ins_in_flight == world.cache.swap_outs_in_flight == 0
    assert total["replies"] > 4 * SEEDS
    fired = ["dropped", "recomputed_tokens", "suspensions", "resumptions"]
    if shape.host_pages:
        fired += ["reclaimed", "swapped_out", "swapped_in", "reclaim_hits", "copied_on_write"]
    if shape.failing:
        fired += ["discarded", "failed"]
    if name.startswith("large"):
        fired = [each for each in fired if each not in ("suspensions", "resumptions")]
    if shape.overlap:
        fired += ["idle_tokens"]
    else:
        assert total["idle_tokens"] == 0
    assert not [each for each in fired if not total[each]], f"never happened: {dict(total)}"
    assert total["ranges"] >= 2


def test_planning_ahead_says_the_same() -> None:
    """A conversation's replies do not depend on when its iterations were planned."""
    for seed in range(20):
        logs = []
        for overlap in (False, True):
            world = World(seed, Shape(overlap=overlap))
            for name, prompt in (("a", [1, 2, 3]), ("b", [7] * 9), ("c", list(range(13)))):
                world.logs[name], world.commits[name] = [], [0]
                world.random.seed(seed)
                world.submit(name, prompt=prompt)
            world.settle()
            logs.append(world.logs)
        assert logs[0] == logs[1]
