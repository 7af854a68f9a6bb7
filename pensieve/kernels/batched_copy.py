"""Moves pieces of memory over the bus by one call of CUDA's driver (cuMemcpyBatchAsync).

The copy engines do it, so no multiprocessor is taken from the computation; each piece costs the host a part
of a microsecond.  The driver orders the whole batch like one operation of the stream, and promises nothing
about the order inside it.  A captured graph cannot hold it, and the stream may not be the default one.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import NamedTuple

import torch

from pensieve.errors import DeviceError

LIBRARY = "libcuda.so.1"
# CUmemcpyAttributes: sources are read in the order of the stream; two locations that do not matter for memory
# that CUDA knows; beside computation if possible.
ACCESS_ORDER_STREAM, OVERLAP_WITH_COMPUTE = 1, 1
_ATTRIBUTES = struct.Struct("=IiiiiI")


class Pieces(NamedTuple):
    """Pieces that move together: parallel int64 tensors on the host, in bytes from where two arenas begin."""

    sources: torch.Tensor
    targets: torch.Tensor
    sizes: torch.Tensor


@cache
def _driver() -> ctypes.CDLL:
    """Load the driver; OSError or AttributeError if there is none, or one that cannot copy batches."""
    driver = ctypes.CDLL(LIBRARY)
    driver.cuMemcpyBatchAsync_v2  # noqa: B018  # the symbol is looked up here
    return driver


def available() -> bool:
    """Return whether the driver copies batches, as those for CUDA 13 do."""
    try:
        _driver()
    except (OSError, AttributeError):
        return False
    return True


def copy_pieces(pieces: Pieces, source: torch.Tensor, target: torch.Tensor, stream: int) -> None:
    """Copy the pieces from one arena to the other, on the stream with this handle, if it is `available`."""
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
        ctypes.byref(
            ctypes.c_size_t(0)
        ),  # the attributes are those of all pieces from the first on
        ctypes.c_size_t(1),
        ctypes.c_void_p(stream),
    )
    if code:
        raise DeviceError(f"cuMemcpyBatchAsync answers {code} for {count} pieces")
