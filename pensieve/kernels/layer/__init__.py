"""Select the dense parts of a decoder layer for a model's device; `protocol` is their interface."""

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
    """Return the maker of a model's layers on this device."""
    return cpu.CpuLayerKernels() if device.type == "cpu" else cuda.CudaLayerKernels()


def paged_rows(
    arena: torch.Tensor,
    slot_mapping: torch.Tensor,  # int64 (tokens)
    page_index: PageIndex,
    plan: DevicePlan | None,
    dtype: torch.dtype,
    kv_scales: Callable[[int], torch.Tensor | None] = lambda layer: None,
) -> PagedRows | None:
    """Return an iteration's rows, in `dtype`, for the layer kernels of the arena's device.

    None if no layer kernels can run there. `kv_scales` returns the scales of a layer's fp8 pages.
    """
    if arena.device.type != "cpu":
        return cuda.CudaPagedRows(arena, slot_mapping, page_index, plan, dtype, kv_scales)
    if not cpu.available(dtype) or format_of(arena, dtype).name not in STORED:
        return None
    return CpuPagedRows(arena, slot_mapping, page_index, dtype)
