"""Replace a model's layers and products by faster ones that compute the same results.

Whether a layer can be replaced is measured, not derived from the model's name.  One forward over a prompt is
recorded (`record`).  The prompt has positions at the start of the context and far into it.  A replacement is
used only if it reproduces the module's own output.

**A decoder layer** is replaced as a whole (`layers`) if its recorded calls have this form, in this order
(`match`):

    [norm] → products of one input: queries, keys, values → [norms of queries and keys] → [rotation of
    halves] → attention → a product → [norm] → + → [norm] → MLP → [norm] → +

    MLP: products of one input: gate and up → act(gate) · up → a product, or
         a product → act → a product, or
         a router → experts, each of which is a gated MLP

Brackets mean "optional".  A norm is a root-mean-square norm; before attention and MLP a LayerNorm is allowed
too.  Before the layer adds a term to the residual, it may multiply the term by a constant.  The MLP may read
the layer's input instead of the attention's result, in parallel with the attention.  GPT-2 and nearly all
later models have this form.

**The whole model** is replaced by a loop over the layers (`whole_model`) if every layer was replaced and the
rest has only these parts: a table of embeddings (times a number), a table of positions or one pair of
rotations for all layers, a norm, and an LM head (times a number).

**Any other product** (torch's Linear, GPT-2's Conv1D) stays in the module's own code but gets packed weights
(`products`).  Products that one parent calls with the same input become one product.

Weights are packed layer by layer, and each original is freed before the next layer is packed.  So each weight
is in memory only once.  The exception is an embedding table that is also the output matrix: it is in memory
twice.  The load probe compares the result with the plain model.  If they differ, the loader reads the model
again and replaces nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pensieve.kernels.layer import layer_kernels
from pensieve.kernels.layer.protocol import LayerKernels
from pensieve.model.attention import FlatModel
from pensieve.model.fuse.layers import FusedLayer, fused_layer
from pensieve.model.fuse.match import NoMatch
from pensieve.model.fuse.products import pack_products
from pensieve.model.fuse.record import decoder_layers, product_calls, record_forward
from pensieve.model.fuse.whole_model import FusedModel, match_surroundings

__all__ = ["Fused", "fuse", "in_torch"]


class Fused(NamedTuple):
    num_layers: int  # layers that were replaced as a whole
    num_products: int  # products that were packed one by one
    form: str  # a text that says how the layers run
    has_experts: bool = False  # a replaced layer has experts


def fuse(
    flat: FlatModel,
    prompt: Sequence[int],
    positions: Sequence[int],
    *,
    int8: bool,
) -> Fused:
    """Replace all layers and products that the kernels can compute.

    `positions` ascend, one for each token of the prompt.  They should reach the end of the context, because
    some layers scale their queries only at far positions.  Such a layer must not be replaced.  `int8` rounds
    the weights inside the layers.
    """
    module = flat.module
    first = next(module.parameters())
    kernels = layer_kernels(first.device)
    if not kernels.available(first.dtype):
        return Fused(0, 0, in_torch(kernels.unavailable_reason(first.dtype)))
    layers = decoder_layers(module)
    num_layers = len(layers)
    record = record_forward(flat, prompt, positions, [layer for _, _, layer in layers])
    surroundings = match_surroundings(flat, record, kernels) if flat.num_layers is None else None
    records = record.layers
    num_products = pack_products(module, product_calls(record.outside, kernels), kernels)
    fused: list[FusedLayer] = []
    reason = "it has no list of decoder layers"
    del record
    while layers:  # each original is freed before the next layer is packed
        parent, name, layer = layers.pop()
        layer_record = records.pop()
        try:
            found = fused_layer(layer, layer_record, kernels, int8=int8)
        except NoMatch as error:
            reason = f"layer {name}: {error}"
            num_products += pack_products(
                layer, product_calls(layer_record.calls, kernels), kernels, int8=int8
            )
        else:
            setattr(parent, name, found)
            fused.append(found)
    if surroundings is not None and len(fused) == num_layers:
        flat.whole = FusedModel(surroundings, fused[::-1], kernels)
    return Fused(
        len(fused),
        num_products,
        _form(len(fused), num_layers, kernels, first, reason),
        any(each.has_experts for each in fused),
    )


def in_torch(reason: str) -> str:
    """Return the text `Fused.form` for a model without any replaced layer."""
    return f"layers in torch: {reason}"


def _form(
    num_fused: int, num_layers: int, kernels: LayerKernels, weight: torch.Tensor, reason: str
) -> str:
    if not num_fused:
        return in_torch(reason)
    form = f"in {kernels.form(weight.dtype)}"
    if num_fused == num_layers:
        return f"layers {form}"
    return f"{num_fused} of {num_layers} layers {form}, the others in torch: {reason}"
