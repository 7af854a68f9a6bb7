"""Replace a decoder layer by the layer kernels, if they compute the same output.

If the module calls of a layer match a known pattern (match.py), the layer is rebuilt from its weights and run
on the recorded input.  The rebuilt layer replaces the module only if it reproduces the module's output.  So a
layer is not replaced if it has another order of operations, a factor that no attribute holds, or a step that
is not a module.

The first comparison runs in float32, with widened weights.  In 16 bits, rounding may hide an error.  For
example, an extra rotation changes the scores of small queries only slightly.  A second comparison checks the
packed 16-bit weights.  The check temporarily needs eight bytes for each of the layer's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from pensieve.errors import one_line
from pensieve.kernels.attention.input import AttentionKind
from pensieve.kernels.layer.protocol import (
    DenseLayer,
    ExpertWeights,
    LayerKernels,
    LayerWeights,
    MlpWeights,
    NormWeights,
)
from pensieve.model.attention import AttentionCall, ForwardPass
from pensieve.model.fuse.match import NoMatch, match_layer
from pensieve.model.fuse.record import (
    CausalPass,
    LayerRecord,
    ModuleCall,
    attention_of,
    in_float32,
    record_again,
)

# The tolerated error of a layer, relative to the largest change that the layer makes to the residual.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# How far rounding may move a router's logits, in ulps of the row's largest logit.
UNDECIDED_ULPS = 8


class FusedLayer(torch.nn.Module):
    """Replace a decoder layer, with the same arguments and the same output."""

    has_experts = False

    def __init__(
        self,
        dense: DenseLayer,
        layer_index: int,
        attention: AttentionKind,
        in_tuple: bool,
        attributes: dict[str, Any],
        *,
        rotates: bool = True,
    ) -> None:
        super().__init__()
        for name, value in attributes.items():  # some models' own loops read a layer's attributes
            setattr(self, name, value)
        self.layer_idx = layer_index  # the name that the attention interface expects
        self.dense = dense
        self._attention = attention
        self._in_tuple = in_tuple
        self.rotates = rotates

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        pensieve_pass: ForwardPass,
        **__: Any,
    ) -> Any:
        out = self.run(hidden_states[0].contiguous(), position_embeddings, pensieve_pass)
        return (out.unsqueeze(0),) if self._in_tuple else out.unsqueeze(0)

    @property
    def weight_bytes(self) -> int:
        return self.dense.weight_bytes

    def run(
        self,
        residual: torch.Tensor,  # (tokens, hidden), contiguous
        rotation: tuple[torch.Tensor, torch.Tensor] | None,  # (1, tokens, rotary) each
        forward_pass: ForwardPass,
        kept: torch.Tensor | None = None,  # int64, contiguous: the rows to return
    ) -> torch.Tensor:
        """Return the next layer's residual, of all rows or of the kept rows."""
        if not self.rotates:
            rotation = None
        paged_rows = forward_pass.paged_rows
        if paged_rows is not None and self.dense.takes(paged_rows):
            forward_pass.wait_for_pages(self.layer_idx)
            paged_rows.rotate_by(rotation)
            return self.dense.forward(residual, paged_rows, kept)
        cosines = sines = None
        if rotation is not None:
            cosines, sines = (each[0].contiguous() for each in rotation)
        query, key, value = self.dense.before_attention(residual, cosines, sines)
        call = AttentionCall(self, query, key, value, self._attention, None, {})
        attended = forward_pass.attend(call)
        if kept is not None:
            residual, attended = residual[kept], attended[kept]
        return self.dense.after_attention(residual, attended.contiguous())


def fused_layer(
    layer: torch.nn.Module, record: LayerRecord, kernels: LayerKernels, *, int8: bool = False
) -> FusedLayer:
    """Return a replacement of a layer; raise NoMatch if the kernels do not reproduce its output."""
    inputs, rotation = record.input, record.arguments.get("position_embeddings")
    in_tuple = isinstance(record.output, tuple)
    if in_tuple and len(record.output) != 1:
        raise NoMatch("it returns more than a residual")
    output = record.output[0] if in_tuple else record.output
    if inputs is None or not isinstance(output, torch.Tensor):
        raise NoMatch("it does not take one residual and return one")
    if rotation is not None and not is_rotation(rotation, inputs):
        raise NoMatch("its rotary embedding is not a pair of cosines and sines for each row")
    layer_index: int = attention_of(layer).layer_idx  # type: ignore[union-attr, assignment]
    weights = match_layer(
        record.calls, inputs, layer_index, kernels, has_rotation=rotation is not None
    )
    attributes = {name: value for name, value in vars(layer).items() if not name.startswith("_")}

    def layer_of(weights: LayerWeights) -> FusedLayer:
        return FusedLayer(
            *(kernels.layer(weights), layer_index, weights.attention, in_tuple, attributes),
            rotates=weights.rotates,
        )

    factors = [1.0, *{v for v in attributes.values() if isinstance(v, float) and v != 1.0}]
    if inputs.dtype != torch.float32:
        with in_float32(layer):
            wide, again = _match_again(layer, record, kernels, has_rotation=rotation is not None)
            factors = _right_factors(factors, layer_of(wide), again, wide.mlp)
            norms = {name: _clone_norm(norm) for name, norm in wide.norms.items()}
        weights = replace(weights, attention=wide.attention, rotates=wide.rotates, norms=norms)
        del wide, again
    fused = layer_of(weights)
    fused.dense.factor = factor = _right_factors(factors, fused, record, weights.mlp)[0]
    fused.has_experts = isinstance(weights.mlp, ExpertWeights)
    if int8:
        fused.dense = kernels.layer(weights, int8=True)
        fused.dense.factor = factor
    return fused


