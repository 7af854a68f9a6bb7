"""Checksums of the host tier's pages: whether what comes back is what was copied out.

A page is summed when its swap-out has finished, over the slots that were copied, in all layers; and again
before it is swapped in.  Nobody writes to it in between (the core moves no page of a copy, and a chunk's
host page is its own), so a page with another sum was changed by something else: by memory that fails, or by
a mistake of ours.  What such a page held is computed again, as if it had been dropped.

A page that a group of streamed turns stores to (core/iteration.py) changes with each token, so it is summed
when it is full: all of its slots were stored.  Until then it has no sum and counts as intact.

It costs the thread that computes a millisecond for one to two MiB of pages, in both directions.
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
    """Of the pages of one host arena; may be used by the threads that submit and that report copies."""

    def __init__(self, host_arena: torch.Tensor) -> None:
        self._arena = host_arena  # (layers, pages, 2, kv_heads, slots, row)
        self._lock = Lock()
        self._swap_outs: dict[int, SwapOut] = {}  # by copy_id, until they are finished
        self._sums: dict[int, _Sum] = {}  # by page
        self._growing: set[int] = set()  # pages that groups store to and that are not full

    def begin(self, swap_outs: Iterable[SwapOut]) -> None:
        """These copies were submitted."""
        with self._lock:
            self._swap_outs.update((each.copy_id, each) for each in swap_outs)

    def finish(self, copy_ids: Iterable[int]) -> None:
        """These copies, in either direction, are done."""
        with self._lock:
            done = [self._swap_outs.pop(each) for each in copy_ids if each in self._swap_outs]
        for each in done:
            self.copied(each.host_page, each.num_slots)

    def stored(self, groups: Iterable[PageGroup]) -> None:
        """What these groups store is on the host."""
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

    def arrived(self, page: int, num_slots: int, crc: int) -> None:
        """It was filled with what comes from another engine, and has this CRC."""
        self._growing.discard(page)
        self._sums[page] = _Sum(num_slots, crc)

    def is_as_copied(self, page: int, num_slots: int, crc: int) -> bool:
        """The same as `is_intact`, where so many leading slots were summed anyway."""
        known = self._sums.get(page)
        if known is None or known.num_slots != num_slots or page in self._growing:
            return self.is_intact(page)
        return known.crc == crc or self.is_intact(page)

    def is_intact(self, page: int) -> bool:
        """Whether a page holds what was copied to it, as far as that is known; else the log says so."""
        if page in self._growing:
            return True
        known = self._sums.get(page)
        if known is not None and self._crc(page, known.num_slots) == known.crc:
            return True
        log.warning(
            "page %d of the host tier is not what was copied to it; it is computed again", page
        )
        return False

    def _crc(self, page: int, num_slots: int) -> int:
        slots = self._arena[:, page, :, :, :num_slots].contiguous()
        return zlib.crc32(slots.view(torch.uint8).numpy().data)
