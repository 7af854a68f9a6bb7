"""A model's shape as plain numbers (layers, heads, sizes), and the bytes that its KV takes.

The load probe measures it on what the layers pass to the attention: the field names of configs differ from
model to model.  Only `context_max` comes from the config, or from the operator who lowers it, and the probe
runs a token at its last position.  `kv_dtype` is the operator's, too (`--kv-dtype`); the scales of KV in fp8
come from the keys and values of the probe's prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pensieve.kernels.kv_format import KVFormat, kv_format


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
    kv_dtype: str = "auto"  # a name of kernels.kv_format
    # Of the scales of KV in fp8, powers of two: by layer, then for keys and for values, by KV head.
    kv_exponents: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def kv_format(self) -> KVFormat:
        return kv_format(self.kv_dtype, self.dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        row_bytes = self.kv_format.row_bytes(self.head_size)
        return 2 * self.num_layers * self.num_kv_heads * row_bytes

    def kv_bytes_per_page(self, chunk_tokens: int) -> int:
        return chunk_tokens * self.kv_bytes_per_token
