"""Describe launches of the attention kernels of csrc/cuda as plain values: kernel, blocks and arguments.

A function ending in `_launch` (or `_launches`) turns tensors into a `Launch` (`kernels.cuda_launch`) by plain
arithmetic, without a GPU.  `plan` decides which blocks do which work of an iteration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import torch

from pensieve.kernels import choices, cuda_launch
from pensieve.kernels.attention import tensor_map
from pensieve.kernels.attention.input import AttentionInput, SharedPages
from pensieve.kernels.attention.plan import BlocksAtOnce, DevicePlan, Plan, plan_work
from pensieve.kernels.attention.tiles import Tiling
from pensieve.kernels.cuda_launch import Argument, Launch, pointers
from pensieve.kernels.kv_format import FP8
from pensieve.kernels.nvrtc import Kernel
from pensieve.kernels.shapes import PAGE_SLOTS

HEAD_SIZES = (64, 96, 128, 256)
HOPPER_HEAD_SIZES = (64, 128)
KIND_FIELDS = frozenset({"scaling"})
ELEMENTS = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
LOG2_E = 1.4426950408889634
# BLOCK_KIB: shared memory of one block of multi_token_attention, by head size, without the 1 KiB that the
# driver adds. MULTIPROCESSOR_KIB: shared memory of a multiprocessor, by compute capability; else 100.
BLOCK_KIB = {64: 52, 96: 60, 128: 80, 256: 96}
MULTIPROCESSOR_KIB = {
    (8, 0): 164,
    (8, 7): 164,
    (9, 0): 228,
    (10, 0): 228,
    (10, 3): 228,
    (11, 0): 228,
}
BLOCKS_MAX = 2  # blocks per multiprocessor: its registers hold no more
ROWS_OF_A_MERGE = 4  # rows per block of merge_parts
# For copy_pages. More blocks do not copy faster over the bus, and take multiprocessors from the computation.
BUS_COPY_BLOCKS, DEVICE_COPY_BLOCKS, COPY_THREADS = 4, 32, 1024


def takes(dtype: torch.dtype, page_slots: int, head_size: int, *, stored: torch.dtype) -> bool:
    """Whether the kernels support these rows and this KV. Otherwise torch computes the attention."""
    return (
        dtype in ELEMENTS
        and stored in (dtype, FP8.element)
        and page_slots == PAGE_SLOTS
        and head_size in HEAD_SIZES
    )


def takes_inputs(inputs: AttentionInput) -> bool:
    pages, dtype = inputs.key_pages, inputs.query.dtype
    return inputs.kind.needs_only(KIND_FIELDS) and takes(
        dtype, *pages.shape[2:], stored=pages.dtype
    )


def takes_arena(arena: torch.Tensor) -> bool:
    """Whether `copy_pages` can copy these pages: any type, but rows of a multiple of 16 bytes."""
    _, _, _, slots, head_size = arena.shape
    return slots == PAGE_SLOTS and head_size * arena.element_size() % 16 == 0


def tiling(head_size: int) -> Tiling:
    """Return the tile sizes of multi_token_attention.cu, which must agree with its struct `Plan`."""
    return Tiling(16, 64) if head_size == 256 else Tiling(32, 128)


# -- the plan of an iteration --


def plan(
    lengths: Sequence[int],
    starts: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    blocks: BlocksAtOnce,
    waves_more: int | None = None,
    shared: SharedPages | None = None,
) -> Plan:
    """Plan the blocks. `waves_more`: waves to try beyond the fewest possible; None: the default."""
    group = num_heads // num_kv_heads
    rows = tiling(head_size)
    return plan_work(lengths, starts, group, num_kv_heads, rows, blocks, waves_more, shared)


def device_plan(inputs: AttentionInput) -> DevicePlan:
    """Plan a single call from its tensors, which are copied to the host.

    Iterations are planned in advance.
    """
    query, key_pages, index = inputs.query, inputs.key_pages, inputs.page_index
    lengths = [end - begin for begin, end in itertools.pairwise(index.slice_offsets.tolist())]
    num_kv_heads, _, head_size = key_pages.shape[1:]
    made = plan(
        lengths,
        index.slice_starts.tolist(),
        query.shape[1],
        num_kv_heads,
        head_size,
        blocks_at_once(query.device, head_size, key_pages.dtype),
        shared=index.shared,
    )
    return DevicePlan.of(made, num_kv_heads, head_size, query.device)


def blocks_at_once(
    device: torch.device, head_size: int, stored: torch.dtype = torch.bfloat16
) -> BlocksAtOnce:
    """Return how many blocks of multi_token_attention, and of Hopper's own kernel, the device runs at once.

    Hopper's kernel does not support fp8 KV: its products read shared memory directly, without a conversion.
    """
    found = _blocks_at_once(device, head_size, bool(choices.current.hopper))
    return found._replace(wide=None) if stored == FP8.element else found


@cache
def _blocks_at_once(device: torch.device, head_size: int, hopper: bool) -> BlocksAtOnce:
    room = MULTIPROCESSOR_KIB.get(torch.cuda.get_device_capability(device), 100)
    count = cuda_launch.multiprocessors(device)
    blocks = min(BLOCKS_MAX, room // (BLOCK_KIB[head_size] + 1)) * count
    is_hopper = hopper and cuda_launch.architecture(device.index or 0) == "sm_90a"
    return BlocksAtOnce(blocks, count if is_hopper and head_size in HOPPER_HEAD_SIZES else None)


# -- launches --


def attention_launches(
    inputs: AttentionInput,
    out: torch.Tensor,
    plan: DevicePlan,
    map_of: Callable[[torch.Tensor], int] | None = None,
) -> list[Launch]:
    """Return up to three launches.

    These are Hopper's kernel for the wide items, the main kernel for the other items, and the merge of parts.

    `map_of` returns the address of a tensor map of key or value pages.
    """
    query, key_pages, value_pages = inputs[:3]
    page_table, slice_offsets, slice_turns, slice_starts, _ = inputs.page_index
    scaling = inputs.kind.scaling
    num_kv_heads, head_size = key_pages.shape[1], key_pages.shape[3]
    num_heads = query.shape[1]
    if not scaling > 0:
        raise ValueError(f"multi_token_attention: scaling is {scaling}, but must be positive")
    for name, tensor in (("query", query), ("out", out)):
        if tensor.stride()[1:] != (head_size, 1) or tensor.stride(0) % 8:
            raise ValueError(f"multi_token_attention: {name} has strides {tensor.stride()}")
    for name, tensor in (("key_pages", key_pages), ("value_pages", value_pages)):
        if tensor.stride() != (key_pages.stride(0), PAGE_SLOTS * head_size, head_size, 1):
            raise ValueError(f"multi_token_attention: {name} has strides {tensor.stride()}")
    for name, tensor in (("query", query), ("key_pages", key_pages), ("value_pages", value_pages)):
        if tensor.data_ptr() % 16:
            raise ValueError(f"multi_token_attention: {name} is not aligned to 16 bytes")
    defines = (f"HEAD_SIZE={head_size}", f"ELEMENT={ELEMENTS[query.dtype]}")
    scales = _scales(inputs.kv_scales, key_pages)
    output_arguments: tuple[Argument, ...] = (
        ("l", query.stride(0)),
        ("l", out.stride(0)),
        ("f", scaling * LOG2_E),
        *pointers(plan.part_values, plan.part_sums, out),
    )
    heads_and_pages: tuple[Argument, ...] = (
        ("i", num_kv_heads),
        ("i", num_heads // num_kv_heads),
        ("i", page_table.stride(0)),
    )
    index = pointers(page_table, slice_offsets, slice_turns, slice_starts)
    launches = []
    if len(plan.wide_items):
        if key_pages.dtype == FP8.element:
            raise ValueError("multi_token_attention: Hopper's kernel does not support fp8")
        num_items = len(plan.wide_items) * num_kv_heads
        map_of = map_of or tensor_map.map_of
        source = "multi_token_attention_hopper.cu"
        launches.append(
            Launch(
                Kernel(source, "multi_token_attention", defines + hopper_defines()),
                min(num_items, cuda_launch.multiprocessors(query.device)),
                384,
                (
                    *pointers(query),
                    ("p", map_of(key_pages)),
                    ("p", map_of(value_pages)),
                    *index,
                    *pointers(plan.wide_items),
                    ("i", num_items),
                    *heads_and_pages,
                    *output_arguments,
                ),
                "multi_token_attention_shared_bytes",
            )
        )
    if len(plan.items):
        launches.append(
            Launch(
                Kernel(
                    "multi_token_attention.cu",
                    "multi_token_attention",
                    defines + stored(key_pages.dtype),
                ),
                len(plan.items) * num_kv_heads,
                128,
                (
                    *pointers(query, key_pages, value_pages),
                    scales,
                    *index,
                    *pointers(plan.items, plan.pack_rows),
                    *heads_and_pages,
                    ("l", key_pages.stride(0)),
                    *output_arguments,
                ),
                "multi_token_attention_shared_bytes",
            )
        )
    if len(plan.merges):
        row_runs = -(-plan.merge_rows // ROWS_OF_A_MERGE)
        launches.append(
            Launch(
                Kernel("merge_parts.cu", "merge_parts", defines),
                len(plan.merges) * num_kv_heads * row_runs,
                128,
                (
                    *pointers(plan.part_values, plan.part_sums, slice_offsets, plan.merges),
                    ("i", row_runs),
                    ("i", num_kv_heads),
                    ("i", num_heads // num_kv_heads),
                    ("l", out.stride(0)),
                    *pointers(out),
                ),
            )
        )
    return launches


def attention_launches_again(
    launches: Sequence[Launch],
    inputs: AttentionInput,
    out: torch.Tensor,
    map_of: Callable[[torch.Tensor], int] | None = None,
) -> list[Launch]:
    """Return the launches for another layer, whose tensors differ only in their addresses."""
    query, key_pages, value_pages = inputs[:3]
    map_of = map_of or tensor_map.map_of
    read = pointers(query, key_pages, value_pages)
    (written,) = pointers(out)
    if any(address % 16 for _, address in read):
        raise ValueError("multi_token_attention: a tensor is not aligned to 16 bytes")
    found = []
    for launch in launches:
        arguments = launch.arguments
        if launch.kernel.source == "multi_token_attention.cu":
            arguments = (*read, _scales(inputs.kv_scales, key_pages), *arguments[4:-1], written)
        elif launch.kernel.source == "multi_token_attention_hopper.cu":
            maps: tuple[Argument, ...] = (("p", map_of(key_pages)), ("p", map_of(value_pages)))
            arguments = (read[0], *maps, *arguments[3:-1], written)
        else:
            arguments = (*arguments[:-1], written)
        found.append(launch._replace(arguments=arguments))
    return found


def write_kv_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> Launch:
    num_tokens, num_kv_heads, head_size = key.shape
    for name, tensor in (("key", key), ("value", value)):
        if tensor.stride(2) != 1 or tensor.stride(0) % 4 or tensor.stride(1) % 4:
            raise ValueError(f"write_kv: {name} has strides {tensor.stride()}")
        if tensor.data_ptr() % 8:
            raise ValueError(f"write_kv: {name} is not aligned to 8 bytes")
    return Launch(
        Kernel("write_kv.cu", "write_kv", _element(key, head_size) + stored(key_pages.dtype)),
        num_tokens,
        128,
        (
            *pointers(key, value, slot_mapping),
            ("i", num_kv_heads),
            ("l", key.stride(0)),
            ("l", key.stride(1)),
            ("l", value.stride(0)),
            ("l", value.stride(1)),
            ("l", key_pages.stride(0)),
            _scales(kv_scales, key_pages),
            *pointers(key_pages, value_pages),
        ),
    )


def rotate_and_write_kv_launch(
    query: torch.Tensor,  # (tokens, heads, head_size)
    key: torch.Tensor,  # (tokens, kv_heads, head_size)
    value: torch.Tensor,
    cosine: torch.Tensor,  # (tokens, rotated)
    sine: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotated_query: torch.Tensor,  # (tokens, heads, head_size), contiguous
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> Launch:
    num_tokens, num_heads, head_size = query.shape
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride()[1:] != (head_size, 1) or tensor.stride(0) % 4:
            raise ValueError(f"rotate_and_write_kv: {name} has strides {tensor.stride()}")
        if tensor.data_ptr() % 8:
            raise ValueError(f"rotate_and_write_kv: {name} is not aligned to 8 bytes")
    if cosine.shape[1] % 4 or not (cosine.is_contiguous() and sine.is_contiguous()):
        raise ValueError(
            "rotate_and_write_kv: cosine and sine must be contiguous, "
            "and their second dimension must be a multiple of 4"
        )
    return Launch(
        Kernel(
            "write_kv.cu",
            "rotate_and_write_kv",
            _element(key, head_size) + stored(key_pages.dtype),
        ),
        num_tokens,
        128,
        (
            *pointers(query, key, value, cosine, sine, slot_mapping),
            ("i", num_heads),
            ("i", key.shape[1]),
            ("i", cosine.shape[1]),
            ("l", query.stride(0)),
            ("l", key.stride(0)),
            ("l", value.stride(0)),
            ("l", key_pages.stride(0)),
            _scales(kv_scales, key_pages),
            *pointers(rotated_query, key_pages, value_pages),
        ),
    )


def copy_pages_launch(
    source_arena: torch.Tensor,
    target_arena: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    num_slots: torch.Tensor,
) -> Launch:
    _, two, num_kv_heads, _, head_size = source_arena.shape
    crosses = source_arena.device != target_arena.device
    most_blocks = BUS_COPY_BLOCKS if crosses else DEVICE_COPY_BLOCKS
    return Launch(
        Kernel("copy_pages.cu", "copy_pages"),
        min(len(source_pages), most_blocks),
        COPY_THREADS,
        (
            *pointers(source_arena, source_pages, target_pages, num_slots),
            ("i", len(source_pages)),
            ("i", two * num_kv_heads),
            ("i", head_size * source_arena.element_size() // 16),
            *pointers(target_arena),
        ),
    )


def hopper_defines() -> tuple[str, ...]:
    """Return the definitions that the current choices add to Hopper's kernel."""
    return ("WATCHDOG",) if choices.current.watchdog else ()


def stored(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the compiler definition for KV whose stored type differs from the query's; else nothing."""
    return ("STORED=E4m3",) if dtype == FP8.element else ()


def _scales(kv_scales: torch.Tensor | None, key_pages: torch.Tensor) -> Argument:
    """Return the address of a layer's scales, or 0 if its pages need none."""
    if key_pages.dtype != FP8.element:
        return ("p", 0)
    if kv_scales is None or kv_scales.shape != (2, key_pages.shape[1]):
        raise ValueError("fp8 pages need a scale for each KV head, of keys and of values")
    if kv_scales.dtype != torch.float32 or not kv_scales.is_contiguous():
        raise ValueError(f"scales are {kv_scales.dtype} with strides {kv_scales.stride()}")
    (address,) = pointers(kv_scales)
    return address


def _element(tensor: torch.Tensor, head_size: int) -> tuple[str, ...]:
    return (f"HEAD_SIZE={head_size}", f"ELEMENT={ELEMENTS[tensor.dtype]}")
