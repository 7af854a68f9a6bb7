"""Match a decoder layer's recorded calls to the form of fused layers, and collect its weights.

`model.fuse` describes the form.  The calls before and after the attention are walked once each.  The first
call that does not fit raises NoMatch.  A norm or an activation is recognised by its outputs.  A norm's
attributes only give candidates for eps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

from pensieve.kernels.layer.protocol import (
    Activation,
    ExpertWeights,
    LayerKernels,
    LayerWeights,
    MlpWeights,
    NormName,
    NormWeights,
    ProductWeights,
)
from pensieve.model.fuse.record import Call, ModuleCall, RecordedAttention, is_product

# The norms that the kernels cannot compute as a LayerNorm.
AFTER: tuple[NormName, ...] = ("attention_after", "mlp_after")
# The tolerated error of a norm, relative to its largest output.
NORM_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class NoMatch(Exception):
    """The kernels cannot compute a layer; the message says why."""


@dataclass
class _Parts:
    """The parts found so far."""

    norms: dict[NormName, NormWeights] = field(default_factory=dict)
    attention_in: list[ModuleCall] = field(default_factory=list)
    attention_out: list[ModuleCall] = field(default_factory=list)
    mlp_in: list[ModuleCall] = field(default_factory=list)
    mlp_out: list[ModuleCall] = field(default_factory=list)
    normed_queries: torch.Tensor | None = None
    activation: ModuleCall | None = None
    router: Router | None = None
    experts: ModuleCall | None = None
    is_parallel: bool = False


def match_layer(
    calls: Sequence[Call],
    inputs: torch.Tensor,
    layer_index: int,
    kernels: LayerKernels,
    *,
    has_rotation: bool = True,
) -> LayerWeights:
    """Return the layer's weights; raise NoMatch if its calls have another form.

    With `has_rotation` the layer is given a rotation, but need not apply it to its queries and keys.
    """
    attentions = [index for index, call in enumerate(calls) if isinstance(call, RecordedAttention)]
    if len(attentions) != 1:
        raise NoMatch(f"it has {len(attentions)} attention calls")
    middle = attentions[0]
    attention = cast(RecordedAttention, calls[middle])
    before, after = (
        cast(Sequence[ModuleCall], part) for part in (calls[:middle], calls[middle + 1 :])
    )
    parts = _Parts()
    _match_before_attention(parts, before, inputs, kernels)
    _match_after_attention(parts, after, inputs, kernels)
    mlp = _mlp_of(parts)
    if not _attention_fits(parts, attention) or not _mlp_fits(parts):
        raise NoMatch("its sizes do not fit the form")
    factor = _query_factor(parts, attention)
    if factor is None and not has_rotation:
        raise NoMatch(
            "its queries are not a multiple of the output of the query projection or its norm"
        )
    kind = attention.call.kind
    weights = LayerWeights(
        layer_index=layer_index,
        heads=attention.heads,
        attention=kind if factor is None else kind._replace(scaling=kind.scaling * factor),
        attention_in=_attention_in(parts, attention),
        attention_out=product_weights(parts.attention_out),
        mlp=mlp,
        norms=parts.norms,
        rotates=factor is None,
        parallel=parts.is_parallel,
    )
    if reason := kernels.unsupported_reason(weights):
        raise NoMatch(reason)
    return weights


def _mlp_of(parts: _Parts) -> MlpWeights | ExpertWeights:
    activation = parts.activation
    if activation is None or not (parts.mlp_out or parts.experts):
        raise NoMatch("its MLP is not two products around an activation")
    name = activation_of(activation.module)
    if name is None:
        raise NoMatch(f"the kernels do not know its activation, {_kind(activation)}")
    if parts.experts is not None:
        assert parts.router is not None
        found = expert_weights(parts.router, parts.experts, name)
        if found is None:
            raise NoMatch("its experts are not gated MLPs that a router chooses")
        return found
    if len(parts.mlp_in) == 2 and parts.mlp_in[0].output is not activation.input:
        parts.mlp_in.reverse()  # the gate comes first
    into = product_weights(parts.mlp_in, name, gated=_is_gated(parts))
    return MlpWeights(into, product_weights(parts.mlp_out))


def _is_gated(parts: _Parts) -> bool:
    """Whether the activation applies to a part of the product's output, not to all of it."""
    assert parts.activation is not None
    return len(parts.mlp_in) != 1 or not is_same_memory(
        parts.activation.input, parts.mlp_in[0].output
    )


def _query_factor(parts: _Parts, attention: RecordedAttention) -> float | None:
    """Return the number that the layer multiplies its queries by; some layers scale queries, not scores.

    Return None if the queries are not a multiple of the output of the query projection or its norm, because
    they are rotated.
    """
    query = attention.call.query.flatten(1)
    if parts.normed_queries is not None:
        return factor_between(parts.normed_queries.reshape(query.shape), query)
    rows = torch.cat([call.output.flatten(0, -2) for call in parts.attention_in], dim=-1)
    return factor_between(rows[:, : query.shape[1]], query)


