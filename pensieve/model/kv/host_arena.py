"""Allocate the host tier of a GPU, page-locked and mapped into the device's addresses.

Asynchronous copies need memory that cannot be paged out, and `copy_pages` accesses it directly from the
device.  The arena is an anonymous mapping of exactly the requested size that begins at a memory page (torch's
own pinned allocator rounds up to a power of two).  It lies on the GPU's NUMA node.  It is registered with the
driver layer by layer: locking reaches at best several GiB a second, so progress is reported.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from pensieve.errors import DeviceError

REPORTED_BYTES = 1 << 30  # locking less is too fast to report
REGISTER_PORTABLE, REGISTER_MAPPED = 1, 2
MPOL_DEFAULT, MPOL_PREFERRED = 0, 1
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the number of the system call


class _Locked(mmap.mmap):
    """Anonymous memory that is unregistered from the driver before it is unmapped."""

    address = 0
    registered: tuple[int, ...] = ()  # offsets of the registered pieces

    def __del__(self) -> None:
        for first in self.registered:
            _unregister(self.address + first)


def allocate(
    num_pieces: int,
    piece_bytes: int,
    device: torch.device,
    report: Callable[[str], None] = lambda line: None,
) -> torch.Tensor:
    """Return uint8 (num_pieces * piece_bytes), page-locked for the lifetime of the tensor.

    A copy must not cross from one registration into another.  A copy stays inside a piece (a layer), so each
    piece is registered by itself.  If the size of a piece is not a multiple of the memory page size, the
    whole arena is registered at once.
    """
    num_bytes = num_pieces * piece_bytes
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if piece_bytes % mmap.PAGESIZE:
        num_pieces, piece_bytes = 1, num_bytes
    try:
        mapped = _Locked(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # large pages, where available, make locking faster
            mapped.madvise(getattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NORMAL))
    except (OSError, ValueError, OverflowError) as error:
        raise DeviceError(
            f"the host cannot allocate {num_bytes / 2**30:.1f} GiB for the host tier: {error}. "
            "Lower --host-cache"
        ) from error
    arena = torch.frombuffer(mapped, dtype=torch.uint8)
    mapped.address = arena.data_ptr()
    reported = 0
    with _preferring(numa_node(device)):
        for first in range(0, num_bytes, piece_bytes):
            code = _register(mapped.address + first, piece_bytes)
            if code:
                raise DeviceError(refusal(code, first, num_bytes))
            mapped.registered += (first,)
            share = 10 * (first + piece_bytes) // num_bytes
            if share > reported and num_bytes > REPORTED_BYTES:
                reported = share
                report(f"locking the host tier: {10 * share}%")
    return arena


def refusal(code: int, locked: int, num_bytes: int) -> str:
    return (
        f"the host refuses to lock more than {locked / 2**30:.0f} of {num_bytes / 2**30:.1f} GiB for "
        f"the host tier (cudaHostRegister returned {code}). Lower --host-cache, or raise the limit "
        "of locked memory (ulimit -l, the container's memory)"
    )


def _register(address: int, num_bytes: int) -> int:
    """Return 0 or a CUDA runtime error."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(cudart.cudaHostRegister(address, num_bytes, REGISTER_PORTABLE | REGISTER_MAPPED))


def _unregister(address: int) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(address)


def numa_node(device: torch.device, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node that the GPU is connected to, or None if there is one node or it is unknown."""
    if device.type != "cuda":
        return None
    gpu: Any = torch.cuda.get_device_properties(device)  # its type stubs lack these attributes
    try:
        domain, bus = gpu.pci_domain_id, gpu.pci_bus_id
        address = f"{domain:04x}:{bus:02x}:{gpu.pci_device_id:02x}.0"
    except AttributeError:  # torch before 2.6
        return None
    return node_of(address, root)


def node_of(address: str, root: Path) -> int | None:
    try:
        node = int((root / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


@contextmanager
def _preferring(node: int | None) -> Iterator[None]:
    """Prefer this node for new memory of this thread inside the block."""
    number = SET_MEMPOLICY.get(platform.machine())
    if node is None or number is None:
        yield
        return
    libc = ctypes.CDLL(None)
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    libc.syscall(number, MPOL_PREFERRED, mask, 1024)  # if refused, memory is only slower
    try:
        yield
    finally:
        libc.syscall(number, MPOL_DEFAULT, None, 0)
