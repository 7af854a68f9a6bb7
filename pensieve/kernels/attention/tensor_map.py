"""Make descriptors of pages for Hopper's tensor memory accelerator (TMA).

Each layer's keys and each layer's values have a descriptor.  The driver makes a descriptor from an address
and a shape (cuTensorMapEncodeTiled).  The descriptor is in device memory, and a kernel gets its address.
Arenas live as long as the engine, so descriptors are made once and kept.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from pensieve.errors import DeviceError
from pensieve.kernels.shapes import PAGE_SLOTS

# CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _FLOAT16
DATA_TYPES = {torch.bfloat16: 9, torch.float16: 6}


class MapShape(NamedTuple):
    """Describe pages as one tensor of (pages, kv_heads · 32, head_size), read in boxes."""

    address: int
    sizes: tuple[int, int, int]  # in elements, the innermost dimension first
    strides: tuple[int, int]  # in bytes, of the second and third dimension
    box: tuple[int, int, int]


def map_shape(pages: torch.Tensor) -> MapShape:
    num_pages, kv_heads, _, head_size = pages.shape
    return MapShape(
        pages.data_ptr(),
        (head_size, kv_heads * PAGE_SLOTS, num_pages),
        (head_size * 2, pages.stride(0) * 2),
        (64, PAGE_SLOTS, 1),
    )


_maps: dict[tuple[torch.device, torch.dtype, MapShape], torch.Tensor] = {}


def map_of(pages: torch.Tensor) -> int:
    """Return the device address of the descriptor of these pages."""
    key = (pages.device, pages.dtype, map_shape(pages))
    found = _maps.get(key)
    if found is None:
        with torch.cuda.device(pages.device):  # the driver needs a current context
            found = _maps[key] = _encoded(key[2], pages.dtype).to(pages.device)
    return found.data_ptr()


def _encoded(shape: MapShape, dtype: torch.dtype) -> torch.Tensor:
    """Let the driver make the 128 bytes of a descriptor."""
    driver = ctypes.CDLL("libcuda.so.1")
    buffer = torch.empty(256, dtype=torch.uint8)
    begin = -buffer.data_ptr() % 128
    code: int = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(buffer.data_ptr() + begin),
        ctypes.c_int(DATA_TYPES[dtype]),
        ctypes.c_uint32(3),
        ctypes.c_void_p(shape.address),
        (ctypes.c_uint64 * 3)(*shape.sizes),
        (ctypes.c_uint64 * 2)(*shape.strides),
        (ctypes.c_uint32 * 3)(*shape.box),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(3),  # CU_TENSOR_MAP_SWIZZLE_128B
        ctypes.c_int(2),  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
        ctypes.c_int(0),  # elements outside are zero
    )
    if code:
        raise DeviceError(f"cuTensorMapEncodeTiled returned {code} for {shape}")
    return buffer[begin : begin + 128].clone()
