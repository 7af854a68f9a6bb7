"""Compute the whole forward of a model whose layers are all fused, without the model's own code.

The loop over the layers supports: a table of embeddings times a number; a table of position embeddings to
add, or one rotation (cosines and sines) for all layers; a final norm; an LM head (`lm_head`: hidden
states to logits) times a number.  Each part is found in the recorded forward and compared with the recorded
results.  A second forward, in which the result of the LM head is 64 times as large, reveals a cap on
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from pensieve.kernels.layer.protocol import LayerChain, LayerKernels, NormWeights
from pensieve.model.attention import FlatModel, ForwardPass
from pensieve.model.fuse.layers import FusedLayer, is_rotation
from pensieve.model.fuse.match import factor_between, match_norm
from pensieve.model.fuse.products import PackedProduct, children_of
from pensieve.model.fuse.record import ForwardRecord, ModuleCall, causal_logits, is_product

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, (1, tokens, rotary)


@dataclass(frozen=True)
class Surroundings:
    """The operations before and after the layers."""

    table: torch.nn.Embedding
    table_factor: float
    # A row for each position; None: nothing is added to the embeddings.
    positions: torch.Tensor | None
    # Takes hidden states (1, tokens, …) and positions (1, tokens).
    rotation: Callable[[torch.Tensor, torch.Tensor], Rotation] | None
    norm: NormWeights
    find_head: Callable[[], torch.nn.Module]  # returns the packed LM head
    head_factor: float


class LayerGraphs(Protocol):
    """Run all layers as captured graphs (`model/piecewise_graphs.py`)."""

    rows_padded: int  # padding rows computed since the start

    def takes(self, num_tokens: int, forward_pass: ForwardPass) -> bool: ...

    def run(
        self,
        hidden: torch.Tensor,
        rotation: Rotation | None,
        kept: torch.Tensor,
        forward_pass: ForwardPass,
    ) -> torch.Tensor:
        """Return the last layer's residual of the rows in `kept`, whose logits are needed."""


class FusedModel:
    """Run embeddings, fused layers, norm and LM head in one loop."""

    def __init__(
        self, surroundings: Surroundings, layers: Sequence[FusedLayer], kernels: LayerKernels
    ) -> None:
        head = surroundings.find_head()
        assert isinstance(head, PackedProduct)
        self._surroundings = surroundings
        self.layers = layers
        self.graphs: LayerGraphs | None = None  # on a GPU
        self._norm = kernels.norm(surroundings.norm)
        self._head = head.packed
        for layer, following in pairwise(layers):
            layer.dense.set_next(following.dense)
        layers[-1].dense.set_next(self._head)
        self._chain: LayerChain | None = None
        if len({layer.rotates for layer in layers}) == 1:  # in a chain all layers rotate, or none
            self._chain = kernels.chain([layer.dense for layer in layers])

    def embed(
        self, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Rotation | None]:
        """Return the input of the first layer."""
        surroundings = self._surroundings
        hidden: torch.Tensor = surroundings.table(input_ids)
        if surroundings.table_factor != 1:
            hidden = hidden * surroundings.table_factor
        if surroundings.positions is not None:
            hidden = hidden + F.embedding(positions, surroundings.positions)
        if surroundings.rotation is None:
            return hidden, None
        return hidden, surroundings.rotation(hidden[None], positions[None])

    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        forward_pass: ForwardPass,
    ) -> torch.Tensor:
        """Return float32 (rows, vocab)."""
        hidden, rotation = self.embed(input_ids, positions)
        hidden = self._all_layers(hidden, rotation, rows, forward_pass)
        logits = torch.empty(
            (len(rows), self._head.outputs), dtype=torch.float32, device=hidden.device
        )
        self._head.multiply(self._norm(hidden), logits)
        factor = self._surroundings.head_factor
        return logits if factor == 1 else logits.mul_(factor)

    def _all_layers(
        self,
        hidden: torch.Tensor,
        rotation: Rotation | None,
        rows: torch.Tensor,
        forward_pass: ForwardPass,
    ) -> torch.Tensor:
        """Return the last layer's residual of the rows in `rows`, whose logits are needed."""
        if self.graphs is not None and self.graphs.takes(len(hidden), forward_pass):
            return self.graphs.run(hidden, rotation, rows, forward_pass)
        paged_rows = forward_pass.paged_rows
        chain = self._chain if forward_pass.pages_ready else None
        if chain is not None and paged_rows is not None and chain.takes(paged_rows):
            paged_rows.rotate_by(rotation if self.layers[0].rotates else None)
            return chain.forward(hidden, paged_rows, rows)
        for layer in self.layers[:-1]:
            hidden = layer.run(hidden, rotation, forward_pass)
        return self.layers[-1].run(hidden, rotation, forward_pass, rows)


