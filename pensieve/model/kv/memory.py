"""Hold keys and values in arenas of both tiers, and move pages between them.

    device_arena, host_arena   (layers, pages, 2, kv_heads, slots, row)

Inside a layer a page is one contiguous run: keys, then values, of all heads.  So moving a page of one layer
is one copy.  The keys (or values) of one head in a page are also contiguous, for the kernels.
kernels/kv_format.py defines a row; here rows move as bytes.  The core decides which page holds which chunk.
Nothing here is initialized: a slot that was never written may hold anything.

    staging_arena              (2, staging_pages, 2, kv_heads, slots, row)

Two arenas on the device, shared by all layers, hold the pages of streamed turns (core/iteration.py,
`PageGroup`): one layer of one group at a time (streamer.py).  A staged page's number is its index in the
group.

Both tiers number their pages from 0.  Moves are given as `PageMoves`, built once for all layers, and done one
layer at a time, so copying can overlap with computing.

On a GPU the host tier is page-locked and mapped (host_arena.py).  If the driver can copy batches of pages,
and pages are not too small, one call of the driver moves all swapped pages of a layer over the bus
(kernels/batched_copy.py).  Otherwise, and for streamed turns, one launch of the kernel `copy_pages` moves the
pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pensieve.core.iteration import PageCopy, PageGroup, SwapIn, SwapOut
from pensieve.errors import DeviceError
from pensieve.kernels import batched_copy, copy_pages
from pensieve.kernels.batched_copy import Pieces
from pensieve.kernels.kv_format import FP8
from pensieve.model.kv import host_arena
from pensieve.model.shape import ModelShape
from pensieve.model.transfer import upload

IN_PLACE = -1  # value of `staging_pages`: no staging, turns attend to the host tier
STAGING_ARENAS = 2  # while the attention reads one arena, the other is loaded
# Size of a page in one layer.  For smaller pages, `copy_pages` is faster than the driver.
BATCHED_BYTES_MIN = 32 << 10


def copies_batches(device: torch.device, layer_page_bytes: int) -> bool:
    """Whether the driver, not `copy_pages`, moves pages of this size over the bus."""
    return (
        device.type == "cuda" and layer_page_bytes >= BATCHED_BYTES_MIN and batched_copy.available()
    )


class PageMoves(NamedTuple):
    """Pages that move together: parallel int64 tensors (moves)."""

    source_pages: torch.Tensor
    target_pages: torch.Tensor
    num_slots: torch.Tensor
    pieces: Pieces | None = None  # the moves in one layer as the driver takes them

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

    def in_pieces(self, chunk_tokens: int, tiles: int, tile_bytes: int) -> Pieces:
        """Return a layer's moves as pieces, in bytes.

        Consecutive whole pages are joined into one piece.  A partial page becomes a piece for each tile (the
        keys or values of one head), with only the tile's first slots.
        """
        page_bytes = tiles * tile_bytes
        rows: list[tuple[int, int, int]] = []
        for source, target, count in sorted(
            zip(*(each.tolist() for each in self[:3]), strict=True)
        ):
            source_begin, target_begin = source * page_bytes, target * page_bytes
            if count < chunk_tokens:
                size = tile_bytes * count // chunk_tokens
                rows += [
                    (source_begin + offset, target_begin + offset, size)
                    for offset in range(0, page_bytes, tile_bytes)
                ]
                continue
            if rows:
                last_source, last_target, size = rows[-1]
                if (source_begin, target_begin) == (last_source + size, last_target + size):
                    rows[-1] = (last_source, last_target, size + page_bytes)
                    continue
            rows.append((source_begin, target_begin, page_bytes))
        table = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 3)
        return Pieces(*table.T.contiguous())


class GroupMoves(NamedTuple):
    """The pages that a group of streamed slices moves in each layer."""

    loads: PageMoves  # host pages to staging
    stores: PageMoves  # staging to host pages

    @classmethod
    def of(cls, group: PageGroup) -> GroupMoves:
        pages, loaded, stored = (torch.frombuffer(each, dtype=torch.int32) for each in group[2:])
        to_load, to_store = loaded.nonzero()[:, 0], stored.nonzero()[:, 0]
        return cls(
            PageMoves(pages[to_load].long(), to_load, loaded[to_load].long()),
            PageMoves(to_store, pages[to_store].long(), stored[to_store].long()),
        )


class KVMemory:
    """Arenas of both tiers for one model."""

    def __init__(
        self,
        shape: ModelShape,
        device_pages: int,
        host_pages: int,
        chunk_tokens: int,
        device: str | torch.device = "cpu",
        report: Callable[[str], None] = lambda line: None,
        staging_pages: int = 0,
    ) -> None:
        """`staging_pages` IN_PLACE lets streamed turns attend to the host tier itself; only on a CPU."""
        self.in_place = staging_pages == IN_PLACE
        staging_pages = 0 if self.in_place else staging_pages
        if device_pages < 1 or min(host_pages, staging_pages) < 0 or chunk_tokens < 1:
            raise DeviceError(
                f"cannot hold KV in {device_pages} device pages, {host_pages} host pages and "
                f"{staging_pages} staging pages of {chunk_tokens} tokens"
            )
        self.shape = shape
        self.chunk_tokens = chunk_tokens
        self.page_bytes = shape.kv_bytes_per_page(chunk_tokens)
        self.format = shape.kv_format
        device = torch.device(device)
        self._copies_batches = copies_batches(device, self.page_bytes // shape.num_layers)
        assert device.type == "cpu" or not self.in_place, (
            "on a GPU, attention reads only device memory"
        )
        self.device_arena = self._allocate("device", device_pages + 1, device)
        self.staging_arena = self._allocate("staging", staging_pages, device, STAGING_ARENAS)
        self._kv_scales: torch.Tensor | None = None  # float32 (layers, 2, kv_heads)
        if self.format == FP8:
            exponents = torch.tensor(shape.kv_exponents, dtype=torch.float32)
            if exponents.shape != (shape.num_layers, 2, shape.num_kv_heads):
                raise ValueError(f"scales of fp8 KV have the shape {tuple(exponents.shape)}")
            self._kv_scales = torch.exp2(exponents).to(device)
        if device.type == "cpu":
            self.host_arena = self._allocate("host", host_pages, device)
        else:
            layer_bytes = host_pages * self.page_bytes // shape.num_layers
            locked = host_arena.allocate(shape.num_layers, layer_bytes, device, report)
            self.host_arena = locked.view(self.format.element).view(self._arena_shape(host_pages))

    def _arena_shape(self, num_pages: int, num_layers: int | None = None) -> tuple[int, ...]:
        shape = self.shape
        tile = (shape.num_kv_heads, self.chunk_tokens, self.format.row(shape.head_size))
        return (shape.num_layers if num_layers is None else num_layers, num_pages, 2, *tile)

    def _allocate(
        self, tier: str, num_pages: int, device: torch.device, num_layers: int | None = None
    ) -> torch.Tensor:
        sizes, element = self._arena_shape(num_pages, num_layers), self.format.element
        try:
            return torch.empty(sizes, dtype=element, device=device)
        except (MemoryError, RuntimeError) as error:
            page_bytes = self.page_bytes * sizes[0] // self.shape.num_layers
            raise DeviceError(
                f"cannot allocate {num_pages * page_bytes / 2**30:.1f} GiB for the {tier} tier "
                f"({num_pages} pages of {page_bytes} bytes)"
            ) from error

    @property
    def device_pages(self) -> int:
        return self.device_arena.shape[1] - 1

    @property
    def spare_page(self) -> int:
        """An additional last page that no turn has; padding rows of a batch write there."""
        return self.device_pages

    @property
    def host_pages(self) -> int:
        return self.host_arena.shape[1]

    @property
    def staging_pages(self) -> int:
        """Pages of each staging arena."""
        return self.staging_arena.shape[1]

    @property
    def device_bytes(self) -> int:
        return self.device_pages * self.page_bytes

    @property
    def host_bytes(self) -> int:
        return self.host_pages * self.page_bytes

    def key_pages(self, layer: int) -> torch.Tensor:
        """Return the layer's keys, a view (pages, kv_heads, slots, row)."""
        return self.device_arena[layer, :, 0]

    def value_pages(self, layer: int) -> torch.Tensor:
        return self.device_arena[layer, :, 1]

    def staged_pages(self, arena: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a staging arena's keys and values, views (pages, kv_heads, slots, row)."""
        return self.staging_arena[arena, :, 0], self.staging_arena[arena, :, 1]

    def pages_on_host(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the host tier's keys and values, views (pages, kv_heads, slots, row)."""
        return self.host_arena[layer, :, 0], self.host_arena[layer, :, 1]

    def kv_scales(self, layer: int) -> torch.Tensor | None:
        """Return the layer's scales of keys and values, (2, kv_heads); None if the format has none."""
        return None if self._kv_scales is None else self._kv_scales[layer]

    def prepared(self, moves: PageMoves) -> PageMoves:
        """Upload the moves for `copy_pages` to the arenas' device."""
        device = self.device_arena.device
        if device.type == "cpu":
            return moves
        sources, targets, num_slots = (upload(each, device) for each in moves[:3])
        return PageMoves(sources, targets, num_slots)

    def prepared_for_swap(self, moves: PageMoves) -> PageMoves:
        """Prepare the moves for `swap_in` or `swap_out`."""
        if not self._copies_batches:
            return self.prepared(moves)
        tiles = 2 * self.shape.num_kv_heads
        tile_bytes = self.page_bytes // self.shape.num_layers // tiles
        return moves._replace(pieces=moves.in_pieces(self.chunk_tokens, tiles, tile_bytes))

    def moves_of(self, groups: Sequence[PageGroup]) -> list[GroupMoves]:
        """Return the groups' moves on the arenas' device, uploaded by one copy."""
        group_moves = [GroupMoves.of(group) for group in groups]
        columns = [column for each in group_moves for moves in each for column in moves[:3]]
        uploaded = upload(torch.cat(columns), self.device_arena.device)
        parts = iter(torch.split(uploaded, [len(column) for column in columns]))
        moves = [PageMoves(*each) for each in zip(parts, parts, parts, strict=True)]
        return [GroupMoves(*each) for each in zip(moves[::2], moves[1::2], strict=True)]

    def copy_within(self, layer: int, moves: PageMoves) -> None:
        """Copy device pages to device pages."""
        copy_pages(self.device_arena[layer], self.device_arena[layer], *moves[:3])

    def swap_in(self, layer: int, moves: PageMoves) -> None:
        self._copy_between_tiers(self.host_arena[layer], self.device_arena[layer], moves)

    def swap_out(self, layer: int, moves: PageMoves) -> None:
        self._copy_between_tiers(self.device_arena[layer], self.host_arena[layer], moves)

    def load(self, layer: int, arena: int, moves: PageMoves) -> None:
        """Copy host pages of a layer to a staging arena."""
        if len(moves.num_slots):
            self._copy_between_tiers(self.host_arena[layer], self.staging_arena[arena], moves)

    def store(self, layer: int, arena: int, moves: PageMoves) -> None:
        """Copy a staging arena's pages to host pages of a layer."""
        if len(moves.num_slots):
            self._copy_between_tiers(self.staging_arena[arena], self.host_arena[layer], moves)

    @staticmethod
    def _copy_between_tiers(source: torch.Tensor, target: torch.Tensor, moves: PageMoves) -> None:
        if moves.pieces is None:
            copy_pages(source, target, *moves[:3], mapped=True)
            return
        device = target.device if target.is_cuda else source.device
        handle = torch.cuda.current_stream(device).cuda_stream
        batched_copy.copy_pieces(moves.pieces, source, target, handle)
