"""Sections `iteration`, `sampler`, `hidden`, `exactness` and `load` of the GPU bench.

`iteration` decodes rows with a context of 1,000 in the executor, with and without a piece of a prompt, as
captured graphs and eagerly. It measures the host's launch time and the whole time. `sampler` draws from rows
of logits, by options. `hidden` compares two turns: the history of one is swapped in, the history of the other
is on the device. `exactness` compares replies under memory pressure with replies without it.

`load` compares the throughputs of engines that keep KV between turns and of an engine that does not, at equal
P90 normalized latency (the time of a turn over its output tokens), as the Pensieve paper does. Conversations
like those of ShareGPT arrive at random. Reaction times and tier sizes are divided by the same factor
(`SHRINK`). So, measured in reaction times, idle KV stays as long as it would in tiers of full size. Each
engine's latency is measured at a few rates and interpolated:

    stateless     a conversation is forgotten at the end of each turn, and computed again
    device only   KV that the device tier has no room for is dropped
    two tiers     KV moves to the host tier instead
    two, LRU      two tiers, evicting the least recently used KV first
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from pensieve.core.iteration import Iteration, Slice, SwapIn, SwapOut, TurnStart
from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS as PAGE
from pensieve.kernels import choices
from pensieve.kernels.choices import chosen
from pensieve.model.executor import TorchExecutor
from pensieve.model.loader import LoadedModel
from pensieve.model.sampling.penalties import Row, TurnLog
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling
from scripts.gpu_bench.harness import Bench
from scripts.gpu_bench.model import (
    ENGINES,
    GREEDY,
    ConversationDriver,
    EngineKind,
    EngineShape,
    ScriptedConversation,
    drawn_conversations,
    engine_of,
    executor_of,
    in_fp8,
    random_model,
    serve,
)

OPTIONS = {
    "greedy": Sampling(),
    "temperature 0.7": Sampling(temperature=0.7, seed=1),
    "temperature 0.7, top_p 0.9": Sampling(temperature=0.7, top_p=0.9, seed=1),
    "temperature 0.7, top_k 50": Sampling(temperature=0.7, top_k=50, seed=1),
}


def section_iteration(bench: Bench) -> None:
    model = random_model(bench.device, bench.small)
    context = 70 if bench.small else 1000
    small, large = (
        ((1, 0), (3, 20)),
        ((1, 0), (16, 0), (64, 0), (128, 0), (0, 512), (16, 64), (64, 448)),
    )
    sizes = small if bench.small else large  # decodes, and prompt tokens in the same iteration
    turns_max = max(decodes for decodes, _ in sizes) + 1
    pages = -(-context // PAGE)
    kinds = ["eager", "graphs"] if bench.device.type == "cuda" else ["eager"]
    for kind in (*kinds, f"{kinds[-1]}, KV in fp8"):
        graphs, num_pages = not kind.startswith("eager"), turns_max * pages + 1
        if kind.endswith("fp8") and "fp8" in bench.wrong:
            bench.report("iteration", f"{kind}: skipped, its kernels are wrong", left_out=kind)
            continue
        kind_model = in_fp8(model) if kind.endswith("fp8") else model
        with bench.reporting_failure("iteration", kind, kind=kind), ExitStack() as ends:
            executor = executor_of(
                *(kind_model, bench.device, num_pages, 0, turns_max), graphs=graphs, filled=True
            )
            ends.callback(executor.close)
            for rows, prompt in sizes:
                lengths = [*[1] * rows, *[prompt] * bool(prompt)]
                host, whole = _iterate(bench, executor, lengths, context, model.shape.vocab_size)
                prompts = f" and {prompt} prompt tokens" if prompt else ""
                bench.report(
                    "iteration",
                    f"{rows} decodes{prompts}, context {context}, {kind}: {whole * 1e3:.2f} ms; "
                    f"launch on the host: {host * 1e3:.2f} ms",
                    kind=kind,
                    rows=rows,
                    prompt=prompt,
                    host_seconds=host,
                    seconds=whole,
                )


def _iterate(
    bench: Bench,
    executor: TorchExecutor,
    lengths: Sequence[int],  # lengths of the slices; each slice ends at the context's end
    context: int,
    vocab_size: int,
) -> tuple[float, float]:
    """Return the medians of the host's time and of the whole time of one iteration.

    Raises PensieveError if a row gets no token. A row with NaN logits gets none, and its time would mislead,
    because NaN takes another path through the kernels.
    """
    rows, pages = len(lengths), -(-context // PAGE)
    draw = random.Random(rows)
    tokens = array("I", draw.choices(range(vocab_size), k=context))
    started = tuple(TurnStart(turn, tokens, GREEDY) for turn in range(rows))
    slices = tuple(
        Slice(
            turn,
            context - length,
            context,
            tokens[-length:],
            array("i", range(turn * pages, (turn + 1) * pages)),
            True,
        )
        for turn, length in enumerate(lengths)
    )
    host: list[float] = []
    whole: list[float] = []
    for index in range(3 if bench.small else 20):
        bench.synchronize()
        began = time.perf_counter()
        executor.launch(Iteration(index, slices, started=started if index == 0 else ()))
        host.append(time.perf_counter() - began)
        outcome = executor.collect()
        whole.append(time.perf_counter() - began)
        if len(outcome.samples) != rows:
            raise PensieveError(
                f"{rows} rows: {len(outcome.samples)} tokens, {outcome.failures[:1]}"
            )
    executor.launch(Iteration(99, (), ended=tuple(range(rows))))
    executor.collect()
    return statistics.median(host[1:]), statistics.median(whole[1:])


def section_sampler(bench: Bench) -> None:
    rows, vocab_size = (4, 1000) if bench.small else (64, 128_256)
    logits = torch.randn(rows, vocab_size, device=bench.device) * 3
    sampler = Sampler(vocab_size)
    context = array("I", [1, 2, 3])
    now = choices.current
    cases = [(kind, sampling, now) for kind, sampling in OPTIONS.items()]
    if bench.device.type == "cuda" and now.radix:
        by_sorting = now._replace(radix=0)
        cases.append(("temperature 0.7, sorted", OPTIONS["temperature 0.7"], by_sorting))
    for kind, sampling, each in cases:
        turns = [Row(TurnLog(sampling, context, 3, turn), 3) for turn in range(rows)]
        with bench.reporting_failure("sampler", kind, kind=kind):
            times = []
            for _ in range(10):
                began = time.perf_counter()
                with chosen(each):
                    sampler.draw(logits, turns).read()
                times.append(time.perf_counter() - began)
            seconds = statistics.median(times[1:])
            line = f"{rows} rows of {vocab_size}, {kind}: {seconds * 1e3:.2f} ms"
            bench.report("sampler", line, kind=kind, seconds=seconds)


def section_hidden(bench: Bench) -> None:
    model = random_model(bench.device, bench.small)
    history, message = (320, 64) if bench.small else (4000, 512)
    pages = -(-(history + message) // PAGE)
    executor = executor_of(model, bench.device, 2 * pages, pages, 1)
    draw = random.Random(0)
    tokens = array("I", [draw.randrange(model.shape.vocab_size) for _ in range(history + message)])
    order = list(range(2 * pages))
    draw.shuffle(order)
    table = order[:pages]
    started = [TurnStart(0, tokens, GREEDY)]
    spare = order[pages:]
    host = list(range(pages))
    draw.shuffle(host)
    num_full_pages = history // PAGE

    def step(*slices: Slice, ins: Sequence[SwapIn] = (), outs: Sequence[SwapOut] = ()) -> float:
        bench.synchronize()
        began = time.perf_counter()
        executor.launch(Iteration(0, slices, (), tuple(ins), tuple(outs), tuple(started)))
        started.clear()
        outcome = executor.collect()
        if slices and slices[-1].needs_token and not outcome.samples:
            raise PensieveError(f"no token: {outcome.failures}")
        return time.perf_counter() - began

    def slice_of(start: int, stop: int, needs_token: bool = False) -> Slice:
        return Slice(0, start, stop, tokens[start:stop], array("i", table), needs_token)

    for start in range(0, history, 512):
        step(slice_of(start, min(start + 512, history)))
    outs = [SwapOut(i, table[i], host[i], PAGE) for i in range(num_full_pages)]
    step(outs=outs)
    num_finished = 0
    while num_finished < num_full_pages:
        executor.launch(Iteration(0, ()))
        num_finished += len(executor.collect().finished_copies)
        if num_finished == 0:
            break
    times: dict[str, list[float]] = {"device": [], "host": []}
    for _ in range(3 if bench.small else 9):
        times["device"].append(step(slice_of(history, history + message, True)))
        table[:num_full_pages], spare[:num_full_pages] = (
            spare[:num_full_pages],
            table[:num_full_pages],
        )
        ins = [SwapIn(i, host[i], table[i], PAGE) for i in range(num_full_pages)]
        times["host"].append(step(slice_of(history, history + message, True), ins=ins))
        executor._copier.wait_any()
    executor.close()
    median = {place: statistics.median(each[1:]) for place, each in times.items()}
    ratio = median["host"] / median["device"]
    bench.report(
        "hidden",
        f"{message} new tokens over {history}: {median['device'] * 1e3:.1f} ms on the device, "
        f"{median['host'] * 1e3:.1f} ms from the host tier: {ratio:.3f} x",
        ratio=ratio,
    )


# How far a token's logit may be below the largest because of rounding, as a share of the logits' range. A
# random token is about half of the range below the largest.
BF16_GAP = 2e-2
FP8_GAP = 0.1
ROOMS = {"room": (400, 0), "pressure": (60, 40)}  # pages of the device and of the host


def section_exactness(bench: Bench) -> None:
    """Compare conversations with enough KV memory with the same conversations in a quarter of that memory.

    Sums of floats depend on the other rows of a batch, so two replies may differ after a near tie.
    Therefore, all tokens are compared with the logits of the plain model, not with the other reply.
    """
    model = random_model(bench.device, bench.small)
    replies: dict[str, list[ScriptedConversation]] = {}
    recomputed = 0
    for name in ROOMS:
        replies[name], recomputed = _play(bench, model, name)
    differ = sum(
        one.tokens != other.tokens
        for one, other in zip(replies["room"], replies["pressure"], strict=True)
    )
    right = random_model(bench.device, bench.small, plain=True)
    counts = [
        (name, count_wrong_tokens(right, bench.device, each, BF16_GAP))
        for name, each in replies.items()
    ]
    if any(wrong for _, wrong in counts):
        raise PensieveError(f"tokens that the model would not sample: {counts}")
    count = sum(len(talk.replied) for each in replies.values() for talk in each)
    bench.report(
        "exactness",
        f"{count} tokens of replies, {recomputed} of histories recomputed, 0 wrong; {differ} of "
        f"{len(replies['room'])} conversations differ after a near tie",
        parted=differ,
        recomputed=recomputed,
    )
    if bench.small:
        with bench.reporting_failure("exactness", "KV in fp8"):
            _check_fp8(bench, model, right)


def _check_fp8(bench: Bench, model: LoadedModel, right: LoadedModel) -> None:
    """Check the whole fp8 path: its tokens are near the model's likeliest tokens."""
    if "fp8" in bench.wrong:
        bench.report("exactness", "KV in fp8: skipped, its kernels are wrong")
        return
    replies, recomputed = _play(bench, in_fp8(model), "pressure")
    if wrong := count_wrong_tokens(right, bench.device, replies, FP8_GAP):
        raise PensieveError(f"{wrong} tokens are far less likely than the model's best token")
    count = sum(len(talk.replied) for talk in replies)
    line = (
        f"KV in fp8: {count} tokens of replies, {recomputed} of histories recomputed, none far off"
    )
    bench.report("exactness", line, fp8_tokens=count)


