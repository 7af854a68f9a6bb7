"""Draw tokens from logits on a GPU with csrc/cuda/draw_tokens.cu, without sorting them.

pensieve/model/sampling/draw.py defines the distribution.  This module makes the launch, and the kernel's
table of options, one record for each row.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import torch

from pensieve.kernels.cuda_launch import Launch, pointers
from pensieve.kernels.nvrtc import Kernel

_RECORD = struct.Struct("=ddqQQ")
SHARED = "draw_tokens_shared_bytes"


class RowOptions(NamedTuple):
    """Mirror `RowOptions` of the source."""

    temperature: float
    top_p: float
    top_k: int  # the vocabulary's size means no limit
    weight_min: int  # for min_p: tokens with a smaller weight (draw.py) are dropped; at least 1
    draw: int  # the row's random number, 62 bits


def table_of(rows: Iterable[RowOptions]) -> torch.Tensor:
    """Return the records as uint8 (rows · record), on the host."""
    return torch.frombuffer(bytearray().join(_RECORD.pack(*row) for row in rows), dtype=torch.uint8)


def draw_tokens_launch(
    values: torch.Tensor,  # float32 (rows, vocab), finite or -infinity
    table: torch.Tensor,  # made by `table_of`
    weight_bits: int,
    token_ids: torch.Tensor,  # int64 (rows)
) -> Launch:
    num_rows, vocab_size = values.shape
    if values.dtype != torch.float32 or values.stride(1) != 1:
        raise ValueError(f"draw_tokens: values are {values.dtype} with strides {values.stride()}")
    if len(table) != num_rows * _RECORD.size or token_ids.shape != (num_rows,):
        raise ValueError(f"draw_tokens: a table of {len(table)} bytes does not fit {num_rows} rows")
    return Launch(
        Kernel("draw_tokens.cu", "draw_tokens"),
        num_rows,
        1024,
        (
            *pointers(values, table),
            ("i", vocab_size),
            ("i", weight_bits),
            ("l", values.stride(0)),
            *pointers(token_ids),
        ),
        SHARED,
    )
