"""Loads the model on one device, or its first part with the other ranks beside it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from pensieve.config import Settings
from pensieve.errors import ConfigError, ModelError
from pensieve.launch import programs
from pensieve.launch.device import usable_device
from pensieve.launch.memory_nodes import spread_memory
from pensieve.launch.model_folder import Report
from pensieve.model.loader import LoadedModel, check_divisible, load
from pensieve.model.parallel.leader import Leader
from pensieve.model.parallel.ranks import check_machine


class ModelRanks(NamedTuple):
    model: LoadedModel
    leader: Leader | None  # of the other ranks; None where there is one rank


def load_model(settings: Settings, folder: Path, report: Report, undo: ExitStack) -> ModelRanks:
    """Load the model in all ranks; `undo` gets a callback that ends the other ranks."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    device = usable_device(settings, report)
    if device.type == "cpu":
        spread_memory(report)
    int8 = settings.weights == "int8"
    if settings.tensor_parallel == 1:
        model = load(
            folder,
            dtype=dtype,
            device=device,
            int8=int8,
            kv_dtype=settings.kv_dtype,
            context_max=settings.context_max,
            report=report,
        )
        return ModelRanks(model, None)
    if int8:
        raise ConfigError("--weights int8 is for one rank: --tensor-parallel 1")
    leader = _start_ranks(settings, folder, device, report, undo)
    try:
        model = load(
            folder,
            dtype=dtype,
            device=device,
            kv_dtype=settings.kv_dtype,
            context_max=settings.context_max,
            rank=leader,
            report=report,
        )
    except (ModelError, RuntimeError) as error:  # perhaps only because another rank has ended
        leader.explain(error)
        raise
    leader.check_shapes(model.shape)
    return ModelRanks(model, leader)


def _start_ranks(
    settings: Settings, folder: Path, device: torch.device, report: Report, undo: ExitStack
) -> Leader:
    num_ranks = settings.tensor_parallel
    check_machine(device, num_ranks)
    check_divisible(folder, num_ranks)
    num_threads = max(torch.get_num_threads() // num_ranks, 1)
    torch.set_num_threads(num_threads)
    report(f"starting {num_ranks - 1} more rank{'s' if num_ranks > 2 else ''}")
    worker_settings = {
        "folder": str(folder),
        "dtype": None if settings.dtype == "auto" else settings.dtype,
        "kv_dtype": settings.kv_dtype,
        "context_max": settings.context_max,
        "num_threads": num_threads,
        "check_kv": bool(settings.check_kv),
    }
    leader = Leader(num_ranks, device, worker_settings, programs.RANK)
    undo.callback(leader.close)
    return leader
