"""The dense parts of a decoder layer in C++ (csrc/cpu/layer.h): products, norms, rotation.

`Packed` holds the weights of one product, in the panels that the machine's vectors want; `Layer` is what
stands around a layer's attention.  Results of a row are the same whatever other rows are in the call.
CPU, float32 and bfloat16; `available` says whether the library is there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from pensieve.kernels.attention import cpu
from pensieve.kernels.shapes import Shapes

ZERO = 128  # what a row's 0 becomes as a byte without sign
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}


def available(dtype: torch.dtype) -> bool:
    return dtype in cpu.TYPES and cpu.compiled_library() is not None


class _Linear(ctypes.Structure):
    _fields_: ClassVar = [
        ("panels", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("bias", "scales", "offsets")),
        ("panel_bytes", ctypes.c_int64),
        ("inputs", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("activation", ctypes.c_int32),
    ]


class _Product(ctypes.Structure):
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


class _Norm(ctypes.Structure):
    _fields_: ClassVar = [
        ("weight", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("eps", ctypes.c_float),
    ]


class _Layer(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("type", "index", "hidden")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_size")),
        *((name, _Norm) for name in ("attention_before", "query_norm", "key_norm")),
        *((name, _Norm) for name in ("attention_after", "mlp_before", "mlp_after")),
        *((name, _Linear) for name in ("attention_in", "attention_out", "mlp_in", "mlp_out")),
        ("factor", ctypes.c_float),
        ("scaling", ctypes.c_float),
        ("then", ctypes.c_void_p),
    ]


class _Buffers(ctypes.Structure):
    _fields_: ClassVar = [
        (name, ctypes.c_void_p)
        for name in ("normed", "turned", "gated", "added", "sum", "attended")
    ]


class _Pages(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("num_rows", "num_slices")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines")),
        *((name, ctypes.c_int32) for name in ("rotation_float", "rotary")),
        ("slot_mapping", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("page_table", "slice_offsets")),
        *((name, ctypes.c_void_p) for name in ("slice_turns", "slice_starts")),
        *((name, ctypes.c_int64) for name in ("pages_max", "num_pages")),
        ("arena", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("slots", "num_threads")),
    ]


@cache
def _library() -> Any:
    found = cpu.compiled_library()
    assert found is not None
    pointer, int32, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p
    found.pensieve_lanes.argtypes = [text]
    found.pensieve_multiply.argtypes = [text, int32, pointer, int32]
    found.pensieve_multiply.restype = None
    found.pensieve_before_attention.argtypes = [
        *(text, pointer, pointer, pointer, pointer, pointer),
        *(int32, int32, int32, int32),
    ]
    found.pensieve_before_attention.restype = None
    found.pensieve_after_attention.argtypes = [
        *(text, pointer, pointer, pointer, pointer, pointer),
        *(int32, int32),
    ]
    found.pensieve_after_attention.restype = None
    found.pensieve_layer.argtypes = [
        *(text, pointer, pointer, pointer, pointer),
        *(pointer, int32, pointer),
    ]
    found.pensieve_layer.restype = int32
    found.pensieve_normalise.argtypes = [text, int32, pointer, pointer, pointer, int32, int32]
    found.pensieve_normalise.restype = None
    found.pensieve_argmax.argtypes = [text, pointer, ctypes.c_int64, int32, int32, pointer, int32]
    found.pensieve_argmax.restype = None
    return found


def argmax(rows: torch.Tensor) -> torch.Tensor:
    """int64 (rows): where each row of float32 is largest, of equals the first; -1 if one is not finite."""
    assert rows.dtype == torch.float32
    assert rows.stride(1) == 1
    out = torch.empty(len(rows), dtype=torch.int64)
    _library().pensieve_argmax(
        cpu.only,
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


class Packed:
    """Weights (outputs, inputs) of one product, or of several with the same input, as panels.

    With an activation the first half of the outputs goes through it and multiplies the second half.

    With `int8` an output's weights become whole numbers times the largest over 127, and so does each row
    that is multiplied with them; sums are exact.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] | None = None,
        activation: str | None = None,
        *,
        int8: bool = False,
    ) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        bias = _joined(weights, biases) if biases is not None else None
        self.dtype = weight.dtype
        self.inputs = weight.shape[1]
        lanes = _library().pensieve_lanes(cpu.only)
        if activation is None:
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
        self._step = 4 // weight.itemsize
        self.panels = _panels(weight, order, 2 * lanes, self._step)
        self._sides = (None if bias is None else _picked(bias.float(), order), scales, offsets)
        self.struct = _Linear(
            self.panels.data_ptr(),
            *(0 if each is None else each.data_ptr() for each in self._sides),
            self.panels[0].nbytes,
            self.panels.shape[1] * self._step,
            self.inputs,
            self.outputs,
            ACTIVATIONS[activation] if activation else 0,
        )

    def multiply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """out (rows, outputs) = rows (rows, inputs) times the weights, plus the bias."""
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
        product = _Product(
            ctypes.addressof(self.struct),
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            out.data_ptr(),
            out.stride(0),
            out.dtype != self.dtype,
        )
        _library().pensieve_multiply(
            cpu.only, cpu.TYPES[self.dtype], ctypes.byref(product), torch.get_num_threads()
        )


