"""Rank 0's executor when there are several ranks: it sends each iteration to the workers, then runs it.

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
"""

from __future__ import annotations

from collections import deque

from pensieve.core.iteration import Iteration, Outcome
from pensieve.errors import DeviceError, one_line
from pensieve.model.constraints import Constraints
from pensieve.model.executor import TorchExecutor
from pensieve.model.parallel.leader import Leader
from pensieve.model.parallel.rank_messages import pack


class ParallelExecutor:
    """Rank 0's own executor, whose model is a `ParallelModel`, and the workers."""

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
    def constraints(self) -> Constraints:
        return self._own.constraints

    def launch(self, iteration: Iteration) -> None:
        self._leader.send_iteration(pack(iteration))
        self._launched.append(iteration)
        try:
            self._own.launch(iteration)
        except DeviceError:
            raise
        except RuntimeError as error:  # what a broken collective raises
            raise self._failure(error) from error

    def collect(self) -> Outcome:
        iteration = self._launched.popleft()
        try:
            outcome = self._own.collect()
        except DeviceError:
            raise
        except RuntimeError as error:  # on a device, a collective may break after the launch
            raise self._failure(error) from error
        tally = self._leader.tally
        tally.add(outcome.finished_copies)
        finished = tally.take(wait=not iteration.slices)
        return Outcome(outcome.samples, finished, outcome.failures)

    def close(self) -> None:
        self._own.close()
        self._leader.close()

    def _failure(self, error: RuntimeError) -> DeviceError:
        return self._leader.failure(f"a collective between the ranks failed: {one_line(error)}")