def match_surroundings(
    flat: FlatModel, record: ForwardRecord, kernels: LayerKernels
) -> Surroundings | None:
    """Find the operations around the layers; return None if the loop does not support them."""
    layers, outside = record.layers, record.outside
    if not layers:
        return None
    first, last = layers[0].input, _hidden(layers[-1].output)
    rotation = layers[0].arguments.get("position_embeddings")
    if first is None or not (rotation is None or is_rotation(rotation, first)):
        return None
    if any(layer.arguments.get("position_embeddings") is not rotation for layer in layers):
        return None
    tables = [call for call in outside if isinstance(call.module, torch.nn.Embedding)]
    rotations = [call for call in outside if rotation is not None and call.output is rotation]
    norms = [call for call in outside if call.input is last]
    heads = [call for call in outside if is_product(call, kernels)]
    if not len(norms) == len(heads) == 1 or len(rotations) != (rotation is not None):
        return None
    chained = all(after.input is _hidden(layer.output) for layer, after in pairwise(layers))
    embeddings = _match_embeddings(tables, first, record)
    head = heads[0]
    norm = match_norm(norms[0])
    head_factor = factor_between(head.output[0], record.logits)
    if (
        norm is None
        or not chained
        or embeddings is None
        or head_factor is None
        or not torch.equal(head.input, norms[0].output)
        or factor_between(64 * head.output[0], _with_larger_logits(flat, record, head.module, 64))
        is None
    ):
        return None
    rotate = _with_other_positions(rotations[0]) if rotations else None
    if rotate is not None and rotation is not None:
        again = rotate(first, torch.tensor([list(record.positions)], device=first.device))
        if not all(map(torch.equal, again, rotation)):
            return None
    table, table_factor, positions = embeddings
    parent, name, _ = children_of(flat.module)[id(head.module)]
    return Surroundings(
        table=table,
        table_factor=table_factor,
        positions=positions,
        rotation=rotate,
        norm=norm,
        find_head=partial(getattr, parent, name),
        head_factor=head_factor,
    )


def _match_embeddings(
    calls: Sequence[ModuleCall], first: torch.Tensor, record: ForwardRecord
) -> tuple[torch.nn.Embedding, float, torch.Tensor | None] | None:
    """Return the table of embeddings, its factor, and the table of positions that is added."""
    if not calls or calls[0].input.flatten().tolist() != list(record.prompt):
        return None
    table: Any = calls[0].module
    factor = factor_between(calls[0].output, first)
    if len(calls) == 1:
        return None if factor is None else (table, factor, None)
    if len(calls) > 2 or not torch.equal(calls[0].output + calls[1].output, first):
        return None
    rows: torch.Tensor = calls[1].module.weight  # type: ignore[assignment]
    output = calls[1].output.view(-1, rows.shape[1])
    positions = torch.tensor(list(record.positions), device=rows.device)
    for row in (rows == output[0]).all(1).nonzero().flatten().tolist():
        begin = row - record.positions[0]  # OPT's positions begin at row 2
        if begin < 0 or begin + int(positions.max()) >= len(rows):
            continue
        if torch.equal(rows[begin + positions], output):
            return table, 1.0, rows[begin:]
    return None


def _hidden(output: Any) -> Any:
    """Return a layer's residual; some models' layers return a tuple."""
    return output[0] if isinstance(output, tuple) else output


def _with_other_positions(call: ModuleCall) -> Callable[[torch.Tensor, torch.Tensor], Rotation]:
    """Return a function that repeats the recorded call of the rotation for other positions.

    The positions are the call's only tensor besides the first argument.
    """
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
    """Return the model's logits with an LM head that is `times` times as large."""
    hook = head.register_forward_hook(lambda module, args, output: output * times)
    try:
        return causal_logits(flat, record.prompt, record.positions)
    finally:
        hook.remove()
