"""Launch arguments are converted once, and layers of the same shape are checked once."""

from __future__ import annotations

import pytest
import torch

from pensieve.kernels import cuda_launch
from pensieve.kernels.attention import paged
from pensieve.kernels.attention.cuda import plan
from pensieve.kernels.attention.input import AttentionInput, AttentionKind, PageIndex
from pensieve.kernels.attention.paged import CudaAttention
from pensieve.kernels.attention.plan import BlocksAtOnce, DevicePlan
from pensieve.kernels.cuda_launch import Argument, Launch


def test_a_repeated_argument_keeps_its_type_and_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    monkeypatch.setattr(cuda_launch, "CONVERTED_MAX", 6)
    for address in range(20):
        arguments: tuple[Argument, ...] = (("p", 2**40 + address), ("i", 7), ("l", 7), ("f", 0.5))
        for _ in range(2):
            found = cuda_launch.converted(arguments)
            assert [type(each) for each in found] == [
                cupy.uint64,
                cupy.int32,
                cupy.int64,
                cupy.float32,
            ]
            assert [float(each) for each in found] == [2**40 + address, 7, 7, 0.5]
    assert len(cuda_launch._converted) <= 6 + 4


def test_layers_of_one_shape_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with tensors of another shape is checked again."""
    launched: list[Launch] = []
    monkeypatch.setattr(cuda_launch, "launch", lambda launch, device: launched.append(launch))
    checks: list[str] = []
    check = paged._check
    monkeypatch.setattr(
        paged, "_check", lambda *tensors: (checks.append("checked"), check(*tensors))
    )
    ints = torch.zeros(1, 4, dtype=torch.int32), *torch.zeros(3, 2, dtype=torch.int32)
    page_index = PageIndex(ints[0], ints[1], ints[2][:1], ints[3][:1])
    work = DevicePlan.of(plan([1], [100], 4, 2, 64, BlocksAtOnce(8)), 2, 64, "cpu")
    attention = CudaAttention(work)
    arena = torch.zeros(3, 4, 2, 2, 32, 64).half()
    outs = [torch.zeros(1, 4, 64).half() for _ in arena]
    query = torch.zeros(1, 4, 64).half()

    def inputs_of(query: torch.Tensor, layer: torch.Tensor) -> AttentionInput:
        return AttentionInput(query, layer[:, 0], layer[:, 1], page_index, AttentionKind(0.1))

    for layer, out in zip(arena, outs, strict=True):
        attention(inputs_of(query, layer), out)
    assert checks == ["checked"]
    assert [each.arguments[1][1] for each in launched] == [
        layer[:, 0].data_ptr() for layer in arena
    ]
    assert [each.arguments[-1][1] for each in launched] == [out.data_ptr() for out in outs]
    with pytest.raises(ValueError, match="heads = 3"):
        attention(inputs_of(torch.zeros(1, 3, 64).half(), arena[0]), outs[0])