def _attention_in(parts: _Parts, attention: RecordedAttention) -> ProductWeights:
    """Return the weights of queries, keys and values, in this order."""
    combined = product_weights(parts.attention_in)
    num_heads, num_kv_heads, head_size = attention.heads
    if len(parts.attention_in) > 1 or num_heads != num_kv_heads:
        return combined
    rows = parts.attention_in[0].output.flatten(0, -2)
    if torch.equal(rows[:, 2 * num_heads * head_size :], attention.call.value.flatten(1)):
        return combined
    by_head = rows.view(len(rows), num_heads, 3, head_size)
    if not torch.equal(by_head[:, :, 2], attention.call.value):
        raise NoMatch("its queries, keys and values are in an unknown order")
    weight, bias = combined.weights[0], combined.biases[0]
    return ProductWeights(
        [weight.reshape(num_heads, 3, head_size, -1).transpose(0, 1).flatten(0, 2)],
        [None if bias is None else bias.view(num_heads, 3, head_size).transpose(0, 1).flatten()],
    )


def _match_before_attention(
    parts: _Parts, calls: Sequence[ModuleCall], inputs: torch.Tensor, kernels: LayerKernels
) -> None:
    """Match [norm] → products of one input → [norms of queries and keys]."""
    normed = inputs
    for call in calls:
        if is_product(call, kernels):
            if call.input is not normed:
                raise NoMatch("its queries, keys and values have different inputs")
            parts.attention_in.append(call)
            continue
        norm = _norm_of(call)
        if call.input is inputs and not parts.attention_in:
            parts.norms["attention_before"], normed = norm, call.output
        elif "query_norm" not in parts.norms:
            parts.norms["query_norm"], parts.normed_queries = norm, call.output
        elif "key_norm" not in parts.norms:
            parts.norms["key_norm"] = norm
        else:
            raise NoMatch("it has too many norms before its attention")


def _match_after_attention(
    parts: _Parts, calls: Sequence[ModuleCall], inputs: torch.Tensor, kernels: LayerKernels
) -> None:
    """Match a product → [norms] → products of one input → activation → a product → [norm].

    In a layer with experts, a router → activation → experts → [norm] come after the norms.
    """
    unnamed: list[tuple[NormWeights, ModuleCall]] = []  # norms since the last product or router
    for call in calls:
        if is_product(call, kernels):
            if not parts.attention_out:
                parts.attention_out.append(call)
            elif not parts.mlp_in:
                _name_middle_norms(parts, unnamed, call, inputs)
                parts.mlp_in.append(call)
            elif call.input is parts.mlp_in[0].input:
                parts.mlp_in.append(call)
            elif not parts.mlp_out:
                parts.mlp_out.append(call)
            else:
                raise NoMatch("it has too many products after its attention")
            unnamed = []
        elif parts.attention_out and not parts.mlp_in and (router := match_router(call)):
            if parts.router is not None:
                raise NoMatch("it has more than one router")
            _name_middle_norms(parts, unnamed, call, inputs)
            parts.router, unnamed = router, []
        elif (
            parts.activation is None
            and not list(call.module.parameters())
            and not any(call.others)
            and (parts.mlp_in or parts.router)
        ):
            parts.activation = call
        elif parts.router is not None and parts.experts is None:
            parts.experts = call
        else:
            unnamed.append((_norm_of(call), call))
    if len(unnamed) > 1:
        raise NoMatch("it has too many norms after its MLP")
    if unnamed:
        parts.norms["mlp_after"] = unnamed[0][0]


def _name_middle_norms(
    parts: _Parts,
    unnamed: list[tuple[NormWeights, ModuleCall]],
    product: ModuleCall,
    inputs: torch.Tensor,
) -> None:
    """Name the norms between the attention's product and the MLP's first product.

    The MLP runs in parallel with the attention if its input is a norm of the layer's input, or if it shares
    the norm before the attention.
    """
    before = parts.attention_in[0].input if parts.attention_in else None
    if product.input is before and "attention_before" in parts.norms:
        parts.norms["mlp_before"], parts.is_parallel = parts.norms["attention_before"], True
    if unnamed and is_same_memory(product.input, unnamed[-1][1].output):
        norm, call = unnamed.pop()
        parts.norms["mlp_before"], parts.is_parallel = norm, call.input is inputs
    if unnamed:
        parts.norms["attention_after"] = unnamed.pop()[0]
    if unnamed:
        raise NoMatch("it has too many norms between attention and MLP")


