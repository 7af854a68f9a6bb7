"""Run the dense parts of a decoder layer on a GPU, mostly in torch operations.

`protocol` is the interface.  `transformers` makes about twenty launches per layer; this module makes about
ten.  Products with the same input become one product.  A gate and its product are one launch.  A sum and its
norm are also one launch, if the rows' type holds the norm's weights exactly (csrc/cuda/fused_rows.cu).
Queries and keys are rotated on their way to the pages (`rotate_and_write_kv` of csrc/cuda/write_kv.cu).  The
model's own modules are not used, so an iteration can be captured as a CUDA graph.

Weights keep their type: `int8` is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from pensieve.kernels import cuda_launch
from pensieve.kernels.attention import cuda
from pensieve.kernels.attention.cuda import ELEMENTS
from pensieve.kernels.attention.input import AttentionInput, PageIndex
from pensieve.kernels.attention.paged import CudaAttention
from pensieve.kernels.attention.plan import DevicePlan
from pensieve.kernels.cuda_launch import Launch, pointers
from pensieve.kernels.layer.protocol import (
    Activation,
    DenseLayer,
    LayerWeights,
    MlpWeights,
    NormName,
    NormWeights,
    PackedWeights,
    PagedRows,
    ProductWeights,
)
from pensieve.kernels.nvrtc import Kernel

FUSED_THREADS = 256
FUSED_EACH = 8  # elements that a thread moves at a time
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
}


class CudaLayerKernels:
    """Make the layers of one model; buffers come from torch's allocator."""

    def available(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def unavailable_reason(self, dtype: torch.dtype) -> str:
        return f"there are no kernels for {str(dtype).removeprefix('torch.')} on a GPU"

    def form(self, dtype: torch.dtype) -> str:
        return "CUDA kernels, with torch's matrix products"

    def unsupported_reason(self, weights: LayerWeights) -> str:
        if not weights.attention.needs_only(cuda.KIND_FIELDS):
            return "the GPU's layers do not support the model's kind of attention"
        if not isinstance(weights.mlp, MlpWeights):
            return "the GPU's layers do not support experts"
        if weights.parallel or not weights.rotates or not weights.mlp.into.gated:
            return (
                "the GPU's layers need rotary embeddings, and a gated MLP that runs after the attention, "
                "not in parallel"
            )
        if any(norm.centred for norm in weights.norms.values()):
            return "the GPU's layers do not support LayerNorm"
        return ""

    def layer(self, weights: LayerWeights, *, int8: bool = False) -> CudaLayer:
        return CudaLayer(weights, int8=int8)

    def chain(self, layers: Sequence[DenseLayer]) -> None:
        """Return None: a CUDA graph already replays the layers without running Python."""

    def pack(self, product: ProductWeights, *, int8: bool = False) -> CudaPackedWeights:
        return CudaPackedWeights(product.weights, product.biases, product.activation, int8=int8)

    def norm(self, weights: NormWeights) -> CudaNorm:
        return CudaNorm(weights)


class CudaPackedWeights:
    """Hold the weights of a product, or of several products with the same input, as one matrix."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] | None = None,
        activation: Activation | None = None,
        *,
        int8: bool = False,
    ) -> None:
        if int8:
            raise ValueError("int8 weights are not supported on a GPU")
        self.matrix = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self._bias: torch.Tensor | None = None
        if biases is not None and any(bias is not None for bias in biases):
            self._bias = torch.cat(
                [
                    weight.new_zeros(len(weight)) if bias is None else bias
                    for weight, bias in zip(weights, biases, strict=True)
                ]
            )
        self._activation = ACTIVATIONS[activation] if activation is not None else None
        self.dtype = self.matrix.dtype
        self.inputs = self.matrix.shape[1]
        self.outputs = self.matrix.shape[0] // (1 if activation is None else 2)

    @property
    def num_bytes(self) -> int:
        return self.matrix.nbytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        product = F.linear(rows, self.matrix, self._bias)
        if self._activation is None:
            return product
        if self._activation is F.silu and takes_fused(product, self.outputs):
            out = product.new_empty(*product.shape[:-1], self.outputs)
            cuda_launch.launch(gate_and_multiply_launch(product, out), product.device)
            return out
        gate, up = torch.split(product, self.outputs, dim=-1)
        return self._activation(gate).mul_(up)

    def multiply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self(rows))


class CudaNorm:
    """Normalize the last dimension, or each part of it that is as wide as the weights."""

    def __init__(self, weights: NormWeights) -> None:
        self.weight = weights.weight  # float32
        self.eps = weights.eps
        self._bias, self._centred = weights.bias, weights.centred
        self._in_type: dict[torch.dtype, torch.Tensor | None] = {}

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        width = len(self.weight)
        parts = rows.view(*rows.shape[:-1], rows.shape[-1] // width, width)
        if self._centred:
            wide = F.layer_norm(parts.float(), (width,), self.weight, self._bias, self.eps)
            return wide.to(rows.dtype).view(rows.shape)
        weight = self._exact_in(rows.dtype)
        if weight is not None:
            return F.rms_norm(parts, (width,), weight, self.eps).view(rows.shape)
        wide = F.rms_norm(parts.float(), (width,), self.weight, self.eps)
        return wide.to(rows.dtype).view(rows.shape)

    def with_sum(
        self, residual: torch.Tensor, added: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return residual + added, and its norm."""
        weight = None if self._centred else self._exact_in(residual.dtype)
        if (
            weight is None
            or not takes_fused(residual, len(weight))
            or residual.dtype != added.dtype
        ):
            total = residual + added
            return total, self(total)
        total, normed = torch.empty_like(residual), torch.empty_like(residual)
        tensors = (residual, added, weight, self.eps, total, normed)
        cuda_launch.launch(add_and_norm_launch(*tensors), residual.device)
        return total, normed

    def _exact_in(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the weights in the rows' type, or None if that would round a weight."""
        if dtype not in self._in_type:
            rounded = self.weight.to(dtype)
            exact = torch.equal(rounded.float(), self.weight)
            self._in_type[dtype] = rounded if exact else None
        return self._in_type[dtype]


class CudaPagedRows:
    """One iteration's rows, in `dtype`, and their arena (layers, pages, 2, kv_heads, slots, row)."""

    def __init__(
        self,
        arena: torch.Tensor,
        slot_mapping: torch.Tensor,
        page_index: PageIndex,
        plan: DevicePlan | None,
        dtype: torch.dtype,
        kv_scales: Callable[[int], torch.Tensor | None] = lambda layer: None,
    ) -> None:
        self.arena = arena
        self.dtype = dtype
        self.kv_scales = kv_scales
        self.slot_mapping = slot_mapping
        self.page_index = page_index
        self.attention = CudaAttention(plan)
        self.rotation: tuple[torch.Tensor, torch.Tensor] = (arena, arena)  # until `rotate_by`
        self._rotated_by: object = None

    def rotate_by(self, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        assert rotation is not None, "`unsupported_reason` refuses layers that do not rotate"
        if rotation is not self._rotated_by:
            cosines, sines = (each[0].to(self.dtype).contiguous() for each in rotation)
            self.rotation, self._rotated_by = (cosines, sines), rotation


class CudaLayer:
    """One decoder layer: its products and norms."""

    def __init__(self, weights: LayerWeights, *, int8: bool = False) -> None:
        self._heads = weights.heads
        assert isinstance(weights.mlp, MlpWeights)
        self._products = [
            CudaPackedWeights(each.weights, each.biases, each.activation, int8=int8)
            for each in (
                weights.attention_in,
                weights.attention_out,
                weights.mlp.into,
                weights.mlp.out,
            )
        ]
        self._norms = {name: CudaNorm(each) for name, each in weights.norms.items()}
        self._layer_index = weights.layer_index
        self._attention = weights.attention
        self.factor = 1.0

    @property
    def weight_bytes(self) -> int:
        return sum(each.num_bytes for each in self._products)

    def set_next(self, then: DenseLayer | PackedWeights) -> None:
        """Do nothing: a GPU does not prefetch weights."""

    def takes(self, paged_rows: PagedRows) -> bool:
        if not isinstance(paged_rows, CudaPagedRows):
            return False
        arena = paged_rows.arena
        dtype = paged_rows.dtype
        return (
            cuda.takes(dtype, *arena.shape[4:], stored=arena.dtype)
            and dtype == self._products[0].dtype
        )

    def forward(
        self, residual: torch.Tensor, paged_rows: PagedRows, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(paged_rows, CudaPagedRows)
        heads, _, head_size = self._heads
        rotated = residual.new_empty(len(residual), heads, head_size)
        self.write_rows(residual, paged_rows, rotated)
        attended = torch.empty_like(rotated)
        self.attend(rotated, paged_rows, attended)
        if kept is not None:
            residual, attended = residual.index_select(0, kept), attended.index_select(0, kept)
        return self.after_attention(residual, attended)

    def write_rows(
        self, residual: torch.Tensor, paged_rows: CudaPagedRows, rotated: torch.Tensor
    ) -> None:
        """Write queries into `rotated`, and keys and values into their pages."""
        query, key, value = self._before_rotation(residual)
        launch = cuda.rotate_and_write_kv_launch(
            *(query, key, value, *paged_rows.rotation, paged_rows.slot_mapping, rotated),
            *self._pages(paged_rows),
        )
        cuda_launch.launch(launch, residual.device)

    def attend(
        self, rotated: torch.Tensor, paged_rows: CudaPagedRows, attended: torch.Tensor
    ) -> None:
        key_pages, value_pages, kv_scales = self._pages(paged_rows)
        pages = (key_pages, value_pages, paged_rows.page_index)
        paged_rows.attention(AttentionInput(rotated, *pages, self._attention, kv_scales), attended)

    def _pages(
        self, paged_rows: CudaPagedRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return this layer's key pages, value pages and their scales."""
        layer = paged_rows.arena[self._layer_index]
        return layer[:, 0], layer[:, 1], paged_rows.kv_scales(self._layer_index)

    def before_attention(
        self, residual: torch.Tensor, cosines: torch.Tensor | None, sines: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = self._before_rotation(residual)
        assert cosines is not None
        assert sines is not None
        return _rotate(query, cosines, sines), _rotate(key, cosines, sines), value

    def after_attention(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        _, attention_out, mlp_in, mlp_out = self._products
        added = attention_out(attended.flatten(1))
        added = self._norm_rows("attention_after", added)
        before = self._norms.get("mlp_before")
        if before is not None and self.factor == 1:
            middle, rows = before.with_sum(residual, added)
        else:
            middle = self._sum(residual, added)
            rows = self._norm_rows("mlp_before", middle)
        added = mlp_out(mlp_in(rows))
        return self._sum(middle, self._norm_rows("mlp_after", added))

    def _before_rotation(self, residual: torch.Tensor) -> list[torch.Tensor]:
        """Return queries, keys and values before the rotation."""
        num_heads, num_kv_heads, head_size = self._heads
        counts = [num_heads, num_kv_heads, num_kv_heads]
        rows = self._products[0](self._norm_rows("attention_before", residual))
        query, key, value = torch.split(rows, [count * head_size for count in counts], dim=-1)
        if "query_norm" in self._norms:
            query = self._norms["query_norm"](query)
            key = self._norms["key_norm"](key)
        pairs = zip((query, key, value), counts, strict=True)
        return [each.view(len(rows), count, head_size) for each, count in pairs]

    def _norm_rows(self, name: NormName, rows: torch.Tensor) -> torch.Tensor:
        norm = self._norms.get(name)
        return rows if norm is None else norm(rows)

    def _sum(self, residual: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return residual + added if self.factor == 1 else residual + added * self.factor


def _rotate(rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    rotary = cosines.shape[1]
    part = rows[..., :rotary]
    low, high = part.chunk(2, dim=-1)
    rotated = part * cosines[:, None] + torch.cat((-high, low), dim=-1) * sines[:, None]
    return torch.cat((rotated, rows[..., rotary:]), dim=-1).to(rows.dtype)


def takes_fused(rows: torch.Tensor, width: int) -> bool:
    """Whether csrc/cuda/fused_rows.cu supports these rows.

    A row has `width` elements, or 2 · `width` if it holds gate and up.  The kernels of that file need
    one launch where torch needs two launches.
    """
    return bool(
        rows.is_cuda and rows.dtype in ELEMENTS and rows.is_contiguous() and width % FUSED_EACH == 0
    )


def add_and_norm_launch(
    residual: torch.Tensor,  # (rows, width), contiguous, like the others
    added: torch.Tensor,
    weight: torch.Tensor,  # (width)
    eps: float,
    total: torch.Tensor,
    normed: torch.Tensor,
) -> Launch:
    width = len(weight)
    for name, rows in (
        ("residual", residual),
        ("added", added),
        ("sum", total),
        ("normed", normed),
    ):
        if rows.shape != residual.shape or rows.shape[-1] != width or not rows.is_contiguous():
            raise ValueError(
                f"add_and_norm: {name} is {tuple(rows.shape)}, strides {rows.stride()}"
            )
    return Launch(
        _fused_rows("add_and_norm", residual),
        residual.numel() // width,
        FUSED_THREADS,
        (
            *pointers(residual, added, weight),
            ("i", width),
            ("f", eps),
            *pointers(total, normed),
        ),
        "add_and_norm_shared_bytes",
    )


def gate_and_multiply_launch(rows: torch.Tensor, out: torch.Tensor) -> Launch:
    """Return the launch for `rows` (rows, 2 · width), gate and up side by side, and `out` (rows, width)."""
    width = out.shape[-1]
    num_rows = out.numel() // width
    if rows.shape[-1] != 2 * width or rows.numel() != 2 * out.numel():
        raise ValueError(f"gate_and_multiply: {tuple(rows.shape)} into {tuple(out.shape)}")
    return Launch(
        _fused_rows("gate_and_multiply", rows),
        -(-num_rows * (width // FUSED_EACH) // FUSED_THREADS),
        FUSED_THREADS,
        (*pointers(rows), ("i", num_rows), ("i", width), *pointers(out)),
    )


def _fused_rows(name: str, rows: torch.Tensor) -> Kernel:
    return Kernel("fused_rows.cu", name, (f"ELEMENT={ELEMENTS[rows.dtype]}",))
