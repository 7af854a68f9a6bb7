"""The dense parts of a decoder layer on a CPU, compiled.

`protocol` is the interface, csrc/cpu/layer.cpp the implementation, for float32, bfloat16 and float16.  A
row's result is the same whatever other rows are in the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch

from pensieve.kernels import cpu_library
from pensieve.kernels.attention import cpu as attention_cpu
from pensieve.kernels.attention.cpu import KindStruct, kind_struct
from pensieve.kernels.cpu_library import TYPES, compiled_library, succeeded, takes_pages
from pensieve.kernels.layer.cpu_rows import CpuPagedRows, Widths, Workspace
from pensieve.kernels.layer.cpu_weights import (
    LinearStruct,
    NormStruct,
    PackedExperts,
    library,
    norm_struct,
    packed,
)
from pensieve.kernels.layer.cpu_weights import Norm as Norm
from pensieve.kernels.layer.cpu_weights import Packed as Packed
from pensieve.kernels.layer.protocol import (
    DenseLayer,
    ExpertWeights,
    LayerWeights,
    NormWeights,
    PackedWeights,
    PagedRows,
    ProductWeights,
)

# As the stages of csrc/cpu/laps.h.  Experts, with their router, are "MLP out".
PARTS = (
    *("norm before", "heads in", "rotation", "KV written", "attention", "heads out"),
    *("sum and norm", "MLP in", "MLP out", "sum", "output matrix"),
)


def available(dtype: torch.dtype) -> bool:
    return dtype in TYPES and compiled_library() is not None


def argmax(rows: torch.Tensor) -> torch.Tensor:
    """int64 (rows): the column of each float32 row's largest value, the first of equals; -1: not finite."""
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
    """Makes the layers of one model, which share their buffers."""

    def __init__(self) -> None:
        self._workspace = Workspace()

    def available(self, dtype: torch.dtype) -> bool:
        return available(dtype)

    def lack(self, dtype: torch.dtype) -> str:
        if compiled_library() is None:
            return "pensieve was installed without its compiled kernels"
        names = " and ".join(str(each).removeprefix("torch.") for each in TYPES)
        return f"the compiled kernels are for {names}, not {str(dtype).removeprefix('torch.')}"

    def form(self, dtype: torch.dtype) -> str:
        return f"C++ ({cpu_library.instruction_set(dtype, 0)})"

    def lacks_form(self, weights: LayerWeights) -> str:
        if not weights.attention.needs_only(attention_cpu.KIND_FIELDS):
            return "the compiled layers do not know its kind of attention"
        return ""

    def layer(self, weights: LayerWeights, *, int8: bool = False) -> Layer:
        return Layer(weights, self._workspace, int8=int8)

    def chain(self, layers: Sequence[DenseLayer]) -> CpuLayerChain:
        compiled = [each for each in layers if isinstance(each, Layer)]
        assert len(compiled) == len(layers), "layers follow only layers of their own kind"
        return CpuLayerChain(compiled, self._workspace)

    def pack(self, product: ProductWeights, *, int8: bool = False) -> Packed:
        return packed(product, int8=int8)

    def norm(self, weights: NormWeights) -> Norm:
        return Norm(weights)


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


class Layer:
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
        self._mlp: list[Packed] = []
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
        """The weights of each product, by its name among `PARTS`."""
        products: dict[str, Packed | PackedExperts] = dict(
            zip(("heads in", "heads out"), self._attention, strict=True)
        )
        if self._experts is not None:
            products["MLP out"] = self._experts
        else:
            products["MLP in"], products["MLP out"] = self._mlp
        return {name: each.num_bytes for name, each in products.items()}

    def followed_by(self, then: DenseLayer | PackedWeights) -> None:
        first = then._attention[0] if isinstance(then, Layer) else then
        assert isinstance(first, Packed)
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
            raise RuntimeError("the compiled attention does not take these pages")
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
    """Layers of one model that run one after the other in one call."""

    def __init__(self, layers: Sequence[Layer], workspace: Workspace) -> None:
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
            raise RuntimeError("the compiled attention does not take these pages")
        return out


@contextmanager
def measured_parts() -> Iterator[dict[str, float]]:
    """Measure what each part of the compiled layers takes.

    Fills the dictionary at the end: the seconds of all calls in between, by part.

    For one thread that computes; the threads that help it are not counted.
    """
    sums = (ctypes.c_int64 * len(PARTS))()
    found: dict[str, float] = {}
    count = library().pensieve_measure_parts(ctypes.byref(sums))
    assert count == len(PARTS), (count, PARTS)
    try:
        yield found
    finally:
        library().pensieve_measure_parts(None)
        found.update({name: each / 1e9 for name, each in zip(PARTS, sums, strict=True)})
