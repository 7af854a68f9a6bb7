"""Replaces a model's layers and products by faster ones that compute the same.

What a model does is measured, not concluded from its name.  One forward over a prompt is recorded
(`record`), whose rows lie near and far in the context.  A replacement is used only if it gives what the
module itself gave.

**A decoder layer** is replaced as a whole (`layers`) if its recorded calls have this form, in this order
(`match`):

    [norm] → products of one input: queries, keys, values → [norms of queries and keys] → [rotation of
    halves] → attention → a product → [norm] → + → [norm] → MLP → [norm] → +

    MLP: products of one input: gate and up → act(gate) · up → a product, or
         a product → act → a product, or
         a router → experts, each of which is a gated MLP

where a norm is the root-mean-square kind or, in front of attention and MLP, a LayerNorm; brackets mean "may
be missing", and what is added to the residual may be multiplied by a number that the layer holds.  The MLP
may take the layer's own residual, so that it stands beside the attention.  That is GPT-2 and nearly
everything after it.

**The whole model** is replaced (`whole_model`) if every layer was, and what surrounds the layers is a table
of embeddings (times a number) with a table of positions or one pair of rotations for all layers, a norm and
an output product (times a number).  Then an iteration is a loop over such layers and nothing else.

**Any other product** (torch's Linear, GPT-2's Conv1D) stays in the module's own code with packed weights
(`products`); products that one parent calls with the same input become one.

Weights are packed layer by layer and the originals are freed on the way, so the model is in memory once,
except for a table of embeddings that is also the output matrix.  The load probe compares the result
with the plain model; where they differ, the loader reads the model again and leaves it as it is.
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
    num_layers: int  # replaced as a whole
    num_products: int  # packed one by one
    form: str  # in which the layers run, as a sentence for people
    has_experts: bool = False  # in layers that were replaced


def fuse(
    flat: FlatModel,
    prompt: Sequence[int],
    positions: Sequence[int],
    *,
    int8: bool,
) -> Fused:
    """Replace what can be replaced.

    `positions` ascend, one for each token of the prompt, and should reach to the end of the context.  A layer
    that scales its queries at far positions is recognised only there, and is not replaced.  With `int8` the
    weights of replaced layers are rounded.
    """
    module = flat.module
    first = next(module.parameters())
    kernels = layer_kernels(first.device)
    if not kernels.available(first.dtype):
        return Fused(0, 0, in_torch(kernels.lack(first.dtype)))
    layers = decoder_layers(module)
    num_layers = len(layers)
    record = record_forward(flat, prompt, positions, [layer for _, _, layer in layers])
    surroundings = match_surroundings(flat, record, kernels) if flat.num_layers is None else None
    records = record.layers
    num_products = pack_products(module, product_calls(record.outside, kernels), kernels)
    fused: list[FusedLayer] = []
    reason = "it has no list of decoder layers"
    del record
    while layers:  # the originals of each are freed before the next is packed
        parent, name, layer = layers.pop()
        of_layer = records.pop()
        try:
            found = fused_layer(layer, of_layer, kernels, int8=int8)
        except NoMatch as error:
            reason = f"layer {name}: {error}"
            num_products += pack_products(
                layer, product_calls(of_layer.calls, kernels), kernels, int8=int8
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
    """The form of a model none of whose layers were replaced."""
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
