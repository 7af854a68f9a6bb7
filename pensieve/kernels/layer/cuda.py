"""The dense parts of a decoder layer in torch, for GPUs; the same interface as `dense`.

What `transformers` does in some twenty launches a layer takes about twelve: products with one input are
one product, a norm is one launch where its weights are exact in the rows' type, and rotation happens on the
way to the pages (csrc/cuda/write_kv.cu).  Nothing depends on the model's own modules any more, so an
iteration can be captured.

Weights are joined as they are; there is no `int8` here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from pensieve.kernels.attention import cuda
from pensieve.kernels.attention.paged import multi_token_attention
from pensieve.kernels.attention.plan import Work

ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
}


def available(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.bfloat16, torch.float16)


class Packed:
    """Weights (outputs, inputs) of one product, or of several with the same input.

    With an activation the first half of the outputs goes through it and multiplies the second half.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] | None = None,
        activation: str | None = None,
        *,
        int8: bool = False,
    ) -> None:
        if int8:
            raise ValueError("weights are not rounded on a GPU")
        self.panels = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self._bias: torch.Tensor | None = None
        if biases is not None and any(bias is not None for bias in biases):
            self._bias = torch.cat(
                [
                    weight.new_zeros(len(weight)) if bias is None else bias
                    for weight, bias in zip(weights, biases, strict=True)
                ]
            )
        self._activation = ACTIVATIONS[activation] if activation is not None else None
        self.dtype = self.panels.dtype
        self.inputs = self.panels.shape[1]
        self.outputs = self.panels.shape[0] // (1 if activation is None else 2)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        product = F.linear(rows, self.panels, self._bias)
        if self._activation is None:
            return product
        gate, up = torch.split(product, self.outputs, dim=-1)
        gated: torch.Tensor = self._activation(gate)
        return gated.mul_(up)

    def multiply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """out (rows, outputs) = rows (rows, inputs) times the weights, plus the bias."""
        out.copy_(self(rows))


