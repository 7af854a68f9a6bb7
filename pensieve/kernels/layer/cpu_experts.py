"""The experts of a layer as the compiled kernels read them; csrc/cpu/experts.h has the structures."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from pensieve.kernels.layer.cpu_weights import LinearStruct, Packed, packed
from pensieve.kernels.layer.protocol import ExpertWeights


class ExpertsStruct(ctypes.Structure):
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
