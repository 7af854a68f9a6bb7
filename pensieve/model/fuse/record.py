"""Records what one forward calls, layer by layer (modules that hold weights or are leaves, and attention).

The record holds the very tensors that were given and answered, so `is` tells whether one call got what
another answered.  These tensors stay alive as long as the record does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

from pensieve.kernels.layer.protocol import Heads, LayerKernels, PagedRows
from pensieve.model.attention import FlatModel
from pensieve.model.layer_range import LayerElsewhere


class ModuleCall(NamedTuple):
    """One call of a module that holds weights of its own, or has no modules inside."""

    module: torch.nn.Module
    given: torch.Tensor  # the first argument
    answer: Any
    others: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # the other arguments


@dataclass
class AttentionCall:
    heads: Heads
    scaling: float
    rest: dict[str, Any]  # what else the layer passed
    answer: torch.Tensor
    query: torch.Tensor  # (tokens, heads, head_size)
    value: torch.Tensor  # (tokens, kv_heads, head_size)


Call = ModuleCall | AttentionCall


@dataclass
class LayerRecord:
    """One call of a decoder layer, and the calls inside."""

    given: torch.Tensor | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    answer: Any = None
    calls: list[Call] = field(default_factory=list)


class ForwardRecord(NamedTuple):
    prompt: Sequence[int]
    layers: list[LayerRecord]
    outside: list[ModuleCall]  # the calls that were in no layer
    logits: torch.Tensor


class Child(NamedTuple):
    """A module and its parent; `setattr(parent, name, other)` replaces it."""

    parent: torch.nn.Module
    name: str
    module: torch.nn.Module


class CausalPass:
    """A forward pass over one prompt from its beginning: plain causal attention, without pages."""

    paged_rows: PagedRows | None = None
    pages_ready = False

    def __init__(self, report: Callable[[AttentionCall], None] = lambda call: None) -> None:
        self._report = report

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        rest: dict[str, Any],
    ) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
        answer = attended.transpose(0, 1).contiguous()
        heads = Heads(query.shape[1], key.shape[1], query.shape[2])
        self._report(AttentionCall(heads, scaling, rest, answer, query, value))
        return answer

    def arrive(self, layer: int) -> None:
        """Nothing moves."""


def decoder_layers(module: torch.nn.Module) -> list[Child]:
    """The outermost list of modules whose members each hold one attention; empty where there is none.

    Layers of other stages are left out.
    """
    for parent in module.modules():
        if isinstance(parent, torch.nn.ModuleList):
            layers = [
                Child(parent, name, layer)
                for name, layer in parent.named_children()
                if not isinstance(layer, LayerElsewhere)
            ]
            if layers and all(attention_of(each.module) is not None for each in layers):
                return layers
    return []


def attention_of(layer: torch.nn.Module) -> torch.nn.Module | None:
    """The innermost module of a layer that has a `layer_idx`, as transformers' attentions do."""
    found = [each for each in layer.modules() if hasattr(each, "layer_idx")]
    return found[-1] if found else None


def record_forward(
    flat: FlatModel, prompt: Sequence[int], layers: Sequence[torch.nn.Module]
) -> ForwardRecord:
    records = [LayerRecord() for _ in layers]
    outside: list[ModuleCall] = []
    inside: list[LayerRecord] = []  # the layer that is running, if any

    def enter(record: LayerRecord) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            record.given = args[0] if args else kwargs.get("hidden_states")
            record.arguments = kwargs
            inside.append(record)

        return hook

    def leave(module: torch.nn.Module, args: tuple[Any, ...], answer: Any) -> None:
        inside.pop().answer = answer

    def leaf(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any
    ) -> None:
        if not args or isinstance(module, torch.nn.Dropout | torch.nn.Identity):
            return
        call = ModuleCall(module, args[0], answer, (args[1:], kwargs))
        if inside:
            inside[-1].calls.append(call)
        else:
            outside.append(call)

    def attended(call: AttentionCall) -> None:
        if inside:
            inside[-1].calls.append(call)

    handles = []
    for layer, record in zip(layers, records, strict=True):
        handles.append(layer.register_forward_pre_hook(enter(record), with_kwargs=True))
        handles.append(layer.register_forward_hook(leave))
    for each in flat.module.modules():
        if not list(each.children()) or list(each.parameters(recurse=False)):
            handles.append(each.register_forward_hook(leaf, with_kwargs=True))
    try:
        logits = causal_logits(flat, prompt, attended)
    finally:
        for handle in handles:
            handle.remove()
    return ForwardRecord(prompt, records, outside, logits)


def causal_logits(
    flat: FlatModel,
    prompt: Sequence[int],
    report: Callable[[AttentionCall], None] = lambda call: None,
) -> torch.Tensor:
    """Logits of every position of one prompt."""
    ids = torch.tensor(prompt, device=flat.module.device)
    positions = torch.arange(len(ids), device=ids.device)
    return flat.logits(ids, positions, positions, CausalPass(report))


def is_product(call: Call, kernels: LayerKernels) -> bool:
    """Whether it is a product with weights of its input's type, which the kernels can pack."""
    return (
        isinstance(call, ModuleCall)
        and not any(call.others)
        and type(call.module) in (torch.nn.Linear, Conv1D)
        and call.module.weight.dtype == call.given.dtype
        and kernels.available(call.given.dtype)
    )


def product_calls(calls: Iterable[Call], kernels: LayerKernels) -> list[ModuleCall]:
    return [call for call in calls if isinstance(call, ModuleCall) and is_product(call, kernels)]