def _joined(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
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
    """(panels, steps, width, step); a few panels at a time, so that no second whole copy exists."""
    inputs = weight.shape[1] + -weight.shape[1] % step
    panels = torch.empty(
        (len(order) // width, inputs // step, width, step), dtype=weight.dtype, device="cpu"
    )
    cpu.advise_huge(panels)
    for first in range(0, len(panels), 64):
        some = _picked(weight, order[first * width : (first + 64) * width])
        some = F.pad(some, (0, inputs - weight.shape[1]))
        panels[first : first + 64] = some.view(-1, width, inputs // step, step).transpose(1, 2)
    return panels


@dataclass(frozen=True)
class Norm:
    """x / rms(x) · weight, over each `len(weight)` values."""

    weight: torch.Tensor  # float32
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of contiguous rows of this width."""
        assert rows.is_contiguous()
        assert rows.shape[1] == len(self.weight)
        out = torch.empty_like(rows)
        _library().pensieve_normalise(
            cpu.only,
            cpu.TYPES[rows.dtype],
            ctypes.byref(self.struct()),
            rows.data_ptr(),
            out.data_ptr(),
            len(rows),
            torch.get_num_threads(),
        )
        return out

    def struct(self) -> _Norm:
        return _Norm(self.weight.data_ptr(), len(self.weight), self.eps)


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
    ) -> None:
        shapes = Shapes("layer")
        shapes.unify("arena", arena, ("layers", "pages", "two", "kv_heads", "slots", "head_size"))
        shapes.unify("slot_mapping", slot_mapping, ("tokens",), torch.int64)
        shapes.unify("page_table", page_table, ("turns", "pages_max"), torch.int32)
        shapes.unify("slice_offsets", slice_offsets, ("slices+1",), torch.int32)
        shapes.unify("slice_turns", slice_turns, ("slices",), torch.int32)
        shapes.unify("slice_starts", slice_starts, ("slices",), torch.int32)
        tensors = (arena, slot_mapping, page_table, slice_offsets, slice_turns, slice_starts)
        assert all(each.is_contiguous() for each in tensors)
        self._tensors: tuple[torch.Tensor, ...] = tensors  # kept alive
        self._turned_by: object = None
        self.kv_shape = (shapes["kv_heads"], shapes["head_size"], arena.dtype)
        self.struct = _Pages(
            num_rows=shapes["tokens"],
            num_slices=shapes["slices"],
            slot_mapping=slot_mapping.data_ptr(),
            page_table=page_table.data_ptr(),
            slice_offsets=slice_offsets.data_ptr(),
            slice_turns=slice_turns.data_ptr(),
            slice_starts=slice_starts.data_ptr(),
            pages_max=shapes["pages_max"],
            num_pages=shapes["pages"],
            arena=arena.data_ptr(),
            slots=shapes["slots"],
            num_threads=torch.get_num_threads(),
        )

    def turn_by(self, embeddings: tuple[torch.Tensor, torch.Tensor]) -> None:
        """The cosines and sines (1, tokens, rotary) of this iteration; the same object for all layers."""
        if embeddings is self._turned_by:
            return
        cosines, sines = (each[0].contiguous() for each in embeddings)
        self._turned_by = embeddings
        self._rotation = (cosines, sines)
        self.struct.cosines, self.struct.sines = cosines.data_ptr(), sines.data_ptr()
        self.struct.rotation_float = cosines.dtype != self.kv_shape[2]
        self.struct.rotary = cosines.shape[1]


class Workspace:
    """The buffers that all layers of a model share, for as many rows as were ever asked for."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._made_for: tuple[object, ...] = ()
        self._tensors: list[torch.Tensor] = []
        self.struct = _Buffers()

    def reserve(self, num_rows: int, widths: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        """For rows of the hidden size, of queries, keys and values, of the MLP, and of heads."""
        if num_rows <= self._num_rows and (*widths, dtype) == self._made_for:
            return
        self._num_rows, self._made_for = max(num_rows, self._num_rows), (*widths, dtype)
        rows, (hidden, turned, gated, heads) = self._num_rows, widths
        self._tensors = [
            *(torch.empty((rows, width), dtype=dtype) for width in (hidden, turned, gated)),
            *(torch.empty((rows, hidden), dtype=torch.float32) for _ in range(2)),
            torch.empty((rows, heads), dtype=dtype),
        ]
        self.struct = _Buffers(*(each.data_ptr() for each in self._tensors))

    @property
    def turned(self) -> torch.Tensor:
        return self._tensors[1]


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
        norms: dict[str, Norm],  # by their names in the structure; those that there are
        index: int,
        scaling: float,
        factor: float,  # of what is added to the residual
        workspace: Workspace,
    ) -> None:
        self._parts = (attention_in, attention_out, mlp_in, mlp_out, norms)  # kept alive
        self._heads = heads
        self._workspace = workspace
        num_heads, num_kv_heads, head_size = heads
        self._dtype = attention_in.dtype
        self._widths = (
            attention_in.inputs,
            attention_in.outputs,
            mlp_in.outputs,
            num_heads * head_size,
        )
        assert attention_in.outputs == (num_heads + 2 * num_kv_heads) * head_size
        self._struct = _Layer(
            type=cpu.TYPES[attention_in.dtype],
            index=index,
            hidden=attention_in.inputs,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            attention_in=attention_in.struct,
            attention_out=attention_out.struct,
            mlp_in=mlp_in.struct,
            mlp_out=mlp_out.struct,
            factor=factor,
            scaling=scaling,
            **{name: norm.struct() for name, norm in norms.items()},
        )

    @property
    def weight_bytes(self) -> int:
        return sum(each.panels.nbytes for each in self._parts[:4])

    def followed_by(self, then: Layer | Packed) -> None:
        """Fetch the first weights of what comes next as soon as this layer's have been read."""
        first = then._parts[0] if isinstance(then, Layer) else then
        self._then = first  # kept alive
        self._struct.then = ctypes.addressof(first.struct)

    def fits(self, pages: Pages) -> bool:
        """Whether the compiled attention takes these pages."""
        _, num_kv_heads, head_size = self._heads
        return (
            pages.kv_shape == (num_kv_heads, head_size, self._dtype)
            and pages.struct.slots == cpu.SLOTS
            and cpu.instruction_set(self._dtype, head_size) is not None
        )

    def whole(
        self, residual: torch.Tensor, pages: Pages, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The next layer's residual, of all rows or those of `kept`; keys and values are in their slots."""
        self._workspace.reserve(len(residual), self._widths, self._dtype)
        num_rows = len(residual) if kept is None else len(kept)
        out = torch.empty((num_rows, residual.shape[1]), dtype=residual.dtype)
        answer = _library().pensieve_layer(
            cpu.only,
            ctypes.addressof(self._struct),
            ctypes.addressof(self._workspace.struct),
            ctypes.addressof(pages.struct),
            residual.data_ptr(),
            None if kept is None else kept.data_ptr(),
            -1 if kept is None else num_rows,
            out.data_ptr(),
        )
        if not cpu.done(answer):
            raise RuntimeError("the compiled attention does not take these pages")
        return out

    def before_attention(
        self,
        residual: torch.Tensor,  # (tokens, hidden), contiguous
        cosines: torch.Tensor,  # (tokens, rotary), contiguous, of the residual's type or float32
        sines: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, (tokens, their heads, head_size); good until the next call."""
        rows = len(residual)
        self._workspace.reserve(rows, self._widths, self._dtype)
        _library().pensieve_before_attention(
            cpu.only,
            ctypes.byref(self._struct),
            ctypes.byref(self._workspace.struct),
            residual.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            cosines.dtype != residual.dtype,
            cosines.shape[1],
            rows,
            torch.get_num_threads(),
        )
        num_heads, num_kv_heads, head_size = self._heads
        turned = self._workspace.turned[:rows].view(rows, -1, head_size)
        sizes = [num_heads, num_kv_heads, num_kv_heads]
        query, key, value = torch.split(turned, sizes, dim=1)
        return query, key, value

    def after_attention(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The next layer's residual."""
        out = torch.empty_like(residual)
        _library().pensieve_after_attention(
            cpu.only,
            ctypes.byref(self._struct),
            ctypes.byref(self._workspace.struct),
            residual.data_ptr(),
            attended.data_ptr(),
            out.data_ptr(),
            len(residual),
            torch.get_num_threads(),
        )
        return out
