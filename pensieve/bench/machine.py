"""What a bench ran on, in words: figures of unknown machines are worth nothing."""

from __future__ import annotations

import platform
from pathlib import Path

from pensieve.config.machine import num_cores

CPU_INFO = Path("/proc/cpuinfo")


def machine(device: str = "cpu") -> str:
    """The processor and how many CPUs of it this process may use, or the GPU."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    count = num_cores()
    return f"{_processor()}, {count} CPU{'s' * (count != 1)}"


def _processor() -> str:
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
