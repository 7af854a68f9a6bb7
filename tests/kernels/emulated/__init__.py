"""Run the kernels of csrc/cuda on a CPU. cuda.h explains how."""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.kernels.attention.tensor_map import map_shape
from pensieve.kernels.cuda_launch import Launch
from tests.compiled import compiled

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "csrc"
ENTRY = """
#include "cuda.h"
#include SOURCE
extern "C" void emulate(unsigned blocks, unsigned threads, unsigned shared, void** arguments,
                        int backwards, int early) {
  emulated::early = early != 0;
  emulated::shared_bytes = shared;
  emulated::launch(KERNEL, blocks, threads, arguments, backwards != 0);
}
"""
TYPES: dict[str, Any] = {
    "p": ctypes.c_uint64,
    "i": ctypes.c_int32,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
}


class Map(ctypes.Structure):
    """Replaces a tensor map; see hopper.h."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_int64 * 3),
        ("strides", ctypes.c_int64 * 2),
        ("box", ctypes.c_int64 * 3),
    )


def map_of(pages: torch.Tensor) -> int:
    address, sizes, strides, box = map_shape(pages)
    made = Map(address, sizes, strides, box)
    MAPS.append(made)
    return ctypes.addressof(made)


MAPS: list[Map] = []  # keeps the maps alive, because launches contain their addresses

# A GPU fuses multiplications and additions, so do the same where the CPU can.
FUSED = ("-mfma", "-ffp-contract=fast") if " fma " in Path("/proc/cpuinfo").read_text() else ()

needs_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the emulation's fibers are for x86-64"
)


@functools.cache
def library(source: str, defines: tuple[str, ...], kernel: str) -> ctypes.CDLL:
    """Return the kernel, compiled for this CPU."""
    command = [
        *("g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-w", *FUSED),
        *(f'-DSOURCE="cuda/{source}"', f"-DKERNEL={kernel}"),
        *(f"-D{define}" for define in defines),
    ]
    built = compiled(command, ENTRY, folders=(HERE, CSRC / "include", CSRC))
    return ctypes.CDLL(str(built))


def shared_bytes(launch: Launch) -> int:
    """Return the dynamic shared memory of a block, which the source defines."""
    if not launch.shared:
        return 0
    found = library(launch.kernel.source, launch.kernel.defines, launch.kernel.name)
    return ctypes.c_int.in_dll(found, launch.shared).value


def run(launch: Launch, *, backwards: bool = False, early: bool = False) -> None:
    """Run a launch on tensors in this machine's memory."""
    found = library(launch.kernel.source, launch.kernel.defines, launch.kernel.name)
    values = [TYPES[kind](value) for kind, value in launch.arguments]
    pointers = (ctypes.c_void_p * len(values))(
        *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
    )
    if launch.num_blocks:
        found.emulate(
            launch.num_blocks,
            launch.num_threads,
            shared_bytes(launch),
            pointers,
            int(backwards),
            int(early),
        )
