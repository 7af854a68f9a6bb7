"""The compiled dense layers, with each instruction set of this machine, compared with float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from pensieve.kernels.layer import cpu
from pensieve.kernels.layer.protocol import Activation, NormWeights

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
TYPES = list(TOLERANCE)


def close(got: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> bool:
    assert not got.isnan().any()
    scale = float(right.abs().max().clamp_min(1.0))
    return float((got.double() - right).abs().max()) <= TOLERANCE[dtype] * scale


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=draw) * shape[-1] ** -0.5).to(dtype)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"),
    [(64, 96, 1), (63, 33, 5), (2, 1, 1), (100, 7, 13), (512, 256, 25), (96, 70, 500)],
)
def test_products(dtype: torch.dtype, inputs: int, outputs: int, rows: int) -> None:
    first, second = (
        drawn(outputs, inputs, dtype=dtype, seed=1),
        drawn(9, inputs, dtype=dtype, seed=2),
    )
    bias = drawn(outputs, dtype=dtype, seed=3)
    given = drawn(rows, inputs, dtype=dtype, seed=4) * inputs**0.5
    packed = cpu.CpuPackedWeights([first, second], [bias, None])
    whole = torch.cat([first, second]).double()
    right = given.double() @ whole.T + F.pad(bias, (0, 9)).double()
    for kind in (dtype, torch.float32):
        # The gap between rows, and the numbers after them, must not change.
        around = torch.full((rows + 1, outputs + 9 + 3), 7.0, dtype=kind)
        out = around[:rows, : outputs + 9]
        packed.multiply(given, out)
        assert close(out, right, dtype)
        assert bool((around[:, outputs + 9 :] == 7).all())
        assert bool((around[rows] == 7).all())
    spread = torch.zeros(rows, inputs + 5, dtype=dtype)
    spread[:, :inputs] = given
    again = torch.empty(rows, outputs + 9, dtype=torch.float32)
    packed.multiply(spread[:, :inputs], again)
    assert torch.equal(again, out)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(32, 48, 3), (64, 5, 1), (34, 129, 30)])
def test_gated_products(
    dtype: torch.dtype, activation: Activation, inputs: int, outputs: int, rows: int
) -> None:
    gate, up = (drawn(outputs, inputs, dtype=dtype, seed=seed) for seed in (1, 2))
    bias = drawn(2 * outputs, dtype=dtype, seed=3)
    given = drawn(rows, inputs, dtype=dtype, seed=4) * inputs**0.5 * 6
    packed = cpu.CpuPackedWeights([gate, up], [bias[:outputs], bias[outputs:]], activation)
    out = torch.empty(rows, outputs, dtype=dtype)
    packed.multiply(given, out)
    wide = given.double()
    left = wide @ gate.double().T + bias[:outputs].double()
    right = wide @ up.double().T + bias[outputs:].double()
    act = F.silu(left) if activation == "silu" else F.gelu(left, approximate="tanh")
    assert close(out, act * right, dtype)


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
    "relu": F.relu,
    "gelu": F.gelu,
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(64, 5, 1), (34, 129, 30)])
def test_an_activation_applies_to_all_outputs_of_a_product(
    dtype: torch.dtype, activation: Activation, int8: bool, inputs: int, outputs: int, rows: int
) -> None:
    weight = drawn(outputs, inputs, dtype=dtype, seed=1)
    bias = drawn(outputs, dtype=dtype, seed=3)
    given = drawn(rows, inputs, dtype=dtype, seed=4) * inputs**0.5 * 3
    packed = cpu.CpuPackedWeights([weight], [bias], activation, int8=int8, gated=False)
    out, before = torch.empty(rows, outputs), torch.empty(rows, outputs)
    packed.multiply(given, out)
    cpu.CpuPackedWeights([weight], [bias], int8=int8).multiply(given, before)
    assert close(out, ACTIVATIONS[activation](before.double()), torch.float32)
    again = torch.empty(1, outputs)
    packed.multiply(given[-1:], again)
    assert torch.equal(again, out[-1:])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    packed = cpu.CpuPackedWeights([drawn(130, 96, dtype=dtype, seed=1)])
    given = drawn(40, 96, dtype=dtype, seed=2)
    whole = torch.empty(40, 130, dtype=dtype)
    packed.multiply(given, whole)
    for rows in (1, 2, 7, 12, 13, 25):
        out = torch.empty(rows, 130, dtype=dtype)
        packed.multiply(given[:rows], out)
        assert torch.equal(out, whole[:rows])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_far_from_zero(activation: Activation) -> None:
    """Inputs are NaN, or so large that exponentials overflow."""
    values = torch.tensor([0.0, -0.0, 1e-30, 3.0, -3.0, 88.0, -88.0, 200.0, -200.0, 1e18, -1e18])
    count = len(values)
    gate, up = torch.diag(values), torch.zeros(count, count)
    packed = cpu.CpuPackedWeights([gate, up], [None, torch.ones(count)], activation)
    out = torch.empty(1, count)
    packed.multiply(torch.ones(1, count), out)
    right = ACTIVATIONS[activation](values.double()).float()
    assert torch.allclose(out[0], right, rtol=2e-6, atol=1e-6)
    packed.multiply(torch.full((1, count), float("nan")), out)
    assert bool(out.isnan().all())


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [8, 48, 100, 1024])
def test_norms(dtype: torch.dtype, width: int) -> None:
    weight = drawn(width, dtype=torch.float32, seed=1) + 1
    norm = cpu.CpuNorm(NormWeights(weight, 1e-5))
    for rows in (1, 30):
        given = (drawn(rows, width, dtype=torch.float32, seed=2) * 50).to(dtype)
        wide = given.double()
        right = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        assert close(norm(given), right, dtype)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [8, 48, 100, 1024])
def test_layer_norms(dtype: torch.dtype, width: int) -> None:
    weight, bias = (drawn(width, dtype=torch.float32, seed=seed) + 1 for seed in (1, 3))
    for each in (bias, None):
        norm = cpu.CpuNorm(NormWeights(weight, 1e-5, each, centred=True))
        # The values are large compared with their differences, which the mean of squares would lose.
        given = (drawn(30, width, dtype=torch.float32, seed=2) * 50 + 300).to(dtype)
        given[3] = 7.0
        wide = given.double()
        right = F.layer_norm(
            wide, (width,), weight.double(), None if each is None else each.double(), 1e-5
        )
        whole = norm(given)
        assert close(whole, right, dtype)
        for row in (0, 3, 29):
            assert torch.equal(norm(given[row : row + 1]), whole[row : row + 1])


@pytest.mark.usefixtures("kernel")
def test_the_largest_of_each_row() -> None:
    rows = drawn(9, 103, dtype=torch.float32, seed=1)
    rows[1, 7] = rows[1, 90] = 5.0
    rows[2, 102] = 5.0
    rows[3, 0] = 5.0
    rows[4, 50] = float("nan")
    rows[5, 101] = float("inf")
    rows[6, 3] = float("-inf")
    rows[7] = -3e38
    rows[8] = 3e38  # a plain sum would overflow
    found = cpu.argmax(rows).tolist()
    assert found[1:] == [7, 102, 0, -1, -1, -1, 0, 0]
    assert found[0] == int(rows[0].argmax())
    assert cpu.argmax(rows[:, :5]).tolist()[0] == int(rows[0, :5].argmax())


def test_the_error_names_shapes_that_do_not_fit() -> None:
    packed = cpu.CpuPackedWeights([torch.ones(6, 4)])
    with pytest.raises(ValueError, match=r"weights are for \(4, 6\), not \(5, 6\)"):
        packed.multiply(torch.ones(2, 5), torch.ones(2, 6))
    with pytest.raises(ValueError, match="out has rows = 3, but rows has rows = 2"):
        packed.multiply(torch.ones(2, 4), torch.ones(3, 6))
    with pytest.raises(ValueError, match=r"out is torch\.float64"):
        packed.multiply(torch.ones(2, 4), torch.ones(2, 6, dtype=torch.float64))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"),
    [(64, 96, 1), (63, 33, 5), (5, 1, 3), (512, 256, 25), (96, 70, 300)],
)
def test_int8_products(dtype: torch.dtype, inputs: int, outputs: int, rows: int) -> None:
    """Results are exact, except that weights and rows are rounded to 127 steps of their largest value."""
    weight = drawn(outputs, inputs, dtype=dtype, seed=1)
    bias = drawn(outputs, dtype=dtype, seed=2)
    given = drawn(rows, inputs, dtype=dtype, seed=3) * inputs**0.5
    given[0] = 0
    packed = cpu.CpuPackedWeights([weight], [bias], int8=True)
    out = torch.empty(rows, outputs)
    packed.multiply(given, out)
    worth = weight.float().abs().amax(1) / 127
    steps = given.float().abs().amax(1, keepdim=True) / 127
    whole = (weight.float() / worth[:, None]).round().double()
    around = given.double() / steps.clamp_min(1e-30)
    right = around @ whole.T * steps * worth + bias.double()
    # Each rounded number is off by half a step at most. This is the resulting limit for the products.
    most = 0.51 * steps * worth * whole.abs().sum(1)
    assert bool(((out.double() - right).abs() <= most + 1e-6).all())
    assert torch.equal(out[0], bias.float())
    assert packed.panels.nbytes < weight.nbytes + 2 * 16 * (inputs + 4)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_row_stays_non_finite_in_int8(odd: float) -> None:
    packed = cpu.CpuPackedWeights([torch.ones(3, 40)], int8=True)
    given = torch.ones(3, 40)
    given[1, 39] = odd
    out = torch.empty(3, 3)
    packed.multiply(given, out)
    assert out[1].isfinite().logical_not().all()
    assert torch.allclose(out[[0, 2]], torch.tensor(40.0))


@pytest.mark.usefixtures("kernel")
def test_every_half_is_read_exactly_and_floats_are_rounded_like_in_torch() -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    finite = halves[halves.isfinite()]
    many = finite.view(-1, 64)  # 992 rows
    out = torch.empty(len(many), 64)
    cpu.CpuPackedWeights([torch.eye(64).half()]).multiply(many, out)  # the values as inputs
    assert torch.equal(out, many.float())
    turned = torch.empty(64, len(many))
    cpu.CpuPackedWeights([many]).multiply(torch.eye(64).half(), turned)  # the values as weights
    assert torch.equal(turned.T, many.float())
    between = (finite.float() + finite.float().roll(1)) / 2  # ties; `beside` has their neighbours
    beside = [torch.nextafter(between, torch.tensor(end)) for end in (-1e9, 1e9)]
    large = [65504.0, 65519.99, 65520.0, 65536.0, 1e30, 1e-30, 3e-8, float("inf"), float("nan")]
    floats = torch.cat([between, *beside, torch.tensor(large), -torch.tensor(large)])
    rounded = torch.empty(1, len(floats), dtype=torch.float16)
    zero = torch.zeros(len(floats), 1, dtype=torch.float16)
    cpu.CpuPackedWeights([zero], [floats]).multiply(zero[:1], rounded)  # the floats as biases
    assert torch.equal(
        rounded[0].nan_to_num(7.0, 8.0, 9.0), floats.half().nan_to_num(7.0, 8.0, 9.0)
    )
