"""Bring pages of streamed turns to the device and back, in each layer.

A *pass* is one forward over the groups of an iteration (core/iteration.py, `PageGroup`).

A CPU copies nothing (`InPlaceStreamer`), because its kernels read the host tier as fast as the device tier.
The slices of a group write to the group's host pages and attend to them there.

A GPU has two staging arenas (`StagedStreamer`).  In every layer the groups come in their order.  Group g (of
G groups) in layer l is step n = l · G + g, and its arena is n % 2:

    load n        copy host pages of layer l to arena n % 2
    attend n      the step's slices write to the arena and attend to it
    store n       copy back to the host what they have written

    staging  ├ load 0 ┤a├ load 1 ┤b├ wait A ┤ store 0 ┤ load 2 ┤c├ wait B ┤ store 1 ┤ load 3 ┤d …
    compute            ├ wait a ┤ attend 0 ┤A├ wait b ┤ attend 1 ┤B├ wait c ┤ …     … ├ wait for the last ┤

Events a, b, … are recorded after the loads, and A, B, … after the attends.

All copies of all passes are launched on one stream, so they are ordered.  The host does not wait:
`wait_loaded` makes the computing stream wait for the event after a load, and `attended` records an event
that the staging stream waits for before the store.

Why no page is read or written wrongly:

* Attend n waits for load n.  Load n + 1 fills the other arena.
* Load n + 2 overwrites arena n % 2.  Load n + 2 comes after store n, which comes after attend n.  So nothing
  reads or writes the arena any more, and its new slots are on the host.  This also holds for a group that
  stores nothing: its store is empty, not missing.
* A slot of an arena that was neither loaded nor written may hold anything.  No slice attends to such a slot.
  The core guarantees that the loaded slots and the group's own writes cover the contexts of all slices of the
  group.  Slots after a slice's position affect no result.
* Store n copies the first slots of each stored page, including slots that were only loaded.  On the host,
  loaded slots are overwritten with the same values: a page that a group stores is in no other group, so
  nothing else writes it in this iteration.
* A group loads what earlier iterations have left on the host in that layer.  Stores of earlier passes come
  before the load, because all copies are ordered.  A swap-out into such a page was reported before the group
  was planned.
* Later readers and writers of host pages (swap-ins, swap-outs into released pages, and checksums) see all
  stores.  `end` makes the computing stream wait for the last store.  The readers and writers wait for
  an event that is recorded on the computing stream after `end`.
* A swap may run during the pass.  A page that the swap and the pass both use is full and shared, and the pass
  only reads it.  This is so because the core does not reuse the pages of a copy before the copy is
  reported, and because no turn is resident and streamed at once.

If a pass fails (out of memory), `abandon` gives the pass up and launches no further copies.  The host pages
then hold the old contents or some of the pass's stores.  Computing the pass again writes the same values.

One thread makes all calls, in the order begin, (wait_loaded, attended) for each step, end.  A copy that fails
raises DeviceError.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch

from pensieve.core.iteration import PageGroup, Slice
from pensieve.errors import DeviceError
from pensieve.model.kv import copier
from pensieve.model.kv.memory import STAGING_ARENAS, GroupMoves, KVMemory


class StagedStreamer:
    """Stage pages on a copy stream, and track the launched copies of the current pass."""

    def __init__(self, memory: KVMemory, streams: copier.Streams | None = None) -> None:
        device = memory.device_arena.device
        self._memory = memory
        if streams is None:
            streams = InOrderStreams() if device.type == "cpu" else copier.TorchStreams(device)
        self._streams = streams
        self._moves: list[GroupMoves] = []  # moves of the current pass; empty between passes
        self._num_steps = 0
        self._loaded: list[copier.Event] = []  # one after each launched load
        self._attended = 0
        self._abandoned = False

    def begin(self, groups: Sequence[PageGroup]) -> None:
        """Begin a pass: load the first groups of the first layer.

        These loads need not wait for the computing stream.  They follow the stores of the previous pass on
        the same stream, and those stores waited for the attention that used the arenas.  An abandoned pass
        may have left kernels that read arenas without an event after them.  So the next pass begins after
        all work that was launched earlier.  The tensors of page numbers are uploaded and freed on the staging
        stream only.
        """
        assert not self._moves, "a pass is already running"
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
        """Make later computations wait until the step's pages are in its arena."""
        self._streams.compute.wait_event(self._loaded[step])

    def pages(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the step's layer that its slices write and attend to."""
        return self._memory.staged_pages(arena_of(step))

    def attended(self, step: int) -> None:
        """Store the step's pages and load the next step.  Call this after launching the step's attention."""
        assert step == self._attended < len(self._loaded), "steps must be attended in order"
        self._attended += 1
        streams = self._streams
        streams.staging.wait_event(streams.record(streams.compute))
        self._copy(step, is_load=False)
        if len(self._loaded) < self._num_steps:
            self._load_next()

    def end(self) -> None:
        """Make later computations wait until everything is stored.

        The last layer's MLP is launched by then, so the wait is short.  The copier's swaps wait for an event
        that `submit` records after this wait.
        """
        assert self._attended == self._num_steps, "a layer has not attended"
        streams = self._streams
        streams.compute.wait_event(streams.record(streams.staging))
        self._moves = []

    def abandon(self) -> None:
        """Give up the current pass, if there is one; a new pass may then begin."""
        self._abandoned = self._abandoned or bool(self._moves)
        self._moves = []

    def wait_stored(self) -> None:
        """Wait until the host can read the stores of all ended passes."""
        self._streams.record(self._streams.staging).synchronize()

    def close(self) -> None:
        """Wait for running copies: they still use the memory."""
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
        except (IndexError, RuntimeError) as error:
            raise DeviceError(f"copying pages of streamed turns failed: {error}") from error


class InOrderStreams:
    """CPU streams that run all work at launch; only tests use staging arenas on a CPU."""

    @property
    def compute(self) -> InOrderStreams:
        return self

    swap_in = swap_out = staging = compute

    def wait_event(self, event: Any) -> None:
        return

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, stream: Any) -> copier.Event:
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def adopt_thread(self) -> None:
        return


