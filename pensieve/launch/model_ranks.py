"""Load the whole model on one device. With several ranks, load this rank's part of the model."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from pensieve.config import Settings, read_secret
from pensieve.errors import ConfigError, DeviceError, ModelError
from pensieve.launch import programs
from pensieve.launch.memory_nodes import spread_memory
from pensieve.launch.model_folder import Report, weights_fingerprint
from pensieve.model.loader import LoadedModel, check_divisible, check_stages, load
from pensieve.model.parallel.arrivals import RemoteRanks, split_address
from pensieve.model.parallel.handshake import described
from pensieve.model.parallel.leader import Leader
from pensieve.model.parallel.ranks import check_devices, check_machine

RANK_WAIT_SECONDS = 300.0  # how long a starting engine waits for ranks on other machines


def usable_device(settings: Settings, report: Report) -> torch.device:
    """Return the device of the settings, with its kernels ready.

    With `auto`, return the CPU if the GPU cannot be used.
    """
    device = _device_with_kernels(settings, report)
    if device.type == "cpu" and settings.kv_dtype == "fp8":
        report("warning: --kv-dtype fp8 is meant for GPUs and slow on a CPU")
    return device


def _device_with_kernels(settings: Settings, report: Report) -> torch.device:
    """Return the device of the settings; with `auto`, the CPU if the GPU's kernels cannot be prepared."""
    device = chosen_device(settings)
    if device.type != "cuda":
        return device
    try:
        torch.cuda.set_device(device)
        _check_kernels(settings, device, report)
    except (DeviceError, ConfigError) as error:
        if settings.device != "auto":
            raise
        report(f"computing on the CPU: {error}")
        return torch.device("cpu")
    return device


def chosen_device(settings: Settings) -> torch.device:
    """Return the device of the settings. Raises ConfigError if it does not exist."""
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (it was built without CUDA)"
        raise ConfigError(f"--device {name}: torch {torch.__version__} finds no GPU{built}")
    index = int(name.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs")
    for name in ("tensor_parallel", "pipeline_stages"):
        if index and getattr(settings, name) > 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} uses the first GPUs: pass --device cuda")
    return torch.device("cuda", index)


def _check_kernels(settings: Settings, device: torch.device, report: Report) -> None:
    """Prepare the kernels for this GPU. Compiling them takes a few seconds the first time."""
    from pensieve.kernels import PAGE_SLOTS as PAGE
    from pensieve.kernels import cuda_launch

    if settings.weights == "int8":
        raise ConfigError("--weights int8 is only for CPUs: pass --device cpu")
    if settings.kv_dtype == "int8":
        raise ConfigError("--kv-dtype int8 is only for CPUs: pass --device cpu")
    if settings.chunk_tokens != PAGE:
        raise ConfigError(
            f"chunk_tokens must be {PAGE} on a GPU, because the kernels have pages of this size"
        )
    report(f"preparing kernels for {cuda_launch.architecture(device.index)}")
    cuda_launch.prepare(device.index)


class ModelRanks(NamedTuple):
    model: LoadedModel  # this rank's part
    leader: Leader | None  # controls the other ranks; None if there is only one rank
    whole: LoadedModel  # like `model`, but its shape has the layers of all stages


def load_model(settings: Settings, folder: Path, report: Report, undo: ExitStack) -> ModelRanks:
    """Load the model in all ranks. `undo` receives a callback that ends the other ranks."""
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
    if settings.pipeline_stages > 1 and settings.stream == "on":
        raise ConfigError(
            f"--pipeline-stages {settings.pipeline_stages} needs --stream auto or off: pipeline stages do "
            "not support streamed turns"
        )
    if settings.tensor_parallel > 1 and int8:
        raise ConfigError("--weights int8 needs a single rank: pass --tensor-parallel 1")
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
    except (ModelError, RuntimeError) as error:  # the cause may be that another rank has ended
        leader.explain(error)
        raise
    whole = leader.check_shapes(model.shape, model.flat.first_layer)
    return ModelRanks(model, leader, replace(model, shape=whole))


def _start_ranks(
    settings: Settings, folder: Path, device: torch.device, report: Report, undo: ExitStack
) -> Leader:
    num_stages, num_shards = settings.pipeline_stages, settings.tensor_parallel
    num_ranks = num_shards * num_stages
    remote_ranks = _remote_ranks(settings, folder, device)
    num_local = num_ranks - (remote_ranks.num_ranks if remote_ranks is not None else 0)
    if num_shards > 1:
        check_machine(device)
        check_divisible(folder, num_shards)
    if num_stages > 1:
        check_stages(folder, num_stages)
    check_devices(device, num_local)
    num_threads = max(torch.get_num_threads() // num_local, 1)
    torch.set_num_threads(num_threads)
    if num_local > 1:
        report(f"starting {num_local - 1} more rank{'s' if num_local > 2 else ''}")
    worker_settings = {
        "folder": str(folder),
        "dtype": None if settings.dtype == "auto" else settings.dtype,
        "kv_dtype": settings.kv_dtype,
        "context_max": settings.context_max,
        "num_threads": num_threads,
        "check_kv": bool(settings.check_kv),
        "int8": settings.weights == "int8",
    }
    leader = Leader(
        num_ranks, device, worker_settings, programs.RANK, num_stages, remote_ranks, report
    )
    undo.callback(leader.close)
    return leader


def _remote_ranks(settings: Settings, folder: Path, device: torch.device) -> RemoteRanks | None:
    """Describe the ranks on other machines; None if there are none.

    By default, these are the ranks of all stages except the last. If there is only one stage, they are all
    ranks except rank 0.
    """
    address, secret = settings.rank_address, settings.cluster_secret
    if not address:
        return None
    if secret is None:
        raise ConfigError(
            "--rank-address needs --cluster-secret, a file that must exist on each rank's machine"
        )
    num_shards, num_stages = settings.tensor_parallel, settings.pipeline_stages
    num_others = num_shards * num_stages - 1
    num_ranks = settings.ranks_elsewhere
    if not num_ranks:
        num_ranks = num_shards * (num_stages - 1) if num_stages > 1 else num_others
    if num_ranks > num_others:
        raise ConfigError(
            f"--ranks-elsewhere {num_ranks}: of {num_others + 1} ranks at most {num_others} can run elsewhere"
        )
    expected = described(device.type, weights_fingerprint(folder), str(folder), 0, 0)
    return RemoteRanks(
        *(num_ranks, *split_address(address)),
        *(read_secret(secret).encode(), expected, RANK_WAIT_SECONDS),
    )
