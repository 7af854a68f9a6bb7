"""The launches of csrc/cuda/fused_rows.cu, which do between two products what takes torch two launches.

They are used by the choice `fused=1`; without it, and for rows that they do not take, torch does the same.
"""

from __future__ import annotations

import torch

from pensieve.kernels import choices
from pensieve.kernels.attention.cuda import ELEMENTS
from pensieve.kernels.cuda_launch import Launch, pointers
from pensieve.kernels.nvrtc import Kernel

THREADS = 256
EACH = 8  # elements that a thread moves at a time


def takes(rows: torch.Tensor, width: int) -> bool:
    """Whether the kernels are chosen, and can do these rows, of `width` or of twice as many elements."""
    return bool(
        choices.current.fused
        and rows.is_cuda
        and rows.dtype in ELEMENTS
        and rows.is_contiguous()
        and width % EACH == 0
    )


def add_and_norm_launch(
    residual: torch.Tensor,  # (rows, width), contiguous, as are the others
    added: torch.Tensor,
    weight: torch.Tensor,  # (width)
    eps: float,
    whole: torch.Tensor,
    normed: torch.Tensor,
) -> Launch:
    width = len(weight)
    for name, rows in (
        ("residual", residual),
        ("added", added),
        ("sum", whole),
        ("normed", normed),
    ):
        if rows.shape != residual.shape or rows.shape[-1] != width or not rows.is_contiguous():
            raise ValueError(
                f"add_and_norm: {name} is {tuple(rows.shape)}, strides {rows.stride()}"
            )
    return Launch(
        _kernel("add_and_norm", residual),
        residual.numel() // width,
        THREADS,
        (
            *pointers(residual, added, weight),
            ("i", width),
            ("f", eps),
            *pointers(whole, normed),
        ),
        "add_and_norm_shared_bytes",
    )


def gate_and_multiply_launch(rows: torch.Tensor, out: torch.Tensor) -> Launch:
    """`rows` hold gate and up side by side: (rows, 2 · width); `out` (rows, width)."""
    width = out.shape[-1]
    num_rows = out.numel() // width
    if rows.shape[-1] != 2 * width or rows.numel() != 2 * out.numel():
        raise ValueError(f"gate_and_multiply: {tuple(rows.shape)} into {tuple(out.shape)}")
    return Launch(
        _kernel("gate_and_multiply", rows),
        -(-num_rows * (width // EACH) // THREADS),
        THREADS,
        (*pointers(rows), ("i", num_rows), ("i", width), *pointers(out)),
    )


def _kernel(name: str, rows: torch.Tensor) -> Kernel:
    return Kernel("fused_rows.cu", name, (f"ELEMENT={ELEMENTS[rows.dtype]}",))
