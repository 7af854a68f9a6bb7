"""The interface of a decoder layer's dense parts (products, norms, rotation, sums).

    cpu    compiled (csrc/cpu/layer.cpp); weights packed for the machine's vectors, optionally as int8
    cuda   torch operations and two kernels of csrc/cuda; can be captured in a CUDA graph

`LayerKernels` belongs to one model.  It makes the model's layers from `LayerWeights`, and the two parts
outside of the layers: the last norm and the LM head.  Layers can only follow layers of the same
device.  `takes` tells whether a layer can run with an iteration's `PagedRows`.

    weights ──── LayerKernels.layer ──> DenseLayer ─┐
    residual of all rows ───────────────────────────┼─ forward ──> the next layer's residual
    arena and PageIndex ── paged_rows ──> PagedRows ┘

A layer computes, in this order (norms in brackets are optional):

    [attention_before] → queries, keys, values → [query_norm, key_norm] → rotation of halves
    → attention → product → [attention_after] · factor + residual
    → [mlp_before] → gate and up → activation(gate) · up → product → [mlp_after] · factor + residual

A norm divides by the root mean square, or is a LayerNorm.  A layer may have no rotation (learned positions
were added before the first layer), or an MLP without a gate (product → activation → product).  Its MLP may
run in parallel with the attention (`parallel`), with a norm of the layer's own input.

Instead of one MLP a layer may have experts (`ExpertWeights`).  A router gives each row a logit for each
expert.  The few experts with the largest logits are applied to the row.  Their outputs are added, each
multiplied by the expert's *share*, the softmax of its logit.

`forward` does all of this, including attention over pages.  If other code computes the attention (the load
probe runs without pages), it calls `before_attention` and `after_attention`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from pensieve.kernels.attention.input import AttentionKind

Activation = Literal["silu", "gelu_tanh", "relu", "gelu"]
NormName = Literal[
    "attention_before", "query_norm", "key_norm", "attention_after", "mlp_before", "mlp_after"
]


class HeadShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_size: int


@dataclass(frozen=True)
class NormWeights:
    """Norm: x / rms(x) · weight + bias, over each run of `len(weight)` values in a row.

    `centred` first subtracts the mean of x (LayerNorm).
    """

    weight: torch.Tensor  # float32
    eps: float
    bias: torch.Tensor | None = None  # float32
    centred: bool = False


@dataclass(frozen=True)
class ProductWeights:
    """Weights of one product, or of several with the same input, whose outputs lie side by side.

    With an activation, the activation of the first half of the outputs multiplies the second half.  If
    `gated` is False, the activation is applied to every output.
    """

    weights: Sequence[torch.Tensor]  # each (outputs, inputs)
    biases: Sequence[torch.Tensor | None]  # each (outputs)
    activation: Activation | None = None
    gated: bool = True


@dataclass(frozen=True)
class MlpWeights:
    into: ProductWeights  # gate and up, or one product that is not gated
    out: ProductWeights


@dataclass(frozen=True)
class ExpertWeights:
    """Experts. Each row uses `num_chosen` experts; the softmax over all experts gives the shares."""

    router: torch.Tensor  # (experts, inputs)
    experts: Sequence[MlpWeights]
    num_chosen: int
    normalized: bool  # the shares of the chosen experts are divided by their sum
    rounded: bool  # shares are rounded to the weights' type


@dataclass(frozen=True)
class LayerWeights:
    """The weights and the form of one decoder layer."""

    layer_index: int
    heads: HeadShape
    attention: AttentionKind
    attention_in: ProductWeights  # queries, keys and values
    attention_out: ProductWeights
    mlp: MlpWeights | ExpertWeights
    norms: Mapping[NormName, NormWeights]  # only the existing norms
    rotates: bool = True  # queries and keys are rotated by their positions
    parallel: bool = False  # the MLP reads the layer's own input, not the sum after the attention


class PackedWeights(Protocol):
    """A product's weights in the layout that the device's kernel reads."""

    @property
    def outputs(self) -> int:
        """Columns of the result; with a gated activation, half of the weights' outputs."""

    @property
    def num_bytes(self) -> int: ...

    def multiply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Compute out (rows, outputs) = rows (rows, inputs) times the weights, plus the bias."""


class Norm(Protocol):
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalize contiguous rows as wide as the weights."""


class PagedRows(Protocol):
    """One iteration's rows, and the pages that they are written to; the same for all layers."""

    def rotate_by(self, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Set the cosines and sines (1, tokens, rotary) of the next layers; None if they do not rotate.

        Passing the same object again costs nothing.
        """


class DenseLayer(Protocol):
    """One decoder layer."""

    factor: float  # multiplies the outputs of attention and MLP, before the residual is added

    @property
    def weight_bytes(self) -> int: ...

    def set_next(self, then: DenseLayer | PackedWeights) -> None:
        """Name the next layer or product, so that its first weights can be prefetched."""

    def takes(self, paged_rows: PagedRows) -> bool:
        """Whether `forward` supports these pages."""

    def forward(
        self,
        residual: torch.Tensor,  # (tokens, hidden), contiguous
        paged_rows: PagedRows,
        kept: torch.Tensor | None = None,  # int64: rows to return; None: all
    ) -> torch.Tensor:
        """Write keys and values to their slots; return the next layer's residual of the kept rows."""

    def before_attention(
        self,
        residual: torch.Tensor,  # (tokens, hidden), contiguous
        # (tokens, rotary), contiguous, of the residual's type or float32; None if the layer does not rotate.
        cosines: torch.Tensor | None,
        sines: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, each (tokens, its heads, head_size), valid until the next call."""

    def after_attention(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the next layer's residual, from this layer's residual and its attention's result."""


class LayerChain(Protocol):
    """All layers of a model, run one after the other."""

    def takes(self, paged_rows: PagedRows) -> bool:
        """Whether every layer supports these pages."""

    def forward(
        self, residual: torch.Tensor, paged_rows: PagedRows, kept: torch.Tensor
    ) -> torch.Tensor:
        """Return the result of the last layer's `forward`. All pages must be ready before the call."""


class LayerKernels(Protocol):
    """Makes the dense parts of one model."""

    def available(self, dtype: torch.dtype) -> bool:
        """Whether kernels exist for weights of this type."""

    def unavailable_reason(self, dtype: torch.dtype) -> str:
        """Return why there are no kernels for weights of this type."""

    def form(self, dtype: torch.dtype) -> str:
        """Return a description of how layers of this type run, such as `C++ (AVX2)`."""

    def unsupported_reason(self, weights: LayerWeights) -> str:
        """Return why the kernels cannot compute such a layer, or an empty string."""

    def layer(self, weights: LayerWeights, *, int8: bool = False) -> DenseLayer: ...

    def chain(self, layers: Sequence[DenseLayer]) -> LayerChain | None:
        """Return the layers as one call, or None if that would be no faster."""

    def pack(self, product: ProductWeights, *, int8: bool = False) -> PackedWeights: ...

    def norm(self, weights: NormWeights) -> Norm: ...
