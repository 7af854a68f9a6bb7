"""Sections `iteration` and `sampler` of the GPU bench (what an iteration takes beside its kernels).

`iteration` decodes rows of a context of 1,000 by the executor, as captured graphs and eagerly: how long the
host takes to launch, and how long all of it takes.  `sampler` draws from rows of logits, by options.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from contextlib import ExitStack

import torch

from pensieve.bench.gpu_harness import Bench
from pensieve.bench.gpu_model import GREEDY, executor_of, in_fp8
from pensieve.core.iteration import Iteration, Slice, TurnStart
from pensieve.core.sampling import Sampling
from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS as PAGE
from pensieve.kernels import choices
from pensieve.kernels.choices import chosen
from pensieve.model.executor import TorchExecutor
from pensieve.model.loader import LoadedModel
from pensieve.model.sampling.penalties import Row, TurnLog
from pensieve.model.sampling.sampler import Sampler

OPTIONS = {
    "greedy": Sampling(),
    "temperature 0.7": Sampling(temperature=0.7, seed=1),
    "temperature 0.7, top_p 0.9": Sampling(temperature=0.7, top_p=0.9, seed=1),
    "temperature 0.7, top_k 50": Sampling(temperature=0.7, top_k=50, seed=1),
}


def section_iteration(bench: Bench, model: LoadedModel) -> None:
    sizes, context = ((1, 4), 70) if bench.small else ((1, 16, 64, 128), 1000)
    pages = -(-context // PAGE)
    now = choices.current  # what was switched off stays so
    kinds = {"eager": now}
    if bench.device.type == "cuda":
        captured = {
            "": now,
            ", fused": now._replace(fused=1),
            ", few rows": now._replace(few_rows=1),
        }
        kinds |= {f"graphs{name}": each for name, each in captured.items()}
    kinds[f"{list(kinds)[-1].partition(',')[0]}, KV in fp8"] = now
    for kind, each in kinds.items():
        graphs, num_pages = not kind.startswith("eager"), max(sizes) * pages + 1
        wrong = [name for name in bench.wrong if kind.endswith(name)]
        if wrong:
            bench.report("iteration", f"{kind}: left out, its kernels are not right", left_out=kind)
            continue
        of_kind = in_fp8(model) if kind.endswith("fp8") else model
        # A captured graph keeps its choices, and what is planned for it has to follow them.
        with bench.noting("iteration", kind, kind=kind), chosen(each), ExitStack() as ends:
            executor = executor_of(
                *(of_kind, bench.device, num_pages, 0, max(sizes)), graphs=graphs, filled=True
            )
            ends.callback(executor.close)
            for rows in sizes:
                host, whole = _decode(bench, executor, rows, context, pages, model.shape.vocab_size)
                bench.report(
                    "iteration",
                    f"{rows} decodes over {context}, {kind}: {whole * 1e3:.2f} ms, of which the host "
                    f"launches for {host * 1e3:.2f}",
                    kind=kind,
                    rows=rows,
                    host_seconds=host,
                    seconds=whole,
                )


def _decode(
    bench: Bench, executor: TorchExecutor, rows: int, context: int, pages: int, vocab_size: int
) -> tuple[float, float]:
    """The medians of the host's time and of the whole time, of one iteration alone.

    Each row draws a token every time: logits that are no numbers take another way through a kernel.
    """
    draw = random.Random(rows)
    tokens = array("I", draw.choices(range(vocab_size), k=context))
    started = tuple(TurnStart(turn, tokens, GREEDY) for turn in range(rows))
    slices = tuple(
        Slice(
            turn,
            context - 1,
            context,
            tokens[-1:],
            array("i", range(turn * pages, (turn + 1) * pages)),
            True,
        )
        for turn in range(rows)
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
        with bench.noting("sampler", kind, kind=kind):
            times = []
            for _ in range(10):
                began = time.perf_counter()
                with chosen(each):
                    sampler.draw(logits, turns).read()
                times.append(time.perf_counter() - began)
            seconds = statistics.median(times[1:])
            line = f"{rows} rows of {vocab_size}, {kind}: {seconds * 1e3:.2f} ms"
            bench.report("sampler", line, kind=kind, seconds=seconds)
