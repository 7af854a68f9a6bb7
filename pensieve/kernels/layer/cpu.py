"""Run the dense parts of a decoder layer in compiled kernels on a CPU.

`protocol` is the interface.  csrc/cpu/layer.cpp implements it for float32, bfloat16 and float16.  A row's
result does not depend on other rows in the call.

The weights of a product are stored in panels.  A panel holds all weights of some outputs: as many outputs as
two SIMD registers have lanes.  A panel is a sequence of steps.  A step holds the weights of one float or
float16 input, two bfloat16 inputs or four int8 inputs, for all outputs of the panel.  So a product reads a
panel from front to back.  Outputs that pad the last panel have weights of 0.  csrc/cpu/layer.h has the
structures.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F

from pensieve.kernels import cpu_library
from pensieve.kernels.attention import cpu as attention_cpu
from pensieve.kernels.attention.cpu import KindStruct, kind_struct
from pensieve.kernels.cpu_library import TYPES, compiled_library, succeeded, takes_pages
from pensieve.kernels.layer.cpu_rows import CpuPagedRows, Widths, Workspace
from pensieve.kernels.layer.protocol import (
    Activation,
    DenseLayer,
    ExpertWeights,
    LayerWeights,
    NormWeights,
    PackedWeights,
    PagedRows,
    ProductWeights,
)
from pensieve.kernels.shapes import Shapes

# The stages of csrc/cpu/laps.h.  Experts, with their router, count as "MLP out".
PARTS = (
    *("norm before", "heads in", "rotation", "KV written", "attention", "heads out"),
    *("sum and norm", "MLP in", "MLP out", "sum", "output matrix"),
)
ZERO = 128  # the unsigned byte that represents 0 in a quantized row
ACTIVATIONS: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2, "relu": 3, "gelu": 4}
MADV_HUGEPAGE = 14


class LinearStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("panels", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("bias", "scales", "offsets")),
        ("panel_bytes", ctypes.c_int64),
        ("inputs", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("pointwise", ctypes.c_int32),
    ]


class ProductStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("linear", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("out_float", ctypes.c_int32),
        ("row_scales", ctypes.c_void_p),
    ]


class NormStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("weight", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("bias", ctypes.c_void_p),
        ("centred", ctypes.c_int32),
    ]


@cache
def library() -> ctypes.CDLL:
    """Return the compiled library, which must exist."""
    found = compiled_library()
    assert found is not None, "layers were made without the compiled library"
    return found


class CpuPackedWeights:
    """Pack the weights of a product, or of several products of one input (`ProductWeights`), as panels.

    With `int8`, the weights of an output become integers from -127 to 127, scaled by the largest weight.
    Each row that is multiplied by them is rounded like this, too.  Sums of integers are exact.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] | None = None,
        activation: Activation | None = None,
        *,
        int8: bool = False,
        gated: bool = True,
    ) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        bias = _concatenated(weights, biases) if biases is not None else None
        self.dtype = weight.dtype
        self.inputs = weight.shape[1]
        lanes = library().pensieve_lanes(cpu_library.only_instruction_set)
        gated = gated and activation is not None
        if not gated:
            self.outputs = weight.shape[0]
            order = torch.arange(self.outputs)
            order = F.pad(order, (0, -self.outputs % (2 * lanes)), value=-1)
        else:
            self.outputs = weight.shape[0] // 2
            halves = torch.arange(2 * self.outputs).view(2, -1)
            halves = F.pad(halves, (0, -self.outputs % lanes), value=-1)
            order = halves.view(2, -1, lanes).transpose(0, 1).reshape(-1)
        self.int8 = int8
        scales = offsets = None
        if int8:
            scales = weight.float().abs().amax(1) / 127
            weight = (weight.float() / scales.clamp_min(1e-38)[:, None]).round_().to(torch.int8)
            offsets = _picked(ZERO * weight.sum(1, dtype=torch.int32), order)
            scales = _picked(scales, order)
        self._step = 1 if weight.dtype == torch.float16 else 4 // weight.itemsize
        self.panels = _panels(weight, order, 2 * lanes, self._step)
        bias = None if bias is None else _picked(bias.float(), order)
        self._vectors = (bias, scales, offsets)
        self.struct = LinearStruct(
            self.panels.data_ptr(),
            *(0 if each is None else each.data_ptr() for each in self._vectors),
            self.panels[0].nbytes,
            self.panels.shape[1] * self._step,
            self.inputs,
            self.outputs,
            ACTIVATIONS[activation] if activation and gated else 0,
            ACTIVATIONS[activation] if activation and not gated else 0,
        )

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes

    def multiply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        shapes = Shapes("multiply")
        shapes.unify("rows", rows, ("rows", "inputs"), self.dtype)
        shapes.unify("out", out, ("rows", "outputs"))
        if (shapes["inputs"], shapes["outputs"]) != (self.inputs, self.outputs):
            raise ValueError(
                f"multiply: weights are for ({self.inputs}, {self.outputs}), "
                f"not ({shapes['inputs']}, {shapes['outputs']})"
            )
        if out.dtype not in (self.dtype, torch.float32) or out.stride(1) != 1:
            raise ValueError(
                f"multiply: out is {out.dtype} with stride {out.stride(1)} in a row. It must be "
                f"{self.dtype} (the type of rows) or torch.float32, with stride 1"
            )
        if not self.int8 and self.inputs % self._step:
            rows = F.pad(rows, (0, 1))
        elif rows.stride(1) != 1:
            rows = rows.contiguous()
        product = ProductStruct(
            ctypes.addressof(self.struct),
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            out.data_ptr(),
            out.stride(0),
            out.dtype != self.dtype,
        )
        succeeded(
            library().pensieve_multiply(
                cpu_library.only_instruction_set,
                TYPES[self.dtype],
                ctypes.byref(product),
                torch.get_num_threads(),
            )
        )


