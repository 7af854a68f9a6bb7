"""The streamer of a GPU, which copies pages on a stream of its own; `streamer` is its interface.

All copies of all passes are launched on that one stream, so their order is that in which they are launched:

    staging  ├ load 0 ┤a├ load 1 ┤b├ wait A ┤ store 0 ┤ load 2 ┤c├ wait B ┤ store 1 ┤ load 3 ┤d …
    compute            ├ wait a ┤ attend 0 ┤A├ wait b ┤ attend 1 ┤B├ wait c ┤ …     … ├ wait for the last ┤

The host waits for nothing: `wait_loaded` makes the computing stream wait for the event behind a load, and
`attended` records an event that the staging stream waits for, before the store.

* An iteration may be launched while the one before it runs.  Its first loads need no event of the computing
  stream: they are behind all copies of the pass before, and those behind the attention that used the arenas.
* `end` makes the computing stream wait for the last store.  By then what follows the last layer's attention
  is launched, so that it waits for little; and all that is launched or recorded there later is behind the
  stores.  The copier's swap-ins and swap-outs wait for an event that `submit` records there.
* A pass that was abandoned has left loads, and kernels that read arenas without an event behind them.  So the
  next one begins behind all that was launched on the computing stream until then.
* The tensors of page numbers are uploaded, and their memory is used again, on the staging stream alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pensieve.core.iteration import PageGroup
from pensieve.errors import DeviceError
from pensieve.model.kv import copier_cuda
from pensieve.model.kv.copier_cuda import Event, Streams
from pensieve.model.kv.memory import STAGING_ARENAS, GroupMoves, KVMemory
from pensieve.model.kv.streamer import arena_of


class CudaStreamer:
    """The stream, and what is launched there for the pass under way."""

    def __init__(self, memory: KVMemory, streams: Streams | None = None) -> None:
        device = memory.device_arena.device
        self._memory = memory
        self._streams = streams if streams is not None else copier_cuda.TorchStreams(device)
        self._moves: list[GroupMoves] = []  # of the pass under way; empty: there is none
        self._num_steps = 0
        self._loaded: list[Event] = []  # behind each load that was launched
        self._attended = 0
        self._abandoned = False

    def begin(self, groups: Sequence[PageGroup]) -> None:
        assert not self._moves, "a pass is under way"
        streams = self._streams
        if self._abandoned:
            streams.staging.wait_event(streams.record(streams.compute))
            self._abandoned = False
        with streams.on(streams.staging):
            self._moves = self._memory.moves_of(groups)
        self._num_steps = self._memory.shape.num_layers * len(groups)
        self._loaded, self._attended = [], 0
        for _ in range(min(STAGING_ARENAS, self._num_steps)):
            self._load_next()

    def wait_loaded(self, step: int) -> None:
        self._streams.compute.wait_event(self._loaded[step])

    def pages(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._memory.staged_pages(arena_of(step))

    def attended(self, step: int) -> None:
        assert step == self._attended < len(self._loaded), "steps are attended to in their order"
        self._attended += 1
        streams = self._streams
        streams.staging.wait_event(streams.record(streams.compute))
        self._copy(step, is_load=False)
        if len(self._loaded) < self._num_steps:
            self._load_next()

    def end(self) -> None:
        assert self._attended == self._num_steps, "a layer has not attended"
        streams = self._streams
        streams.compute.wait_event(streams.record(streams.staging))
        self._moves = []

    def abandon(self) -> None:
        self._abandoned = self._abandoned or bool(self._moves)
        self._moves = []

    def wait_stored(self) -> None:
        self._streams.record(self._streams.staging).synchronize()

    def close(self) -> None:
        """Copies under way still use the memory."""
        self.wait_stored()

    def _load_next(self) -> None:
        self._copy(len(self._loaded), is_load=True)
        self._loaded.append(self._streams.record(self._streams.staging))

    def _copy(self, step: int, *, is_load: bool) -> None:
        layer, group = divmod(step, len(self._moves))
        loads, stores = self._moves[group]
        try:
            with self._streams.on(self._streams.staging):
                if is_load:
                    self._memory.load(layer, arena_of(step), loads)
                else:
                    self._memory.store(layer, arena_of(step), stores)
        except RuntimeError as error:
            raise DeviceError(f"copying pages of streamed turns failed: {error}") from error
