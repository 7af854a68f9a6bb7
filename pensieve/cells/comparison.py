"""Compare the policies on this machine with real cells: throughput and latency, side by side."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from pensieve.cells.baselines import Merging, NodeByNode, Padding
from pensieve.cells.executor import CellServer, run_alone
from pensieve.cells.graph import Graph
from pensieve.cells.models import Cell, Model, lstm, rows_of, seq2seq, tree_lstm
from pensieve.cells.scheduler import Policy
from pensieve.cells.workload import NUM_WORDS, parse_tree, sentence_length, translated_length

HIDDEN = 512  # the paper has 1,024. With 256, most of a task is the overhead of Python
BATCH_MAX = 64  # requests of padding and merging. A cell type has the same limit
RATE_SHARE = 0.8  # of the throughput of merging: the rate at which latencies are compared
CHECKED = 20  # replies of each run that are compared with those of unbatched runs
POLICIES: dict[str, Callable[[], Policy | None]] = {
    "cellular": lambda: None,
    "padding": partial(Padding, 10, BATCH_MAX),
    "merging": partial(Merging, BATCH_MAX),
    "no batching": partial(NodeByNode, 1),
}


def _sentence(rng: random.Random) -> list[int]:
    return [rng.randrange(3, NUM_WORDS) for _ in range(sentence_length(rng, longest=100))]


def _pair(model: Model, rng: random.Random) -> Graph:
    source = _sentence(rng)
    return model.unfold(source, translated_length(rng, len(source)))


def _parse_tree(model: Model, rng: random.Random) -> Graph:
    return model.unfold(parse_tree(rng))


# How to make a model, and a random request. As in the paper, a given length ends a reply, and no token does.
MODELS: dict[str, tuple[Callable[[], Model], Callable[[Model, random.Random], Graph]]] = {
    "lstm": (partial(lstm, HIDDEN), lambda model, rng: model.unfold(_sentence(rng))),
    "seq2seq": (partial(seq2seq, HIDDEN, eos=-1), _pair),
    "tree": (partial(tree_lstm, HIDDEN, batch_max=4 * BATCH_MAX), _parse_tree),
}


class Measured(NamedTuple):
    throughput: float  # requests per second of CPU time, if all are there at the beginning
    p50_ms: float
    p90_ms: float
    p99_ms: float
    exact: bool  # whether all checked replies equal unbatched ones


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def compare(name: str, num_requests: int = 200, seed: int = 0) -> dict[str, Measured]:
    """Serve the same random requests by each policy, on one thread of the CPU."""
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
        p50, p90, p99 = torch.tensor(latencies).quantile(torch.tensor([0.5, 0.9, 0.99])).tolist()
        exact = all(map(equal, alone, replies))
        found[policy] = Measured(num_requests / at_once[policy][2], p50, p90, p99, exact)
    return found


def _serve(
    model: Model, policy: str, graphs: Sequence[Graph], arrivals: Sequence[float]
) -> tuple[list[float], list[Any], float]:
    """Submit each request at its time. Return when the replies came, the replies, and the CPU seconds."""
    finished = [0.0] * len(graphs)
    with CellServer(model, POLICIES[policy]()) as server:
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


@one_thread()
def speeds(cell: Cell, most: int = 512, repeats: int = 5) -> dict[int, float]:
    """Return the rows per second of a cell for each batch size that is a power of two."""
    found: dict[int, float] = {}
    for size in (1 << exponent for exponent in range(most.bit_length())):
        states = rows_of(cell.initial * cell.arity, size)
        payload, seconds = torch.full((size, cell.payload), cell.pad), []
        with torch.inference_mode():
            for _ in range(repeats):
                began = time.perf_counter()
                cell(payload, *states)
                seconds.append(time.perf_counter() - began)
        found[size] = size / min(seconds)
    return found


def best_batch(cell: Cell, most: int = 512, repeats: int = 5) -> int:
    """Return the smallest power of two whose rows per second are within a tenth of the best."""
    found = speeds(cell, most, repeats)
    return next(size for size, speed in found.items() if speed >= 0.9 * max(found.values()))
