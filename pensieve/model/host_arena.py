"""The host tier of a GPU: memory that is page-locked and mapped into the device's addresses.

Asynchronous copies need memory that cannot be paged out, and `copy_pages` reads and writes it straight from
the device.  It is mapped anonymously (so it begins at a page and is not rounded up, as torch's own
pinned allocator does, to a power of two), put on the NUMA node that the GPU hangs on, and registered
with the driver piece by piece: locking is slow (several GiB a second at best), so whoever waits is told
how far it is.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pensieve.errors import DeviceError

PIECE_BYTES = 1 << 30
REGISTER_PORTABLE, REGISTER_MAPPED = 1, 2
MPOL_DEFAULT, MPOL_PREFERRED = 0, 1
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the number of the system call


def allocate(
    num_bytes: int, device: torch.device, report: Callable[[str], None] = lambda line: None
) -> torch.Tensor:
    """uint8 (num_bytes), page-locked; lives as long as the tensor does."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise DeviceError(
            f"the host has no {num_bytes / 2**30:.1f} GiB for the host tier: {error}; "
            "lower --host-cache"
        ) from error
    arena = torch.frombuffer(mapped, dtype=torch.uint8)
    with _preferring(numa_node(device)):
        for first, size in pieces(num_bytes):
            code = _register(arena.data_ptr() + first, size)
            if code:
                raise DeviceError(refusal(code, first, num_bytes))
            if num_bytes > PIECE_BYTES:
                report(f"locking the host tier: {(first + size) / num_bytes:.0%}")
    return arena


def pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, size), each but the last a whole number of gibibytes."""
    for first in range(0, num_bytes, PIECE_BYTES):
        yield first, min(PIECE_BYTES, num_bytes - first)


def refusal(code: int, locked: int, num_bytes: int) -> str:
    return (
        f"the host refuses to lock more than {locked / 2**30:.0f} of {num_bytes / 2**30:.1f} GiB for "
        f"the host tier (cudaHostRegister answers {code}): lower --host-cache, or raise the limit "
        "of locked memory (ulimit -l, the container's memory)"
    )


def _register(address: int, num_bytes: int) -> int:
    """0, or the error of the CUDA runtime."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(cudart.cudaHostRegister(address, num_bytes, REGISTER_PORTABLE | REGISTER_MAPPED))


def numa_node(device: torch.device, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The node that the GPU hangs on, where there are several."""
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)  # whose stubs do not know these
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
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
    """New pages of this thread come from that node, as long as it has any."""
    number = SET_MEMPOLICY.get(platform.machine())
    if node is None or number is None:
        yield
        return
    libc = ctypes.CDLL(None)
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    libc.syscall(number, MPOL_PREFERRED, mask, 1024)  # a wish: where it is refused, nothing is lost
    try:
        yield
    finally:
        libc.syscall(number, MPOL_DEFAULT, None, 0)
