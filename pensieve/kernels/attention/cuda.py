"""The kernels of csrc/cuda: what each is launched with, and the launch itself.

A function ending in `_launch` (or `_launches`) turns tensors into a `Launch`: which kernel, how many blocks,
which arguments.  It is plain arithmetic, so the tests carry the same launch out on a CPU.  `launch` does it
on the GPU: the code comes from `nvrtc`, is loaded once per device, and goes onto torch's current stream, so
a CUDA graph captures it like any operation of torch.  Nothing is allocated, waited for or read back.

Tensors go over as addresses and strides; whatever the layout of torch or CuPy objects, nothing else of
them is needed.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from pensieve.errors import DeviceError
from pensieve.kernels import nvrtc
from pensieve.kernels.attention.plan import PAGE, Plan, Tiling, Work, plan_work
from pensieve.kernels.nvrtc import Kernel

HEAD_SIZES = (64, 96, 128, 256)
HOPPER_HEAD_SIZES = (64, 128)
ELEMENTS = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
LOG2_E = 1.4426950408889634
# Shared memory in KiB: what a block of multi_token_attention takes, by head size (and 1 of the driver's);
# what a multiprocessor has, by compute capability (100 where it is not named).
BLOCK_KIB = {64: 52, 96: 60, 128: 80, 256: 96}
MULTIPROCESSOR_KIB = {
    (8, 0): 164,
    (8, 7): 164,
    (9, 0): 228,
    (10, 0): 228,
    (10, 3): 228,
    (11, 0): 228,
}
BLOCKS_MAX = 2  # that fit into a multiprocessor's registers
CAN_USE_HOST_POINTERS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
COPY_BLOCKS = 32  # enough for the bus, and a fraction of the machine

Argument = tuple[Literal["p", "i", "l", "f"], float]  # pointer, int32, int64, float


class Launch(NamedTuple):
    kernel: Kernel
    blocks: int
    threads: int
    arguments: tuple[Argument, ...]
    shared: str = ""  # the constant of the source that says how much dynamic shared memory it needs


def takes(dtype: torch.dtype, page_slots: int, head_size: int) -> bool:
    """Whether the kernels are for KV like this; torch does what they are not for."""
    return dtype in ELEMENTS and page_slots == PAGE and head_size in HEAD_SIZES


def takes_arena(arena: torch.Tensor) -> bool:
    """Whether `copy_pages` is for pages like these: any element, rows of whole 16 bytes."""
    _, _, _, slots, head_size = arena.shape
    return slots == PAGE and head_size * arena.element_size() % 16 == 0


def tiling(head_size: int) -> Tiling:
    """How multi_token_attention.cu shares rows: its `Plan`s."""
    return Tiling(16, 64) if head_size == 256 else Tiling(32, 128)


# -- the plan of an iteration --


def plan(
    lengths: Sequence[int],
    starts: Sequence[int],
    heads: int,
    kv_heads: int,
    head_size: int,
    slots: int,
    waves_more: int | None = None,
) -> Plan:
    group = heads // kv_heads
    return plan_work(lengths, starts, group, kv_heads, tiling(head_size), slots, waves_more)


def work_of(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    slice_offsets: torch.Tensor,
    slice_starts: torch.Tensor,
) -> Work:
    """Planned from the tensors themselves: reads them back, so it is for single calls."""
    offsets = slice_offsets.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(offsets)]
    kv_heads, _, head_size = key_pages.shape[1:]
    made = plan(
        lengths,
        slice_starts.tolist(),
        query.shape[1],
        kv_heads,
        head_size,
        slots(query.device, head_size),
    )
    return Work.of(made, kv_heads, head_size, query.device, wide_above(head_size, query.device))


def wide_above(head_size: int, device: torch.device) -> int | None:
    """On Hopper, wide items have a kernel of their own."""
    if device.type != "cuda" or architecture(device.index or 0) != "sm_90a":
        return None
    return tiling(head_size).narrow_max if head_size in HOPPER_HEAD_SIZES else None


@cache
def slots(device: torch.device, head_size: int) -> int:
    """Blocks of multi_token_attention that run at once."""
    room = MULTIPROCESSOR_KIB.get(torch.cuda.get_device_capability(device), 100)
    blocks = min(BLOCKS_MAX, room // (BLOCK_KIB[head_size] + 1))
    return blocks * multiprocessors(device)


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # of a GPU that is emulated
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# -- launches --


def attention_launches(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    slice_offsets: torch.Tensor,
    slice_turns: torch.Tensor,
    slice_starts: torch.Tensor,
    scaling: float,
    out: torch.Tensor,
    work: Work,
    map_of: Callable[[torch.Tensor], int] | None = None,
) -> list[Launch]:
    """The kernel, the one for Hopper's wide items, and the merge of what was cut.

    `map_of` gives the address of a tensor map of key or value pages.
    """
    kv_heads, head_size = key_pages.shape[1], key_pages.shape[3]
    heads = query.shape[1]
    if not scaling > 0:
        raise ValueError(f"multi_token_attention: scaling is {scaling}, it has to be positive")
    for name, tensor in (("query", query), ("out", out)):
        if tensor.stride()[1:] != (head_size, 1) or tensor.stride(0) % 8:
            raise ValueError(f"multi_token_attention: {name} has strides {tensor.stride()}")
    for name, tensor in (("key_pages", key_pages), ("value_pages", value_pages)):
        if tensor.stride() != (key_pages.stride(0), PAGE * head_size, head_size, 1):
            raise ValueError(f"multi_token_attention: {name} has strides {tensor.stride()}")
    for name, tensor in (("query", query), ("key_pages", key_pages), ("value_pages", value_pages)):
        if tensor.data_ptr() % 16:
            raise ValueError(f"multi_token_attention: {name} does not begin at 16 bytes")
    defines = (f"HEAD_SIZE={head_size}", f"ELEMENT={ELEMENTS[query.dtype]}")
    rows: tuple[Argument, ...] = (
        ("l", query.stride(0)),
        ("l", out.stride(0)),
        ("f", scaling * LOG2_E),
        *_pointers(work.part_values, work.part_sums, out),
    )
    heads_and_pages: tuple[Argument, ...] = (
        ("i", kv_heads),
        ("i", heads // kv_heads),
        ("i", page_table.stride(0)),
    )
    index = _pointers(page_table, slice_offsets, slice_turns, slice_starts)
    launches = []
    if len(work.wide_items):
        num_items = len(work.wide_items) * kv_heads
        map_of = map_of or _map_of
        launches.append(
            Launch(
                Kernel("multi_token_attention_hopper.cu", "multi_token_attention", defines),
                min(num_items, multiprocessors(query.device)),
                384,
                (
                    *_pointers(query),
                    ("p", map_of(key_pages)),
                    ("p", map_of(value_pages)),
                    *index,
                    *_pointers(work.wide_items),
                    ("i", num_items),
                    *heads_and_pages,
                    *rows,
                ),
                "multi_token_attention_shared_bytes",
            )
        )
    if len(work.items):
        launches.append(
            Launch(
                Kernel("multi_token_attention.cu", "multi_token_attention", defines),
                len(work.items) * kv_heads,
                128,
                (
                    *_pointers(query, key_pages, value_pages),
                    *index,
                    *_pointers(work.items),
                    *heads_and_pages,
                    ("l", key_pages.stride(0)),
                    *rows,
                ),
                "multi_token_attention_shared_bytes",
            )
        )
    if len(work.merges):
        launches.append(
            Launch(
                Kernel("merge_parts.cu", "merge_parts", defines),
                len(work.merges) * kv_heads,
                128,
                (
                    *_pointers(work.part_values, work.part_sums, slice_offsets, work.merges),
                    ("i", kv_heads),
                    ("i", heads // kv_heads),
                    ("l", out.stride(0)),
                    *_pointers(out),
                ),
            )
        )
    return launches


def write_kv_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
) -> Launch:
    num_tokens, kv_heads, head_size = key.shape
    for name, tensor in (("key", key), ("value", value)):
        if tensor.stride(2) != 1 or tensor.stride(0) % 2 or tensor.stride(1) % 2:
            raise ValueError(f"write_kv: {name} has strides {tensor.stride()}")
    return Launch(
        Kernel("write_kv.cu", "write_kv", _element(key, head_size)),
        num_tokens,
        128,
        (
            *_pointers(key, value, slot_mapping),
            ("i", kv_heads),
            ("l", key.stride(0)),
            ("l", key.stride(1)),
            ("l", value.stride(0)),
            ("l", value.stride(1)),
            ("l", key_pages.stride(0)),
            *_pointers(key_pages, value_pages),
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
) -> Launch:
    num_tokens, heads, head_size = query.shape
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride()[1:] != (head_size, 1) or tensor.stride(0) % 2:
            raise ValueError(f"rotate_and_write_kv: {name} has strides {tensor.stride()}")
    if cosine.shape[1] % 4 or not (cosine.is_contiguous() and sine.is_contiguous()):
        raise ValueError(
            "rotate_and_write_kv: cosine and sine are (tokens, a multiple of 4), contiguous"
        )
    return Launch(
        Kernel("write_kv.cu", "rotate_and_write_kv", _element(key, head_size)),
        num_tokens,
        128,
        (
            *_pointers(query, key, value, cosine, sine, slot_mapping),
            ("i", heads),
            ("i", key.shape[1]),
            ("i", cosine.shape[1]),
            ("l", query.stride(0)),
            ("l", key.stride(0)),
            ("l", value.stride(0)),
            ("l", key_pages.stride(0)),
            *_pointers(rotated_query, key_pages, value_pages),
        ),
    )


def copy_pages_launch(
    source_arena: torch.Tensor,
    target_arena: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    num_slots: torch.Tensor,
) -> Launch:
    _, two, kv_heads, _, head_size = source_arena.shape
    return Launch(
        Kernel("copy_pages.cu", "copy_pages"),
        min(len(source_pages), COPY_BLOCKS),
        256,
        (
            *_pointers(source_arena, source_pages, target_pages, num_slots),
            ("i", len(source_pages)),
            ("i", two * kv_heads),
            ("i", head_size * source_arena.element_size() // 16),
            *_pointers(target_arena),
        ),
    )


def _pointers(*tensors: torch.Tensor) -> tuple[Argument, ...]:
    return tuple(("p", tensor.data_ptr()) for tensor in tensors)


def _element(tensor: torch.Tensor, head_size: int) -> tuple[str, ...]:
    return (f"HEAD_SIZE={head_size}", f"ELEMENT={ELEMENTS[tensor.dtype]}")


# -- tensor maps --


class MapShape(NamedTuple):
    """Pages as the tensor memory accelerator sees them: (pages, kv_heads · 32, head_size)."""

    address: int
    sizes: tuple[int, int, int]  # elements, the innermost first
    strides: tuple[int, int]  # bytes, of the second and the third
    box: tuple[int, int, int]


def map_shape(pages: torch.Tensor) -> MapShape:
    num_pages, kv_heads, _, head_size = pages.shape
    return MapShape(
        pages.data_ptr(),
        (head_size, kv_heads * PAGE, num_pages),
        (head_size * 2, pages.stride(0) * 2),
        (64, PAGE, 1),
    )


_maps: dict[tuple[torch.device, torch.dtype, MapShape], torch.Tensor] = {}


def _map_of(pages: torch.Tensor) -> int:
    """The address on the device of a map of these pages; made once, and kept."""
    key = (pages.device, pages.dtype, map_shape(pages))
    found = _maps.get(key)
    if found is None:
        with torch.cuda.device(pages.device):  # the driver asks for a context
            found = _maps[key] = _encoded(key[2], pages.dtype).to(pages.device)
    return found.data_ptr()


def _encoded(shape: MapShape, dtype: torch.dtype) -> torch.Tensor:
    """128 bytes that the driver makes (cuTensorMapEncodeTiled)."""
    driver = ctypes.CDLL("libcuda.so.1")
    room = torch.empty(256, dtype=torch.uint8)
    begin = -room.data_ptr() % 128
    code: int = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(room.data_ptr() + begin),
        ctypes.c_int(
            9 if dtype == torch.bfloat16 else 6
        ),  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _FLOAT16
        ctypes.c_uint32(3),
        ctypes.c_void_p(shape.address),
        (ctypes.c_uint64 * 3)(*shape.sizes),
        (ctypes.c_uint64 * 2)(*shape.strides),
        (ctypes.c_uint32 * 3)(*shape.box),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(3),  # CU_TENSOR_MAP_SWIZZLE_128B
        ctypes.c_int(2),  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
        ctypes.c_int(0),  # what lies outside is zero
    )
    if code:
        raise DeviceError(f"cuTensorMapEncodeTiled answers {code} for {shape}")
    return room[begin : begin + 128].clone()


# -- on a GPU --


def launch(wanted: Launch, device: torch.device) -> None:
    """Put it onto torch's current stream of that device."""
    if not wanted.blocks:
        return
    import cupy

    function, shared_bytes = _loaded(wanted.kernel, wanted.shared, device.index or 0)
    types: dict[str, Any] = {
        "p": cupy.uint64,
        "i": cupy.int32,
        "l": cupy.int64,
        "f": cupy.float32,
    }
    arguments = tuple(types[kind](value) for kind, value in wanted.arguments)
    stream = _Stream(torch.cuda.current_stream(device).cuda_stream)
    with torch.cuda.device(device):
        function(
            (wanted.blocks,), (wanted.threads,), arguments, shared_mem=shared_bytes, stream=stream
        )


