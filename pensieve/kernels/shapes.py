"""Check that the shapes of a kernel's tensors fit together.

Each dimension has a symbol, which must have one size over all tensors of a call.
`Shapes("write_kv").unify("key", key, ("tokens", "kv_heads", "head_size"))` binds each symbol to its
size the first time and compares it afterwards.  A mismatch names the tensor, the symbol, both sizes
and the tensor that bound it.  A symbol may carry "+1" ("slices+1": one more than `slices`).
"""

from __future__ import annotations

import torch

PAGE_SLOTS = 32  # page size of the compiled kernels; the torch implementation takes any size


class Shapes:
    """Hold the sizes that one kernel call has bound so far."""

    __slots__ = ("_bound", "_device", "_kernel")

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self._bound: dict[str, tuple[int, str]] = {}  # symbol -> size, the tensor that bound it
        self._device: tuple[torch.device, str] | None = None

    def __getitem__(self, symbol: str) -> int:
        return self._bound[symbol][0]

    def unify(
        self,
        name: str,
        tensor: torch.Tensor,
        symbols: tuple[str, ...],
        dtype: torch.dtype | None = None,
        *,
        anywhere: bool = False,
    ) -> None:
        """Bind or compare each dimension; `anywhere` allows a tensor on another device."""
        shape = tensor.shape
        if len(shape) != len(symbols):
            raise ValueError(
                f"{self._kernel}: {name} has shape {tuple(shape)}, expected ({', '.join(symbols)})"
            )
        for symbol, length in zip(symbols, shape, strict=True):
            self._bind(name, symbol, length)
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"{self._kernel}: {name} is {tensor.dtype}, expected {dtype}")
        if not anywhere:
            if self._device is None:
                self._device = (tensor.device, name)
            elif self._device[0] != tensor.device:
                device, other = self._device
                raise ValueError(
                    f"{self._kernel}: {name} is on {tensor.device}, but {other} is on {device}"
                )

    def expect(self, symbol: str, size: int, why: str) -> None:
        """Raise ValueError unless a bound symbol has this size."""
        bound, name = self._bound[symbol]
        if bound != size:
            raise ValueError(
                f"{self._kernel}: {name} has {symbol} = {bound}, expected {size} ({why})"
            )

    def _bind(self, name: str, symbol: str, length: int) -> None:
        size = length
        if symbol.endswith("+1"):
            symbol, size = symbol[:-2], length - 1
        bound = self._bound.setdefault(symbol, (size, name))
        if bound[0] != size:
            raise ValueError(
                f"{self._kernel}: {name} has {symbol} = {size}, but {bound[1]} has "
                f"{symbol} = {bound[0]}"
            )