def packed(product: ProductWeights, *, int8: bool) -> CpuPackedWeights:
    return CpuPackedWeights(
        product.weights, product.biases, product.activation, int8=int8, gated=product.gated
    )


class CpuNorm:
    """Normalize rows as wide as the weights."""

    def __init__(self, weights: NormWeights) -> None:
        self.weights = weights  # kept alive
        self.struct = norm_struct(weights)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        assert rows.is_contiguous()
        assert rows.shape[1] == len(self.weights.weight)
        out = torch.empty_like(rows)
        library().pensieve_normalise(
            cpu_library.only_instruction_set,
            TYPES[rows.dtype],
            ctypes.byref(self.struct),
            rows.data_ptr(),
            out.data_ptr(),
            len(rows),
            torch.get_num_threads(),
        )
        return out


def norm_struct(norm: NormWeights) -> NormStruct:
    """Return a structure with the addresses of the weights; its owner must keep the weights alive."""
    return NormStruct(
        norm.weight.data_ptr(),
        len(norm.weight),
        norm.eps,
        None if norm.bias is None else norm.bias.data_ptr(),
        norm.centred,
    )


def _concatenated(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    """Concatenate biases, with zeros for missing biases; return None if no product has a bias."""
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            weight.new_zeros(len(weight)) if bias is None else bias
            for weight, bias in zip(weights, biases, strict=True)
        ]
    )


