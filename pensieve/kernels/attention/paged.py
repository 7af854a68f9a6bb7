"""Choose the implementation of attention over paged keys and values for the device of the tensors.

These are the public functions.  Each checks the shapes of its tensors and calls a compiled kernel (through
cpu.py or cuda.py), or reference.py if no compiled kernel supports the tensors.  The values in index tensors
are not checked: they come from the batch, and reading them back would stall a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from pensieve.kernels import cuda_launch
from pensieve.kernels.attention import cpu, cuda, reference
from pensieve.kernels.attention.input import AttentionInput, PageIndex
from pensieve.kernels.attention.plan import DevicePlan
from pensieve.kernels.cuda_launch import Launch
from pensieve.kernels.kv_format import format_of
from pensieve.kernels.shapes import Shapes


def multi_token_attention(
    inputs: AttentionInput,
    out: torch.Tensor,  # (tokens, heads, head_size); must not alias the query
    plan: DevicePlan | None = None,  # on a GPU, the plan for these slices; None makes it here
) -> None:
    """Compute out[t] = softmax(scaling · query[t] · Kᵀ) · V over positions 0 … position of t, per head.

    Sums are accumulated in fp32.
    """
    _check(inputs, out)
    query = inputs.query
    match query.device.type:
        case "cuda" if cuda.takes_inputs(inputs):
            if query.stride()[1:] != (query.shape[2], 1):
                inputs = inputs._replace(query=query.contiguous())
            for launch in cuda.attention_launches(inputs, out, plan or cuda.device_plan(inputs)):
                cuda_launch.launch(launch, query.device)
        case "cpu" if cpu.multi_token_attention(inputs, out):
            pass
        case _:
            reference.multi_token_attention(inputs, out)


def _check(inputs: AttentionInput, out: torch.Tensor) -> None:
    query, key_pages, value_pages = inputs[:3]
    page_table, slice_offsets, slice_turns, slice_starts, _ = inputs.page_index
    shapes = Shapes("multi_token_attention")
    shapes.unify("query", query, ("tokens", "heads", "head_size"))
    _unify_pages(shapes, key_pages, value_pages, query.dtype)
    shapes.unify("page_table", page_table, ("turns", "pages_max"), torch.int32)
    shapes.unify("slice_offsets", slice_offsets, ("slices+1",), torch.int32)
    shapes.unify("slice_turns", slice_turns, ("slices",), torch.int32)
    shapes.unify("slice_starts", slice_starts, ("slices",), torch.int32)
    shapes.unify("out", out, ("tokens", "heads", "head_size"), query.dtype)
    if shapes["heads"] % shapes["kv_heads"]:
        raise ValueError(
            f"multi_token_attention: query has heads = {shapes['heads']}, not a multiple of "
            f"key_pages' kv_heads = {shapes['kv_heads']}"
        )
    if query.numel() and out.data_ptr() == query.data_ptr():
        raise ValueError("multi_token_attention: out aliases query")


def _unify_pages(
    shapes: Shapes, key_pages: torch.Tensor, value_pages: torch.Tensor, dtype: torch.dtype
) -> None:
    stored = format_of(key_pages, dtype)
    symbols = ("pages", "kv_heads", "slots", "row")
    shapes.unify("key_pages", key_pages, symbols, stored.element)
    shapes.unify("value_pages", value_pages, symbols, stored.element)
    shapes.expect("row", stored.row(shapes["head_size"]), f"KV {stored.name}")


class CudaAttention:
    """Run `multi_token_attention` for the layers of one iteration on a GPU.

    The first layer checks and packs everything that the layers share (index, plan, kind, shapes).  Later
    layers only insert their addresses.  A layer that differs is checked like the first.
    """

    def __init__(self, plan: DevicePlan | None) -> None:
        self._plan = plan
        self._index: PageIndex | None = None
        self._form: tuple[Any, ...] = ()
        self._launches: list[Launch] = []

    def __call__(self, inputs: AttentionInput, out: torch.Tensor) -> None:
        if self._plan is None:
            multi_token_attention(inputs, out)
            return
        query, key_pages, value_pages = inputs[:3]
        form = (
            *(query.shape, query.stride(), query.dtype, out.shape, out.stride(), inputs.kind),
            *(key_pages.shape, key_pages.stride(), key_pages.dtype, value_pages.stride()),
        )
        if form == self._form and inputs.page_index is self._index:
            self._launches = cuda.attention_launches_again(self._launches, inputs, out)
        else:
            _check(inputs, out)
            self._launches = cuda.attention_launches(inputs, out, self._plan)
            self._form, self._index = form, inputs.page_index
        for launch in self._launches:
            cuda_launch.launch(launch, query.device)


def write_kv(
    key: torch.Tensor,  # (tokens, kv_heads, head_size)
    value: torch.Tensor,  # (tokens, kv_heads, head_size)
    slot_mapping: torch.Tensor,  # int64 (tokens): page · slots + slot, no value twice
    key_pages: torch.Tensor,  # (pages, kv_heads, slots, row): `kv_format` defines a row
    value_pages: torch.Tensor,  # (pages, kv_heads, slots, row)
    kv_scales: torch.Tensor | None = None,  # float32 (2, kv_heads), of fp8 pages
) -> None:
    """Write the key and value of token t to slot `slot_mapping[t]`; no other slot changes."""
    shapes = Shapes("write_kv")
    shapes.unify("key", key, ("tokens", "kv_heads", "head_size"))
    shapes.unify("value", value, ("tokens", "kv_heads", "head_size"), key.dtype)
    shapes.unify("slot_mapping", slot_mapping, ("tokens",), torch.int64)
    _unify_pages(shapes, key_pages, value_pages, key.dtype)
    tensors = (key, value, slot_mapping, key_pages, value_pages)
    match key.device.type:
        case "cuda" if cuda.takes(key.dtype, *key_pages.shape[2:], stored=key_pages.dtype):
            cuda_launch.launch(cuda.write_kv_launch(*tensors, kv_scales), key.device)
        case "cpu" if cpu.write_kv(*tensors):
            pass
        case _:
            reference.write_kv(*tensors, kv_scales)


def copy_pages(
    source_arena: torch.Tensor,  # (source_pages, 2, kv_heads, slots, row)
    target_arena: torch.Tensor,  # (target_pages, 2, kv_heads, slots, row)
    source_pages: torch.Tensor,  # int64 (copies)
    target_pages: torch.Tensor,  # int64 (copies); no page twice, none that is also a source
    num_slots: torch.Tensor,  # int64 (copies): how many leading slots of the page to copy
    *,
    mapped: bool = False,
) -> None:
    """Copy pages of one layer, bit for bit; both arenas may be the same tensor.

    `mapped` means that an arena in host memory is page-locked and mapped into the other arena's device.
    """
    tail = ("two", "kv_heads", "slots", "row")
    shapes = Shapes("copy_pages")
    shapes.unify("source_arena", source_arena, ("source_arena_pages", *tail), anywhere=True)
    shapes.unify(
        "target_arena",
        target_arena,
        ("target_arena_pages", *tail),
        source_arena.dtype,
        anywhere=True,
    )
    shapes.unify("source_pages", source_pages, ("copies",), torch.int64)
    shapes.unify("target_pages", target_pages, ("copies",), torch.int64)
    shapes.unify("num_slots", num_slots, ("copies",), torch.int64)
    tensors = (source_arena, target_arena, source_pages, target_pages, num_slots)
    match source_arena.device.type, target_arena.device.type:
        case "cpu", "cpu" if cpu.copy_pages(*tensors):
            pass
        case source, target if (
            "cuda" in (source, target)
            and (mapped or source == target)
            and cuda.takes_arena(source_arena)
        ):
            cuda_launch.launch(cuda.copy_pages_launch(*tensors), source_pages.device)
        case _:
            reference.copy_pages(*tensors)
