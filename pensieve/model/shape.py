"""A model's shape as plain numbers (layers, heads, sizes), and the bytes that its KV takes.

The load probe measures it on what the layers pass to the attention: the field names of configs differ from
model to model.  Only `context_max` comes from the config, or from the operator who lowers it, and the probe
runs a token at its last position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ModelShape:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context_max: int  # in tokens: the positions that the model was made for, or fewer
    dtype: torch.dtype
    num_parameters: int
    weight_bytes: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype.itemsize

    def kv_bytes_per_page(self, chunk_tokens: int) -> int:
        return chunk_tokens * self.kv_bytes_per_token