def _match_again(
    layer: torch.nn.Module, record: LayerRecord, kernels: LayerKernels, *, has_rotation: bool
) -> tuple[LayerWeights, LayerRecord]:
    """Return the layer's float32 weights, and a record of the layer running with them."""
    try:
        again = record_again(layer, record)
    except Exception as error:
        raise NoMatch(f"it does not run in float32: {one_line(error)}") from error
    assert again.input is not None
    index: int = attention_of(layer).layer_idx  # type: ignore[union-attr, assignment]
    weights = match_layer(again.calls, again.input, index, kernels, has_rotation=has_rotation)
    return weights, again


def _clone_norm(norm: NormWeights) -> NormWeights:
    return replace(
        norm, weight=norm.weight.clone(), bias=None if norm.bias is None else norm.bias.clone()
    )


def _right_factors(
    factors: Sequence[float],
    fused: FusedLayer,
    record: LayerRecord,
    mlp: MlpWeights | ExpertWeights,
) -> list[float]:
    """Return the factors with which the fused layer reproduces the recorded output.

    A factor multiplies the terms that the layer adds to the residual.  Raises NoMatch if no factor is right.
    """
    inputs, rotation = record.input, record.arguments.get("position_embeddings")
    assert inputs is not None
    output = record.output[0] if isinstance(record.output, tuple) else record.output
    undecided = _undecided_rows(record, mlp, inputs)
    found = []
    for factor in factors:
        fused.dense.factor = factor
        with torch.inference_mode():
            got = fused(inputs, position_embeddings=rotation, pensieve_pass=CausalPass())
        if _agree(got[0] if isinstance(got, tuple) else got, output, inputs, undecided):
            found.append(factor)
    if not found:
        raise NoMatch("the kernels' output differs from the layer's output")
    return found


def _agree(
    got: torch.Tensor, output: torch.Tensor, inputs: torch.Tensor, undecided: torch.Tensor
) -> bool:
    """Whether the outputs agree up to rounding, in all rows whose experts do not depend on rounding."""
    change, size = (output - inputs).abs().max(), output.abs().max()
    rounding = torch.finfo(inputs.dtype).eps * size
    by_row = (got - output).abs().amax(-1).flatten()
    if not by_row.isfinite().all():
        return False
    decided = by_row[~undecided]
    worst = (decided if len(decided) else by_row).max()
    return float(worst) <= float(TOLERANCE[inputs.dtype] * change + rounding)


def _undecided_rows(
    record: LayerRecord, mlp: MlpWeights | ExpertWeights, inputs: torch.Tensor
) -> torch.Tensor:
    """Return a mask of the rows where rounding may decide which expert is chosen last."""
    no_rows = torch.zeros(inputs.numel() // inputs.shape[-1], dtype=torch.bool)
    if not isinstance(mlp, ExpertWeights) or mlp.num_chosen == len(mlp.router):
        return no_rows
    for call in record.calls:
        if isinstance(call, ModuleCall) and any(
            each is mlp.router for each in call.module.parameters()
        ):
            logits = F.linear(call.input.reshape(-1, mlp.router.shape[1]), mlp.router).float()
            last, following = logits.topk(mlp.num_chosen + 1).values[:, -2:].unbind(1)
            near = UNDECIDED_ULPS * torch.finfo(inputs.dtype).eps * logits.abs().amax(1)
            return last - following <= near
    return no_rows


def is_rotation(
    rotation: Any, inputs: torch.Tensor
) -> TypeGuard[tuple[torch.Tensor, torch.Tensor]]:
    """Whether this is a pair of cosines and sines for these rows."""
    return (
        isinstance(rotation, tuple)
        and len(rotation) == 2
        and all(
            each.dtype in (inputs.dtype, torch.float32)
            and each.dim() == 3
            and each.shape[:2] == inputs.shape[:2]
            for each in rotation
        )
    )
