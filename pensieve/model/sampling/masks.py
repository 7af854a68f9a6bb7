"""Forbid tokens: a token whose bit in the row's mask is 0 gets the logit -infinity.

A mask of 150,000 tokens takes 19 kB.  It is uploaded as bits and unpacked on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pensieve.model.transfer import indices, upload


class TokenMask(NamedTuple):
    """The tokens that may come next in one reply."""

    packed: bytes  # a bit for each token of the model's vocabulary, the lowest bit first
    must_end: bool = False  # the mask allows only tokens that end the reply


def masked(values: Tensor, rows: Sequence[int], masks: Sequence[TokenMask]) -> Tensor:
    """Return a copy of `values` (rows, vocab) with -infinity for the tokens that a row's mask forbids."""
    index = indices(rows, values.device)
    allowed = unpacked(masks, values.device)[:, : values.shape[1]]
    chosen = values.index_select(0, index).masked_fill_(~allowed, -torch.inf)
    return values.index_copy(0, index, chosen)


def unpacked(masks: Sequence[TokenMask], device: torch.device) -> Tensor:
    """Return the masks as bool (masks, bits)."""
    joined = bytearray(b"".join(each.packed for each in masks))
    packed = upload(torch.frombuffer(joined, dtype=torch.uint8), device)
    bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=device)
    return (bits & 1).to(torch.bool).view(len(masks), -1)
