"""The interface of the copiers, which move pages between the tiers beside the compute.

`copier_cpu` copies in a thread, `copier_cuda` on streams of the GPU.  Both keep this order:

    submit ──> pages of layer 0 │ layer 1 │ layer 2 │ …          begins when earlier iterations have written
    forward ── wait_layer(0) ─ layer 0 computes ─ wait_layer(1) ─ layer 1 computes …

Swap-ins come first, lowest layer first, because some layer's attention may be waiting for exactly that.
Swap-outs free pages that nobody needs at once; they go on only while no swap-in is outstanding.

A copy is *finished* when all of its layers have arrived; `poll` and `wait_any` report each finished copy
once, and the core moves neither of its pages before.  Copies may finish in any order.

The thread that computes calls `submit`, `wait_layer` and `arriving`; `poll` and `wait_any` may be called by
another thread, one at a time.  After an error in a copy, whatever waits, then and later, raises DeviceError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pensieve.core.iteration import SwapIn, SwapOut


class Copier(Protocol):
    def submit(self, swap_ins: Sequence[SwapIn], swap_outs: Sequence[SwapOut]) -> None:
        """Begin these copies; whatever earlier iterations write was launched before this call."""

    def wait_layer(self, layer: int) -> None:
        """Let what is computed from now on wait until every outstanding swap-in has brought this layer."""

    @property
    def arriving(self) -> bool:
        """Whether a swap-in is outstanding."""

    def poll(self) -> tuple[int, ...]:
        """The ids of copies that finished since the last report, without waiting."""

    def wait_any(self) -> tuple[int, ...]:
        """As `poll`, but waits for at least one copy if any is outstanding."""

    def close(self) -> None:
        """End the worker after its present unit of work; outstanding copies are given up."""
