"""The streamer where both tiers lie in the same memory: nothing is copied; `streamer` is its interface.

On a CPU the kernels read the host tier as fast as the device tier.  So a group's slices write to its host
pages and attend to them there, and no arena is needed: a pass takes what it would take if all turns were
resident.

Why no page is read or written wrongly: what the core says of groups (core/iteration.py) is about pages, and
holds for the host pages themselves.  A group writes slots that nobody else reads in this iteration, behind
those that were there; a swap-in beside it copies slots that earlier iterations have written; and everything
is done when the pass ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from pensieve.core.iteration import PageGroup, Slice
from pensieve.model.kv.memory import KVMemory


class InPlaceStreamer:
    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._num_groups = 1

    def begin(self, groups: Sequence[PageGroup]) -> None:
        self._num_groups = len(groups)

    def wait_loaded(self, step: int) -> None:
        """It lies where it is."""

    def pages(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._memory.pages_on_host(step // self._num_groups)

    def attended(self, step: int) -> None:
        """It was written where it stays."""

    def end(self) -> None:
        """Everything is done in the order of its calls."""

    def abandon(self) -> None:
        """What was written is written again."""

    def wait_stored(self) -> None:
        """It was stored when `attended` returned."""

    def close(self) -> None:
        """There is nothing to end."""


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
