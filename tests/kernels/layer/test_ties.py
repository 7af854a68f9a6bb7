"""If router logits are equal, the compiled kernels choose the same experts as `torch.topk`.

Routers of transformers use `torch.topk`. Logits in bfloat16 are often equal, because they have only a
few hundred possible values. So in many rows another expert has the same logit as the last chosen expert.
"""

from __future__ import annotations

import pytest
import torch

from pensieve.kernels.attention.input import AttentionKind
from pensieve.kernels.layer import cpu
from pensieve.kernels.layer.protocol import (
    ExpertWeights,
    HeadShape,
    LayerWeights,
    MlpWeights,
    ProductWeights,
)

SHAPES = [
    (8, 2),
    (32, 8),
    (60, 4),
    (64, 1),
    (64, 2),
    (128, 2),
    (128, 8),
    (160, 6),
    (512, 8),
    (512, 10),
]


def chosen_by_layer(logits: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Return bool (rows, experts): which experts added something.

    A row has its logits, then a 4 as the input of every expert, then one column for each expert's output.
    """
    num_rows, num_experts = logits.shape
    input_column, hidden, dtype = num_experts, 2 * num_experts + 2, logits.dtype
    into = torch.zeros(4, hidden, dtype=dtype)
    into[0::2, input_column] = 1.0
    outs = torch.zeros(num_experts, hidden, 2, dtype=dtype)
    outs[range(num_experts), range(hidden - num_experts, hidden), 0] = 1.0
    experts = ExpertWeights(
        router=torch.eye(num_experts, hidden, dtype=dtype),
        experts=[
            MlpWeights(ProductWeights([into], [None], "silu"), ProductWeights([out], [None]))
            for out in outs
        ],
        num_chosen=num_chosen,
        normalized=True,
        rounded=False,
    )
    heads_in = ProductWeights([torch.zeros(64, hidden, dtype=dtype)], [None])
    heads_out = ProductWeights([torch.zeros(hidden, 32, dtype=dtype)], [None])
    weights = LayerWeights(
        0, HeadShape(2, 1, 16), AttentionKind(1.0), heads_in, heads_out, experts, {}
    )
    rows = torch.zeros(num_rows, hidden, dtype=dtype)
    rows[:, :num_experts] = logits
    rows[:, input_column] = 4.0
    layer = cpu.CpuLayerKernels().layer(weights)
    answer = layer.after_attention(rows, torch.zeros(num_rows, 32, dtype=dtype))
    return answer[:, -num_experts:] != 0


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_logits_choose_the_same_experts_as_topk(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        compare(dtype, *shape)


def compare(dtype: torch.dtype, num_experts: int, num_chosen: int) -> None:
    draw = torch.Generator().manual_seed(num_experts + num_chosen)
    logits = torch.randn(200, num_experts, generator=draw)
    logits = (logits * torch.tensor([1.0, 4.0, 16.0, 64.0]).repeat(50)[:, None]).round()
    logits = (logits / 16).to(dtype)  # some rows with few distinct values, some with many
    logits[0] = 0.0
    shares = torch.softmax(logits.float(), dim=-1)
    named = torch.topk(shares, num_chosen).indices
    right = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, named, True)
    rivals = (shares == shares.gather(1, named[:, -1:])).sum(1) > 1
    assert int(rivals.sum()) > 20
    assert torch.equal(chosen_by_layer(logits, num_chosen), right)
