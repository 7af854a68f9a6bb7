"""The whole forward of a model all of whose layers are fused: a loop over them, without the model's own code.

The loop knows a table of embeddings times a number, one pair of rotations for all layers, a norm, and an
output product times a number.  Each is found in the recorded forward and compared with what was answered.
A second forward, with an output product 64 times as large, shows a cap on logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from pensieve.kernels.layer.protocol import LayerKernels, NormWeights
from pensieve.model.attention import FlatModel, ForwardPass
from pensieve.model.fuse.layers import FusedLayer, is_rotation
from pensieve.model.fuse.match import match_norm
from pensieve.model.fuse.products import PackedProduct, children_of
from pensieve.model.fuse.record import ForwardRecord, ModuleCall, causal_logits, is_product

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, (1, tokens, rotary)


@dataclass(frozen=True)
class Surroundings:
    """What stands around the layers."""

    table: torch.nn.Embedding
    table_factor: float
    rotation: Callable[[torch.Tensor, torch.Tensor], Rotation]  # of (1, tokens, …), (1, tokens)
    norm: NormWeights
    find_head: Callable[[], torch.nn.Module]  # what the output product was replaced by
    head_factor: float


class FusedModel:
    """Embeddings, fused layers, norm and output product, in one loop."""

    def __init__(
        self, around: Surroundings, layers: Sequence[FusedLayer], kernels: LayerKernels
    ) -> None:
        head = around.find_head()
        assert isinstance(head, PackedProduct)
        self._around = around
        self._layers = layers
        self._norm = kernels.norm(around.norm)
        self._head = head.packed
        for layer, then in pairwise(layers):
            layer.dense.followed_by(then.dense)
        layers[-1].dense.followed_by(self._head)

    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        forward_pass: ForwardPass,
    ) -> torch.Tensor:
        """float32 (rows, vocab)"""
        around = self._around
        hidden: torch.Tensor = around.table(input_ids)
        if around.table_factor != 1:
            hidden = hidden * around.table_factor
        rotation = around.rotation(hidden[None], positions[None])
        for layer in self._layers[:-1]:
            hidden = layer.run(hidden, rotation, forward_pass)
        hidden = self._layers[-1].run(hidden, rotation, forward_pass, rows)
        logits = torch.empty(
            (len(rows), self._head.outputs), dtype=torch.float32, device=hidden.device
        )
        self._head.multiply(self._norm(hidden), logits)
        return logits if around.head_factor == 1 else logits.mul_(around.head_factor)


def match_surroundings(
    flat: FlatModel, record: ForwardRecord, kernels: LayerKernels
) -> Surroundings | None:
    """What surrounds the layers; None if the loop could not do it."""
    layers, outside = record.layers, record.outside
    if not layers:
        return None
    first, last = layers[0].given, _hidden(layers[-1].answer)
    rotation = layers[0].arguments.get("position_embeddings")
    if first is None or not is_rotation(rotation, first):
        return None
    if any(layer.arguments.get("position_embeddings") is not rotation for layer in layers):
        return None
    tables = [call for call in outside if isinstance(call.module, torch.nn.Embedding)]
    rotations = [call for call in outside if call.answer is rotation]
    norms = [call for call in outside if call.given is last]
    heads = [call for call in outside if is_product(call, kernels)]
    if not len(tables) == len(rotations) == len(norms) == len(heads) == 1:
        return None
    chained = all(after.given is _hidden(layer.answer) for layer, after in pairwise(layers))
    table, head = tables[0], heads[0]
    norm = match_norm(norms[0])
    table_factor = _factor(table.answer, first)
    head_factor = _factor(head.answer[0], record.logits)
    rotate = _with_other_positions(rotations[0])
    again = rotate(first, torch.arange(len(record.prompt), device=first.device)[None])
    if (
        norm is None
        or not chained
        or table_factor is None
        or head_factor is None
        or not torch.equal(head.given, norms[0].answer)
        or _factor(64 * head.answer[0], _with_larger_logits(flat, record, head.module, 64)) is None
        or not all(torch.equal(one, other) for one, other in zip(again, rotation, strict=True))
    ):
        return None
    parent, name, _ = children_of(flat.module)[id(head.module)]
    return Surroundings(
        table=table.module,  # type: ignore[arg-type]
        table_factor=table_factor,
        rotation=rotate,
        norm=norm,
        find_head=partial(getattr, parent, name),
        head_factor=head_factor,
    )


def _hidden(answer: Any) -> Any:
    """A layer's residual, which some models' layers answer in a tuple."""
    return answer[0] if isinstance(answer, tuple) else answer


def _with_other_positions(call: ModuleCall) -> Callable[[torch.Tensor, torch.Tensor], Rotation]:
    """The call that gave the rotation, for other positions, which are its one tensor beside the first."""
    args, kwargs = call.others

    def rotate(hidden: torch.Tensor, positions: torch.Tensor) -> Rotation:
        def replaced(argument: Any) -> Any:
            return positions if isinstance(argument, torch.Tensor) else argument

        named = {name: replaced(argument) for name, argument in kwargs.items()}
        cosines, sines = call.module(hidden, *map(replaced, args), **named)
        return cosines, sines

    return rotate


def _with_larger_logits(
    flat: FlatModel, record: ForwardRecord, head: torch.nn.Module, times: int
) -> torch.Tensor:
    """The model's logits with an output product that is so many times larger."""
    hook = head.register_forward_hook(lambda module, args, answer: answer * times)
    try:
        return causal_logits(flat, record.prompt)
    finally:
        hook.remove()


def _factor(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """The number that one was multiplied by to become the other; None if there is no such number."""
    if before.shape != after.shape:
        return None
    wide, right = before.double(), after.double()
    factor = float((wide * right).sum() / (wide * wide).sum())
    worst = float((wide * factor - right).abs().max() / right.abs().max())
    if not worst <= torch.finfo(after.dtype).eps:  # also where it is NaN
        return None
    return 1.0 if torch.equal(before, after) else factor
