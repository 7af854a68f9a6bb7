"""`pensieve bench`: figures a user can reproduce.

`planning` measures what a decision costs: `plan` and `commit` of the real scheduler and cache, with
256 turns generating, a full host tier, and growing numbers of cached conversations.  The executor
answers at once, so what is timed is bookkeeping alone.  Garbage collection stays on.
(`service`, `chat`, `swap`, `attention` and `step` are in bench_service.py, bench_chat.py and so on.)
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from pensieve.bench import chat as bench_chat
from pensieve.bench import service as bench_service
from pensieve.bench import swap as bench_swap
from pensieve.core.policies.registry import POLICIES
from pensieve.errors import InvalidArgument

CONVERSATIONS = (1_000, 10_000, 100_000)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure this machine and this build")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    planning = kinds.add_parser(
        "planning",
        help="time of plan + commit against the number of cached conversations",
        description=(__doc__ or "").split("\n\n", 1)[1],
    )
    planning.add_argument(
        "--conversations",
        type=_counts,
        default=CONVERSATIONS,
        metavar="N,N,…",
        help="cached conversations (default: 1000,10000,100000; together they fill both tiers)",
    )
    planning.add_argument(
        "--running", type=int, default=256, help="turns generating (default: 256)"
    )
    planning.add_argument(
        "--iterations", type=int, default=2000, help="iterations to time (default: 2000)"
    )
    planning.add_argument(
        "--policy",
        type=lambda text: text.split(","),
        default=list(POLICIES),
        metavar="NAME,…",
        help=f"(default: {','.join(POLICIES)})",
    )
    planning.add_argument("--json", action="store_true", help="print figures as JSON")
    planning.set_defaults(run=planning_command)
    bench_service.add_parser(kinds)
    bench_chat.add_parser(kinds)
    bench_swap.add_parser(kinds)
    attention = kinds.add_parser(
        "attention",
        help="attention over scattered pages against torch on keys and values in one piece",
        description="Times multi_token_attention over pages in random order against torch's fused "
        "attention on contiguous keys and values (the best of padded batch and loop, with grouped "
        "heads as they are and folded into rows), against gathering the pages first, and against one "
        "query at a time. Every answer is checked before it is timed.",
    )
    attention.add_argument(
        "--context",
        type=_counts,
        default=(128, 256, 512, 1024, 2048, 4096),
        metavar="N,N,…",
        help="tokens of each turn (default: 128,256,512,1024,2048,4096)",
    )
    attention.add_argument(
        "--batch", type=_counts, default=(32, 8), metavar="N,N,…", help="turns (default: 32,8)"
    )
    attention.add_argument(
        "--queries", type=int, default=8, metavar="N", help="tokens of each slice (default: 8)"
    )
    attention.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="only this one (default: both)"
    )
    attention.add_argument(
        "--repeats", type=int, default=9, metavar="N", help="times for each median (default: 9)"
    )
    attention.add_argument("--json", action="store_true", help="print figures as JSON")
    attention.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the ratios (needs the extra `bench`)"
    )
    attention.set_defaults(run=attention_command)
    step = kinds.add_parser(
        "step",
        help="an iteration of a model against the time that reading its weights takes",
        description="Times one iteration (forward, sampling) of turns that generate, alone and beside a "
        "piece of a prompt, and divides by the time that reading the weights takes at the bandwidth "
        "measured in between. Before that several turns must say in a batch what they say alone.",
    )
    step.add_argument(
        "model",
        nargs="?",
        default="",
        help="a folder or a hub id (default: random weights of the shape --shape)",
    )
    step.add_argument(
        "--shape",
        default="0.37B",
        help="of the random weights: 0.03B, 0.37B or 1.1B (default: 0.37B)",
    )
    step.add_argument(
        "--batch", type=_counts, default=(1, 16, 64), metavar="N,N,…", help="(default: 1,16,64)"
    )
    step.add_argument(
        "--context", type=int, default=64, metavar="N", help="tokens of each turn (default: 64)"
    )
    step.add_argument(
        "--prompt", type=int, default=256, metavar="N", help="tokens of the piece (default: 256)"
    )
    step.add_argument(
        "--repeats", type=int, default=15, metavar="N", help="times for each median (default: 15)"
    )
    step.add_argument(
        "--weights", choices=("native", "int8"), default="native", help="(default: native)"
    )
    step.add_argument("--json", action="store_true", help="print figures as JSON")
    step.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the ratios (needs the extra `bench`)"
    )
    step.set_defaults(run=step_command)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def attention_command(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from pensieve.bench import attention as bench

    if min(arguments.context) < arguments.queries:
        raise InvalidArgument("context", "is at least as long as the queries")
    bandwidth = bench.read_bytes_per_second()
    about = {**bench.machine(), "read_bytes_per_second": bandwidth}
    print(", ".join(f"{name} {value}" for name, value in about.items()), file=sys.stderr)
    rows = []
    for shape in bench.shapes(arguments.context, arguments.batch, arguments.queries):
        if arguments.dtype not in (None, shape.dtype):
            continue
        row = bench.measure(shape, arguments.repeats, bandwidth)
        rows.append(row)
        print(
            f"{row.dtype:8} {row.heads}/{row.kv_heads:<2} of {row.head_size:3}, batch {row.batch:2}, "
            f"context {row.context:5}: {row.seconds * 1e3:7.2f} ms, contiguous "
            f"{row.contiguous_seconds * 1e3:7.2f} ({row.ratio:.2f} x), copy-out "
            f"{row.copy_out_seconds * 1e3:7.2f}, token by token "
            f"{row.token_by_token_seconds * 1e3:7.2f}; {row.bandwidth_share:4.0%} of the bandwidth",
            file=sys.stderr if arguments.json else sys.stdout,
            flush=True,
        )
    means = bench.geometric_means(rows)
    if arguments.json:
        print(json.dumps({**about, "rows": [asdict(row) for row in rows], "ratios": means}))
    else:
        for name, ratio in means.items():
            print(f"{name}: {ratio:.2f} x (geometric mean)")
    if arguments.plot is not None:
        bench.plot(rows, arguments.plot)
    return 0


def step_command(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    import torch

    from pensieve.bench import step as bench
    from pensieve.model.loader import load
    from pensieve.text.tokenizer import Tokenizer

    if min(arguments.batch) < 1 or arguments.context < 1 or arguments.repeats < 1:
        raise InvalidArgument("batch, context, repeats", "are at least 1")
    out = sys.stderr if arguments.json else sys.stdout
    about: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    int8 = arguments.weights == "int8"
    from pensieve.bench.measured_model import measured_model

    with measured_model(arguments.model, arguments.shape) as folder:
        exact = bench.Logits.of(load(folder)) if int8 else None
        model = load(
            folder, int8=int8, report=lambda line: print(line, file=sys.stderr, flush=True)
        )
        tokenizer = Tokenizer.load(folder)
    if exact is not None:
        about["accuracy"] = told = bench.Logits.of(model).against(exact)
        print(
            f"int8 against the checkpoint's weights: {told['same_token_share']:.1%} of the likeliest "
            f"tokens are the same, KL divergence {told['kl_divergence']:.4f}, logits off by "
            f"{told['logit_difference']:.1%} of their range",
            file=out,
        )
    rows = []
    for row in bench.measure(
        model,
        tokenizer,
        batches=arguments.batch,
        context=arguments.context,
        prompt_tokens=arguments.prompt,
        repeats=arguments.repeats,
    ):
        rows.append(row)
        beside = f" beside {row.prompt_tokens} of a prompt" if row.prompt_tokens else ""
        print(
            f"{row.batch:3} turns{beside}: {row.seconds * 1e3:7.2f} ms (p90 "
            f"{row.p90_seconds * 1e3:.2f}), weights {row.floor_seconds * 1e3:.2f} ms: "
            f"{row.ratio:.2f} x, {row.tokens_per_second:,.0f} tokens/s",
            file=out,
            flush=True,
        )
    if arguments.json:
        print(json.dumps({**about, "rows": [asdict(row) for row in rows]}))
    if arguments.plot is not None:
        bench.plot(rows, arguments.plot)
    return 0


def planning_command(arguments: argparse.Namespace) -> int:
    rows = []
    for policy in arguments.policy:
        for count in arguments.conversations:
            print(f"{policy}: building {count:,} conversations …", file=sys.stderr, flush=True)
            rows.append(measure_planning(policy, count, arguments.running, arguments.iterations))
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title="plan + commit, milliseconds per iteration")
    for name in ("policy", "conversations", "chunks", "running", "p50", "p99", "max", "moved"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['conversations']:,}",
            f"{row['chunks']:,}",
            str(row["running"]),
            *(f"{row[key] * 1e3:.3f}" for key in ("p50_seconds", "p99_seconds", "max_seconds")),
            f"{row['pages_reclaimed_per_iteration']:.1f} + {row['pages_dropped_per_iteration']:.1f}",
        )
    Console().print(table)
    return 0


def measure_planning(
    policy: str, num_conversations: int, num_running: int, num_iterations: int, seed: int = 1
) -> dict[str, Any]:
    """Times of plan + commit, checked: the cache's invariants hold before and after."""
    from pensieve.core.cache import CacheConfig, KVCache
    from pensieve.core.cost import CostProfile
    from pensieve.core.iteration import Iteration, Outcome, Sample
    from pensieve.core.policies.registry import policy_named
    from pensieve.core.sampling import Sampling
    from pensieve.core.scheduler import Scheduler, SchedulerConfig
    from pensieve.core.turn import FinishReason, Turn

    choose = random.Random(seed)
    cost = CostProfile.analytic(8_000_000_000, num_layers=32, num_heads=32, head_size=128)
    # Contexts of 512 to 32,768 tokens; of most cached ones only the end is still resident, so a cached
    # conversation holds ten chunks, or more where few of them have to fill both tiers.
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
                Sample(
                    piece.turn.turn_id,
                    1,
                    FinishReason.STOP if piece.turn.turn_id in ending else None,
                )
                for piece in iteration.slices
                if piece.needs_token
            ),
            tuple(
                [copy.copy_id for copy in iteration.swap_ins]
                + [copy.copy_id for copy in iteration.swap_outs]
            ),
        )

    def turn_on(name: str, tokens: int, history: int) -> Turn:
        nonlocal num_turns
        num_turns += 1
        ids = array("I", bytes(4 * tokens))
        return Turn(num_turns, name, ids, history, tokens, tokens + 100_000, Sampling())

    def settle() -> None:
        while swap_outs := cache.plan_swap_outs(now, 0):
            for copy in swap_outs:
                cache.finish_copy(copy.copy_id, now)

    def remember(name: str, tokens: int, history: int) -> None:
        """As if a turn had come and gone."""
        turn = turn_on(name, tokens, history)
        while type(found := cache.begin(turn, now, 0, {})).__name__ == "Shortage":
            settle()
        for copy in found.swap_ins:  # type: ignore[union-attr]
            cache.finish_copy(copy.copy_id, now)
        cache.release_sources(found.sources, now)  # type: ignore[union-attr]
        for chunk in turn.chunks:
            chunk.filled = min(32, tokens - 32 * chunk.index)
        cache.end(turn, now, tokens)

    # 1. the cached: one in ten shares a system prompt with others
    prefixes = [f"prefix-{i}" for i in range(max(num_conversations // 1000, 4))]
    for name in prefixes:
        remember(name, 512, 0)
    for i in range(num_conversations):
        now += 0.05
        name = f"cached-{i}"
        if choose.random() < 0.1:
            cache.fork(choose.choice(prefixes), 512, name, now)
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
        settle()

    # 2. the running
    for i, context in enumerate(contexts):
        scheduler.submit(turn_on(f"running-{i}", context, 0), now)
    while len(scheduler.running) < num_running or any(
        turn.frontier < turn.prompt_end for turn in scheduler.running.values()
    ):
        now += 0.001
        iteration = scheduler.plan(now)
        assert iteration is not None
        scheduler.commit(iteration, outcome_of(iteration, set()), now)
    scheduler.check(now)
    num_chunks = sum(len(conv.chunks()) for conv in cache.conversations.values())
    before = (cache.counters.reclaimed, cache.counters.dropped, cache.counters.swapped_out)

    # 3. the timed: each fourth iteration one turn ends and a cached conversation comes back
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
            scheduler.submit(turn_on(name, history + choose.randint(32, 256), history), now)
        started = time.perf_counter()
        iteration = scheduler.plan(now)
        planned = time.perf_counter()
        assert iteration is not None
        outcome = outcome_of(iteration, ending)
        resumed = time.perf_counter()
        scheduler.commit(iteration, outcome, now)
        seconds.append(time.perf_counter() - resumed + planned - started)
    scheduler.check(now)
    seconds.sort()
    counters = cache.counters
    return {
        "policy": policy,
        "conversations": num_conversations,
        "running": num_running,
        "chunks": num_chunks,
        "p50_seconds": seconds[len(seconds) // 2],
        "p99_seconds": seconds[int(len(seconds) * 0.99)],
        "max_seconds": seconds[-1],
        "pages_reclaimed_per_iteration": (counters.reclaimed - before[0]) / num_iterations,
        "pages_dropped_per_iteration": (counters.dropped - before[1]) / num_iterations,
        "pages_swapped_out_per_iteration": (counters.swapped_out - before[2]) / num_iterations,
    }
