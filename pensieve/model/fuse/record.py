"""Run one forward and record its calls by layer: of attention, and of modules with weights or no submodules.

`CausalPass` computes the attention of this forward.

The record holds the original tensors, so `is` tells whether one call received another call's result.
These tensors stay alive as long as the record does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

from pensieve.kernels.layer.protocol import HeadShape, LayerKernels, PagedRows
from pensieve.model.attention import AttentionCall, FlatModel
from pensieve.model.layer_range import OtherStageLayer


class ModuleCall(NamedTuple):
    """One call of a module that holds weights of its own or has no submodules."""

    module: torch.nn.Module
    input: torch.Tensor  # the first argument
    output: Any
    others: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # the other arguments


class RecordedAttention(NamedTuple):
    call: AttentionCall
    output: torch.Tensor  # (tokens, heads, head_size)

    @property
    def heads(self) -> HeadShape:
        query, key = self.call.query, self.call.key
        return HeadShape(query.shape[1], key.shape[1], query.shape[2])


Call = ModuleCall | RecordedAttention


@dataclass
class LayerRecord:
    """One call of a decoder layer, and the calls inside it."""

    input: torch.Tensor | None = None
    others: tuple[Any, ...] = ()  # the positional arguments after `input`
    arguments: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    calls: list[Call] = field(default_factory=list)


class ForwardRecord(NamedTuple):
    prompt: Sequence[int]
    positions: Sequence[int]
    layers: list[LayerRecord]
    outside: list[ModuleCall]  # calls outside all layers
    logits: torch.Tensor


class Child(NamedTuple):
    """A module and its parent; `setattr(parent, name, other)` replaces it."""

    parent: torch.nn.Module
    name: str
    module: torch.nn.Module


class CausalPass:
    """Run a forward over one prompt with plain causal attention among its rows, without pages."""

    paged_rows: PagedRows | None = None
    pages_ready = False

    def __init__(self, report: Callable[[RecordedAttention], None] = lambda call: None) -> None:
        self._report = report

    def attend(self, call: AttentionCall) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(
            call.query.transpose(0, 1),
            call.key.transpose(0, 1),
            call.value.transpose(0, 1),
            is_causal=True,
            scale=call.kind.scaling,
            enable_gqa=True,
        )
        output = attended.transpose(0, 1).contiguous()
        self._report(RecordedAttention(call, output))
        return output

    def wait_for_pages(self, layer: int) -> None:
        """Do nothing: no pages move."""


def decoder_layers(module: torch.nn.Module) -> list[Child]:
    """Return the outermost list of modules that each hold an attention; empty if there is none.

    Layers of other stages are left out.
    """
    for parent in module.modules():
        if isinstance(parent, torch.nn.ModuleList):
            layers = [
                Child(parent, name, layer)
                for name, layer in parent.named_children()
                if not isinstance(layer, OtherStageLayer)
            ]
            if layers and all(attention_of(each.module) is not None for each in layers):
                return layers
    return []


def attention_of(layer: torch.nn.Module) -> torch.nn.Module | None:
    """Return a layer's attention: its innermost module with a `layer_idx`."""
    found = [each for each in layer.modules() if hasattr(each, "layer_idx")]
    return found[-1] if found else None


@contextmanager
def _recording(
    module: torch.nn.Module,
    layers: Sequence[torch.nn.Module],
    records: Sequence[LayerRecord],
    outside: list[ModuleCall],
) -> Iterator[Callable[[RecordedAttention], None]]:
    """Record calls in their layer's record or in `outside`; yield a function that records attention."""
    running: list[LayerRecord] = []  # the record of the running layer, if any

    def enter(record: LayerRecord) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            record.input = args[0] if args else kwargs.get("hidden_states")
            record.others, record.arguments = args[1:], kwargs
            running.append(record)

        return hook

    def leave(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running.pop().output = output

    def record_call(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not args or isinstance(module, torch.nn.Dropout | torch.nn.Identity):
            return
        call = ModuleCall(module, args[0], output, (args[1:], kwargs))
        if running:
            running[-1].calls.append(call)
        else:
            outside.append(call)

    def record_attention(call: RecordedAttention) -> None:
        if running:
            running[-1].calls.append(call)

    handles = []
    for layer, record in zip(layers, records, strict=True):
        handles.append(layer.register_forward_pre_hook(enter(record), with_kwargs=True))
        handles.append(layer.register_forward_hook(leave))
    for each in module.modules():
        if not list(each.children()) or list(each.parameters(recurse=False)):
            handles.append(each.register_forward_hook(record_call, with_kwargs=True))
    try:
        yield record_attention
    finally:
        for handle in handles:
            handle.remove()


def record_forward(
    flat: FlatModel,
    prompt: Sequence[int],
    positions: Sequence[int],
    layers: Sequence[torch.nn.Module],
) -> ForwardRecord:
    records = [LayerRecord() for _ in layers]
    outside: list[ModuleCall] = []
    with _recording(flat.module, layers, records, outside) as record_attention:
        logits = causal_logits(flat, prompt, positions, record_attention)
    return ForwardRecord(prompt, positions, records, outside, logits)


def causal_logits(
    flat: FlatModel,
    prompt: Sequence[int],
    positions: Sequence[int],
    report: Callable[[RecordedAttention], None] = lambda call: None,
) -> torch.Tensor:
    """Return the logits of every row of one prompt."""
    device = flat.module.device
    ids, position_ids = (torch.tensor(each, device=device) for each in (prompt, positions))
    return flat.logits(ids, position_ids, torch.arange(len(ids), device=device), CausalPass(report))


def record_again(layer: torch.nn.Module, record: LayerRecord) -> LayerRecord:
    """Run a layer with its recorded arguments, and record its calls. Call this inside `in_float32`."""
    again = LayerRecord()
    args = () if "hidden_states" in record.arguments else (record.input, *record.others)
    named = {name: _widened(each) for name, each in record.arguments.items()}
    with torch.inference_mode(), _recording(layer, [layer], [again], []) as record_attention:
        layer(*map(_widened, args), **{**named, "pensieve_pass": CausalPass(record_attention)})
    return again


@contextmanager
def in_float32(module: torch.nn.Module) -> Iterator[None]:
    """Widen weights and buffers to float32 inside the block, then restore the original memory."""
    narrow = [
        (each, each.data)
        for each in (*module.parameters(), *module.buffers())
        if each.is_floating_point() and each.dtype != torch.float32
    ]
    try:
        for each, data in narrow:
            each.data = data.float()
        yield
    finally:
        for each, data in narrow:
            each.data = data


def _widened(value: Any) -> Any:
    """Return floating-point tensors, also inside a tuple, as float32, and other values unchanged."""
    if isinstance(value, tuple):
        return tuple(_widened(each) for each in value)
    is_narrow = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if is_narrow else value


def is_product(call: Call, kernels: LayerKernels) -> bool:
    """Whether the kernels can pack this product; its weights and its input must have the same dtype."""
    return (
        isinstance(call, ModuleCall)
        and not any(call.others)
        and type(call.module) in (torch.nn.Linear, Conv1D)
        and call.module.weight.dtype == call.input.dtype
        and kernels.available(call.input.dtype)
    )


def product_calls(calls: Iterable[Call], kernels: LayerKernels) -> list[ModuleCall]:
    return [call for call in calls if isinstance(call, ModuleCall) and is_product(call, kernels)]
