"""The streamer of a CPU, which copies in the thread that computes; `streamer` is its interface.

A step is loaded when it is waited for, and stored when it was attended to, so everything is in the order of
its calls, and no two things happen at once:

    load 0, attend 0, store 0, load 1, attend 1, …

Copies use all threads of the kernels.  A thread beside the compute, one group ahead, would take a core from
it, and copy with one core's bandwidth while the others wait; measured on two cores a pass took a tenth to a
fifth more time with such a thread.  An arena that has just been loaded is in the caches when its attention
reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pensieve.core.iteration import PageGroup
from pensieve.errors import DeviceError
from pensieve.model.kv.memory import GroupMoves, KVMemory
from pensieve.model.kv.streamer import arena_of


class CpuStreamer:
    """The pass under way: how far it is."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._moves: list[GroupMoves] = []
        self._loaded = self._attended = 0

    def begin(self, groups: Sequence[PageGroup]) -> None:
        assert not self._moves, "a pass is under way"
        self._moves = self._memory.moves_of(groups)
        self._loaded = self._attended = 0

    def wait_loaded(self, step: int) -> None:
        assert step == self._loaded == self._attended, "steps are attended to in their order"
        self._copy(step, is_load=True)
        self._loaded += 1

    def pages(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._memory.staged_pages(arena_of(step))

    def attended(self, step: int) -> None:
        assert step == self._attended < self._loaded, "steps are attended to in their order"
        self._copy(step, is_load=False)
        self._attended += 1

    def end(self) -> None:
        num_steps = self._memory.shape.num_layers * len(self._moves)
        assert self._attended == num_steps, "a layer has not attended"
        self._moves = []

    def abandon(self) -> None:
        self._moves = []

    def wait_stored(self) -> None:
        """It was stored when `attended` returned."""

    def close(self) -> None:
        """There is nothing to end."""

    def _copy(self, step: int, *, is_load: bool) -> None:
        layer, group = divmod(step, len(self._moves))
        loads, stores = self._moves[group]
        num_threads = torch.get_num_threads()
        try:
            if is_load:
                self._memory.load(layer, arena_of(step), loads, num_threads)
            else:
                self._memory.store(layer, arena_of(step), stores, num_threads)
        except (IndexError, RuntimeError) as error:
            raise DeviceError(f"copying pages of streamed turns failed: {error}") from error