def _play(bench: Bench, model: LoadedModel, name: str) -> tuple[list[ScriptedConversation], int]:
    """Run the conversations; return them with replies, and the number of recomputed history tokens."""
    turns_max, budget = 8, 128
    pages = ROOMS[name]
    draw = random.Random(3)
    executor = executor_of(model, bench.device, *pages, turns_max)
    driver = ConversationDriver(False, time.perf_counter())
    shape = EngineShape(*pages, budget, turns_max)
    engine = engine_of(model, executor, EngineKind(name), shape, driver)
    talks = []
    common = array("I", draw.choices(range(3, model.shape.vocab_size), k=3 * PAGE))
    for index in range(12):
        outputs = [draw.randint(4, 24) for _ in range(4)]
        messages = [
            array("I", draw.choices(range(3, model.shape.vocab_size), k=draw.randint(5, 150)))
            for _ in outputs
        ]
        if index % 3:  # these conversations share whole pages and a part of a page
            messages[0] = common[: draw.randint(PAGE, 3 * PAGE)] + messages[0]
        talks.append(ScriptedConversation(f"c{index}", messages, outputs, [0.0] * 4))
        driver.add(0.0, talks[-1])
    while True:
        driver.send_due(math.inf)
        if not engine.step() and driver.next_at == math.inf:
            break
    executor.close()
    if driver.failures:
        raise PensieveError(f"{driver.failures} turns failed")
    if not driver.num_shared:
        raise PensieveError("no turn found KV that another conversation had computed")
    recomputed = engine.scheduler.counters.recomputed_tokens
    if name == "pressure" and not recomputed:
        raise PensieveError("no memory pressure: no history was recomputed")
    return talks, recomputed


