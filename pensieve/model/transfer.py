"""Copy tensors between host and device without waiting.

On an accelerator both directions use page-locked memory and are ordered by the stream.  So an upload is
complete before a kernel that is launched after it.  The host waits only for a `ReadBack` whose value it
reads.  (An ordinary copy waits for everything launched before it.)  Torch reuses the page-locked memory only
after the copy is done.

On a CPU nothing is copied: an upload or a read-back is the tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reading_is_free(values: Tensor) -> bool:
    """Whether the host can read the values without waiting for a device."""
    return values.device.type == "cpu"


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor's copy on the device; on a CPU, the tensor itself."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return the numbers as an int64 tensor of one dimension."""
    return upload(torch.tensor(numbers, dtype=torch.int64), device)


class ReadBack:
    """Bring a tensor from the device to the host."""

    def __init__(self, values: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._values = values
        if values.device.type != "cpu":
            with torch.cuda.device(values.device):  # other threads may have another current device
                self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                self._values.copy_(values, non_blocking=True)
                self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._arrived.record(torch.cuda.current_stream(values.device))

    def wait(self) -> Tensor:
        """Wait until the device has computed the values; return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
