"""Read and write the pages of both tiers as bytes, to hand KV over to another engine (engine/hand_over.py).

A chunk's bytes are its leading slots, layer by layer, keys and then values of all heads.  The layout is that
of an arena (memory.py) without the remaining slots: (layers, 2, kv_heads, slots, row).  Only an engine of the
same identity (launch/kv_compatibility.py) can use these bytes.

The engine's thread reads and writes between two iterations.  On a GPU, reading a device page waits for all
launched work, and reading a host page waits for nothing.  `write` fills pages that have just been allocated,
so no copy and no forward pass uses them yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pensieve.core.adoption import KvPlace
from pensieve.model.kv.checksums import PageChecksums
from pensieve.model.kv.memory import KVMemory


class PageBytes:
    """Copy pages to and from bytes, in the calling thread only.

    A copy by torch's threads would wait for the slowest thread, which is slow if other processes use the
    cores.
    """

    def __init__(self, memory: KVMemory, checksums: PageChecksums | None) -> None:
        self.slot_bytes = memory.page_bytes // memory.chunk_tokens
        self._device = memory.device_arena.view(torch.uint8)
        self._host = memory.host_arena.view(torch.uint8)
        self._checksums = checksums

    def read(self, places: Sequence[KvPlace]) -> bytearray:
        """Return the bytes of all places in sequence, after all launched work."""
        body = bytearray(sum(place.num_slots for place in places) * self.slot_bytes)
        if not body:
            return body
        start, flat = 0, torch.frombuffer(body, dtype=torch.uint8)
        for place in places:
            arena = self._host if place.on_host else self._device
            source = arena[:, place.page, :, :, : place.num_slots]
            target = flat[start : start + source.numel()].view(source.shape)
            if source.is_cuda:
                target.copy_(source)
            else:
                target.numpy()[...] = source.numpy()
            start += source.numel()
        return body

    def is_intact(self, place: KvPlace, crc: int) -> bool:
        """Whether a host page still holds the bytes that were copied to it.

        `crc`: the CRC of the bytes that the page holds now.
        """
        if self._checksums is None or not place.on_host:
            return True
        return self._checksums.is_intact_given_crc(place.page, place.num_slots, crc)

    def write(self, host_page: int, num_slots: int, data: memoryview, crc: int) -> None:
        """Fill a page that nothing uses."""
        target = self._host[:, host_page, :, :, :num_slots]
        target.numpy()[...] = data.cast("B", tuple(target.shape))
        if self._checksums is not None:
            self._checksums.set_crc(host_page, num_slots, crc)
