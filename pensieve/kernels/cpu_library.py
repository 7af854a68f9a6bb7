"""Find, load and declare libpensieve_cpu.so, the compiled kernels for CPUs.

The library is built from csrc/cpu when the package is installed.  If the build failed, `compiled_library`
warns once and returns None, and the torch implementations do the work.

The table `FUNCTIONS` declares the C interface.  Its functions are defined in csrc/cpu:
multi_token_attention.cpp, pages.cpp (copies), layer.cpp (the dense parts of a layer) and
instruction_sets.cpp.  A library that lacks any of these functions is not used at all.

The kernels have their own threads (csrc/cpu/threads.cpp), as many as torch is set to use.  Torch's threads
wait for each other at barriers, which is slow on a shared core.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
import warnings
from ctypes import c_char_p as text
from ctypes import c_int32 as int32
from ctypes import c_int64 as int64
from ctypes import c_void_p as pointer
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pensieve.kernels.shapes import PAGE_SLOTS

NAME = "libpensieve_cpu.so"
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # numbers of the C interface
STORED = {"auto": 0, "int8": 1}  # formats of KV (`kv_format`), numbers of the C interface
# Force all calls to use this instruction set, for comparisons; empty: the best of this machine.
only_instruction_set = os.environ.get("PENSIEVE_CPU_KERNEL", "").encode()

# The result and the arguments of each function; `None` is void.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pensieve_kernel": (text, (int32, text)),
    "pensieve_multi_token_attention": (
        int32,
        (
            *(text, int32, int32),
            *(pointer, int64, int64),  # query
            *(pointer, pointer, int64, int64, int64),  # key and value pages
            *(pointer, int64),  # page table
            *(pointer, pointer, pointer),  # offsets, turns and starts of the slices
            *(pointer, pointer, int32),  # groups of slices that share pages
            *(int32, int32, int32, int32, int32),
            pointer,  # kind
            *(pointer, int64, int64),  # out
            int32,
        ),
    ),
    "pensieve_write_kv": (
        int32,
        (
            *(text, int32, int32),
            *(pointer, int64, int64),  # key
            *(pointer, int64, int64),  # value
            *(pointer, int64),  # slot mapping
            *(int32, int32, int64),
            *(pointer, pointer, int64, int64, int64),  # key and value pages
            int32,
        ),
    ),
    "pensieve_copy_pages": (
        int32,
        (
            *(pointer, pointer, pointer, pointer, pointer, int64),
            *(int32, int32, int64, int64, int64, int32),
        ),
    ),
    "pensieve_lanes": (int32, (text,)),
    "pensieve_measure_parts": (int32, (pointer,)),
    "pensieve_multiply": (int32, (text, int32, pointer, int32)),
    "pensieve_before_attention": (
        int32,
        (*(text, pointer, pointer, pointer, pointer, pointer), *(int32, int32, int32, int32)),
    ),
    "pensieve_after_attention": (
        int32,
        (*(text, pointer, pointer, pointer, pointer, pointer), *(int32, int32)),
    ),
    "pensieve_layer": (
        int32,
        (*(text, pointer, pointer, pointer, pointer), *(pointer, int32, pointer)),
    ),
    "pensieve_layers": (
        int32,
        (
            *(text, pointer, int32, pointer, pointer, pointer),
            *(pointer, int32, pointer, pointer),
        ),
    ),
    "pensieve_normalise": (None, (text, int32, pointer, pointer, pointer, int32, int32)),
    "pensieve_argmax": (None, (text, pointer, int64, int32, int32, pointer, int32)),
}


@cache
def compiled_library() -> ctypes.CDLL | None:
    """Return the loaded library, or None, after a warning, if there is none."""
    for folder in _folders():
        if (folder / NAME).exists():
            try:
                return _declare(ctypes.CDLL(str(folder / NAME)))
            except (OSError, AttributeError) as error:
                warnings.warn(f"{folder / NAME} cannot be used: {error}", stacklevel=2)
                return None
    warnings.warn(
        "pensieve was installed without its CPU kernels (no C++ compiler?); attention runs in "
        "torch, which is slower",
        stacklevel=2,
    )
    return None


def instruction_set(dtype: torch.dtype, head_size: int) -> str | None:
    """Return the instruction set that attention would use, or None if it would run in torch."""
    library = compiled_library()
    if library is None or dtype not in TYPES:
        return None
    name: bytes | None = library.pensieve_kernel(head_size, only_instruction_set)
    return None if name is None else name.decode()


def takes_pages(dtype: torch.dtype, page_slots: int, head_size: int) -> bool:
    """Whether the compiled attention can read pages like these."""
    return page_slots == PAGE_SLOTS and instruction_set(dtype, head_size) is not None


def succeeded(status: int) -> bool:
    """Return True if a kernel's status means done, False if it does not support these tensors."""
    if status == 2:
        raise IndexError("a page or slot lies outside the arena")
    if status == 3:
        raise MemoryError("not enough memory for the buffers of the compiled kernels")
    return status == 0


def _folders() -> list[Path]:
    """Return the library's possible folders: of this file, and of editable installations."""
    named = os.environ.get("PENSIEVE_CPU_LIBRARY")
    if named:
        return [Path(named)]
    site = {sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *sys.path}
    return [
        Path(__file__).parent,
        *(Path(each) / "pensieve" / "kernels" for each in sorted(site) if each),
    ]


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = list(arguments)
        function.restype = result
    return library
