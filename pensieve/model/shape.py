"""Describe a model's shape as plain numbers (layers, heads, sizes), and compute the bytes of its KV.

Configs name their fields differently, so the load probe measures the shape on the tensors that the layers
pass to the attention.  Only `context_max` comes from the config, and the operator may lower it.  The probe
runs a token at the last position of this context.  `kv_dtype` is the operator's choice (`--kv-dtype`).  The
scales of fp8 KV come from the keys and values of the probe's prompts.
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
    context_max: int  # in tokens; at most the length that the model was trained for
    dtype: torch.dtype
    num_parameters: int
    weight_bytes: int
    kv_dtype: str = "auto"  # a name of kernels.kv_format
    # Exponents of the scales of fp8 KV (powers of two): by layer, then keys and values, then KV head.
    kv_exponents: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def kv_format(self) -> KVFormat:
        return kv_format(self.kv_dtype, self.dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        row_bytes = self.kv_format.row_bytes(self.head_size)
        return 2 * self.num_layers * self.num_kv_heads * row_bytes

    def kv_bytes_per_page(self, chunk_tokens: int) -> int:
        return chunk_tokens * self.kv_bytes_per_token
