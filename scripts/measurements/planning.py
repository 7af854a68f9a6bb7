"""Measure the cost of a scheduling decision: `plan` and `commit` of the real scheduler and cache.

256 turns generate, the host tier is full, and the number of cached conversations grows. The executor returns
immediately, so only bookkeeping is timed. The garbage collector has the settings of the engine.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from pensieve import gc_pause
from pensieve.bench.report import percentile, progress
from pensieve.core.cache import CacheConfig, KVCache
from pensieve.core.cost import CostProfile
from pensieve.core.identities import Identities
from pensieve.core.iteration import Iteration, Outcome, SampledToken
from pensieve.core.policies.registry import POLICIES, policy_named
from pensieve.core.scheduler import Scheduler
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import Turn
from scripts.measurements.processes import counts

CONVERSATIONS = (1_000, 10_000, 100_000)  # cached; they fill both tiers
RUNNING, ITERATIONS = 256, 2000


class PlanningTimes(NamedTuple):
    chunks: int
    seconds: list[float]  # per iteration
    reclaimed: float  # pages per iteration
    dropped: float


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure planning", description=__doc__)
    parser.add_argument("--conversations", type=counts, default=CONVERSATIONS, metavar="N,N,…")
    parser.add_argument("--policy", default=",".join(POLICIES), metavar="NAME,…")
    arguments = parser.parse_args(given)
    print("plan + commit, milliseconds per iteration")
    columns = ("policy", "conversations", "chunks", "p50", "p99", "max", "reclaimed", "dropped")
    print("".join(f"{each:>14}" for each in columns))
    for policy in arguments.policy.split(","):
        for count in arguments.conversations:
            progress(f"{policy}: building {count:,} conversations …")
            found = measure(policy, count)
            times = (percentile(found.seconds, share) * 1e3 for share in (0.5, 0.99, 1.0))
            print(
                f"{policy:>14}{count:>14,}{found.chunks:>14,}"
                + "".join(f"{each:>14.3f}" for each in times)
                + f"{found.reclaimed:>14.1f}{found.dropped:>14.1f}"
            )


def measure(
    policy: str,
    num_conversations: int,
    num_running: int = RUNNING,
    num_iterations: int = ITERATIONS,
) -> PlanningTimes:
    """Time plan + commit, and check the cache's invariants before and after."""
    choose = random.Random(1)
    cost = CostProfile.analytic(8_000_000_000, num_layers=32, num_heads=32, head_size=128)
    # Contexts of 512 to 32,768 tokens. Most conversations have only their last ten chunks in the cache. If
    # there are few conversations, each has more chunks, so that both tiers are full.
    contexts = [int(512 * 64 ** choose.random()) for _ in range(num_running)]
    running_pages = sum(-(-context // 32) + 8 for context in contexts)
    device_pages = int(running_pages / 0.6)
    chunks_each = max(10, -(-2 * (device_pages - running_pages) // num_conversations))
    host_pages = chunks_each * num_conversations
    scheduler = Scheduler(
        KVCache(
            CacheConfig(device_pages, host_pages, 32, swap_outs_max=64),
            policy_named(policy, cost, 32),
        ),
        SchedulerConfig(batch_tokens_max=512, turns_max=num_running),
    )
    cache, now, num_turns = scheduler.cache, 0.0, 0

    def outcome_of(iteration: Iteration, ending: set[int]) -> Outcome:
        return Outcome(
            tuple(
                SampledToken(piece.attempt_id, 1, stopped=piece.attempt_id in ending)
                for piece in iteration.slices
                if piece.needs_token
            ),
            tuple(
                [copy.copy_id for copy in iteration.swap_ins]
                + [copy.copy_id for copy in iteration.swap_outs]
            ),
        )

    prefix_of: dict[str, str] = {}  # conversation -> its system prompt (512 tokens)

    def turn_of(name: str, tokens: int, history: int) -> Turn:
        """Make a turn. Each conversation has different tokens, and so has each system prompt."""
        nonlocal num_turns
        num_turns += 1
        own, common = crc32(name.encode()), crc32(prefix_of.get(name, name).encode())
        ids = array("I", [common] * min(tokens, 512) + [own] * (tokens - 512))
        turn = Turn(num_turns, name, ids, history, tokens, tokens + 100_000)
        cached = cache.conversations.get(name)
        known = cached.identities if cached is not None else None
        turn.identities = known.beginning(history) if known is not None else Identities("", 32)
        return turn

    def finish_swap_outs() -> None:
        while swap_outs := cache.plan_swap_outs(now, 0):
            for copy in swap_outs:
                cache.finish_copy(copy.copy_id, now)

    def remember(name: str, tokens: int, history: int) -> None:
        """Leave the KV of a completed turn in the cache."""
        turn = turn_of(name, tokens, history)
        while type(found := cache.begin(turn, now, 0, {})).__name__ == "Shortage":
            finish_swap_outs()
        for copy in found.swap_ins:  # type: ignore[union-attr]
            cache.finish_copy(copy.copy_id, now)
        cache.release_sources(found.sources, now)  # type: ignore[union-attr]
        for chunk in turn.chunks:
            chunk.filled = min(32, tokens - 32 * chunk.index)
            turn.completed.append((chunk, chunk.generation))
        cache.register(turn)
        cache.end(turn, now, tokens)
        cache.settle(now)

    # 1. cached conversations: one in ten shares a system prompt
    prefixes = [f"prefix-{i}" for i in range(max(num_conversations // 1000, 4))]
    for name in prefixes:
        remember(name, 512, 0)
    for i in range(num_conversations):
        now += 0.05
        name = f"cached-{i}"
        if choose.random() < 0.1:
            prefix_of[name] = choose.choice(prefixes)
            cache.fork(prefix_of[name], 512, name, now)
            remember(name, 512 + 32 * choose.randint(1, 4), 512)
        else:
            long = choose.random() < 0.003
            remember(
                name,
                int(512 * 64 ** choose.random())
                if long
                else choose.randint(26 * chunks_each, 38 * chunks_each),
                0,
            )
        finish_swap_outs()

    # 2. running turns
    for i, context in enumerate(contexts):
        scheduler.submit(turn_of(f"running-{i}", context, 0), now)
    while len(scheduler.running) < num_running or any(
        turn.frontier < turn.prompt_end for turn in scheduler.running.values()
    ):
        now += 0.001
        iteration = scheduler.plan(now)
        assert iteration is not None
        scheduler.commit(iteration, outcome_of(iteration, set()), now)
    scheduler.check(now)
    num_chunks = sum(len(conv.chunks()) for conv in cache.conversations.values())
    before = (cache.counters.reclaimed, cache.counters.dropped)

    gc_pause.freeze()
    # 3. timed: every fourth iteration a turn ends and a cached conversation returns
    seconds: list[float] = []
    resting = [name for name in cache.conversations if name.startswith("cached")]
    choose.shuffle(resting)
    returning = iter(resting * (1 + num_iterations // len(resting)))
    for i in range(num_iterations):
        now += 0.03
        ending: set[int] = set()
        if i % 4 == 0:
            ending.add(choose.choice(list(scheduler.running)))
            name = next(returning)
            known = cache.conversations.get(name)
            history = known.num_tokens if known is not None else 32 * chunks_each
            scheduler.submit(turn_of(name, history + choose.randint(32, 256), history), now)
        started = time.perf_counter()
        iteration = scheduler.plan(now)
        planned = time.perf_counter()
        assert iteration is not None
        outcome = outcome_of(iteration, ending)
        resumed = time.perf_counter()
        scheduler.commit(iteration, outcome, now)
        seconds.append(time.perf_counter() - resumed + planned - started)
    scheduler.check(now)
    return PlanningTimes(
        num_chunks,
        seconds,
        (cache.counters.reclaimed - before[0]) / num_iterations,
        (cache.counters.dropped - before[1]) / num_iterations,
    )


if __name__ == "__main__":
    main()