class _Stream(NamedTuple):
    """Torch's stream as CuPy wants to see one."""

    ptr: int


def prepare(device_index: int) -> None:
    """Raise DeviceError if kernels cannot be had for this device, before anything large is loaded."""
    _loaded(Kernel("copy_pages.cu", "copy_pages"), "", device_index)
    import cupy

    if not cupy.cuda.runtime.deviceGetAttribute(CAN_USE_HOST_POINTERS, device_index):
        raise DeviceError("this machine gives page-locked memory other addresses on its GPU")


@cache
def _loaded(kernel: Kernel, shared: str, device_index: int) -> tuple[Any, int]:
    """The function on that device, and the dynamic shared memory that it needs."""
    import cupy

    path = nvrtc.cubin(kernel, architecture(device_index))
    try:
        with torch.cuda.device(device_index):
            module = cupy.RawModule(path=str(path))
            function = module.get_function(kernel.name)
            shared_bytes = 0
            if shared:
                constant = cupy.ndarray((1,), dtype=cupy.int32, memptr=module.get_global(shared))
                shared_bytes = int(constant[0])
                function.max_dynamic_shared_size_bytes = shared_bytes
                function.preferred_shared_memory_carveout = 100
            return function, shared_bytes
    except Exception as error:  # CuPy's own kinds: a driver that is too old, no memory
        raise DeviceError(f"{kernel.name} cannot be loaded from {path}: {error}") from error


def architecture(device_index: int = 0) -> str:
    """What to compile for; Hopper's own instructions have a name of their own."""
    major, minor = torch.cuda.get_device_capability(device_index)
    if (major, minor) < (8, 0):
        name = torch.cuda.get_device_name(device_index)
        raise DeviceError(f"{name} is of compute capability {major}.{minor}; 8.0 is needed")
    if (major, minor) == (9, 0):
        return "sm_90a"
    # Code for the first of a generation runs on all of it, and every compiler that knows one knows the first.
    return f"sm_{major}0" if major >= 10 else f"sm_{major}{minor}"
