"""The executor of rank 0 when there are several: an order to the others, then its own part.

    Engine ── launch(iteration) ─> order ──pipe──> follower 1 … n-1
                  │                                     │
                  └─ own forward <── collectives ─────> the same forward
           <─ collect ── samples of rank 0; copies that every rank has finished

Why the ranks cannot diverge.  A follower's state is its weights and its pages; its pages change only
by what orders say, and it gets every order, in the order in which rank 0 launches them (one pipe,
one thread that reads, one that carries out).  The page numbers mean the same everywhere, since all
ranks have equally many.  Nothing that is computed decides anything but on rank 0: the token ids of
a batch come from there, sampling, text and the end of turns happen there, and the scheduler runs
there.  Logits are the same on all ranks because what enters a layer is: `transformers` sums the
parts in one collective whose result is, bit for bit, the same on every rank, so that a router
of experts chooses the same experts everywhere.

Why they cannot deadlock.  Collectives happen only in forwards; every rank runs the same forwards in
the same order, each with the same collectives.  Beside them a rank waits for three things only: for
an order (rank 0 is free to send it, since followers always read), for its own copier (which waits
for nobody), and rank 0 for a copy that it has finished itself and others have not, which is their
copiers' to finish and their reporters' to tell, whatever else they do.

Why a page is never moved too early.  Each rank has its own copier, so a copy is finished on one rank
before it is on another.  What the core hears of is the last of them (`Tally`), and by then no copier
touches either page.  Everything else that the core relies on follows from the order of iterations,
which is each rank's own: when rank 0 collects iteration k, a follower may be behind in it, but it
will do k + 1 after k.  An iteration without copies costs no message back.

A follower that ends or fails makes `launch` or `collect` raise DeviceError, which ends the engine:
its KV is incomplete, and histories are not in it.
"""

from __future__ import annotations

from collections import deque

from pensieve.core.iteration import Iteration, Outcome
from pensieve.errors import DeviceError, one_line
from pensieve.model.executor import TorchExecutor
from pensieve.model.parallel.leader import Leader
from pensieve.model.parallel.wire import pack


class ParallelExecutor:
    """Rank 0's own executor, whose model is a `ParallelModel`, and the followers."""

    def __init__(self, own: TorchExecutor, leader: Leader) -> None:
        self._own = own
        self._leader = leader
        self._launched: deque[Iteration] = deque()

    @property
    def depth(self) -> int:
        return self._own.depth

    def launch(self, iteration: Iteration) -> None:
        self._leader.order(pack(iteration))
        self._launched.append(iteration)
        try:
            self._own.launch(iteration)
        except DeviceError:
            raise
        except RuntimeError as error:  # what a broken collective raises
            raise self._lost(error) from error

    def collect(self) -> Outcome:
        iteration = self._launched.popleft()
        try:
            outcome = self._own.collect()
        except DeviceError:
            raise
        except RuntimeError as error:  # on a device, a collective may break after the launch
            raise self._lost(error) from error
        tally = self._leader.tally
        tally.add(outcome.finished_copies)
        finished = tally.take(wait=not iteration.slices)
        return Outcome(outcome.samples, finished, outcome.failures)

    def close(self) -> None:
        self._own.close()
        self._leader.close()

    def _lost(self, error: RuntimeError) -> DeviceError:
        return self._leader.failure(f"the ranks lost each other: {one_line(error)}")
