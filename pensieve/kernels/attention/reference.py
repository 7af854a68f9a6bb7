"""Compute attention in plain torch, for devices, dtypes and page sizes without a compiled kernel.

The daemon uses this module where there is no compiled kernel.  Tests also compare the kernels with it.

Attention gathers a slice's pages into contiguous keys and values and calls torch's fused attention, which
accumulates in fp32.  Grouped heads are folded into rows (the queries of one KV head lie together), so keys
and values are never repeated.

Slices of equal length are computed together.  They are padded to the longest context among them, but at most
to twice a slice's own context.  So a batch of decodes is one call.  Padding is zeroed after the gather,
because a slot that was never written may hold NaN, and 0 · NaN would spread it.  Rows of long slices are
computed a few at a time, which bounds the size of the mask.

Rows of int8 and fp8 become float32 after the gather, and attention on them is computed in float32.

Memory traffic: each page is read and written once more than by a fused paged kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pensieve.kernels.attention.input import AttentionInput
from pensieve.kernels.kv_format import FP8, INT8, dequantised, from_fp8, quantised, to_fp8

_MASK_ELEMENTS_MAX = 1 << 24  # per call; further rows go to the next call
_GATHERED_ELEMENTS_MAX = 1 << 24  # keys per call, unless a single slice has more


class _Slice(NamedTuple):
    first_row: int
    length: int
    context: int
    turn: int


def multi_token_attention(inputs: AttentionInput, out: torch.Tensor) -> None:
    index = inputs.page_index
    offsets = index.slice_offsets.tolist()
    slices = [
        _Slice(offsets[i], offsets[i + 1] - offsets[i], start + offsets[i + 1] - offsets[i], turn)
        for i, (turn, start) in enumerate(
            zip(index.slice_turns.tolist(), index.slice_starts.tolist(), strict=True)
        )
    ]
    num_kv_heads, head_size = inputs.key_pages.shape[1], inputs.query.shape[2]
    for group in _groups(slices, _GATHERED_ELEMENTS_MAX // (num_kv_heads * head_size)):
        _attend(inputs, group, out)


def _groups(slices: list[_Slice], positions_max: int) -> Iterator[list[_Slice]]:
    """Group slices of one length whose contexts differ by at most a factor of two.

    Each turn gathers all of its pages, even pages that several turns share.  So `positions_max` bounds the
    positions that a group gathers, including padding.
    """
    group: list[_Slice] = []
    for piece in sorted(slices, key=lambda piece: (piece.length, piece.context)):
        if piece.length == 0:
            continue
        if group and (
            piece.length != group[0].length
            or piece.context > 2 * group[0].context
            or (len(group) + 1) * piece.context > positions_max
        ):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _attend(inputs: AttentionInput, group: list[_Slice], out: torch.Tensor) -> None:
    query, key_pages, value_pages = inputs[:3]
    device = query.device
    num_heads, head_size = query.shape[1:]
    num_kv_heads, slots = key_pages.shape[1:3]
    length = group[0].length
    context_max = group[-1].context  # `_groups` sorts by context
    num_pages = -(-context_max // slots)
    contexts = torch.tensor([piece.context for piece in group], device=device)
    turns = torch.tensor([piece.turn for piece in group], device=device)
    first_rows = torch.tensor([piece.first_row for piece in group], device=device)

    pages = inputs.page_index.page_table[turns, :num_pages].long()  # (group, num_pages)
    scales = (None, None) if inputs.kv_scales is None else inputs.kv_scales
    # (group, kv_heads, context, head_size)
    keys = _gather(key_pages, pages, contexts, context_max, scales[0])
    values = _gather(value_pages, pages, contexts, context_max, scales[1])

    rows_max = max(1, _MASK_ELEMENTS_MAX // (len(group) * num_heads * context_max))
    for first in range(0, length, rows_max):
        last = min(first + rows_max, length)
        rows = first_rows[:, None] + torch.arange(first, last, device=device)  # (group, rows)
        block = query[rows].to(keys.dtype)  # (group, rows, heads, head_size)
        folded = (
            block.view(len(group), last - first, num_kv_heads, -1, head_size)
            .permute(0, 2, 3, 1, 4)
            .reshape(len(group), num_kv_heads, -1, head_size)
        )  # (group, kv_heads, heads_per_kv_head * rows, head_size)
        mask = _visible(contexts, length, first, last, context_max)
        repeats = num_heads // num_kv_heads
        attended = F.scaled_dot_product_attention(
            folded,
            keys,
            values,
            attn_mask=None if mask is None else mask.repeat(1, 1, repeats, 1),
            scale=inputs.kind.scaling,
        )
        out[rows] = (
            attended.view(len(group), num_kv_heads, repeats, last - first, head_size)
            .permute(0, 3, 1, 2, 4)
            .reshape(len(group), last - first, num_heads, head_size)
            .to(out.dtype)
        )


def _gather(
    arena: torch.Tensor,
    pages: torch.Tensor,
    contexts: torch.Tensor,
    context_max: int,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    """Return contiguous keys (or values) of each slice's context, zero beyond it."""
    num_kv_heads, slots, row = arena.shape[1:]
    num_slices, num_pages = pages.shape
    gathered = _as_bytes(arena)[pages]  # (slices, pages, kv_heads, slots, row)
    gathered = gathered.transpose(1, 2).reshape(num_slices, num_kv_heads, num_pages * slots, row)
    gathered = gathered[:, :, :context_max]
    if arena.dtype == INT8.element:
        gathered = dequantised(gathered)
    elif arena.dtype == FP8.element:
        assert scales is not None, "fp8 pages need scales"
        gathered = from_fp8(gathered.view(FP8.element), scales)
    if num_slices > 1:
        beyond = torch.arange(context_max, device=arena.device) >= contexts[:, None]
        gathered = gathered.masked_fill(beyond[:, None, :, None], 0.0)
    return gathered


def _visible(
    contexts: torch.Tensor, length: int, first: int, last: int, context_max: int
) -> torch.Tensor | None:
    """Return the mask of rows [first, last) of each slice, (slices, 1, rows, context).

    Return None if every row sees the whole context.
    """
    if length == 1 and len(contexts) == 1:
        return None
    device = contexts.device
    positions = (contexts - length)[:, None] + torch.arange(first, last, device=device)
    return (torch.arange(context_max, device=device) <= positions[:, :, None])[:, None]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    slots = key_pages.shape[2]
    pages = torch.div(slot_mapping, slots, rounding_mode="floor")
    offsets = slot_mapping - pages * slots
    if key_pages.dtype == INT8.element:
        key, value = quantised(key), quantised(value)
    elif key_pages.dtype == FP8.element:
        assert kv_scales is not None, "fp8 pages need scales"
        key, value = to_fp8(key, kv_scales[0]), to_fp8(value, kv_scales[1])
    _as_bytes(key_pages).transpose(1, 2)[pages, offsets] = _as_bytes(key)
    _as_bytes(value_pages).transpose(1, 2)[pages, offsets] = _as_bytes(value)


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """View fp8 rows as bytes, because torch cannot index fp8; return other rows unchanged."""
    return rows.view(torch.uint8) if rows.dtype == FP8.element else rows


def copy_pages(
    source_arena: torch.Tensor,
    target_arena: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    num_slots: torch.Tensor,
) -> None:
    slots = source_arena.shape[3]
    for source, target, filled in zip(
        source_pages.tolist(), target_pages.tolist(), num_slots.tolist(), strict=True
    ):
        if filled == slots:
            target_arena[target].copy_(source_arena[source])
        else:
            target_arena[target, :, :, :filled].copy_(source_arena[source, :, :, :filled])