def _picked(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return rows[order], with zeros where the order is -1."""
    picked = rows[order.clamp(min=0)]
    picked[order < 0] = 0
    return picked


def _panels(weight: torch.Tensor, order: torch.Tensor, width: int, step: int) -> torch.Tensor:
    """Return (panels, steps, width, step), made a few panels at a time to avoid a second full copy."""
    inputs = weight.shape[1] + -weight.shape[1] % step
    panels = torch.empty(
        (len(order) // width, inputs // step, width, step), dtype=weight.dtype, device="cpu"
    )
    _advise_huge(panels)
    for first in range(0, len(panels), 64):
        some = _picked(weight, order[first * width : (first + 64) * width])
        some = F.pad(some, (0, inputs - weight.shape[1]))
        panels[first : first + 64] = some.view(-1, width, inputs // step, step).transpose(1, 2)
    return panels


def _advise_huge(tensor: torch.Tensor) -> None:
    """Ask the operating system for huge pages under weights: each iteration reads all weights."""
    page = 2 << 20
    first = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if sys.platform == "linux" and end > first:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_HUGEPAGE)


class ExpertsStruct(ctypes.Structure):
    """Mirror csrc/cpu/experts.h."""

    _fields_: ClassVar = [
        ("router", LinearStruct),
        *((name, ctypes.c_void_p) for name in ("into", "out")),
        *((name, ctypes.c_int32) for name in ("num_experts", "num_chosen")),
        *((name, ctypes.c_int32) for name in ("normalised", "rounded")),
    ]


class PackedExperts:
    """Pack the router and experts of one layer.

    `int8` rounds the experts but not the router, because the router decides which experts compute.
    """

    def __init__(self, weights: ExpertWeights, *, int8: bool) -> None:
        self._router = CpuPackedWeights([weights.router])
        self._into, self._out = (
            [packed(each, int8=int8) for each in products]
            for products in (
                [expert.into for expert in weights.experts],
                [expert.out for expert in weights.experts],
            )
        )
        self.num_experts, self.num_chosen = len(weights.experts), weights.num_chosen
        self.width = self._into[0].outputs
        assert self._router.outputs == self.num_experts >= self.num_chosen
        self._arrays = [
            (LinearStruct * self.num_experts)(*(each.struct for each in products))
            for products in (self._into, self._out)
        ]  # kept alive
        self.struct = ExpertsStruct(
            self._router.struct,
            *(ctypes.addressof(each) for each in self._arrays),
            self.num_experts,
            self.num_chosen,
            weights.normalized,
            weights.rounded,
        )

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in (self._router, *self._into, *self._out))


def available(dtype: torch.dtype) -> bool:
    return dtype in TYPES and compiled_library() is not None


def argmax(rows: torch.Tensor) -> torch.Tensor:
    """Return the first column of each float32 row's largest value, or -1 if a value is not finite.

    The result is int64 (rows).
    """
    assert rows.dtype == torch.float32
    assert rows.stride(1) == 1
    out = torch.empty(len(rows), dtype=torch.int64)
    library().pensieve_argmax(
        cpu_library.only_instruction_set,
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


class CpuLayerKernels:
    """Make the layers of one model, which share their buffers."""

    def __init__(self) -> None:
        self._workspace = Workspace()

    def available(self, dtype: torch.dtype) -> bool:
        return available(dtype)

    def unavailable_reason(self, dtype: torch.dtype) -> str:
        if compiled_library() is None:
            return "pensieve was installed without its compiled kernels"
        names = " and ".join(str(each).removeprefix("torch.") for each in TYPES)
        return f"the compiled kernels support {names}, not {str(dtype).removeprefix('torch.')}"

    def form(self, dtype: torch.dtype) -> str:
        return f"C++ ({cpu_library.instruction_set(dtype, 0)})"

    def unsupported_reason(self, weights: LayerWeights) -> str:
        if not weights.attention.needs_only(attention_cpu.KIND_FIELDS):
            return "the compiled layers do not support the model's kind of attention"
        return ""

    def layer(self, weights: LayerWeights, *, int8: bool = False) -> CpuLayer:
        return CpuLayer(weights, self._workspace, int8=int8)

    def chain(self, layers: Sequence[DenseLayer]) -> CpuLayerChain:
        compiled = [each for each in layers if isinstance(each, CpuLayer)]
        assert len(compiled) == len(layers), "layers can only follow layers of their own kind"
        return CpuLayerChain(compiled, self._workspace)

    def pack(self, product: ProductWeights, *, int8: bool = False) -> CpuPackedWeights:
        return packed(product, int8=int8)

    def norm(self, weights: NormWeights) -> CpuNorm:
        return CpuNorm(weights)


class LayerStruct(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("type", "index", "hidden")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_size")),
        *((name, NormStruct) for name in ("attention_before", "query_norm", "key_norm")),
        *((name, NormStruct) for name in ("attention_after", "mlp_before", "mlp_after")),
        *((name, LinearStruct) for name in ("attention_in", "attention_out", "mlp_in", "mlp_out")),
        ("factor", ctypes.c_float),
        ("kind", KindStruct),
        ("then", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("parallel", ctypes.c_int32),
    ]


class CpuLayer:
    """One decoder layer: its packed weights, and the structure that points to them."""

    def __init__(self, weights: LayerWeights, workspace: Workspace, *, int8: bool) -> None:
        self.heads = weights.heads
        self._workspace = workspace
        self._norms = weights.norms  # kept alive
        num_heads, num_kv_heads, head_size = weights.heads
        self._attention = [
            packed(each, int8=int8) for each in (weights.attention_in, weights.attention_out)
        ]
        attention_in, attention_out = self._attention
        assert attention_in.outputs == (num_heads + 2 * num_kv_heads) * head_size
        self.dtype = attention_in.dtype
        self.widths = Widths(
            attention_in.inputs, attention_in.outputs, heads_out=num_heads * head_size
        )
        self.struct = LayerStruct(
            type=TYPES[attention_in.dtype],
            index=weights.layer_index,
            hidden=attention_in.inputs,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            attention_in=attention_in.struct,
            attention_out=attention_out.struct,
            factor=1.0,
            kind=kind_struct(weights.attention),
            parallel=weights.parallel,
            **{name: norm_struct(norm) for name, norm in weights.norms.items()},
        )
        self._mlp: list[CpuPackedWeights] = []
        self._experts: PackedExperts | None = None
        if isinstance(weights.mlp, ExpertWeights):
            self._experts = experts = PackedExperts(weights.mlp, int8=int8)
            self.widths = self.widths._replace(
                experts=experts.num_experts, chosen=experts.num_chosen, expert_mlp=experts.width
            )
            self.struct.experts = ctypes.addressof(experts.struct)
        else:
            self._mlp = [packed(each, int8=int8) for each in (weights.mlp.into, weights.mlp.out)]
            self.struct.mlp_in, self.struct.mlp_out = (each.struct for each in self._mlp)
            self.widths = self.widths._replace(mlp=self._mlp[0].outputs)

    @property
    def factor(self) -> float:
        return float(self.struct.factor)

    @factor.setter
    def factor(self, factor: float) -> None:
        self.struct.factor = factor

    @property
    def weight_bytes(self) -> int:
        return sum(self.bytes_of_parts.values())

    @property
    def bytes_of_parts(self) -> dict[str, int]:
        """Return the weight bytes of each product, by its name among `PARTS`."""
        products: dict[str, CpuPackedWeights | PackedExperts] = dict(
            zip(("heads in", "heads out"), self._attention, strict=True)
        )
        if self._experts is not None:
            products["MLP out"] = self._experts
        else:
            products["MLP in"], products["MLP out"] = self._mlp
        return {name: each.num_bytes for name, each in products.items()}

    def set_next(self, then: DenseLayer | PackedWeights) -> None:
        first = then._attention[0] if isinstance(then, CpuLayer) else then
        assert isinstance(first, CpuPackedWeights)
        self._then = first  # kept alive
        self.struct.then = ctypes.addressof(first.struct)

    def takes(self, paged_rows: PagedRows) -> bool:
        _, num_kv_heads, head_size = self.heads
        return (
            isinstance(paged_rows, CpuPagedRows)
            and paged_rows.dtype == self.dtype
            and paged_rows.kv_shape == (num_kv_heads, paged_rows.stored.row(head_size))
            and takes_pages(self.dtype, paged_rows.struct.slots, head_size)
        )

    def forward(
        self, residual: torch.Tensor, paged_rows: PagedRows, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(paged_rows, CpuPagedRows)
        self._workspace.reserve(len(residual), self.widths, self.dtype)
        num_rows = len(residual) if kept is None else len(kept)
        out = torch.empty((num_rows, residual.shape[1]), dtype=residual.dtype)
        status = library().pensieve_layer(
            cpu_library.only_instruction_set,
            ctypes.addressof(self.struct),
            ctypes.addressof(self._workspace.struct),
            ctypes.addressof(paged_rows.struct),
            residual.data_ptr(),
            None if kept is None else kept.data_ptr(),
            -1 if kept is None else num_rows,
            out.data_ptr(),
        )
        if not succeeded(status):
            raise RuntimeError("the compiled attention does not support these pages")
        return out

    def before_attention(
        self, residual: torch.Tensor, cosines: torch.Tensor | None, sines: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_rows = len(residual)
        self._workspace.reserve(num_rows, self.widths, self.dtype)
        status = library().pensieve_before_attention(
            cpu_library.only_instruction_set,
            ctypes.byref(self.struct),
            ctypes.byref(self._workspace.struct),
            residual.data_ptr(),
            None if cosines is None else cosines.data_ptr(),
            None if sines is None else sines.data_ptr(),
            cosines is not None and cosines.dtype != residual.dtype,
            0 if cosines is None else cosines.shape[1],
            num_rows,
            torch.get_num_threads(),
        )
        succeeded(status)
        num_heads, num_kv_heads, head_size = self.heads
        rotated = self._workspace.rotated(num_rows, self.widths).view(num_rows, -1, head_size)
        sizes = [num_heads, num_kv_heads, num_kv_heads]
        query, key, value = torch.split(rotated, sizes, dim=1)
        return query, key, value

    def after_attention(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        self._workspace.reserve(len(residual), self.widths, self.dtype)
        out = torch.empty_like(residual)
        status = library().pensieve_after_attention(
            cpu_library.only_instruction_set,
            ctypes.byref(self.struct),
            ctypes.byref(self._workspace.struct),
            residual.data_ptr(),
            attended.data_ptr(),
            out.data_ptr(),
            len(residual),
            torch.get_num_threads(),
        )
        succeeded(status)
        return out


class CpuLayerChain:
    """Run all layers of a model in one call."""

    def __init__(self, layers: Sequence[CpuLayer], workspace: Workspace) -> None:
        self._layers = layers
        self._kinds = list({(layer.heads, layer.dtype): layer for layer in layers}.values())
        self._workspace = workspace
        self._widths = Widths(*map(max, zip(*(layer.widths for layer in layers), strict=True)))
        addresses = [ctypes.addressof(layer.struct) for layer in layers]
        self._structs = (ctypes.c_void_p * len(layers))(*addresses)

    def takes(self, paged_rows: PagedRows) -> bool:
        return all(layer.takes(paged_rows) for layer in self._kinds)

    def forward(
        self, residual: torch.Tensor, paged_rows: PagedRows, kept: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(paged_rows, CpuPagedRows)
        self._workspace.reserve(len(residual), self._widths, residual.dtype)
        out = torch.empty((len(kept), residual.shape[1]), dtype=residual.dtype)
        state = torch.empty_like(residual)
        status = library().pensieve_layers(
            cpu_library.only_instruction_set,
            self._structs,
            len(self._layers),
            ctypes.addressof(self._workspace.struct),
            ctypes.addressof(paged_rows.struct),
            residual.data_ptr(),
            kept.data_ptr(),
            len(kept),
            state.data_ptr(),
            out.data_ptr(),
        )
        if not succeeded(status):
            raise RuntimeError("the compiled attention does not support these pages")
        return out


@contextmanager
def measured_parts() -> Iterator[dict[str, float]]:
    """Measure the time of each part of the compiled layers inside the block.

    At the end the dictionary has the seconds of all calls, by part.  Only the thread that calls the layers is
    measured, not the threads that help it.
    """
    sums = (ctypes.c_int64 * len(PARTS))()
    seconds: dict[str, float] = {}
    count = library().pensieve_measure_parts(ctypes.byref(sums))
    assert count == len(PARTS), (count, PARTS)
    try:
        yield seconds
    finally:
        library().pensieve_measure_parts(None)
        seconds.update({name: each / 1e9 for name, each in zip(PARTS, sums, strict=True)})
