"""The kernels of csrc/cpu, called through ctypes.

The library is built when the package is installed.  Where that failed, or the machine's vectors or a
tensor's shape do not fit, the torch implementation does the work; a missing library is said once.

Its threads are torch's own (see csrc/cpu/kernels.cpp): `GOMP_parallel` of the OpenMP library that torch
has loaded is handed over, and where torch uses another one, the kernels run in the calling thread.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
import warnings
from functools import cache
from pathlib import Path

import torch

NAME = "libpensieve_cpu.so"
SLOTS = 32
MADV_HUGEPAGE = 14
TYPES = {torch.float32: 0, torch.bfloat16: 1}

only = os.environ.get("PENSIEVE_CPU_KERNEL", "").encode()  # an instruction set, to compare them


@cache
def compiled_library() -> ctypes.CDLL | None:
    """The loaded library; None, after a warning, where there is none."""
    for folder in _folders():
        if (folder / NAME).exists():
            try:
                return _declared(ctypes.CDLL(str(folder / NAME)))
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
    """The name of what `multi_token_attention` would use; None: torch."""
    found = compiled_library()
    if found is None or dtype not in TYPES:
        return None
    name: bytes | None = found.pensieve_kernel(head_size, only)
    return None if name is None else name.decode()


def multi_token_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    slice_offsets: torch.Tensor,
    slice_turns: torch.Tensor,
    slice_starts: torch.Tensor,
    scaling: float,
    out: torch.Tensor,
) -> bool:
    """False, and nothing done, where these tensors are not for it."""
    found = compiled_library() if query.dtype in TYPES else None
    if found is None or query.stride(2) != 1 or out.stride(2) != 1:
        return False
    _, num_heads, head_size = query.shape
    _, num_kv_heads, slots, _ = key_pages.shape
    tile = (slots * head_size, head_size, 1)
    if key_pages.stride()[1:] != tile or value_pages.stride() != key_pages.stride():
        return False
    if not (page_table.is_contiguous() and slice_offsets.is_contiguous()):
        return False
    if not (slice_turns.is_contiguous() and slice_starts.is_contiguous()):
        return False
    answer: int = found.pensieve_multi_token_attention(
        only,
        TYPES[query.dtype],
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        key_pages.data_ptr(),
        value_pages.data_ptr(),
        key_pages.stride(0),
        key_pages.stride(1),
        len(key_pages),
        page_table.data_ptr(),
        page_table.stride(0),
        slice_offsets.data_ptr(),
        slice_turns.data_ptr(),
        slice_starts.data_ptr(),
        len(slice_turns),
        num_heads,
        num_kv_heads,
        slots,
        head_size,
        scaling,
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        torch.get_num_threads(),
    )
    return done(answer)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
) -> bool:
    found = compiled_library()
    _, num_kv_heads, slots, head_size = key_pages.shape
    tile = (slots * head_size, head_size, 1)
    if found is None or key.stride(2) != 1 or value.stride(2) != 1:
        return False
    if key_pages.stride()[1:] != tile or value_pages.stride() != key_pages.stride():
        return False
    size = key.element_size()
    slot_mapping = slot_mapping.contiguous()
    answer: int = found.pensieve_write_kv(
        key.data_ptr(),
        key.stride(0) * size,
        key.stride(1) * size,
        value.data_ptr(),
        value.stride(0) * size,
        value.stride(1) * size,
        slot_mapping.data_ptr(),
        len(slot_mapping),
        num_kv_heads,
        slots,
        head_size * size,
        key_pages.data_ptr(),
        value_pages.data_ptr(),
        key_pages.stride(0) * size,
        key_pages.stride(1) * size,
        len(key_pages),
    )
    return done(answer)


def copy_pages(
    source_arena: torch.Tensor,
    target_arena: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    num_slots: torch.Tensor,
) -> bool:
    found = compiled_library()
    if found is None or not (source_arena.is_contiguous() and target_arena.is_contiguous()):
        return False
    _, two, num_kv_heads, slots, head_size = source_arena.shape
    moves = (source_pages.contiguous(), target_pages.contiguous(), num_slots.contiguous())
    answer: int = found.pensieve_copy_pages(
        source_arena.data_ptr(),
        target_arena.data_ptr(),
        *(each.data_ptr() for each in moves),
        len(num_slots),
        two * num_kv_heads,
        slots,
        head_size * source_arena.element_size(),
        len(source_arena),
        len(target_arena),
    )
    return done(answer)


def done(answer: int) -> bool:
    """What an attention's answer says: done, or not for it."""
    if answer == 2:
        raise IndexError("a page or slot lies outside the arena")
    if answer == 3:
        raise MemoryError("not enough memory for attention over so long a context")
    return answer == 0


def advise_huge(tensor: torch.Tensor) -> None:
    """Ask for large pages under a tensor that will be read again and again; a wish, not a need."""
    page = 2 << 20
    first = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if sys.platform == "linux" and end > first:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_HUGEPAGE)


# -- the library --


def _folders() -> list[Path]:
    """Beside this file, or where an editable installation puts what was built."""
    named = os.environ.get("PENSIEVE_CPU_LIBRARY")
    if named:
        return [Path(named)]
    site = {sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *sys.path}
    return [
        Path(__file__).parent.parent,
        *(Path(each) / "pensieve" / "kernels" for each in sorted(site) if each),
    ]


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    text, real = ctypes.c_char_p, ctypes.c_float
    found.pensieve_kernel.argtypes = [int32, text]
    found.pensieve_kernel.restype = text
    found.pensieve_multi_token_attention.argtypes = [
        *(text, int32),
        *(pointer, int64, int64),
        *(pointer, pointer, int64, int64, int64),
        *(pointer, int64),
        *(pointer, pointer, pointer),
        *(int32, int32, int32, int32, int32),
        real,
        *(pointer, int64, int64),
        int32,
    ]
    found.pensieve_multi_token_attention.restype = int32
    found.pensieve_write_kv.argtypes = [
        *(pointer, int64, int64),
        *(pointer, int64, int64),
        *(pointer, int64),
        *(int32, int32, int64),
        *(pointer, pointer, int64, int64, int64),
    ]
    found.pensieve_write_kv.restype = int32
    found.pensieve_copy_pages.argtypes = [
        *(pointer, pointer, pointer, pointer, pointer, int64),
        *(int32, int32, int64, int64, int64),
    ]
    found.pensieve_copy_pages.restype = int32
    found.pensieve_use_threads_of.argtypes = [pointer]
    found.pensieve_use_threads_of.restype = None
    parallel = _gomp_parallel()
    if parallel is not None:
        found.pensieve_use_threads_of(parallel)
    return found


def _gomp_parallel() -> int | None:
    """Of the OpenMP library that torch has loaded; opening what is loaded already loads nothing."""
    try:  # one that was loaded before everything else serves torch, too
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, TypeError, AttributeError):
        pass
    home = Path(torch.__file__).parent
    found = [
        path
        for folder in (home / "lib", home.parent / "torch.libs")
        for path in sorted(folder.glob("libgomp*.so*"))
    ]
    for path in (*found, *_loaded("libgomp", "libiomp5", "libomp")):
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _loaded(*names: str) -> list[Path]:
    """Libraries of this process whose file names begin so: some builds of torch bring another OpenMP."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count(" /")}
    return sorted(path for path in paths if path.name.startswith(names))
