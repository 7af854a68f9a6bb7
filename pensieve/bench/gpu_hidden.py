"""Section `hidden` of the GPU bench (does a swap-in hide behind the compute?)."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Sequence

from pensieve.bench.gpu_harness import Bench
from pensieve.bench.gpu_model import GREEDY, executor_of
from pensieve.core.iteration import Iteration, Slice, SwapIn, SwapOut, TurnStart
from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS as PAGE
from pensieve.model.loader import LoadedModel


def section_hidden(bench: Bench, model: LoadedModel) -> None:
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
    full = history // PAGE

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
    outs = [SwapOut(i, table[i], host[i], PAGE) for i in range(full)]
    step(outs=outs)
    num_finished = 0
    while num_finished < full:
        executor.launch(Iteration(0, ()))
        num_finished += len(executor.collect().finished_copies)
        if num_finished == 0:
            break
    times: dict[str, list[float]] = {"device": [], "host": []}
    for _ in range(3 if bench.small else 9):
        times["device"].append(step(slice_of(history, history + message, True)))
        table[:full], spare[:full] = spare[:full], table[:full]
        ins = [SwapIn(i, host[i], table[i], PAGE) for i in range(full)]
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
