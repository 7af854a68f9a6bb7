"""Loads the model on one device, or this rank's part with the other ranks beside it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from pensieve.config import Settings
from pensieve.errors import ConfigError, ModelError
from pensieve.launch import programs
from pensieve.launch.device import usable_device
from pensieve.launch.memory_nodes import spread_memory
from pensieve.launch.model_folder import Report
from pensieve.model.loader import LoadedModel, check_divisible, check_stages, load
from pensieve.model.parallel.leader import Leader
from pensieve.model.parallel.ranks import check_devices, check_machine


class ModelRanks(NamedTuple):
    model: LoadedModel  # this rank's part
    leader: Leader | None  # of the other ranks; None where there is one rank
    whole: LoadedModel  # with the layers of all stages in its shape


def load_model(settings: Settings, folder: Path, report: Report, undo: ExitStack) -> ModelRanks:
    """Load the model in all ranks; `undo` gets a callback that ends the other ranks."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    device = usable_device(settings, report)
    if device.type == "cpu":
        spread_memory(report)
    int8 = settings.weights == "int8"
    if settings.tensor_parallel == settings.pipeline_stages == 1:
        model = load(
            folder,
            dtype=dtype,
            device=device,
            int8=int8,
            kv_dtype=settings.kv_dtype,
            context_max=settings.context_max,
            report=report,
        )
        return ModelRanks(model, None, model)
    if settings.pipeline_stages > 1:
        _check_staged(settings)
    elif int8:
        raise ConfigError("--weights int8 is for one rank: --tensor-parallel 1")
    leader = _start_ranks(settings, folder, device, report, undo)
    try:
        model = load(
            folder,
            dtype=dtype,
            device=device,
            int8=int8,
            kv_dtype=settings.kv_dtype,
            context_max=settings.context_max,
            rank=leader,
            report=report,
        )
    except (ModelError, RuntimeError) as error:  # perhaps only because another rank has ended
        leader.explain(error)
        raise
    whole = leader.check_shapes(model.shape)
    return ModelRanks(model, leader, replace(model, shape=whole))


def _check_staged(settings: Settings) -> None:
    stages = f"--pipeline-stages {settings.pipeline_stages}"
    if settings.tensor_parallel > 1:
        raise ConfigError(f"{stages} needs --tensor-parallel 1: a stage is one rank")
    if settings.stream == "on":
        raise ConfigError(
            f"{stages} needs --stream auto or off: no turn is streamed through stages"
        )
    if settings.kv_dtype == "fp8":
        raise ConfigError(
            f"{stages} needs another --kv-dtype than fp8: its scales come from a prompt in all layers"
        )


def _start_ranks(
    settings: Settings, folder: Path, device: torch.device, report: Report, undo: ExitStack
) -> Leader:
    num_stages = settings.pipeline_stages
    num_ranks = settings.tensor_parallel * num_stages
    if num_stages > 1:
        check_devices(device, num_ranks, "--pipeline-stages")
        check_stages(folder, num_stages)
    else:
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
        "int8": settings.weights == "int8",
    }
    leader = Leader(num_ranks, device, worker_settings, programs.RANK, num_stages)
    undo.callback(leader.close)
    return leader
