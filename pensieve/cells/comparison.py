"""Compare the policies on this machine with real cells: throughput and latency, side by side."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch

from pensieve.cells.baselines import GraphBatching, Merging, NodeByNode, Padding
from pensieve.cells.executor import CellularServer, GraphBatchingServer, run_alone
from pensieve.cells.figures import SEEDS, length, random_tree
from pensieve.cells.graph import Graph
from pensieve.cells.models import Cell, Model, lstm, rows_of, seq2seq, tree_lstm
from pensieve.cells.simulation import quantile

LENGTH_MAX = 100
BATCH_MAX = (
    64  # requests that padding and merging take at once, and nodes of a task of cellular batching
)
RATE_SHARE = 0.8  # of the throughput of merging: the rate at which latencies are compared
CHECKED = 20  # replies of each run that are compared with those of unbatched runs
POLICIES: dict[str, Callable[[], GraphBatching] | None] = {
    "cellular": None,
    "padding": partial(Padding, 10, BATCH_MAX),
    "merging": partial(Merging, BATCH_MAX),
    "no batching": partial(NodeByNode, 1),
}


class Measured(NamedTuple):
    """Medians over the seeds. `exact` says that all checked replies equal unbatched ones."""

    policy: str
    throughput: float  # requests per second of CPU time, if all are there at the beginning
    p50_ms: float
    p99_ms: float
    exact: bool
    verdict: str  # same shape: worse than cellular in throughput and P99


def _sentence(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(min(LENGTH_MAX, length(rng)))]


def _pair(model: Model, rng: random.Random) -> Graph:
    source = _sentence(rng)
    return model.unfold(source, max(1, round(len(source) * rng.uniform(0.8, 1.2))))


def _tree(model: Model, rng: random.Random) -> Graph:
    return model.unfold(random_tree(rng, max(2, round(rng.gauss(19, 9)))))


# How to make a model, and a random request. As in the paper, a given length ends a reply, and no token does.
MODELS: dict[str, tuple[Callable[[], Model], Callable[[Model, random.Random], Graph]]] = {
    "lstm": (lstm, lambda model, rng: model.unfold(_sentence(rng))),
    "seq2seq": (partial(seq2seq, eos=-1), _pair),
    "tree": (tree_lstm, _tree),
}


def compare(name: str, num_requests: int = 600, seeds: Sequence[int] = SEEDS) -> list[Measured]:
    """Serve the same random requests by each policy, on one thread of the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = [_compare_once(name, num_requests, seed) for seed in seeds]
    finally:
        torch.set_num_threads(threads)
    rows: list[Measured] = []
    for policy in runs[0]:
        parts = zip(*(run[policy] for run in runs), strict=True)
        throughput, p50, p99, exact = (list(part) for part in parts)
        row = Measured(policy, median(throughput), median(p50), median(p99), all(exact), "")
        if rows:
            worse = row.throughput < rows[0].throughput and row.p99_ms > rows[0].p99_ms
            row = row._replace(verdict="same shape" if worse else "not reproduced")
        rows.append(row)
    return rows


Once = tuple[float, float, float, bool]  # throughput, P50, P99, exact


def _compare_once(name: str, num_requests: int, seed: int) -> dict[str, Once]:
    make, draw = MODELS[name]
    torch.manual_seed(seed)
    model, rng = make(), random.Random(seed)
    graphs = [draw(model, rng) for _ in range(num_requests)]
    alone = [run_alone(model, graph) for graph in graphs[:CHECKED]]
    policies = [each for each in POLICIES if (name, each) != ("tree", "padding")]
    at_once = {each: _serve(model, each, graphs, [0.0] * num_requests) for each in policies}
    rate = RATE_SHARE * num_requests / max(at_once["merging"][0])
    arrivals = list(accumulate(rng.expovariate(rate) for _ in graphs))
    found = {}
    for policy in policies:
        finished, replies, _ = _serve(model, policy, graphs, arrivals)
        latencies = [1e3 * (end - begin) for end, begin in zip(finished, arrivals, strict=True)]
        p50, p99 = quantile(latencies, 0.5), quantile(latencies, 0.99)
        exact = all(map(equal, alone, replies))
        found[policy] = num_requests / at_once[policy][2], p50, p99, exact
    return found


def _serve(
    model: Model, policy: str, graphs: Sequence[Graph], arrivals: Sequence[float]
) -> tuple[list[float], list[Any], float]:
    """Submit each request at its time. Return when the replies came, the replies, and the CPU seconds."""
    finished = [0.0] * len(graphs)
    make = POLICIES[policy]
    with CellularServer(model) if make is None else GraphBatchingServer(model, make()) as server:
        began, cpu_began = time.perf_counter(), time.process_time()

        def note(index: int, _: Future[Any]) -> None:
            finished[index] = time.perf_counter() - began

        futures = []
        for index, (graph, at) in enumerate(zip(graphs, arrivals, strict=True)):
            time.sleep(max(0.0, began + at - time.perf_counter()))
            futures.append(server.submit(graph))
            futures[-1].add_done_callback(partial(note, index))
        wait(futures)
        seconds = time.process_time() - cpu_began
    return finished, [future.result() for future in futures], seconds


def equal(one: Any, other: Any) -> bool:
    """Compare two replies: token ids exactly, and states up to rounding."""
    if isinstance(one, list):
        return bool(one == other)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True))


def best_batch(cell: Cell, most: int = 512, repeats: int = 5) -> int:
    """Return the smallest power of two whose rows per second are within a tenth of the best."""
    speeds: dict[int, float] = {}
    for size in (1 << exponent for exponent in range(most.bit_length())):
        states = rows_of(cell.initial * cell.arity, size)
        payload, seconds = torch.full((size, cell.payload), cell.pad), []
        with torch.inference_mode():
            for _ in range(repeats):
                began = time.perf_counter()
                cell(payload, *states)
                seconds.append(time.perf_counter() - began)
        speeds[size] = size / min(seconds)
    return next(size for size, speed in speeds.items() if speed >= 0.9 * max(speeds.values()))