class InPlaceStreamer:
    """Let streamed turns attend to the host tier itself: all work is done in the order of the calls.

    The core's guarantees for groups hold for the host pages themselves.  A group writes slots after the
    existing slots, and nothing else reads the new slots in this iteration.  A swap-in during the pass copies
    slots that earlier iterations have written.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._num_groups = 1

    def begin(self, groups: Sequence[PageGroup]) -> None:
        self._num_groups = len(groups)

    def wait_loaded(self, step: int) -> None:
        return

    def pages(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._memory.pages_on_host(step // self._num_groups)

    def attended(self, step: int) -> None:
        return

    def end(self) -> None:
        return

    def abandon(self) -> None:
        return

    def wait_stored(self) -> None:
        return

    def close(self) -> None:
        return


Streamer: TypeAlias = StagedStreamer | InPlaceStreamer


def streamer_for(memory: KVMemory) -> Streamer | None:
    """Return the memory's streamer, or None if the memory has no pages for streamed turns."""
    if memory.in_place:
        return InPlaceStreamer(memory)
    return StagedStreamer(memory) if memory.staging_pages else None


def arena_of(step: int) -> int:
    return step % STAGING_ARENAS


def in_host_pages(slices: Sequence[Slice], groups: Sequence[PageGroup]) -> list[Slice]:
    """Return the slices with host page numbers in all page tables.

    In the given slices of groups, page tables hold indices into the group's pages.
    """
    found = list(slices[: groups[0].first_slice])
    for group in groups:
        pages = group.host_pages
        for each in slices[group.first_slice : group.stop_slice]:
            table = each.page_table
            first, last = table[0], table[-1]
            if last - first == len(table) - 1:  # the table ascends, so it has no gap
                own = pages[first : last + 1]
            else:
                own = array("i", map(pages.__getitem__, table))
            found.append(each._replace(page_table=own))
    return found
