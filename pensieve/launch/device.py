"""Chooses the device that computes, and prepares the kernels for it."""

from __future__ import annotations

import torch

from pensieve.config import Settings
from pensieve.errors import ConfigError, DeviceError
from pensieve.launch.model_folder import Report


def usable_device(settings: Settings, report: Report) -> torch.device:
    """The chosen device with its kernels; `auto` falls back to the CPU where a GPU has none."""
    device = _with_kernels(settings, report)
    if device.type == "cpu" and settings.kv_dtype == "fp8":
        report("--kv-dtype fp8 is made for GPUs: on this CPU torch reads and writes it, slowly")
    return device


def _with_kernels(settings: Settings, report: Report) -> torch.device:
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
    """The device that the settings name; ConfigError if there is none."""
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
        raise ConfigError(f"--device {name}: there are {torch.cuda.device_count()} GPUs")
    for name in ("tensor_parallel", "pipeline_stages"):
        if index and getattr(settings, name) > 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} takes the first GPUs: --device cuda")
    return torch.device("cuda", index)


def _check_kernels(settings: Settings, device: torch.device, report: Report) -> None:
    """Prepare the kernels for this GPU; compiling them takes a few seconds the first time."""
    from pensieve.kernels import PAGE_SLOTS as PAGE
    from pensieve.kernels import cuda_launch

    if settings.weights == "int8":
        raise ConfigError("--weights int8 is for CPUs: --device cpu")
    if settings.kv_dtype == "int8":
        raise ConfigError("--kv-dtype int8 is for CPUs: --device cpu")
    if settings.chunk_tokens != PAGE:
        raise ConfigError(
            f"chunk_tokens must be {PAGE} on a GPU, where that is the page size of the kernels"
        )
    report(f"kernels for {cuda_launch.architecture(device.index)}")
    cuda_launch.prepare(device.index)
