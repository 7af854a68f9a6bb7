"""Measure how long a batch of requests takes with each way of sharing prefixes.

The requests are drawn as in batch_simulation.py, but there are fewer of them. They run through a daemon's
engine in this process, as background turns, once with each way of sharing:

    groups    like a batch job of the daemon: run requests with a common prefix together, and compute the
              prefix once
    lru       in the order of the file, each as a fork of the latest request with a common prefix; a
              conversation stays until the cache evicts it, least recently used first
    off       each request by itself

Each time, the cache has the same size and there is no host tier. Replies have a fixed length. If replies
differ in any token between two ways of sharing, the measurement fails.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from pensieve.bench.measured_model import measured_model, model_in_words
from pensieve.bench.report import machine, progress
from pensieve.config import Settings, resolve
from pensieve.core.group_feed import FeedConfig
from pensieve.core.prefix_groups import saving_of_tree
from pensieve.core.turn import TurnOptions
from pensieve.engine.batch_run import BatchRequest, BatchRun, PrefixSharing
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import EngineEvent
from pensieve.errors import PensieveError
from pensieve.launch.engine import BuiltEngine, SystemClock, build_engine
from pensieve.launch.model_folder import load_texts
from pensieve.sampling import Sampling
from scripts.measurements.batch_simulation import SHARINGS, BatchShape, drawn_batch

SHARE_DEGREE = 7.0  # mean number of requests that share a request's prefix
# distance in the file between requests with a common prefix, as a fraction of the number of requests
DISTANCE = 400 / 3000
_NUMBERS = count(1)  # numbers of turns; an engine must see each number only once


@dataclass(frozen=True)
class Row:
    sharing: str
    requests: int
    seconds: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    saving: float  # share of prompt tokens that were in the cache
    suspensions: int


class _Sink:
    """A sink that collects what the engine publishes."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []

    def publish(self, events: Sequence[EngineEvent]) -> None:
        self.events += events


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure batch", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="(default: random weights of --shape)")
    parser.add_argument("--shape", default="0.37B", help="0.03B, 0.37B or 1.1B (default: 0.37B)")
    for name, default, what in (
        ("requests", 60, "how many"),
        ("prefix", 1100, "mean tokens of a group's common prefix"),
        ("own", 400, "mean tokens of a request after its prefix"),
        ("output", 32, "tokens per reply"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{what} (default: {default})"
        )
    arguments = parser.parse_args(given)
    requests = arguments.requests
    apart = DISTANCE * requests
    shape = BatchShape(requests, arguments.prefix, arguments.own, SHARE_DEGREE, apart=apart)
    longest = 2 * (arguments.prefix + arguments.own) + arguments.output
    cache = max(requests * (arguments.prefix + arguments.own) // 9, 4 * longest)
    flags = {"device_cache": f"{cache}t", "host_cache": "0t", "policy": "lru"}
    with measured_model(arguments.model, arguments.shape) as folder:
        print(
            f"{model_in_words(arguments.model, arguments.shape)}, {machine()}, {cache:,} tokens of KV"
        )
        compared(folder, shape, arguments.output, resolve(flags, {}).settings)


def compared(folder: Path, shape: BatchShape, output_tokens: int, settings: Settings) -> list[Row]:
    mailbox, sink = Mailbox(1 << 20), _Sink()
    texts = load_texts(folder, progress, None)
    settings = replace(settings, model=str(folder))
    built = build_engine(settings, folder, texts, progress, mailbox, sink)
    requests = draw_requests(shape, output_tokens, built.vocab_size)
    prompts = [each.tokens for each in requests]
    rows: list[Row] = []
    try:
        print(
            f"at most {saving_of_tree(prompts):.1%} of {sum(map(len, prompts)):,} tokens can be saved"
        )
        _run_once(built, mailbox, sink, requests[:1], "off")  # the first pass is slower
        replies: dict[str, list[tuple[int, ...]]] = {}
        for sharing in SHARINGS:
            row, replies[sharing] = _run_once(built, mailbox, sink, requests, sharing)
            if replies[sharing] != replies[SHARINGS[0]]:
                raise PensieveError(f"the replies with {sharing} differ")
            rows.append(row)
            print(f"{line_of(row)}; {row.seconds / rows[0].seconds:.2f} x")
    finally:
        built.close()
    return rows


def draw_requests(shape: BatchShape, output_tokens: int, vocab_size: int) -> list[BatchRequest]:
    turn = TurnOptions(Sampling(max_tokens=output_tokens, ignore_eos=True), background=True)
    prompts = (
        array("I", (each % vocab_size for each in one.prompt)) for one in drawn_batch(shape, 1)
    )
    return [BatchRequest(prompt, turn) for prompt in prompts]


def line_of(row: Row) -> str:
    return (
        f"{row.sharing:6} {row.seconds:7.1f} s, {row.requests / row.seconds:6.2f} requests/s, "
        f"{row.prompt_tokens_per_second:7.0f} prompt and {row.output_tokens_per_second:6.0f} output "
        f"tokens/s, {row.saving:5.1%} saved, {row.suspensions} suspensions"
    )


def _run_once(
    built: BuiltEngine,
    mailbox: Mailbox,
    sink: _Sink,
    requests: Sequence[BatchRequest],
    sharing: PrefixSharing,
) -> tuple[Row, list[tuple[int, ...]]]:
    engine, clock = built.engine, SystemClock()
    cache, counters = engine.scheduler.cache.config, engine.scheduler.counters
    pages = cache.device_pages - cache.reserve_pages
    feed = FeedConfig(pages, cache.chunk_tokens)
    before, name = counters.suspensions, str(next(_NUMBERS))
    batch = BatchRun(name, requests, feed, _NUMBERS.__next__, "~batch", sharing=sharing, root="r")
    replies: list[tuple[int, ...]] = [()] * len(requests)
    began = clock.now()
    while not batch.is_done:
        for message in batch.go():
            mailbox.put(message)
        engine.step()
        events, sink.events = sink.events, []
        for event in events:
            if (finished := batch.take(event)) is None:
                continue
            if finished.failure is not None:
                raise PensieveError(f"request {finished.request} failed: {finished.failure}")
            replies[finished.request] = tuple(finished.token_ids)
    while engine.step():
        pass
    seconds = clock.now() - began
    return Row(
        sharing,
        len(requests),
        seconds,
        batch.prompt_tokens / seconds,
        batch.output_tokens / seconds,
        batch.saved_tokens / batch.prompt_tokens,
        counters.suspensions - before,
    ), replies


if __name__ == "__main__":
    main()
