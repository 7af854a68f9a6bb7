"""Bring pages of streamed turns to the device and back, in each layer.

A *pass* is one forward over the groups of an iteration (core/iteration.py, `PageGroup`).  A CPU copies
nothing: its kernels read the host tier as fast as the device tier, so the slices of a group write to its host
pages and attend to them there (`InPlaceStreamer`).  A device has two staging arenas (`StagedStreamer`).  In
every layer the groups come in their order, so what happens is numbered: group g of G in layer l is step n = l
· G + g, and its arena is n % 2.

    load n        host pages of layer l to arena n % 2
    attend n      its slices write there and attend there
    store n       what they have written, back to the host

    staging  ├ load 0 ┤a├ load 1 ┤b├ wait A ┤ store 0 ┤ load 2 ┤c├ wait B ┤ store 1 ┤ load 3 ┤d …
    compute            ├ wait a ┤ attend 0 ┤A├ wait b ┤ attend 1 ┤B├ wait c ┤ …     … ├ wait for the last ┤

All copies of all passes are launched on one stream, so they have one order.  The host waits for nothing:
`wait_loaded` makes the computing stream wait for the event behind a load, and `attended` records an event
that the staging stream waits for before the store.

Why no page is read or written wrongly, in terms of what comes before what:

* Attend n reads what load n has brought: it waits for it.  Load n + 1 fills the other arena.
* Load n + 2 overwrites arena n % 2.  It comes after store n, and store n after attend n.  So nobody reads or
  writes the arena any more, and what was written there is on the host.  This holds for a group that stores
  nothing, too: its store is empty, not missing.
* A slot of an arena that no load has filled, and no slice has written, holds anything.  No slice attends to
  it: the loaded slots and those that the group writes are all of its slices' contexts (the core's guarantee),
  and what lies behind a slice's position reaches no result.
* Store n copies leading slots, of which some were loaded: nobody else writes that page in this iteration (a
  page that a group stores is in no other group), so their values are written over by themselves.
* What a group loads is what iterations before have left on the host, in that layer.  Stores of earlier passes
  come before: copies have one order, over passes too.  Swap-outs into such a page were reported.
* Whoever reads or overwrites host pages after the pass, be it a swap-in, a swap-out to a page that was given
  up, or the checksums, sees all stores: `end` makes what is computed from now on wait for the last store, and
  all of those begin behind something that was computed after it.
* A swap beside the pass reads at most what the pass reads, too (a full page that turns share): the core moves
  neither page of a copy before the copy is reported, and no turn runs both ways at once.

A pass that fails (memory does not suffice) is given up by `abandon`: no copy of it goes on.  The host's
pages then hold what they held, or some of what the pass would have stored; computing the same again writes
the same.

One thread calls all of this, in the order begin, (wait_loaded, attended) for each step, end.  A copy that
fails is a DeviceError.
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
    """A stream that copies, and what is launched there for the pass under way."""

    def __init__(self, memory: KVMemory, streams: copier.Streams | None = None) -> None:
        device = memory.device_arena.device
        self._memory = memory
        if streams is None:
            streams = InOrder() if device.type == "cpu" else copier.TorchStreams(device)
        self._streams = streams
        self._moves: list[GroupMoves] = []  # of the pass under way; empty: there is none
        self._num_steps = 0
        self._loaded: list[copier.Event] = []  # behind each load that was launched
        self._attended = 0
        self._abandoned = False

    def begin(self, groups: Sequence[PageGroup]) -> None:
        """Begin a pass: load the first groups of the first layer.

        These loads need no event of the computing stream: they are behind all copies of the pass before, and
        those behind the attention that used the arenas.  An abandoned pass has left kernels that read arenas
        without an event behind them, so the next pass begins behind all that was launched until then.  The
        tensors of page numbers are uploaded, and their memory is used again, on the staging stream alone.
        """
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
        """Let what is computed from now on wait until the step's pages are in its arena."""
        self._streams.compute.wait_event(self._loaded[step])

    def pages(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that the step's slices write and attend to, in its layer."""
        return self._memory.staged_pages(arena_of(step))

    def attended(self, step: int) -> None:
        """All that writes to the step's arena, or reads it, was computed before: store, and load the next."""
        assert step == self._attended < len(self._loaded), "steps are attended to in their order"
        self._attended += 1
        streams = self._streams
        streams.staging.wait_event(streams.record(streams.compute))
        self._copy(step, is_load=False)
        if len(self._loaded) < self._num_steps:
            self._load_next()

    def end(self) -> None:
        """Let what is computed from now on wait until everything is stored.

        What follows the last layer's attention is launched by then, so it waits for little.  The copier's
        swaps wait for an event that `submit` records behind this.
        """
        assert self._attended == self._num_steps, "a layer has not attended"
        streams = self._streams
        streams.compute.wait_event(streams.record(streams.staging))
        self._moves = []

    def abandon(self) -> None:
        """Give up the pass, if there is one; after that a pass may begin."""
        self._abandoned = self._abandoned or bool(self._moves)
        self._moves = []

    def wait_stored(self) -> None:
        """Return when the host can read what was stored by all passes that have ended."""
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
        except (IndexError, RuntimeError) as error:
            raise DeviceError(f"copying pages of streamed turns failed: {error}") from error


class InOrder:
    """Streams of a CPU with arenas (only tests have them): everything is done when it is launched."""

    @property
    def compute(self) -> InOrder:
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
    """The same where both tiers lie in the same memory: everything is done in the order of its calls.

    What the core says of groups is about pages, and holds for the host pages themselves.  A group writes
    slots that nobody else reads in this iteration, behind those that were there.  A swap-in beside it copies
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
    """None where no turn can be streamed."""
    if memory.in_place:
        return InPlaceStreamer(memory)
    return StagedStreamer(memory) if memory.staging_pages else None


def arena_of(step: int) -> int:
    return step % STAGING_ARENAS


def in_host_pages(slices: Sequence[Slice], groups: Sequence[PageGroup]) -> list[Slice]:
    """The same with host pages in the page tables of groups."""
    found = list(slices[: groups[0].first_slice])
    for group in groups:
        pages = group.host_pages
        for each in slices[group.first_slice : group.stop_slice]:
            table = each.page_table
            first, last = table[0], table[-1]
            if last - first == len(table) - 1:  # ascending, so without a gap
                own = pages[first : last + 1]
            else:
                own = array("i", map(pages.__getitem__, table))
            found.append(each._replace(page_table=own))
    return found
