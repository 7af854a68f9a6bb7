"""Compare the policies on this machine with real cells: throughput and latency, side by side."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from operator import sub
from typing import Any, NamedTuple

import torch

from pensieve.cells.baselines import Merging, NodeByNode, Padding
from pensieve.cells.executor import CellServer, run_alone
from pensieve.cells.graph import Graph
from pensieve.cells.models import Cell, Model, lstm, rows_of, seq2seq, tree_lstm
from pensieve.cells.scheduler import Policy
from pensieve.cells.workload import NUM_WORDS, parse_tree, sentence_length, translated_length

# The paper has 1,024 for all models. With 512, batches of trees gain little.
HIDDEN, TREE_HIDDEN = 512, 1024
BATCH_MAX = 64  # requests of padding and merging. A cell type has the same limit
RATE_SHARE = 0.8  # of the throughput of merging: the rate at which latencies are compared
CHECKED = 20  # replies of each run that are compared with unbatched replies
POLICIES: dict[str, Callable[[], Policy | None]] = {
    "cellular": lambda: None,
    "padding": partial(Padding, 10, BATCH_MAX),
    "merging": partial(Merging, BATCH_MAX),
    "no batching": partial(NodeByNode, 1),
}


def _sentence(rng: random.Random) -> list[int]:
    return [rng.randrange(3, NUM_WORDS) for _ in range(sentence_length(rng, longest=100))]


# A function that makes the model, and a function that draws a random request (the arguments of `unfold`).
# As in the paper, a reply ends at a given length.
MODELS: dict[str, tuple[Callable[[], Model], Callable[[random.Random], tuple[Any, ...]]]] = {
    "lstm": (partial(lstm, HIDDEN), lambda rng: (_sentence(rng),)),
    "seq2seq": (
        partial(seq2seq, HIDDEN, eos=-1),
        lambda rng: (source := _sentence(rng), translated_length(rng, len(source))),
    ),
    "tree": (partial(tree_lstm, TREE_HIDDEN, batch_max=256), lambda rng: (parse_tree(rng),)),
}


class Measured(NamedTuple):
    throughput: float  # requests per second, if all requests arrive at the beginning
    p50_ms: float
    p90_ms: float
    p99_ms: float
    exact: bool  # whether all checked replies equal unbatched replies


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
    graphs = [model.unfold(*draw(rng)) for _ in range(num_requests)]
    unbatched = [run_alone(model, graph) for graph in graphs[:CHECKED]]
    policies = [each for each in POLICIES if (name, each) != ("tree", "padding")]
    exact = dict.fromkeys(policies, True)

    def latencies(arrivals: list[float]) -> dict[str, list[float]]:
        """Return the latencies of the fastest of three runs. "no batching" is slow and runs only once."""
        best: dict[str, list[float]] = {}
        for policy in policies[:-1] * 3 + policies[-1:]:
            finished, replies = _serve(model, policy, graphs, arrivals)
            run = list(map(sub, finished, arrivals))
            best[policy] = min(best.get(policy, run), run, key=sum)
            exact[policy] &= all(map(equal, unbatched, replies))
        return best

    throughput = {k: num_requests / max(run) for k, run in latencies([0.0] * num_requests).items()}
    rate = RATE_SHARE * throughput["merging"]
    found = {}
    for policy, run in latencies(list(accumulate(rng.expovariate(rate) for _ in graphs))).items():
        p50, p90, p99 = (torch.tensor(run) * 1e3).quantile(torch.tensor([0.5, 0.9, 0.99])).tolist()
        found[policy] = Measured(throughput[policy], p50, p90, p99, exact[policy])
    return found


def _serve(
    model: Model, policy: str, graphs: Sequence[Graph], arrivals: Sequence[float]
) -> tuple[list[float], list[Any]]:
    """Submit each request at its arrival time; return the finish times and the replies.

    Times are in CPU seconds. Idle time is skipped.
    """
    finished, futures, skipped = [0.0] * len(graphs), list[Future[Any]](), 0.0
    with CellServer(model, POLICIES[policy]()) as server:
        began = time.process_time()

        def note(index: int, _: Future[Any]) -> None:
            finished[index] = time.process_time() - began + skipped

        for index, (graph, at) in enumerate(zip(graphs, arrivals, strict=True)):
            while (early := at - skipped - time.process_time() + began) > 0:
                skipped += early * all(finished[:index])
                time.sleep(1e-3)
            futures.append(server.submit(graph))
            futures[-1].add_done_callback(partial(note, index))
    return finished, [future.result() for future in futures]


def equal(first: Any, second: Any) -> bool:
    """Compare two replies: token ids exactly, and states up to rounding."""
    if isinstance(first, list):
        return bool(first == second)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(first, second, strict=True))


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
