"""A decoder layer's weights as the compiled kernels read them, products in panels.

A panel is two vectors of outputs wide.  For each step of the inputs (one float or float16, two bfloat16 or
four int8 inputs) it holds the weights of its outputs side by side, so a product reads a panel in one run from
front to back.  Outputs that fill up the last panel have weights of 0.  csrc/cpu/layer.h has the structures.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F

from pensieve.kernels import cpu_library
from pensieve.kernels.cpu_library import TYPES, compiled_library, succeeded
from pensieve.kernels.layer.protocol import Activation, ExpertWeights, NormWeights, ProductWeights
from pensieve.kernels.shapes import Shapes

ZERO = 128  # the unsigned byte that stands for 0 in a quantized row
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
    """The compiled library; there must be one."""
    found = compiled_library()
    assert found is not None, "layers were made without the compiled library"
    return found


class Packed:
    """The weights of a product, or of several with the same input (`ProductWeights`), as panels.

    With `int8` the weights of an output become whole numbers, in steps of their largest over 127, and so
    does each row that is multiplied with them; sums of whole numbers are exact.
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
            raise ValueError(f"multiply: out is {out.dtype}, or its rows have gaps")
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


def packed(product: ProductWeights, *, int8: bool) -> Packed:
    return Packed(
        product.weights, product.biases, product.activation, int8=int8, gated=product.gated
    )


class Norm:
    """Norms of rows as wide as the weights."""

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
    """The structure holds the addresses of the weights, which its owner has to keep alive."""
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
    """The biases side by side, zeros where there is none; None where no product has one."""
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            weight.new_zeros(len(weight)) if bias is None else bias
            for weight, bias in zip(weights, biases, strict=True)
        ]
    )


def _picked(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """rows[order], and zeros where the order says -1."""
    picked = rows[order.clamp(min=0)]
    picked[order < 0] = 0
    return picked


def _panels(weight: torch.Tensor, order: torch.Tensor, width: int, step: int) -> torch.Tensor:
    """(panels, steps, width, step); made a few panels at a time, so that no second whole copy exists."""
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
    """Ask the operating system for huge pages under weights: each iteration reads all of them."""
    page = 2 << 20
    first = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if sys.platform == "linux" and end > first:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_HUGEPAGE)


class ExpertsStruct(ctypes.Structure):
    """As in csrc/cpu/experts.h."""

    _fields_: ClassVar = [
        ("router", LinearStruct),
        *((name, ctypes.c_void_p) for name in ("into", "out")),
        *((name, ctypes.c_int32) for name in ("num_experts", "num_chosen")),
        *((name, ctypes.c_int32) for name in ("normalised", "rounded")),
    ]


class PackedExperts:
    """Router and experts of one layer.

    With `int8` the experts are rounded and the router is not: it decides who computes.
    """

    def __init__(self, weights: ExpertWeights, *, int8: bool) -> None:
        self._router = Packed([weights.router])
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