class Norm:
    """x / rms(x) · weight, over each `len(weight)` values."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight  # float32
        self.eps = eps
        self._in_type: dict[torch.dtype, torch.Tensor | None] = {}

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of the last dimension, or of each part of it that is as wide as the weights."""
        width = len(self.weight)
        parts = rows.view(*rows.shape[:-1], rows.shape[-1] // width, width)
        weight = self._exact_in(rows.dtype)
        if weight is not None:
            return F.rms_norm(parts, (width,), weight, self.eps).view(rows.shape)
        wide = F.rms_norm(parts.float(), (width,), self.weight, self.eps)
        return wide.to(rows.dtype).view(rows.shape)

    def _exact_in(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The weights in the rows' type, if that rounds none."""
        if dtype not in self._in_type:
            rounded = self.weight.to(dtype)
            exact = torch.equal(rounded.float(), self.weight)
            self._in_type[dtype] = rounded if exact else None
        return self._in_type[dtype]


class Pages:
    """One iteration's rows, and the arena (layers, pages, 2, kv_heads, slots, head_size) they go to."""

    def __init__(
        self,
        arena: torch.Tensor,
        slot_mapping: torch.Tensor,
        page_table: torch.Tensor,
        slice_offsets: torch.Tensor,
        slice_turns: torch.Tensor,
        slice_starts: torch.Tensor,
        work: Work | None,
    ) -> None:
        self.arena = arena
        self.slot_mapping = slot_mapping
        self.index = (page_table, slice_offsets, slice_turns, slice_starts)
        self.work = work
        self.rotation: tuple[torch.Tensor, torch.Tensor] = (arena, arena)  # until it is known
        self._turned_by: object = None

    def turn_by(self, embeddings: tuple[torch.Tensor, torch.Tensor]) -> None:
        """The cosines and sines (1, tokens, rotary) of this iteration; the same object for all layers."""
        if embeddings is not self._turned_by:
            cosines, sines = (each[0].to(self.arena.dtype).contiguous() for each in embeddings)
            self.rotation, self._turned_by = (cosines, sines), embeddings


class Workspace:
    """Torch's allocator is one."""


class Layer:
    """What stands around the attention of one layer."""

    def __init__(
        self,
        *,
        heads: tuple[int, int, int],  # query heads, KV heads, head size
        attention_in: Packed,
        attention_out: Packed,
        mlp_in: Packed,
        mlp_out: Packed,
        norms: dict[str, Norm],  # those that there are
        index: int,
        scaling: float,
        factor: float,  # of what is added to the residual
        workspace: Workspace,
    ) -> None:
        self._heads = heads
        self._products = (attention_in, attention_out, mlp_in, mlp_out)
        self._norms = norms
        self._index = index
        self._scaling = scaling
        self._factor = factor

    @property
    def weight_bytes(self) -> int:
        return sum(each.panels.nbytes for each in self._products)

    def followed_by(self, then: Any) -> None:
        """A GPU fetches by itself."""

    def fits(self, pages: Any) -> bool:
        """Whether rows can be turned on their way to these pages."""
        if not isinstance(pages, Pages):
            return False
        arena = pages.arena
        return cuda.takes(arena.dtype, *arena.shape[4:]) and arena.dtype == self._products[0].dtype

    def whole(
        self, residual: torch.Tensor, pages: Pages, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The next layer's residual, of all rows or those of `kept`; keys and values are in their slots."""
        query, key, value = self._turnable(residual)
        turned = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        layer = pages.arena[self._index]
        launch = cuda.rotate_and_write_kv_launch(
            *(query, key, value, *pages.rotation, pages.slot_mapping, turned),
            *(layer[:, 0], layer[:, 1]),
        )
        cuda.launch(launch, residual.device)
        attended = torch.empty_like(turned)
        multi_token_attention(
            turned,
            layer[:, 0],
            layer[:, 1],
            *pages.index,
            self._scaling,
            attended,
            pages.work,
        )
        if kept is not None:
            residual, attended = residual.index_select(0, kept), attended.index_select(0, kept)
        return self.after_attention(residual, attended)

    def before_attention(
        self,
        residual: torch.Tensor,  # (tokens, hidden)
        cosines: torch.Tensor,  # (tokens, rotary)
        sines: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, (tokens, their heads, head_size)."""
        query, key, value = self._turnable(residual)
        return _turned(query, cosines, sines), _turned(key, cosines, sines), value

    def after_attention(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The next layer's residual."""
        _, attention_out, mlp_in, mlp_out = self._products
        added = attention_out(attended.flatten(1))
        middle = self._sum(residual, self._normed("attention_after", added))
        added = mlp_out(mlp_in(self._normed("mlp_before", middle)))
        return self._sum(middle, self._normed("mlp_after", added))

    def _turnable(self, residual: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values that are not yet turned."""
        num_heads, num_kv_heads, head_size = self._heads
        counts = [num_heads, num_kv_heads, num_kv_heads]
        rows = self._products[0](self._normed("attention_before", residual))
        query, key, value = torch.split(rows, [count * head_size for count in counts], dim=-1)
        if "query_norm" in self._norms:
            query = self._norms["query_norm"](query)
            key = self._norms["key_norm"](key)
        pairs = zip((query, key, value), counts, strict=True)
        return [each.view(len(rows), count, head_size) for each, count in pairs]

    def _normed(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        norm = self._norms.get(name)
        return rows if norm is None else norm(rows)

    def _sum(self, residual: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return residual + added if self._factor == 1 else residual + added * self._factor


def _turned(rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    rotary = cosines.shape[1]
    part = rows[..., :rotary]
    low, high = part.chunk(2, dim=-1)
    turned = part * cosines[:, None] + torch.cat((-high, low), dim=-1) * sines[:, None]
    return torch.cat((turned, rows[..., rotary:]), dim=-1).to(rows.dtype)
