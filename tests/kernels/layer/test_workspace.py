"""Buffers that could not be enlarged stay usable."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pensieve.kernels.layer.cpu_rows import Widths, Workspace


@pytest.mark.parametrize("num_allocated", range(9))
def test_buffers_can_be_enlarged_after_a_failed_allocation(
    num_allocated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that does not fit into memory is computed in halves, which need buffers, too."""
    workspace, widths = Workspace(), Widths(8, 24, 16, 8, 4, 2, 16)
    workspace.reserve(4, widths, torch.float32)
    empty, left = torch.empty, [num_allocated]

    def failing(*sizes: Any, **options: Any) -> torch.Tensor:
        if not left[0]:
            raise RuntimeError("can't allocate memory")
        left[0] -= 1
        return empty(*sizes, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", failing)
        with pytest.raises(RuntimeError, match="memory"):
            workspace.reserve(512, widths, torch.float32)
    assert workspace.rotated(4, widths).numel() >= 4 * widths.heads_in
    workspace.reserve(256, widths, torch.float32)
    assert workspace.rotated(256, widths).numel() >= 256 * widths.heads_in
    first = workspace._tensors[0]
    assert first.numel() == 256 * widths.hidden
    assert workspace.struct.normed == first.data_ptr()
