"""`pensieve bench batch` measures what a batch of requests takes, by how it shares prefixes.

The requests are those of `pensieve simulate --batch` (sim/batch.py), fewer of them; they go through the
engine of a daemon, in this process, as background turns, once in each way of sharing:

    groups    as the daemon runs a job: requests with a common prefix together, after it was computed once
    lru       in the order of the file, each as a fork of the latest request that begins like it; a
              conversation stays until the cache evicts it, what was used last is kept longest
    off       each request by itself

The cache is as large for all of them, and there is no host tier.  Replies have a fixed length.  All ways must
give the same replies, token for token, or the bench fails: nothing is compared that is not equal.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

from pensieve.bench.machine import machine
from pensieve.bench.measured_model import measured_model, model_in_words
from pensieve.bench.report import Report, progress
from pensieve.config import Settings
from pensieve.core.group_feed import FeedConfig
from pensieve.core.prefix_groups import saving_of_tree
from pensieve.core.sampling import Sampling
from pensieve.core.turn import TurnOptions
from pensieve.engine.batch_run import BatchRequest, BatchRun, Sharing
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import Event
from pensieve.errors import PensieveError
from pensieve.launch.engine import BuiltEngine, SystemClock, build_engine
from pensieve.launch.model_folder import load_texts
from pensieve.sim.batch import SHARINGS, BatchShape, drawn_batch

DEFAULT_MODEL = "0.37B"
DISTANCE = 400 / 3000  # of requests of one prefix in the file, as a share of it
_NUMBERS = count(1)  # an engine sees none twice


@dataclass(frozen=True)
class Options:
    model: str  # "" for random weights
    shape: str
    requests: int
    prefix_tokens: int
    own_tokens: int
    share_degree: float
    output_tokens: int
    cache_tokens: int
    rounds: int
    seed: int
    sharings: tuple[Sharing, ...] = SHARINGS


@dataclass(frozen=True)
class Row:
    sharing: str
    requests: int
    seconds: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    saving: float  # the share of the prompts' tokens that was found in the cache
    suspensions: int


class _Sink:
    """Collects what the engine publishes."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def publish(self, events: Sequence[Event]) -> None:
        self.events += events


def run(options: Options, settings: Settings, report: Report) -> list[Row]:
    rows: list[Row] = []
    with measured_model(options.model, options.shape) as folder:
        mailbox, sink = Mailbox(1 << 20), _Sink()
        settings = replace(settings, model=str(folder))
        built = _built(settings, folder, mailbox, sink)
        requests = drawn(options, built.vocab_size)
        prompts = [each.tokens for each in requests]
        try:
            report.about(
                model_in_words(options.model, options.shape),
                machine(),
                f"{len(requests)} requests of {sum(map(len, prompts)):,} tokens, replies of "
                f"{options.output_tokens}; a cache of {built.pages.device * settings.chunk_tokens:,} tokens",
                f"at most {saving_of_tree(prompts):.1%} of the prompts can be saved",
            )
            _one(built, mailbox, sink, requests[:1], "off")  # the first pass is slower
            for number in range(options.rounds):
                replies: dict[str, list[tuple[int, ...]]] = {}
                for sharing in options.sharings:
                    progress(f"round {number + 1}: {sharing}")
                    row, replies[sharing] = _one(built, mailbox, sink, requests, sharing)
                    rows.append(row)
                    report.line(line_of(row))
                for name, found in replies.items():
                    if found != replies[options.sharings[0]]:
                        raise PensieveError(f"the replies of {name} are others")
                _compare(rows[-len(options.sharings) :], report)
        finally:
            built.close()
    report.finish({"rows": [asdict(row) for row in rows]})
    return rows


def drawn(options: Options, vocab_size: int) -> list[BatchRequest]:
    shape = BatchShape(
        options.requests,
        options.prefix_tokens,
        options.own_tokens,
        options.share_degree,
        apart=DISTANCE * options.requests,
    )
    sampling = Sampling(max_tokens=options.output_tokens, ignore_eos=True)
    turn = TurnOptions(sampling, background=True)
    batch = drawn_batch(shape, options.seed)
    prompts = (array("I", (each % vocab_size for each in one.prompt)) for one in batch)
    return [BatchRequest(prompt, turn) for prompt in prompts]


def line_of(row: Row) -> str:
    return (
        f"{row.sharing:6} {row.seconds:7.1f} s, {row.requests / row.seconds:6.2f} requests/s, "
        f"{row.prompt_tokens_per_second:7.0f} prompt and {row.output_tokens_per_second:6.0f} output "
        f"tokens/s, {row.saving:5.1%} saved, {row.suspensions} suspensions"
    )


def _compare(rows: Sequence[Row], report: Report) -> None:
    first, *others = rows
    for other in others:
        report.line(f"{first.sharing} over {other.sharing}: {other.seconds / first.seconds:.2f} x")


def _built(settings: Settings, folder: Path, mailbox: Mailbox, sink: _Sink) -> BuiltEngine:
    texts = load_texts(folder, progress, None)
    return build_engine(settings, folder, texts, progress, mailbox, sink)


def _one(
    built: BuiltEngine,
    mailbox: Mailbox,
    sink: _Sink,
    requests: Sequence[BatchRequest],
    sharing: Sharing,
) -> tuple[Row, list[tuple[int, ...]]]:
    engine, clock = built.engine, SystemClock()
    cache, counters = engine.scheduler.cache.config, engine.scheduler.counters
    pages = cache.device_pages - cache.reserve_pages
    feed = FeedConfig(pages, cache.chunk_tokens, engine.scheduler.config.turns_max)
    before, name = counters.suspensions, str(next(_NUMBERS))
    batch = BatchRun(name, requests, feed, _NUMBERS.__next__, "~batch", sharing=sharing)
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
