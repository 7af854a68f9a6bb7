"""Check that pages in the host tier are unchanged when they are swapped in.

After a swap-out, a checksum of the copied slots in all layers is computed.  This sum is checked before the
page is swapped in.  Nothing writes to the page in between: the core does not reuse the pages of a pending
copy, and a host page belongs to one chunk.  So a different sum means failing memory or a bug.  The page's
contents are then recomputed, as if the page had been dropped.

A page that a group of streamed turns stores to (core/iteration.py) changes with each token.  It gets its sum
when it is full, that is, when all of its slots were stored. Until then, the page counts as intact.

Checksums cost the thread that runs the engine one millisecond for each 1 to 2 MiB of pages, both after a
swap-out and before a swap-in.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable
from threading import Lock
from typing import NamedTuple

import torch

from pensieve.core.iteration import PageGroup, SwapOut

log = logging.getLogger("pensieve")


class _Sum(NamedTuple):
    num_slots: int
    crc: int


class PageChecksums:
    """Checksums of one host arena's pages; the threads that submit and report copies may use it."""

    def __init__(self, host_arena: torch.Tensor) -> None:
        self._arena = host_arena  # (layers, pages, 2, kv_heads, slots, row)
        self._lock = Lock()
        self._swap_outs: dict[int, SwapOut] = {}  # by copy_id, until they are finished
        self._sums: dict[int, _Sum] = {}  # by page
        self._growing: set[int] = set()  # pages that groups store to and that are not yet full

    def begin(self, swap_outs: Iterable[SwapOut]) -> None:
        """Remember submitted swap-outs."""
        with self._lock:
            self._swap_outs.update((each.copy_id, each) for each in swap_outs)

    def finish(self, copy_ids: Iterable[int]) -> None:
        """Sum the pages of finished swap-outs; `copy_ids` may include swap-ins."""
        with self._lock:
            done = [self._swap_outs.pop(each) for each in copy_ids if each in self._swap_outs]
        for each in done:
            self.copied(each.host_page, each.num_slots)

    def stored(self, groups: Iterable[PageGroup]) -> None:
        """Sum the pages that these groups have filled; call this after their stores are on the host."""
        num_slots_max = self._arena.shape[4]
        for group in groups:
            for page, num_slots in zip(group.host_pages, group.stored_slots, strict=True):
                if num_slots == num_slots_max:
                    self.copied(page, num_slots)
                elif num_slots:
                    self._sums.pop(page, None)
                    self._growing.add(page)

    def copied(self, page: int, num_slots: int) -> None:
        self._growing.discard(page)
        self._sums[page] = _Sum(num_slots, self._crc(page, num_slots))

    def set_crc(self, page: int, num_slots: int, crc: int) -> None:
        """Remember the CRC of a page that was filled with another engine's KV."""
        self._growing.discard(page)
        self._sums[page] = _Sum(num_slots, crc)

    def is_intact_given_crc(self, page: int, num_slots: int, crc: int) -> bool:
        """Same as `is_intact`, for a caller that has already summed `num_slots` leading slots."""
        known = self._sums.get(page)
        if known is None or known.num_slots != num_slots or page in self._growing:
            return self.is_intact(page)
        return known.crc == crc or self.is_intact(page)

    def is_intact(self, page: int) -> bool:
        """Whether a page still has the checksum that it was stored with.

        A page that is still filling counts as intact. A mismatch or a missing checksum logs a warning.
        """
        if page in self._growing:
            return True
        known = self._sums.get(page)
        if known is not None and self._crc(page, known.num_slots) == known.crc:
            return True
        log.warning(
            "page %d of the host tier has changed since it was written; recomputing it", page
        )
        return False

    def _crc(self, page: int, num_slots: int) -> int:
        slots = self._arena[:, page, :, :, :num_slots].contiguous()
        return zlib.crc32(slots.view(torch.uint8).numpy().data)
