"""The dense parts of a decoder layer, for the device that a model is on; `protocol` is their interface."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pensieve.kernels.attention.input import PageIndex
from pensieve.kernels.attention.plan import DevicePlan
from pensieve.kernels.cpu_library import STORED
from pensieve.kernels.kv_format import format_of
from pensieve.kernels.layer import cpu, cuda
from pensieve.kernels.layer.cpu_rows import CpuPagedRows
from pensieve.kernels.layer.protocol import LayerKernels, PagedRows


def layer_kernels(device: torch.device) -> LayerKernels:
    """What makes the layers of one model on this device."""
    return cpu.CpuLayerKernels() if device.type == "cpu" else cuda.CudaLayerKernels()


def paged_rows(
    arena: torch.Tensor,
    slot_mapping: torch.Tensor,  # int64 (tokens)
    page_index: PageIndex,
    plan: DevicePlan | None,
    dtype: torch.dtype,
    kv_scales: Callable[[int], torch.Tensor | None] = lambda layer: None,
) -> PagedRows | None:
    """An iteration's rows, computed in `dtype`, for the layers on the arena's device; None where there are no
    such layers.  `kv_scales` gives those of a layer whose pages are in fp8."""
    if arena.device.type != "cpu":
        return cuda.CudaPagedRows(arena, slot_mapping, page_index, plan, dtype, kv_scales)
    if not cpu.available(dtype) or format_of(arena, dtype).name not in STORED:
        return None
    return CpuPagedRows(arena, slot_mapping, page_index, dtype)
