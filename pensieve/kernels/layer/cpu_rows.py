"""Pass an iteration's rows and the buffers to the compiled layers of a CPU.

csrc/cpu/layer.cpp has the structures.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar, NamedTuple

import torch

from pensieve.kernels.attention.input import PageIndex
from pensieve.kernels.cpu_library import STORED
from pensieve.kernels.kv_format import format_of
from pensieve.kernels.shapes import Shapes

# The experts compute at most this many rows together. For so many rows, it pays to read all experts' weights.
EXPERT_ROWS_MAX = 512


class PagesStruct(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("num_rows", "num_slices")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines")),
        *((name, ctypes.c_int32) for name in ("rotation_float", "rotary")),
        ("slot_mapping", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("page_table", "slice_offsets")),
        *((name, ctypes.c_void_p) for name in ("slice_turns", "slice_starts")),
        *((name, ctypes.c_void_p) for name in ("slice_groups", "group_pages")),
        *((name, ctypes.c_int64) for name in ("num_groups", "pages_max", "num_pages")),
        ("arena", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("slots", "num_threads", "stored")),
    ]


class ExpertBuffersStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("rows_max", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("logits", "rows", "gated", "outputs")),
    ]


class BuffersStruct(ctypes.Structure):
    _fields_: ClassVar = [
        *(
            (name, ctypes.c_void_p)
            for name in ("normed", "rotated", "gated", "added", "sum", "attended")
        ),
        ("experts", ExpertBuffersStruct),
    ]


class CpuPagedRows:
    """The rows of one iteration (its tokens), in `dtype`, and the arena with their KV.

    The arena is (layers, pages, 2, kv_heads, slots, row). Its last axis holds one key or value.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        slot_mapping: torch.Tensor,
        page_index: PageIndex,
        dtype: torch.dtype,
    ) -> None:
        shapes = Shapes("layer")
        shapes.unify("arena", arena, ("layers", "pages", "two", "kv_heads", "slots", "row"))
        shapes.unify("slot_mapping", slot_mapping, ("tokens",), torch.int64)
        shapes.unify("page_table", page_index.page_table, ("turns", "pages_max"), torch.int32)
        shapes.unify("slice_offsets", page_index.slice_offsets, ("slices+1",), torch.int32)
        shapes.unify("slice_turns", page_index.slice_turns, ("slices",), torch.int32)
        shapes.unify("slice_starts", page_index.slice_starts, ("slices",), torch.int32)
        assert arena.is_contiguous()
        assert slot_mapping.is_contiguous()
        assert page_index.page_table.is_contiguous()
        assert page_index.slice_offsets.is_contiguous()
        assert page_index.slice_turns.is_contiguous()
        assert page_index.slice_starts.is_contiguous()
        shared = page_index.shared
        self._kept_alive = (arena, slot_mapping, page_index)  # the structure holds only addresses
        self._rotated_by: object = None
        self.dtype = dtype
        self.stored = format_of(arena, dtype)
        self.kv_shape = (shapes["kv_heads"], shapes["row"])
        self.struct = PagesStruct(
            num_rows=shapes["tokens"],
            num_slices=shapes["slices"],
            slot_mapping=slot_mapping.data_ptr(),
            page_table=page_index.page_table.data_ptr(),
            slice_offsets=page_index.slice_offsets.data_ptr(),
            slice_turns=page_index.slice_turns.data_ptr(),
            slice_starts=page_index.slice_starts.data_ptr(),
            slice_groups=shared.slice_groups.buffer_info()[0] if shared is not None else None,
            group_pages=shared.group_pages.buffer_info()[0] if shared is not None else None,
            num_groups=len(shared.group_pages) if shared is not None else 0,
            pages_max=shapes["pages_max"],
            num_pages=shapes["pages"],
            arena=arena.data_ptr(),
            slots=shapes["slots"],
            num_threads=torch.get_num_threads(),
            stored=STORED[self.stored.name],
        )

    def rotate_by(self, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        if rotation is self._rotated_by:
            return
        self._rotated_by = rotation
        if rotation is None:  # the previous layer may have rotated
            self.struct.cosines = self.struct.sines = None
            self.struct.rotation_float = self.struct.rotary = 0
            return
        cosines, sines = (each[0].contiguous() for each in rotation)
        self._rotation = (cosines, sines)  # kept alive
        self.struct.cosines, self.struct.sines = cosines.data_ptr(), sines.data_ptr()
        self.struct.rotation_float = cosines.dtype != self.dtype
        self.struct.rotary = cosines.shape[1]


class Widths(NamedTuple):
    """How many values a row has at each step of a layer."""

    hidden: int
    heads_in: int  # queries, keys and values
    mlp: int = 0
    heads_out: int = 0
    experts: int = 0
    chosen: int = 0  # experts per row
    expert_mlp: int = 0


class Workspace:
    """Hold the buffers that all layers of a model share, for the most rows and the widest layer so far."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._widths = Widths(0, 0)
        self._dtype: torch.dtype | None = None
        self._tensors: list[torch.Tensor] = []
        self.struct = BuffersStruct()

    def reserve(self, num_rows: int, widths: Widths, dtype: torch.dtype) -> None:
        widest = Widths(*map(max, widths, self._widths))
        if num_rows <= self._num_rows and widest == self._widths and dtype == self._dtype:
            return
        rows = max(num_rows, self._num_rows)
        expert_rows = min(rows, EXPERT_ROWS_MAX)
        pairs = expert_rows * widest.chosen
        plain = [rows * each for each in (widest.hidden, widest.heads_in, widest.mlp)]
        tensors = [
            *(torch.empty(size, dtype=dtype) for size in plain),
            *(torch.empty(rows * widest.hidden, dtype=torch.float32) for _ in range(2)),
            torch.empty(rows * widest.heads_out, dtype=dtype),
            torch.empty(expert_rows * widest.experts, dtype=dtype),
            *(
                torch.empty(pairs * each, dtype=dtype)
                for each in (widest.hidden, widest.expert_mlp)
            ),
            torch.empty(pairs * widest.hidden, dtype=torch.float32),
        ]
        addresses = [each.data_ptr() for each in tensors]
        experts = ExpertBuffersStruct(expert_rows, *addresses[6:])
        # Assign everything at once, after all allocations: a failed allocation changes nothing.
        self._num_rows, self._widths, self._dtype, self._tensors = rows, widest, dtype, tensors
        self.struct = BuffersStruct(*addresses[:6], experts)

    def rotated(self, num_rows: int, widths: Widths) -> torch.Tensor:
        """Return the queries, keys and values that the last `before_attention` wrote, one row per token.

        `widths`: the widths of that layer.
        """
        return self._tensors[1][: num_rows * widths.heads_in].view(num_rows, widths.heads_in)
