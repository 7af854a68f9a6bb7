"""Spread an engine's memory over all memory nodes of a machine (NUMA).

Linux puts a page on the node of the thread that first writes to the page. One thread packs all weights. So
most of the memory that a step reads would be on one node, and all cores would wait for that node. Any core
may process any part of the weights (csrc/cpu/threads.h), so no node is better for a page than another. If
pages are interleaved over all nodes, the cores read from all nodes in parallel
(docs/performance.md, "More cores").

The policy is set before anything is loaded, for this thread and all threads that it starts. A policy that the
operator has set with `numactl` is kept.
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
SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy, get_mempolicy
BITS = ctypes.sizeof(ctypes.c_ulong) * 8
MASK_WORDS = 1024 // BITS  # Linux supports up to 1024 nodes
Policy = tuple[int, frozenset[int]]


def spread_memory(report: Callable[[str], None]) -> None:
    """From now on, spread newly written memory over all nodes whose processors this process may use."""
    nodes = usable_nodes()
    if len(nodes) < 2:
        return
    try:
        if policy()[0] != DEFAULT:
            return
        set_policy((INTERLEAVE, nodes))
    except OSError as error:  # containers often forbid this call
        report(
            f"memory is not spread over the {len(nodes)} memory nodes of this machine ({error.strerror})."
            " In a container, allow the system call set_mempolicy"
        )
    else:
        report(f"memory is spread over {len(nodes)} memory nodes")


def usable_nodes(nodes: Path = NODES, status: Path = STATUS) -> frozenset[int]:
    """Return the nodes whose memory and processors this process may use; empty if unknown."""
    try:
        lines = status.read_text().splitlines()
        allowed = next(line.split()[1] for line in lines if line.startswith("Mems_allowed_list:"))
        own = os.sched_getaffinity(0)
        with_memory = parsed_numbers((nodes / "has_memory").read_text()) & parsed_numbers(allowed)
        return frozenset(
            node
            for node in with_memory
            if parsed_numbers((nodes / f"node{node}" / "cpulist").read_text()) & own
        )
    except (AttributeError, OSError, StopIteration, ValueError):
        return frozenset()  # the system does not list its nodes


def parsed_numbers(text: str) -> frozenset[int]:
    """Parse a list of numbers in the format of Linux, such as `0-3,8`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def policy() -> Policy:
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * MASK_WORDS)()
    _system_call(
        1, ctypes.byref(mode), mask, ctypes.c_ulong(MASK_WORDS * BITS), None, ctypes.c_ulong(0)
    )
    nodes = (word * BITS + bit for word in range(MASK_WORDS) for bit in range(BITS))
    return mode.value, frozenset(n for n in nodes if mask[n // BITS] >> n % BITS & 1)


def set_policy(wanted: Policy) -> None:
    """Set the policy of this thread, and of the threads and processes that it starts from now on."""
    mode, nodes = wanted
    mask = (ctypes.c_ulong * MASK_WORDS)()
    for node in nodes:
        mask[node // BITS] |= 1 << node % BITS
    _system_call(0, ctypes.c_int(mode), mask, ctypes.c_ulong(MASK_WORDS * BITS))


def _system_call(index: int, *arguments: object) -> None:
    """Make a system call without a function in the C library. `index`: its place in SYSTEM_CALLS' values."""
    calls = SYSTEM_CALLS.get(platform.machine())
    if calls is None:
        raise OSError(0, f"Pensieve does not know the system call's number on {platform.machine()}")
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    if call(ctypes.c_long(calls[index]), *arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
