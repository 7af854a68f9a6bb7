"""The memory that keys and values lie in: one arena per tier, layer-major.

    device_arena, host_arena   (layers, pages, 2, kv_heads, slots, head_size)

Inside a layer a page is keys then values of all heads, one contiguous run, so moving a page of one
layer is one copy and a head's tile of slots x head_size is contiguous for the kernels.  Which page
holds what is the core's business; nothing here is initialised, and a slot that nobody wrote may
hold anything.

Both tiers number their pages from 0.  Movements are given as `PageMoves` (built once per job) and
done one layer at a time, which is what lets copying overlap with computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pensieve.core.iteration import PageCopy, SwapIn, SwapOut
from pensieve.errors import DeviceError
from pensieve.kernels import copy_pages
from pensieve.model.shape import ModelShape


class PageMoves(NamedTuple):
    """Pages that move together: parallel int64 tensors (moves)."""

    source_pages: torch.Tensor
    target_pages: torch.Tensor
    num_slots: torch.Tensor

    @classmethod
    def from_copies(cls, copies: Sequence[PageCopy]) -> PageMoves:
        return cls._of([(each.source_page, each.target_page, each.num_slots) for each in copies])

    @classmethod
    def from_swap_ins(cls, swap_ins: Sequence[SwapIn]) -> PageMoves:
        return cls._of([(each.host_page, each.device_page, each.num_slots) for each in swap_ins])

    @classmethod
    def from_swap_outs(cls, swap_outs: Sequence[SwapOut]) -> PageMoves:
        return cls._of([(each.device_page, each.host_page, each.num_slots) for each in swap_outs])

    @classmethod
    def _of(cls, rows: list[tuple[int, int, int]]) -> PageMoves:
        table = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 3)
        return cls(*table.T.contiguous())


class KVMemory:
    """Arenas of both tiers for one model."""

    def __init__(
        self,
        shape: ModelShape,
        device_pages: int,
        host_pages: int,
        chunk_tokens: int,
        device: str | torch.device = "cpu",
    ) -> None:
        if device_pages < 1 or host_pages < 0 or chunk_tokens < 1:
            raise DeviceError(
                f"cannot hold KV in {device_pages} device pages, {host_pages} host pages "
                f"of {chunk_tokens} tokens"
            )
        self.shape = shape
        self.chunk_tokens = chunk_tokens
        self.page_bytes = shape.kv_bytes_per_page(chunk_tokens)
        self.device_arena = self._allocate("device", device_pages, device)
        self.host_arena = self._allocate("host", host_pages, "cpu")

    def _allocate(self, tier: str, num_pages: int, device: str | torch.device) -> torch.Tensor:
        shape = self.shape
        try:
            return torch.empty(
                (
                    shape.num_layers,
                    num_pages,
                    2,
                    shape.num_kv_heads,
                    self.chunk_tokens,
                    shape.head_size,
                ),
                dtype=shape.dtype,
                device=device,
            )
        except (MemoryError, RuntimeError) as error:
            gibibytes = num_pages * self.page_bytes / 2**30
            raise DeviceError(
                f"cannot allocate {gibibytes:.1f} GiB for the {tier} tier "
                f"({num_pages} pages of {self.page_bytes} bytes)"
            ) from error

    @property
    def device_pages(self) -> int:
        return self.device_arena.shape[1]

    @property
    def host_pages(self) -> int:
        return self.host_arena.shape[1]

    @property
    def device_bytes(self) -> int:
        return self.device_pages * self.page_bytes

    @property
    def host_bytes(self) -> int:
        return self.host_pages * self.page_bytes

    def key_pages(self, layer: int) -> torch.Tensor:
        """(pages, kv_heads, slots, head_size), a view."""
        return self.device_arena[layer, :, 0]

    def value_pages(self, layer: int) -> torch.Tensor:
        return self.device_arena[layer, :, 1]

    def copy_within(self, layer: int, moves: PageMoves) -> None:
        """Device page to device page."""
        copy_pages(self.device_arena[layer], self.device_arena[layer], *moves)

    def swap_in(self, layer: int, moves: PageMoves) -> None:
        copy_pages(self.host_arena[layer], self.device_arena[layer], *moves)

    def swap_out(self, layer: int, moves: PageMoves) -> None:
        copy_pages(self.device_arena[layer], self.host_arena[layer], *moves)
