"""The benches of what computes: `pensieve bench attention` and `step`; and options that others share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pensieve.bench.report import Report
from pensieve.errors import InvalidArgument

# Of `bench attention`, by option: the defaults, and with --full those of docs/performance.md.
ATTENTION = {
    "context": ((256, 1024, 4096), (128, 256, 512, 1024, 2048, 4096), "tokens of each turn"),
    "batch": ((8,), (32, 8), "numbers of turns"),
    "head-size": ((128,), (64, 128), "sizes of a head"),
}
SHARED, OWN = (2048,), 128  # tokens, of `bench attention --shared`


def add_model(parser: argparse.ArgumentParser, size: str) -> None:
    text = f"a folder or a hub id (default: random weights of {size})"
    parser.add_argument("model", nargs="?", default="", help=text)


def add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    text = f"draw {what} (needs the extra `bench`)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)


def counts(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def attention_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "attention",
        help="attention over scattered pages against torch on keys and values in one piece",
        description="Times multi_token_attention over pages in random order against torch's fused "
        "attention on contiguous keys and values (the best of padded batch and loop, with grouped "
        "heads as they are and folded into rows), against gathering the pages first, and against one "
        "query at a time. Every answer is checked before it is timed. The default is a dozen shapes.",
    )
    parser.add_argument(
        "--full", action="store_true", help="the 96 shapes of docs/performance.md: ten minutes"
    )
    for name, (quick, whole, what) in ATTENTION.items():
        few, many = (",".join(map(str, each)) for each in (quick, whole))
        parser.add_argument(
            f"--{name}",
            type=counts,
            metavar="N,N,…",
            help=f"{what} (default: {few}; with --full: {many})",
        )
    parser.add_argument(
        "--queries", type=int, default=8, metavar="N", help="tokens of each slice (default: 8)"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="measure only this type (default: both)"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, metavar="N", help="times for each median (default: 9)"
    )
    parser.add_argument(
        "--shared",
        type=counts,
        nargs="?",
        const=SHARED,
        metavar="N,N,…",
        help="measure slices of one query that share so many tokens at the front instead "
        f"(default: {','.join(map(str, SHARED))}; --batch 32, 128 tokens of their own)",
    )
    add_plot(parser, "the ratios")
    parser.set_defaults(run=attention)


def attention(arguments: argparse.Namespace) -> int:
    if arguments.shared is not None:
        return attention_shared(arguments)
    from pensieve.bench import attention as bench

    chosen = (arguments.context, arguments.batch, arguments.head_size)
    contexts, batches, head_sizes = (
        given or (whole if arguments.full else quick)
        for given, (quick, whole, _) in zip(chosen, ATTENTION.values(), strict=True)
    )
    options = bench.Options(
        contexts, batches, head_sizes, arguments.queries, arguments.dtype, arguments.repeats
    )
    report = Report(arguments.json)
    rows = bench.run(options, report)
    if arguments.plot is not None:
        bench.plot(rows, arguments.plot, report.facts)
    return 0


def attention_shared(arguments: argparse.Namespace) -> int:
    from pensieve.bench import attention_shared as bench

    if arguments.plot is not None or arguments.context is not None:
        raise InvalidArgument("shared", "goes with neither --plot nor --context")
    options = bench.Options(
        arguments.batch or (32,),
        arguments.shared,
        OWN,
        arguments.head_size or (64, 128),
        arguments.dtype,
        arguments.repeats,
    )
    bench.run(options, Report(arguments.json))
    return 0


def step_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "step",
        help="an iteration of a model against the time that reading its weights takes",
        description="Times one iteration (forward, sampling) of turns that generate, alone and beside a "
        "piece of a prompt, and divides by the time that reading the weights takes at the bandwidth "
        "measured in between. Before that several turns must get the same tokens in a batch as alone.",
    )
    add_model(parser, "the shape --shape")
    parser.add_argument(
        "--shape",
        default="0.37B",
        help="shape of the random weights: 0.03B, 0.37B or 1.1B (default: 0.37B)",
    )
    parser.add_argument(
        "--batch",
        type=counts,
        default=(1, 16, 64),
        metavar="N,N,…",
        help="numbers of turns (default: 1,16,64)",
    )
    parser.add_argument(
        "--context", type=int, default=64, metavar="N", help="tokens of each turn (default: 64)"
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=256,
        metavar="N",
        help="prompt tokens beside the turns (default: 256)",
    )
    parser.add_argument(
        "--repeats", type=int, default=15, metavar="N", help="times for each median (default: 15)"
    )
    parser.add_argument(
        "--weights", choices=("native", "int8"), default="native", help="(default: native)"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("auto", "int8", "fp8"),
        default="auto",
        help="type that KV is kept in (default: auto, the model's own)",
    )
    parser.add_argument(
        "--parts",
        action="store_true",
        help="also what each part of the compiled layers takes, and how fast their weights are read",
    )
    add_plot(parser, "the ratios")
    parser.set_defaults(run=step)


def step(arguments: argparse.Namespace) -> int:
    from pensieve.bench import step as bench

    options = bench.Options(
        arguments.model,
        arguments.shape,
        arguments.batch,
        arguments.context,
        arguments.prompt,
        arguments.repeats,
        int8=arguments.weights == "int8",
        parts=arguments.parts,
        kv_dtype=arguments.kv_dtype,
    )
    report = Report(arguments.json)
    rows = bench.run(options, report)
    if arguments.plot is not None:
        bench.plot(rows, arguments.plot, report.facts)
    return 0
