"""Rank 0's executors when there are several ranks: each iteration goes to the workers, and is run here, too.

Where ranks share each layer (`ParallelExecutor`):

    Engine ── launch(iteration) ─> iteration ──pipe──> workers: ranks 1 … n-1
                  │                                        │
                  └─ own forward <────── collectives ────> the same forward
           <─ collect ── samples of rank 0; copies that every rank has finished

Why the ranks cannot diverge.  A worker's state is its weights and its pages.  Its pages change only by
the iterations that it receives, and it receives every one in the order in which rank 0 launches them (one
pipe, one thread that reads, one that carries out).  The page numbers mean the same everywhere, since all
ranks have equally many.  Every decision is made on rank 0: the token ids of a batch come from there,
sampling, text and the end of turns happen there, and the scheduler runs there.  Logits are the same on
all ranks because what enters a layer is: `transformers` sums the parts in one collective whose result is,
bit for bit, the same on every rank, so a router of experts chooses the same experts everywhere.

Why they cannot deadlock.  Collectives happen only in forwards, and every rank runs the same forwards in
the same order, each with the same collectives.  Besides collectives there are three waits.  A worker waits
for the next iteration; rank 0 can always send it, since a thread of each worker always reads.  A rank waits
for its own copier, which waits for no other thread.  Rank 0 waits for copies that it has finished itself
and other ranks have not; their copiers finish them and their reporter threads report them, whatever else
those ranks do.

Why a page is never moved too early.  Each rank has its own copier, so a copy is finished on one rank
before it is on another.  A copy is reported to the core when the last rank has finished it (`Tally`), and
by then no copier touches either page.  Everything else that the core relies on follows from the order of
iterations, which is the same on each rank: when rank 0 collects iteration k, a worker may not have
finished k, but it will do k + 1 after k.  An iteration without copies costs no message back.

A worker that ends or fails makes `launch` or `collect` raise DeviceError, which ends the engine: its KV is
incomplete then.  No history is lost, as the store has them all.

Where layers are divided among stages (`StagedExecutor`), as many iterations are in flight as there are
stages:

    Engine ── launch(k + 1) ──pipe──> stage 1 ──> … ──> activations of k + 1
           ── collect() ────────────> own layers of k, and its samples

Rank 0 is the last stage.  `launch` only hands an iteration to the others, and `collect` computes this stage's
part of the oldest one: so while the engine waits for iteration k, the stage before computes k + 1, and so on.
The tokens of an iteration are known when it is launched (core/pipeline_stages.py) and go with it.  What was
said of ranks holds for stages, with send and receive for collectives.  A stage waits for the activations of
the stage before, and that one for nothing but its next iteration.  A copy of an iteration begins on each rank
when it is its turn there; the pages are its own from the launch on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from pensieve.core.iteration import Iteration, Outcome
from pensieve.errors import DeviceError, one_line
from pensieve.model.constraints import TurnConstraints
from pensieve.model.executor import TorchExecutor
from pensieve.model.parallel.leader import Leader
from pensieve.model.parallel.stages import StageModel


class ParallelExecutor:
    """Rank 0's own executor, whose model is a `ParallelModel`, and the workers."""

    links = "a collective between the ranks"

    def __init__(self, own: TorchExecutor, leader: Leader) -> None:
        self._own = own
        self._leader = leader
        self._launched: deque[Iteration] = deque()

    @property
    def depth(self) -> int:
        return self._own.depth

    @property
    def rows_padded(self) -> int:
        return self._own.rows_padded

    @property
    def constraints(self) -> TurnConstraints:
        return self._own.constraints

    def launch(self, iteration: Iteration) -> None:
        self._leader.send_iteration(iteration)
        self._launched.append(iteration)
        with self._links():
            self._own.launch(iteration)

    def collect(self) -> Outcome:
        iteration = self._launched.popleft()
        with self._links():
            outcome = self._collected(iteration)
        tally = self._leader.tally
        tally.add(outcome.finished_copies)
        finished = tally.take(wait=not iteration.slices)
        return Outcome(outcome.samples, finished, outcome.failures)

    def close(self) -> None:
        self._own.close()
        self._leader.close()

    def _collected(self, iteration: Iteration) -> Outcome:
        return self._own.collect()

    @contextmanager
    def _links(self) -> Iterator[None]:
        """Where a link between ranks may turn out to be broken; on a device it may break after the launch."""
        try:
            yield
        except DeviceError:
            raise
        except RuntimeError as error:
            raise self._leader.failure(f"{self.links} failed: {one_line(error)}") from error


class StagedExecutor(ParallelExecutor):
    """Rank 0's own executor, whose model is the last stage, and the workers."""

    links = "a link between the stages"

    def __init__(self, own: TorchExecutor, model: StageModel, leader: Leader) -> None:
        super().__init__(own, leader)
        self._model = model

    @property
    def depth(self) -> int:
        return self._leader.num_stages

    def launch(self, iteration: Iteration) -> None:
        assert len(self._launched) < self.depth, "an earlier iteration was not collected"
        self._leader.send_iteration(iteration, with_tokens=True)
        self._launched.append(iteration)
        if iteration.slices:
            with self._links():
                self._model.expect(iteration.num_tokens)

    def _collected(self, iteration: Iteration) -> Outcome:
        self._own.launch(iteration)
        return self._own.collect()