def _norm_of(call: ModuleCall) -> NormWeights:
    norm = match_norm(call)
    if norm is None:
        raise NoMatch(f"the kernels do not know its {_kind(call)}")
    return norm


def _kind(call: ModuleCall) -> str:
    return type(call.module).__name__


def _hidden(parts: _Parts) -> int:
    return int(parts.attention_in[0].input.shape[-1]) if parts.attention_in else 0


def _mlp_fits(parts: _Parts) -> bool:
    """Whether the MLP's widths fit the form and are even: the kernels take pairs of bfloat16."""
    if parts.experts is not None:
        return bool(parts.experts.input.shape[-1] == _hidden(parts) and not parts.mlp_in)
    width = sum(call.output.shape[-1] for call in parts.mlp_in) // (2 if _is_gated(parts) else 1)
    return bool(
        len(parts.mlp_in) <= 2
        and width % 2 == 0
        and parts.mlp_out[0].input.shape[-1] == width
        and parts.mlp_out[0].output.shape[-1] == _hidden(parts)
    )


def _attention_fits(parts: _Parts, attention: RecordedAttention) -> bool:
    """Whether the widths of the attention and of all norms fit the form, and are even."""
    num_heads, num_kv_heads, head_size = attention.heads
    norms, hidden = parts.norms, _hidden(parts)
    inputs = sum(call.output.shape[-1] for call in parts.attention_in)
    fits = (
        inputs == (num_heads + 2 * num_kv_heads) * head_size
        and parts.attention_out[0].input.shape[-1] == num_heads * head_size
        and parts.attention_out[0].output.shape[-1] == hidden
        and ("query_norm" in norms) == ("key_norm" in norms)
        and not any(norms[name].centred for name in AFTER if name in norms)
        and all(
            len(norm.weight) == hidden
            for name, norm in norms.items()
            if name not in ("query_norm", "key_norm")
        )
    )
    if not fits:
        return False
    if "query_norm" in norms and not (
        len(norms["query_norm"].weight) in (head_size, num_heads * head_size)
        and len(norms["key_norm"].weight) in (head_size, num_kv_heads * head_size)
    ):
        return False
    return hidden % 2 == 0 and num_heads * head_size % 2 == 0


def product_weights(
    calls: Sequence[ModuleCall], activation: Activation | None = None, *, gated: bool = True
) -> ProductWeights:
    """Combine the weights of products with the same input into one product."""
    return ProductWeights(
        [_weight(call.module) for call in calls],
        [cast(torch.Tensor | None, call.module.bias) for call in calls],
        activation,
        gated,
    )


def _weight(module: torch.nn.Module) -> torch.Tensor:
    """Return the weight as (outputs, inputs)."""
    weight = cast(torch.Tensor, module.weight)
    return weight.T if type(module) is Conv1D else weight


def match_norm(call: ModuleCall) -> NormWeights | None:
    """Return the weights if this call computes a norm that the kernels know, else None."""
    parameters = list(call.module.parameters())
    if (
        any(call.others)
        or len(parameters) not in (1, 2)
        or any(each.dim() != 1 for each in parameters)
    ):
        return None
    if not isinstance(call.output, torch.Tensor) or len(parameters[0]) != len(parameters[-1]):
        return None
    width = len(parameters[0])
    if call.input.shape[-1] % width or call.input.shape != call.output.shape:
        return None
    numbers = [each for each in vars(call.module).values() if isinstance(each, float)]
    small = call.input * 1e-3  # small enough for eps to matter
    pairs = [(call.input, call.output), (small, call.module(small))]
    best: tuple[float, NormWeights] | None = None
    weight = parameters[0].float().contiguous()
    bias = parameters[1].float().contiguous() if len(parameters) == 2 else None
    for eps in numbers:
        candidates = [NormWeights(weight, eps, bias, centred=True)]
        if bias is None:  # the kernels add a bias to a LayerNorm only
            candidates += [NormWeights(weight, eps), NormWeights(1 + weight, eps)]
        for norm in candidates:
            errors = [_error(norm, inputs, output) for inputs, output in pairs]
            fits = all(worst <= NORM_TOLERANCE[call.input.dtype] for worst, _ in errors)
            mean = sum(mean for _, mean in errors)
            if fits and (best is None or mean < best[0]):
                best = mean, norm
    return None if best is None else best[1]


