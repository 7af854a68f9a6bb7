"""Call the attention kernels of csrc/cpu through ctypes.

Each function runs its operation and returns True.  It does nothing and returns False if there is no library
or the library does not support these tensors (their type, strides or page size).  `paged` then calls the
torch implementation (`reference`).
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch

from pensieve.kernels import cpu_library
from pensieve.kernels.attention.input import AttentionInput, AttentionKind
from pensieve.kernels.cpu_library import STORED, TYPES, compiled_library, succeeded
from pensieve.kernels.kv_format import format_of


class KindStruct(ctypes.Structure):
    """Mirror `AttentionKind` of csrc/cpu/attention.h."""

    _fields_: ClassVar = [("scaling", ctypes.c_float)]


KIND_FIELDS = frozenset(each[0] for each in KindStruct._fields_)


def kind_struct(kind: AttentionKind) -> KindStruct:
    return KindStruct(**{name: getattr(kind, name) or 0 for name in KIND_FIELDS})


def multi_token_attention(inputs: AttentionInput, out: torch.Tensor) -> bool:
    query, key_pages, value_pages = inputs[:3]
    page_table, slice_offsets, slice_turns, slice_starts, shared = inputs.page_index
    library = compiled_library() if query.dtype in TYPES else None
    stored = format_of(key_pages, query.dtype)
    if library is None or query.stride(2) != 1 or out.stride(2) != 1 or stored.name not in STORED:
        return False
    if not inputs.kind.needs_only(KIND_FIELDS):
        return False
    _, num_heads, head_size = query.shape
    _, num_kv_heads, slots, row = key_pages.shape
    tile = (slots * row, row, 1)
    if key_pages.stride()[1:] != tile or value_pages.stride() != key_pages.stride():
        return False
    if not (page_table.is_contiguous() and slice_offsets.is_contiguous()):
        return False
    if not (slice_turns.is_contiguous() and slice_starts.is_contiguous()):
        return False
    kind = kind_struct(inputs.kind)
    status: int = library.pensieve_multi_token_attention(
        cpu_library.only_instruction_set,
        TYPES[query.dtype],
        STORED[stored.name],
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        key_pages.data_ptr(),
        value_pages.data_ptr(),
        key_pages.stride(0),
        key_pages.stride(1),
        len(key_pages),
        page_table.data_ptr(),
        page_table.stride(0),
        slice_offsets.data_ptr(),
        slice_turns.data_ptr(),
        slice_starts.data_ptr(),
        shared.slice_groups.buffer_info()[0] if shared is not None else None,
        shared.group_pages.buffer_info()[0] if shared is not None else None,
        len(shared.group_pages) if shared is not None else 0,
        len(slice_turns),
        num_heads,
        num_kv_heads,
        slots,
        head_size,
        ctypes.byref(kind),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        torch.get_num_threads(),
    )
    return succeeded(status)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
) -> bool:
    library = compiled_library()
    _, num_kv_heads, slots, row = key_pages.shape
    tile = (slots * row, row, 1)
    stored = format_of(key_pages, key.dtype)
    if stored.name not in STORED or (stored.name != "auto" and key.dtype not in TYPES):
        return False
    if library is None or key.stride(2) != 1 or value.stride(2) != 1:
        return False
    if key_pages.stride()[1:] != tile or value_pages.stride() != key_pages.stride():
        return False
    size, stored_size = key.element_size(), key_pages.element_size()
    slot_mapping = slot_mapping.contiguous()
    status: int = library.pensieve_write_kv(
        cpu_library.only_instruction_set,
        TYPES.get(key.dtype, 0),
        STORED[stored.name],
        key.data_ptr(),
        key.stride(0) * size,
        key.stride(1) * size,
        value.data_ptr(),
        value.stride(0) * size,
        value.stride(1) * size,
        slot_mapping.data_ptr(),
        len(slot_mapping),
        num_kv_heads,
        slots,
        row * stored_size,
        key_pages.data_ptr(),
        value_pages.data_ptr(),
        key_pages.stride(0) * stored_size,
        key_pages.stride(1) * stored_size,
        len(key_pages),
        torch.get_num_threads(),
    )
    return succeeded(status)


def copy_pages(
    source_arena: torch.Tensor,
    target_arena: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    num_slots: torch.Tensor,
) -> bool:
    library = compiled_library()
    if library is None or not (source_arena.is_contiguous() and target_arena.is_contiguous()):
        return False
    _, two, num_kv_heads, slots, row = source_arena.shape
    moves = (source_pages.contiguous(), target_pages.contiguous(), num_slots.contiguous())
    status: int = library.pensieve_copy_pages(
        source_arena.data_ptr(),
        target_arena.data_ptr(),
        *(each.data_ptr() for each in moves),
        len(num_slots),
        two * num_kv_heads,
        slots,
        row * source_arena.element_size(),
        len(source_arena),
        len(target_arena),
        1,  # one thread: more threads would take cores from the computation
    )
    return succeeded(status)
