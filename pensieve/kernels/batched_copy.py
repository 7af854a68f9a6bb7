"""Copy pieces of memory over the bus with one call of CUDA's driver (cuMemcpyBatchAsync).

The copy engines do the work, so no multiprocessor is taken from the computation.  Each piece costs the host a
part of a microsecond.  The driver orders the whole batch like one operation of the stream, but guarantees no
order inside it.  A captured graph cannot contain the call, and the stream must not be the default stream.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import NamedTuple

import torch

from pensieve.errors import DeviceError

LIBRARY = "libcuda.so.1"
# CUmemcpyAttributes: read sources in stream order; two location fields that CUDA ignores for memory that it
# knows; overlap with computation if possible.
ACCESS_ORDER_STREAM, OVERLAP_WITH_COMPUTE = 1, 1
_ATTRIBUTES = struct.Struct("=IiiiiI")


class Pieces(NamedTuple):
    """Pieces to copy together: int64 tensors on the host, with sizes and offsets in bytes."""

    sources: torch.Tensor
    targets: torch.Tensor
    sizes: torch.Tensor


@cache
def _driver() -> ctypes.CDLL:
    """Load the driver; raise OSError or AttributeError if there is none or it cannot copy batches."""
    driver = ctypes.CDLL(LIBRARY)
    driver.cuMemcpyBatchAsync_v2  # noqa: B018  # looks the symbol up
    return driver


def available() -> bool:
    """Whether the driver copies batches, as CUDA 13's drivers do."""
    try:
        _driver()
    except (OSError, AttributeError):
        return False
    return True


def copy_pieces(pieces: Pieces, source: torch.Tensor, target: torch.Tensor, stream: int) -> None:
    """Copy pieces between arenas, on the stream with this handle.  Call this only if `available()`."""
    count = len(pieces.sizes)
    if not count:
        return
    sources = pieces.sources + source.data_ptr()
    targets = pieces.targets + target.data_ptr()
    attributes = _ATTRIBUTES.pack(ACCESS_ORDER_STREAM, 0, 0, 0, 0, OVERLAP_WITH_COMPUTE)
    code: int = _driver().cuMemcpyBatchAsync_v2(
        ctypes.c_void_p(targets.data_ptr()),
        ctypes.c_void_p(sources.data_ptr()),
        ctypes.c_void_p(pieces.sizes.data_ptr()),
        ctypes.c_size_t(count),
        ctypes.create_string_buffer(attributes, len(attributes)),
        ctypes.byref(ctypes.c_size_t(0)),  # index of the first piece that these attributes apply to
        ctypes.c_size_t(1),
        ctypes.c_void_p(stream),
    )
    if code:
        raise DeviceError(f"cuMemcpyBatchAsync returned {code} for {count} pieces")