def _error(norm: NormWeights, inputs: torch.Tensor, output: torch.Tensor) -> tuple[float, float]:
    """Return the norm's largest and mean error, relative to the largest value of `output`."""
    width = len(norm.weight)
    rows = inputs.float().view(*inputs.shape[:-1], -1, width)
    if norm.centred:
        rows = rows - rows.mean(-1, keepdim=True)
    computed = rows / (rows.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    if norm.bias is not None:
        computed = computed + norm.bias
    expected = output.float()
    difference = (computed.flatten(-2) - expected).abs() / expected.abs().max().clamp_min(1e-12)
    return float(difference.max()), float(difference.mean())


def activation_of(module: torch.nn.Module) -> Activation | None:
    """Return the kernels' activation that the module computes, or None."""
    x = torch.linspace(-8, 8, 257)
    with torch.inference_mode():
        y = module(x)
    activations: dict[Activation, torch.Tensor] = {
        "silu": F.silu(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"),
        "relu": F.relu(x),
        "gelu": F.gelu(x),
    }
    for name, expected in activations.items():
        if torch.allclose(y, expected, atol=1e-6):
            return name
    return None


def factor_between(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Return the number that turns `before` into `after` by multiplication, or None."""
    if before.shape != after.shape:
        return None
    wide, target = before.double(), after.double()
    factor = float((wide * target).sum() / (wide * wide).sum())
    worst = float((wide * factor - target).abs().max() / target.abs().max())
    if not worst <= torch.finfo(after.dtype).eps:  # also true if `worst` is NaN
        return None
    return 1.0 if torch.equal(before, after) else factor


# -- experts --


class Router(NamedTuple):
    """A call of a router.

    It returned for each row the chosen experts and their weights (`shares`, from the softmax of the logits).
    """

    input: torch.Tensor
    weight: torch.Tensor
    shares: torch.Tensor
    experts: torch.Tensor
    normalized: bool


def match_router(call: ModuleCall) -> Router | None:
    """Return how this call chose experts, or None if it is not a router.

    A router is a module with one weight matrix.  It returns logits, shares and chosen experts for each row.
    This function recomputes shares and experts from the logits, and compares them with what the router
    returned.
    """
    parameters = list(call.module.parameters())
    if len(parameters) != 1 or parameters[0].dim() != 2 or not isinstance(call.output, tuple):
        return None
    weight = parameters[0]
    tensors = [each for each in call.output if isinstance(each, torch.Tensor) and each.dim() == 2]
    if len(tensors) != 3 or any(call.others) or weight.dtype != call.input.dtype:
        return None
    if call.input.shape[-1] != weight.shape[1]:
        return None
    logits, shares, experts = tensors
    own_logits = F.linear(call.input.reshape(-1, weight.shape[1]), weight)
    if logits.shape != own_logits.shape or experts.is_floating_point():
        return None
    if logits.dtype != own_logits.dtype and not torch.equal(logits.float(), own_logits.float()):
        return None  # computed in another precision, so the chosen experts sometimes differ
    probabilities = torch.softmax(own_logits.float(), dim=-1)
    largest = torch.topk(probabilities, experts.shape[1]).values
    chosen = probabilities.gather(1, experts)
    if not _near(chosen, largest, torch.float32):
        return None
    for normalized in (False, True):
        expected = chosen / chosen.sum(1, keepdim=True) if normalized else chosen
        if _near(shares.float(), expected, shares.dtype):
            return Router(call.input, weight, shares, experts, normalized)
    return None


def expert_weights(
    router: Router, call: ModuleCall, activation: Activation
) -> ExpertWeights | None:
    """Return the weights of the experts that this call applied, or None if it applied no experts.

    The called module holds the stacked matrices of all experts, and receives the router's output.  This
    function does not check which half of the first matrices is the gate.  A later comparison of the whole
    layer does.
    """
    matrices = list(call.module.parameters(recurse=False))
    inputs = (call.input, *call.others[0], *call.others[1].values())
    if (
        len(matrices) != 2
        or any(each.dim() != 3 or each.dtype != router.weight.dtype for each in matrices)
        or not any(each is router.shares for each in inputs)
        or not any(each is router.experts for each in inputs)
        or not is_same_memory(call.input, router.input)
    ):
        return None
    into, out = matrices
    num_experts, hidden = router.weight.shape
    width = into.shape[1] // 2
    if into.shape != (num_experts, 2 * width, hidden) or out.shape != (num_experts, hidden, width):
        return None
    if width % 2 or hidden % 2:  # the kernels take pairs of bfloat16
        return None
    return ExpertWeights(
        router=router.weight,
        experts=[
            MlpWeights(
                ProductWeights([into[each]], [None], activation),
                ProductWeights([out[each]], [None]),
            )
            for each in range(num_experts)
        ],
        num_chosen=router.experts.shape[1],
        normalized=router.normalized,
        rounded=router.shares.dtype != torch.float32,
    )


def is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether both are the same tensor, perhaps reshaped.  The record keeps all tensors alive."""
    return first.data_ptr() == second.data_ptr() and first.numel() == second.numel()


def _near(values: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    return values.shape == expected.shape and torch.allclose(
        values, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6
    )
