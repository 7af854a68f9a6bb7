"""Rank 0's executor when layers are divided among stages: as many iterations are in flight as stages.

    Engine ── launch(k + 1) ──pipe──> stage 1 ──> … ──> activations of k + 1
           ── collect() ────────────> own layers of k, and its samples

Rank 0 is the last stage.  `launch` only hands an iteration to the others, and `collect` computes this
stage's part of the oldest one: so while the engine waits for iteration k, the stage before computes k + 1,
and so on.  The tokens of an iteration are known when it is launched (core/micro_batches.py) and go with it.

What executor.py says of ranks holds for stages, with send and receive for collectives: one order of
iterations everywhere, the same page numbers, decisions on rank 0 alone, and a copy reported when all have
finished it.  A stage waits for the activations of the stage before, and that one for nothing but its next
iteration.

A copy of an iteration begins on each rank when it is its turn there.  The pages are its own from the launch
on, as they are for a copy that takes its time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from pensieve.core.iteration import Iteration, Outcome
from pensieve.errors import DeviceError, one_line
from pensieve.model.constraints import Constraints
from pensieve.model.executor import TorchExecutor
from pensieve.model.parallel.leader import Leader
from pensieve.model.parallel.rank_messages import pack
from pensieve.model.parallel.stages import StageModel


class StagedExecutor:
    """Rank 0's own executor, whose model is the last stage, and the workers."""

    def __init__(self, own: TorchExecutor, model: StageModel, leader: Leader) -> None:
        self._own, self._model, self._leader = own, model, leader
        self.depth = leader.num_stages
        self._launched: deque[Iteration] = deque()

    @property
    def rows_padded(self) -> int:
        return self._own.rows_padded

    @property
    def constraints(self) -> Constraints:
        return self._own.constraints

    def launch(self, iteration: Iteration) -> None:
        assert len(self._launched) < self.depth, "an earlier iteration was not collected"
        self._leader.send_iteration(pack(iteration, with_tokens=True))
        self._launched.append(iteration)
        if iteration.slices:
            with self._links():
                self._model.expect(iteration.num_tokens)

    def collect(self) -> Outcome:
        iteration = self._launched.popleft()
        with self._links():
            self._own.launch(iteration)
            outcome = self._own.collect()
        tally = self._leader.tally
        tally.add(outcome.finished_copies)
        finished = tally.take(wait=not iteration.slices)
        return Outcome(outcome.samples, finished, outcome.failures)

    def close(self) -> None:
        self._own.close()
        self._leader.close()

    @contextmanager
    def _links(self) -> Iterator[None]:
        """Where a link may turn out to be broken."""
        try:
            yield
        except DeviceError:
            raise
        except RuntimeError as error:
            reason = f"a link between the stages failed: {one_line(error)}"
            raise self._leader.failure(reason) from error
