"""What a bench ran on, in words: figures of unknown machines are worth nothing."""

from __future__ import annotations

from pensieve.config.machine import num_cores, processor_name


def machine(device: str = "cpu") -> str:
    """The processor and how many CPUs of it this process may use, or the GPU."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    count = num_cores()
    return f"{processor_name()}, {count} CPU{'s' * (count != 1)}"
