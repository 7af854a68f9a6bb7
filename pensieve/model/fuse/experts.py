"""Matches a router and its experts in a decoder layer's recorded calls, and collects their weights.

A router is a module with one matrix that answers logits, shares and experts of each row; what it does with
the logits is computed again here and compared with what it answered.  The experts are a module that holds
the matrices of all of them, one behind the other, and is given what the router answered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from pensieve.kernels.layer.protocol import Activation, ExpertWeights, MlpWeights, ProductWeights
from pensieve.model.fuse.record import ModuleCall


class Router(NamedTuple):
    """A call of a router; shares and experts are the tensors that it answered."""

    given: torch.Tensor
    weight: torch.Tensor
    shares: torch.Tensor
    experts: torch.Tensor
    normalized: bool


def match_router(call: ModuleCall) -> Router | None:
    """How this call chose experts; None if it was something else."""
    parameters = list(call.module.parameters())
    if len(parameters) != 1 or parameters[0].dim() != 2 or not isinstance(call.answer, tuple):
        return None
    weight = parameters[0]
    tensors = [each for each in call.answer if isinstance(each, torch.Tensor) and each.dim() == 2]
    if len(tensors) != 3 or any(call.others) or weight.dtype != call.given.dtype:
        return None
    if call.given.shape[-1] != weight.shape[1]:
        return None
    logits, shares, experts = tensors
    right = F.linear(call.given.reshape(-1, weight.shape[1]), weight)
    if logits.shape != right.shape or experts.is_floating_point():
        return None
    if logits.dtype != right.dtype and not torch.equal(logits.float(), right.float()):
        return None  # it computes in another precision, and so chooses other experts now and then
    probabilities = torch.softmax(right.float(), dim=-1)
    largest = torch.topk(probabilities, experts.shape[1]).values
    chosen = probabilities.gather(1, experts)
    if not _near(chosen, largest, torch.float32):
        return None
    for normalized in (False, True):
        expected = chosen / chosen.sum(1, keepdim=True) if normalized else chosen
        if _near(shares.float(), expected, shares.dtype):
            return Router(call.given, weight, shares, experts, normalized)
    return None


def expert_weights(
    router: Router, call: ModuleCall, activation: Activation
) -> ExpertWeights | None:
    """The weights of the experts that this call applied; None if it is no call of experts.

    Which half of the first matrices is the gate is not looked at: the layer is compared as a whole.
    """
    matrices = list(call.module.parameters(recurse=False))
    given = (call.given, *call.others[0], *call.others[1].values())
    if (
        len(matrices) != 2
        or any(each.dim() != 3 or each.dtype != router.weight.dtype for each in matrices)
        or not any(each is router.shares for each in given)
        or not any(each is router.experts for each in given)
        or not is_same_memory(call.given, router.given)
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


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether it is the same tensor, perhaps of another shape; the record keeps all of them alive."""
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


def _near(got: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> bool:
    return got.shape == right.shape and torch.allclose(
        got, right, rtol=4 * torch.finfo(dtype).eps, atol=1e-6
    )
