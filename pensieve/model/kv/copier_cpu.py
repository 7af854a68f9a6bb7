"""The copier of a CPU, a thread that copies pages layer by layer; `copier` is its interface.

A job is the swap-ins, or the swap-outs, of one iteration; a unit of work is one layer of one job.
The worker takes units of swap-ins first, lowest layer first; a swap-out yields after at most one layer.

`wait_layer(n)` returns when no outstanding swap-in still lacks layer n.  The thread that computes and the
worker share only the fields under the one lock.

Why no page is read or written wrongly:

* A swap-in writes device pages that nothing reads before `wait_layer` of that layer: the core gives
  them to no slice of an earlier iteration, and every layer of a later forward waits first.
* A swap-out reads slots written by earlier iterations.  Their forwards have returned when `submit`
  is called (on a CPU `launch` computes, also when the iteration before is not yet collected), and
  those slots are not written again: full chunks never change, and of a partly filled one only
  `num_slots` are copied while new tokens go behind them.
* The core moves neither page of a copy before that copy is reported, so no target is written twice
  and no source is reused.  The report is made under the lock, after the last layer.

An error in the worker ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pensieve.core.iteration import SwapIn, SwapOut
from pensieve.errors import DeviceError
from pensieve.model.kv.memory import KVMemory, PageMoves


@dataclass(slots=True, eq=False)
class _Job:
    copy_ids: tuple[int, ...]
    moves: PageMoves
    move_layer: Callable[[int, PageMoves], None]
    next_layer: int = 0


class CpuCopier:
    """The worker, its jobs, and the copies that finished and were not yet reported."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._num_layers = memory.shape.num_layers
        self._changed = threading.Condition()
        self._swap_ins: list[_Job] = []
        self._swap_outs: list[_Job] = []
        self._finished: list[int] = []
        self._error: BaseException | None = None
        self._closing = False
        self._worker = threading.Thread(target=self._run, name="pensieve-copier", daemon=True)
        self._worker.start()

    # -- called by the thread that computes --

    def submit(self, swap_ins: Sequence[SwapIn], swap_outs: Sequence[SwapOut]) -> None:
        if not swap_ins and not swap_outs:
            return
        memory = self._memory
        jobs_in = [
            _Job(
                tuple(each.copy_id for each in swap_ins),
                PageMoves.from_swap_ins(swap_ins),
                memory.swap_in,
            )
        ]
        jobs_out = [
            _Job(
                tuple(each.copy_id for each in swap_outs),
                PageMoves.from_swap_outs(swap_outs),
                memory.swap_out,
            )
        ]
        with self._changed:
            self._swap_ins.extend(job for job in jobs_in if job.copy_ids)
            self._swap_outs.extend(job for job in jobs_out if job.copy_ids)
            self._changed.notify_all()

    def wait_layer(self, layer: int) -> None:
        if not self._swap_ins:  # only `submit` adds, on this very thread
            return
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._error is not None or all(job.next_layer > layer for job in self._swap_ins)
                )
            )
            self._raise_error()

    @property
    def arriving(self) -> bool:
        return bool(self._swap_ins)

    def poll(self) -> tuple[int, ...]:
        with self._changed:
            return self._report()

    def wait_any(self) -> tuple[int, ...]:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or bool(self._finished)
                    or not (self._swap_ins or self._swap_outs)
                )
            )
            return self._report()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join()

    def _report(self) -> tuple[int, ...]:
        self._raise_error()
        finished, self._finished = tuple(self._finished), []
        return finished

    def _raise_error(self) -> None:
        if self._error is not None:
            raise DeviceError(f"copying pages between the tiers failed: {self._error}")

    # -- the worker --

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while (job := self._next_job()) is not None:
                    job.move_layer(job.next_layer, job.moves)
                    self._advance(job)
        except BaseException as error:  # kept, and raised in whatever waits
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next_job(self) -> _Job | None:
        """The job whose next layer is to be moved now; None when closing."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or bool(self._swap_ins) or bool(self._swap_outs)
            )
            if self._closing:
                return None
            if self._swap_ins:
                return min(self._swap_ins, key=lambda job: job.next_layer)
            return self._swap_outs[0]

    def _advance(self, job: _Job) -> None:
        with self._changed:
            job.next_layer += 1
            if job.next_layer == self._num_layers:
                (self._swap_ins if job in self._swap_ins else self._swap_outs).remove(job)
                self._finished.extend(job.copy_ids)
            self._changed.notify_all()
