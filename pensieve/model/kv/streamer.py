"""The interface of the streamers, which bring pages of streamed turns to the device and back, in each layer.

`streamer_cuda` copies on a stream of its own, `streamer_cpu` in the thread that computes, and
`streamer_in_place` nothing, because both tiers are the same memory.  A *pass* is one forward over the groups
of an iteration (core/iteration.py, `PageGroup`).  In every layer the groups come in their order, so what
happens is numbered: group g of G in layer l is step n = l · G + g, its arena is n % 2.

    load n        host pages of layer l to arena n % 2
    attend n      its slices write there and attend there
    store n       what they have written, back to the host

    copies    ├ load 0 ┤ load 1 ┤        ├ store 0 ┤ load 2 ┤        ├ store 1 ┤ load 3 ┤ …
    compute            ├─ resident, attend 0 ─┤├─ attend 1 ─┤ …          (of a GPU)

Copies are done one after another, in one order: load n + 2 comes after store n.  On a GPU load n + 1 comes
before store n, so copies are one group ahead, over layers too; on a CPU after it.

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

from collections.abc import Sequence
from typing import Protocol

import torch

from pensieve.core.iteration import PageGroup
from pensieve.model.kv.memory import STAGING_ARENAS


class Streamer(Protocol):
    def begin(self, groups: Sequence[PageGroup]) -> None:
        """Begin a pass: load the first groups of the first layer."""

    def wait_loaded(self, step: int) -> None:
        """Let what is computed from now on wait until the step's pages are in its arena."""

    def pages(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that the step's slices write and attend to, in its layer."""

    def attended(self, step: int) -> None:
        """All that writes to the step's arena, or reads it, was computed before: store, and load the next."""

    def end(self) -> None:
        """Let what is computed from now on wait until everything is stored."""

    def abandon(self) -> None:
        """Give up the pass, if there is one; after that a pass may begin."""

    def wait_stored(self) -> None:
        """Return when the host can read what was stored by all passes that have ended."""

    def close(self) -> None:
        """Nothing can be begun afterwards."""


def arena_of(step: int) -> int:
    return step % STAGING_ARENAS
