"""What crosses between host and device, without either waiting for the other.

On an accelerator both ways lead through page-locked memory and are ordered by the stream: what is
uploaded has arrived when a later kernel reads it, and the host waits only for a `ReadBack` whose
value it wants.  (An ordinary copy waits for everything the device was given before it.)  Torch
keeps page-locked memory from being used again until the copy is done.

On a CPU nothing crosses: an upload is the tensor itself, and so is a read-back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reading_is_free(values: Tensor) -> bool:
    """Whether the host can look at values without waiting for a device."""
    return values.device.type == "cpu"


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 (numbers)."""
    return upload(torch.tensor(numbers, dtype=torch.int64), device)


class ReadBack:
    """A tensor of the device on its way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._values = values
        if values.device.type != "cpu":
            with torch.cuda.device(values.device):  # a thread begins with the first one
                self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                self._values.copy_(values, non_blocking=True)
                self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._arrived.record(torch.cuda.current_stream(values.device))

    def wait(self) -> Tensor:
        """Its values, once the device has computed them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
