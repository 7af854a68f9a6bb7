"""Where an engine's memory lies on a machine with several memory nodes (NUMA).

Linux puts a page on the node of the thread that writes it first.  One thread packs the weights and another
writes a conversation's first KV, so without a word from us most of what a step reads would lie on one node,
and all cores would wait for the memory of that one.  Which core reads what is decided while it runs (pieces
are claimed from a counter, csrc/cpu/threads.h), so no page has a right place; spread page by page over the
nodes, all of them are read at once (docs/performance.md, "More cores").

The policy is set before anything is loaded, for this thread and all that it starts.  An operator's own
(`numactl`) stays as it is.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from pathlib import Path

NODES = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")
DEFAULT, INTERLEAVE = 0, 3  # policies, as Linux numbers them
CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy, get_mempolicy
BITS = ctypes.sizeof(ctypes.c_ulong) * 8
MASK_WORDS = 1024 // BITS  # the kernel may be built for so many nodes
Policy = tuple[int, frozenset[int]]


def spread_memory(report: Callable[[str], None]) -> None:
    """Memory that is written from now on lies on all nodes whose processors this process may use."""
    nodes = usable_nodes()
    if len(nodes) < 2:
        return
    try:
        if policy()[0] != DEFAULT:
            return
        set_policy((INTERLEAVE, nodes))
    except OSError as error:  # containers often do not allow it
        report(
            f"memory is not spread over the {len(nodes)} memory nodes of this machine ({error.strerror});"
            " where a container forbids it, allow the system call set_mempolicy"
        )
    else:
        report(f"memory is spread over {len(nodes)} memory nodes")


def usable_nodes(nodes: Path = NODES, status: Path = STATUS) -> frozenset[int]:
    """Nodes that have memory which this process may take, and processors that it may run on."""
    try:
        lines = status.read_text().splitlines()
        allowed = next(line.split()[1] for line in lines if line.startswith("Mems_allowed_list:"))
        own = os.sched_getaffinity(0)
        with_memory = numbers((nodes / "has_memory").read_text()) & numbers(allowed)
        return frozenset(
            node
            for node in with_memory
            if numbers((nodes / f"node{node}" / "cpulist").read_text()) & own
        )
    except (AttributeError, OSError, StopIteration, ValueError):
        return frozenset()  # no such thing on this system


def numbers(text: str) -> frozenset[int]:
    """Of a list as Linux writes it: 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def policy() -> Policy:
    """This thread's."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * MASK_WORDS)()
    _call(1, ctypes.byref(mode), mask, ctypes.c_ulong(MASK_WORDS * BITS), None, ctypes.c_ulong(0))
    nodes = (word * BITS + bit for word in range(MASK_WORDS) for bit in range(BITS))
    return mode.value, frozenset(n for n in nodes if mask[n // BITS] >> n % BITS & 1)


def set_policy(wanted: Policy) -> None:
    """For this thread, and threads and processes that it starts from now on."""
    mode, nodes = wanted
    mask = (ctypes.c_ulong * MASK_WORDS)()
    for node in nodes:
        mask[node // BITS] |= 1 << node % BITS
    _call(0, ctypes.c_int(mode), mask, ctypes.c_ulong(MASK_WORDS * BITS))


def _call(which: int, *arguments: object) -> None:
    """A system call that the C library has no function for."""
    calls = CALLS.get(platform.machine())
    if calls is None:
        raise OSError(0, f"not known for {platform.machine()}")
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    if call(ctypes.c_long(calls[which]), *arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