def count_wrong_tokens(
    model: LoadedModel,
    device: torch.device,
    conversations: Sequence[ScriptedConversation],
    gap_max: float,
) -> int:
    """Count reply tokens whose logit, given all tokens before them, is far below the largest."""
    model.flat.module.set_attn_implementation("sdpa")
    wrong = 0
    for talk in conversations:
        ids = torch.tensor(list(talk.tokens), device=device)
        logits = model.flat.module(input_ids=ids[None], use_cache=False).logits[0].float()
        at = torch.tensor(talk.replied, device=device)
        before = logits[at - 1]
        largest = before.amax(1)
        gaps = (largest - before.gather(1, ids[at, None])[:, 0]) / (largest - before.amin(1))
        wrong += int((gaps > gap_max).sum())
    return wrong


SHRINK = 20  # divides reaction times and tier sizes
REACTION_SECONDS = 60.0


def section_load(bench: Bench) -> None:
    model = random_model(bench.device, bench.small)
    small = bench.small
    rates = (2.0,) if small else (8.0, 16.0, 32.0)  # conversations a second
    runs = len(rates) * len(ENGINES)
    # A run may take a third longer, because turns still run at its end. The factor 0.7 reserves this time, so
    # that the section ends within its time limit.
    seconds = 3.0 if small else min(max(bench.seconds_left - 45, 60) / runs * 0.7, 20.0)
    turns_max, budget = (8, 64) if small else (128, 1024)
    # 40 GB hold about 300,000 tokens of this model's KV. The device tier has four times as many, divided by
    # SHRINK.
    device_pages = 60 if small else 300_000 // SHRINK // PAGE * 4
    host_pages = 4 * device_pages
    shape = EngineShape(device_pages, host_pages, budget, turns_max)
    executor = executor_of(model, bench.device, device_pages, host_pages, turns_max)
    reaction = REACTION_SECONDS / SHRINK
    found: dict[str, list[tuple[float, float]]] = {}  # kind -> (P90 latency, tokens/s)
    for rate in rates:
        for kind in ENGINES:
            vocab_size = model.shape.vocab_size
            arrivals = drawn_conversations(rate, seconds, reaction, vocab_size, int(rate * 10))
            if small:
                for _, talk in arrivals:
                    talk.outputs = [min(each, 12) for each in talk.outputs]
            driver, lasted = serve(
                model, executor, kind, shape, arrivals, seconds, max(seconds / 3, 2.0)
            )
            what = f"{rate:g} conversations/s, {kind.name}"
            with bench.reporting_failure("load", what):
                if driver.failures or not driver.latencies:
                    failed, ended = driver.failures, len(driver.latencies)
                    raise PensieveError(f"{failed} turns failed, {ended} ended")
                ordered = sorted(driver.latencies)
                p90 = ordered[int(0.9 * (len(ordered) - 1))]
                throughput = driver.output_tokens / lasted
                found.setdefault(kind.name, []).append((p90, throughput))
                bench.report(
                    "load",
                    f"{what}: {throughput:.0f} tokens/s, P90 {p90 * 1e3:.1f} ms a token, "
                    f"{len(ordered)} turns, {driver.num_cut} cut off at the end",
                    rate=rate,
                    kind=kind.name,
                    throughput=throughput,
                    p90=p90,
                )
    executor.close()
    if "stateless" not in found:
        raise PensieveError("the stateless engine has no figures, so nothing is compared")
    limit = statistics.median(p90 for p90, _ in found["stateless"])
    at_limit = {name: throughput_at(points, limit) for name, points in found.items()}
    for name, throughput in at_limit.items():
        bench.report(
            "load",
            f"at P90 {limit * 1e3:.1f} ms a token, {name}: {throughput:.0f} tokens/s, "
            f"{throughput / at_limit['stateless']:.2f} x stateless",
            kind=name,
            ratio=throughput / at_limit["stateless"],
        )


def throughput_at(points: Sequence[tuple[float, float]], limit: float) -> float:
    """Return the tokens/s at which the P90 reaches the limit, interpolated between the points."""
    ordered = sorted(points)
    for (low, before), (high, after) in itertools.pairwise(ordered):
        if low <= limit <= high and high > low:
            return before + (after - before) * (limit - low) / (high - low)
    below = [throughput for p90, throughput in ordered if p90 <= limit]
    return max(below) if below else ordered[0][1]
