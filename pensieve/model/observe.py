"""Observes what layers pass to their attention, and refuses what is not plain and causal.

One forward runs under "pensieve-probe" (`model.attention`), whose masks say how far a query sees.
"""

from __future__ import annotations

from typing import Any

import torch

from pensieve.errors import UnsupportedModel
from pensieve.kernels.layer.protocol import PagedRows
from pensieve.model.attention import AttentionCall, FlatModel
from pensieve.model.shape import ModelShape

# Arguments of an attention call that do not change its result: dropout is 0 outside of training,
# positions and caches are ours, and the others request outputs that are not used.
HARMLESS = frozenset(
    {
        "dropout",
        "is_causal",
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)


MEANING = {"s_aux": "attention sinks", "softcap": "a cap on scores"}


class ObservingPass:
    """A forward pass that notes sizes and types, checks masks and arguments, and computes nothing.

    A short view is only noted: a lower context helps there, unless something else is refused.
    """

    paged_rows: PagedRows | None = None
    pages_ready = False

    def __init__(self, context_max: int) -> None:
        self._context_max = context_max
        self.layers: list[Any] = []
        self.views: dict[Any, int] = {}  # how many positions a layer sees, where that is not all
        self.sizes: set[tuple[int, int, int]] = set()  # heads, kv_heads, head_size
        self.dtypes: set[torch.dtype] = set()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        query, key, value = call.query, call.key, call.value
        layer = getattr(call.module, "layer_idx", None)
        self._check_mask(layer, call.mask)
        self._check_arguments(layer, call)
        if key.shape != value.shape or query.shape[::2] != key.shape[::2]:
            described = (
                f"{each.shape[1]} heads of {each.shape[2]}" for each in (query, key, value)
            )
            raise UnsupportedModel(
                f"layer {layer} has queries, keys and values of different sizes ({', '.join(described)}), "
                "and a page holds keys and values of one size"
            )
        self.layers.append(layer)
        self.sizes.add((query.shape[1], key.shape[1], key.shape[2]))
        self.dtypes.update((query.dtype, key.dtype, value.dtype))
        return torch.zeros_like(query)

    def arrive(self, layer: int) -> None:
        """Nothing moves."""

    def _check_mask(self, layer: Any, attention_mask: torch.Tensor | None) -> None:
        if attention_mask is None:
            return
        reach = int(attention_mask.flatten()[0]) if attention_mask.numel() == 1 else 0
        if reach == 0:
            raise UnsupportedModel(f"layer {layer} asks for a mask that is not causal")
        self._note_view(layer, reach)

    def _note_view(self, layer: Any, reach: int) -> None:
        if reach < self._context_max:
            self.views[layer] = min(reach, self.views.get(layer, reach))

    def check_views(self) -> None:
        if self.views:
            layer, reach = min(self.views.items(), key=lambda item: item[1])
            raise UnsupportedModel(
                f"layer {layer} sees at most {reach} positions (a sliding window or chunks), "
                f"fewer than the context of {self._context_max}; --context-max {reach} serves it up to there"
            )

    def _check_arguments(self, layer: Any, call: AttentionCall) -> None:
        for name, given in call.rest.items():
            if given is None or name in HARMLESS:
                continue
            if name == "sliding_window":
                self._note_view(layer, int(given))
                continue
            shown = f" = {given}" if isinstance(given, int | float) else ""
            meaning = f" ({MEANING[name]})" if name in MEANING else ""
            raise UnsupportedModel(
                f"layer {layer} passes {name}{shown} to its attention, which we do not honour{meaning}"
            )
        causal = call.rest.get("is_causal")
        if not (getattr(call.module, "is_causal", True) if causal is None else causal):
            raise UnsupportedModel(f"layer {layer} is not causal")


def declared(module: Any) -> str:
    """What the model itself says of its layers that KV in pages cannot hold; empty if nothing."""
    config = module.config.get_text_config()
    if getattr(module, "_is_stateful", False):
        return "it keeps a recurrent state beside KV (state-space layers or linear attention): "
    if chosen := getattr(config, "index_topk", None):
        return f"its queries see only {chosen} keys that an index chooses (sparse attention): "
    return ""


def observe(flat: FlatModel, prompt: list[int], context_max: int) -> ModelShape:
    """The shape of a model, from one prompt at positions 0 … n-1; UnsupportedModel if it is not plain."""
    observer = ObservingPass(context_max)
    tokens, device = len(prompt), flat.module.device
    logits = flat.logits(
        torch.tensor(prompt, device=device),
        torch.arange(tokens, device=device),
        torch.tensor([tokens - 1], device=device),
        observer,
    )
    module = flat.module
    config = module.config.get_text_config()
    num_layers: int = getattr(config, "num_hidden_layers", len(observer.layers))
    if flat.num_layers is not None:
        num_layers = flat.num_layers
    silent = sorted(
        set(range(num_layers)) - {layer for layer in observer.layers if layer is not None}
    )
    if not observer.layers:
        raise UnsupportedModel(
            f"{declared(module)}none of its layers calls the attention interface"
        )
    if observer.layers != list(range(num_layers)):
        raise UnsupportedModel(
            f"{declared(module)}layer {silent[0]} never calls the attention interface"
            if silent
            else f"its attention is called for layers {observer.layers}, expected 0 to "
            f"{num_layers - 1} once each, in this order"
        )
    if len(observer.sizes) > 1 or len(observer.dtypes) > 1:
        raise UnsupportedModel(
            f"its layers differ in heads or types: {sorted(observer.sizes)}, "
            f"{sorted(str(dtype) for dtype in observer.dtypes)}"
        )
    observer.check_views()
    ((num_heads, num_kv_heads, head_size),) = observer.sizes
    if num_heads % num_kv_heads:
        raise UnsupportedModel(f"{num_heads} heads do not share {num_kv_heads} KV heads evenly")
    parameters = list(module.parameters())
    return ModelShape(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=logits.shape[-1],
        context_max=context_max,
        dtype=observer.dtypes.pop(),
        num_parameters=sum(each.numel() for each in parameters),
        weight_bytes=sum(each.numel() * each.element_size() for each in parameters),
    )
