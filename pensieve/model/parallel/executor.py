"""Run rank 0's executors with several ranks: send each iteration to the workers, and run it here, too.

Ranks that share each layer (`ParallelExecutor`):

    Engine ── launch(iteration) ─> iteration ──pipe──> workers: ranks 1 … n-1
                  │                                        │
                  └─ own forward <────── collectives ────> the same forward
           <─ collect ── samples of rank 0; copies that every rank has finished

Why the ranks cannot diverge:

* A worker's state is its weights and its pages.  Only iterations change the pages.  The worker receives every
  iteration in the order in which rank 0 launches them, because there is one pipe, one reading thread and one
  executing thread.
* Page numbers mean the same on all ranks, because all ranks have equally many pages.
* Rank 0 makes every decision.  It sends a batch's token ids, and it runs sampling, text, the end of turns and
  the scheduler.
* Logits are the same on all ranks, because all layers get the same input.  `transformers` sums the parts in
  one collective whose result is bit for bit the same on every rank.  So a router of experts chooses the same
  experts everywhere.

Why they cannot deadlock.  Collectives happen only in forwards, and every rank runs the same forwards, with
the same collectives, in the same order.  There are three other waits:

* A worker waits for the next iteration.  Rank 0 can always send it, because a thread of each worker always
  reads.
* A rank waits for its own copier, which waits for no other thread.
* Rank 0 waits for copies that other ranks have not finished yet.  The copiers and the reporter threads of
  those ranks finish and report the copies independently of all other work.

Why a page is never reused too early.  Each rank has its own copier, so ranks finish a copy at different
times.  A copy is reported to the core when the last rank has finished it (`Tally`).  By then, no rank's
copier uses the pages of that copy any more.  The core's other guarantees follow from the order of iterations,
which is the same on each rank.  When rank 0 collects iteration k, a worker may not have finished k, but it
will run k + 1 after k.  An iteration without copies needs no reply.

If a worker ends or fails, its KV is incomplete.  `launch` or `collect` then raises DeviceError, which ends
the engine.  No history is lost, because the store has all histories.

Stages that divide the layers (`StagedExecutor`) have as many iterations in flight as there are stages:

    Engine ── launch(k + 1) ──pipe──> stage 1 ──> … ──> activations of k + 1
           ── collect() ────────────> own layers of k, and its samples

Rank 0 is the last stage.  `launch` only sends an iteration to the others.  `collect` computes this stage's
part of the oldest iteration.  So while the engine waits for iteration k, the previous stage computes k + 1.
The tokens of an iteration are known when it is launched (core/pipeline_stages.py) and are sent with it.

The arguments above hold for stages, with send and receive instead of collectives.  A stage waits only for
activations of the previous stage, and for its next iteration.  Each rank starts the copies of an iteration
when the rank runs the iteration.  The core has reserved the pages of these copies since the launch.
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
    """Run rank 0's own executor, whose model is a `ParallelModel`, and the workers."""

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
        with self._link_errors():
            self._own.launch(iteration)

    def collect(self) -> Outcome:
        iteration = self._launched.popleft()
        with self._link_errors():
            outcome = self._collect_own(iteration)
        tally = self._leader.tally
        tally.add(outcome.finished_copies)
        finished = tally.take(wait=not iteration.slices)
        return Outcome(outcome.samples, finished, outcome.failures)

    def close(self) -> None:
        self._own.close()
        self._leader.close()

    def _collect_own(self, iteration: Iteration) -> Outcome:
        return self._own.collect()

    @contextmanager
    def _link_errors(self) -> Iterator[None]:
        """Raise DeviceError for a broken link between ranks.  On a GPU, it may break after the launch."""
        try:
            yield
        except DeviceError:
            raise
        except RuntimeError as error:
            raise self._leader.failure(f"{self.links} failed: {one_line(error)}") from error


class StagedExecutor(ParallelExecutor):
    """Run rank 0's own executor, whose model is the last stage, and the workers."""

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
            with self._link_errors():
                self._model.expect(iteration.num_tokens)

    def _collect_own(self, iteration: Iteration) -> Outcome:
        self._own.launch(iteration)
        return self._own.collect()
