"""Masks of tokens: which ones a row may be, as bits on the host, and as -infinity in its logits.

One row's mask of 150,000 tokens is 19 kB; it goes to the device as it is and becomes a tensor of bools there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pensieve.model.transfer import indices, upload


class TokenMask(NamedTuple):
    """Which tokens may be next in one reply."""

    packed: bytes  # a bit for each token of the model's vocabulary, the lowest bit first
    must_end: bool = False  # only tokens that end the reply


def masked(values: Tensor, rows: Sequence[int], masks: Sequence[TokenMask]) -> Tensor:
    """A copy of `values` (rows, vocab) with -infinity where one of the masks forbids a token in its row."""
    index = indices(rows, values.device)
    allowed = unpacked(masks, values.device)[:, : values.shape[1]]
    chosen = values.index_select(0, index).masked_fill_(~allowed, -torch.inf)
    return values.index_copy(0, index, chosen)


def unpacked(masks: Sequence[TokenMask], device: torch.device) -> Tensor:
    """bool (masks, bits)."""
    together = bytearray(b"".join(each.packed for each in masks))
    packed = upload(torch.frombuffer(together, dtype=torch.uint8), device)
    bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=device)
    return (bits & 1).to(torch.bool).view(len(masks), -1)
