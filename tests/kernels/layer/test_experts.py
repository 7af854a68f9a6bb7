"""The compiled experts of a layer, with each instruction set of this machine, compared with float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from pensieve.kernels.attention.input import AttentionKind
from pensieve.kernels.layer import cpu
from pensieve.kernels.layer.cpu_rows import EXPERT_ROWS_MAX
from pensieve.kernels.layer.protocol import (
    ExpertWeights,
    HeadShape,
    LayerWeights,
    MlpWeights,
    ProductWeights,
)
from tests.kernels.layer.test_cpu import TYPES, close, drawn

HIDDEN, WIDE, EXPERTS, CHOSEN = 64, 38, 19, 3


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Model:
    """A layer whose attention adds nothing. The first values of a row are the router's logits."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        normalized: bool = True,
        rounded: bool = False,
        int8: bool = False,
    ) -> None:
        self.dtype, self.normalized, self.rounded = dtype, normalized, rounded
        self.into = drawn(EXPERTS, 2 * WIDE, HIDDEN, dtype=dtype, seed=1)
        self.out = drawn(EXPERTS, HIDDEN, WIDE, dtype=dtype, seed=2)
        nothing = ProductWeights([torch.zeros(HIDDEN, HIDDEN, dtype=dtype)], [None])
        experts = ExpertWeights(
            router=torch.eye(EXPERTS, HIDDEN, dtype=dtype),
            experts=[
                MlpWeights(ProductWeights([into], [None], "silu"), ProductWeights([out], [None]))
                for into, out in zip(self.into, self.out, strict=True)
            ],
            num_chosen=CHOSEN,
            normalized=normalized,
            rounded=rounded,
        )
        attention_in = ProductWeights([torch.zeros(2 * HIDDEN, HIDDEN, dtype=dtype)], [None])
        weights = LayerWeights(
            0, HeadShape(4, 2, 16), AttentionKind(1.0), attention_in, nothing, experts, {}
        )
        self.layer = cpu.CpuLayerKernels().layer(weights, int8=int8)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer.after_attention(rows, torch.zeros_like(rows))

    def right(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the result in float64. Among equal logits, use torch's choice."""
        wide = rows.double()
        logits = wide[:, :EXPERTS]
        chosen = torch.topk(torch.softmax(logits.float(), dim=1), CHOSEN).indices
        shares = torch.softmax(logits, dim=1).gather(1, chosen)
        if self.normalized:
            shares = shares / shares.sum(1, keepdim=True)
        if self.rounded:
            shares = shares.to(self.dtype).double()
        answer = wide.clone()
        for row in range(len(rows)):
            for share, expert in zip(shares[row], chosen[row], strict=True):
                gate, up = (self.into[expert].double() @ wide[row]).chunk(2)
                gated = (F.silu(gate) * up).to(self.dtype).double()
                answer[row] += share * (self.out[expert].double() @ gated)
        return answer


def rows_of(count: int, dtype: torch.dtype, seed: int = 5) -> torch.Tensor:
    return drawn(count, HIDDEN, dtype=dtype, seed=seed) * HIDDEN**0.5


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("normalized", "rounded"), [(True, False), (False, True)])
def test_experts_are_added_with_their_routing_weights(
    dtype: torch.dtype, normalized: bool, rounded: bool
) -> None:
    model = Model(dtype, normalized=normalized, rounded=rounded)
    for count in (1, 2, 16, 70):
        rows = rows_of(count, dtype)
        rows[0, 4] = rows[0, 11] = rows[0, 2] = rows[0, 17] = 3.5  # one of these four is not chosen
        assert close(model(rows), model.right(rows), dtype)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_a_rows_experts_and_bits_do_not_depend_on_other_rows(
    dtype: torch.dtype, int8: bool
) -> None:
    model = Model(dtype, int8=int8)
    rows = rows_of(EXPERT_ROWS_MAX + 40, dtype)
    rows[40:80, :EXPERTS] = rows[40, :EXPERTS]  # so that one expert has many rows
    torch.set_num_threads(2)
    together = model(rows)
    for first, end in ((0, 1), (3, 5), (30, 60), (0, EXPERT_ROWS_MAX - 1), (500, len(rows))):
        assert torch.equal(model(rows[first:end]), together[first:end])
    torch.set_num_threads(1)
    assert torch.equal(model(rows), together)
    backwards = torch.arange(len(rows) - 1, -1, -1)
    assert torch.equal(model(rows[backwards]), together[backwards])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("column", [0, EXPERTS - 1, HIDDEN - 1])
def test_a_non_finite_row_affects_no_other_row(dtype: torch.dtype, odd: float, column: int) -> None:
    model = Model(dtype)
    rows = rows_of(9, dtype)
    right = model(rows)
    rows[4, column] = odd
    got = model(rows)
    assert not got[4].isfinite().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(got[others], right[others])


@pytest.mark.usefixtures("kernel")
def test_logits_far_apart_and_all_equal() -> None:
    model = Model(torch.float32)
    rows = rows_of(3, torch.float32)
    rows[0, :EXPERTS] = 0.0
    rows[1, :EXPERTS] = -3e3
    rows[1, 7] = 3e3
    rows[2, :EXPERTS] = torch.arange(EXPERTS) * -1e3
    got, right = model(rows), model.right(rows)
    for row in range(3):
        assert close(got[row], right[row], torch.float32)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
def test_int8_experts_are_chosen_like_the_original_ones(dtype: torch.dtype) -> None:
    rows = rows_of(30, dtype)
    exact, rounded = Model(dtype)(rows).double(), Model(dtype, int8=True)(rows).double()
    added = float((exact - rows.double()).abs().max())
    assert 0 < float((exact - rounded).abs().max()) < 0.05 * added
