"""Connects transformers models to our attention over pages.

`AttentionInterface.register` makes "pensieve" a name that `set_attn_implementation` accepts.  What an
iteration shares over all layers travels as a keyword argument of the forward (`pensieve_pass`), which
modeling code that follows the interface passes on to every attention call; there is no global.

No mask is registered under "pensieve", so transformers builds none: causality follows from the
slices.  The load probe runs under "pensieve-probe", which registers a mask function.  It builds no mask
either: it returns None for a plain causal mask, and for any other one a marker that reaches the attention
call.  So the probe sees which mask each layer would use, whatever the config calls it.

One layer of a pass, in this order (the executor's contract in core.iteration):

    wait for this layer's outstanding swap-ins  →  page copies  →  write_kv of all slices  →  attend

The wait comes first, so a page copy may read a page that is being swapped in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from pensieve.errors import UnsupportedModel
from pensieve.kernels import multi_token_attention, write_kv
from pensieve.kernels.attention.input import AttentionInput, AttentionKind
from pensieve.kernels.attention.plan import DevicePlan
from pensieve.kernels.layer import paged_rows
from pensieve.kernels.layer.protocol import PagedRows
from pensieve.model.batch import Batch
from pensieve.model.kv.memory import KVMemory, PageMoves

SERVING = "pensieve"
PROBING = "pensieve-probe"


class AttentionCall(NamedTuple):
    """What one layer of a model asks of its attention, and the rows that it brings."""

    module: torch.nn.Module  # its `layer_idx` is the layer
    query: torch.Tensor  # (tokens, heads, head_size)
    key: torch.Tensor  # (tokens, kv_heads, head_size)
    value: torch.Tensor  # (tokens, kv_heads, head_size)
    kind: AttentionKind
    mask: torch.Tensor | None  # from `probing_mask`
    rest: Mapping[str, Any]  # other arguments, which the probe judges and serving ignores


class ForwardPass(Protocol):
    """What a forward passes to every layer's attention: one object per iteration, or the probe's."""

    @property
    def paged_rows(self) -> PagedRows | None:
        """For fused layers, which then do the attention themselves; None: they call `attend`."""

    @property
    def pages_ready(self) -> bool:
        """Whether all layers' pages hold what `arrive` would wait for, so that nobody needs to call it."""

    def arrive(self, layer: int) -> None:
        """Return when the layer's pages hold what the iteration needs; a fused layer calls this itself."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """(tokens, heads, head_size): what the layer's queries found."""


class PagedPass:
    """The forward pass of one iteration over paged memory."""

    def __init__(
        self,
        batch: Batch,
        memory: KVMemory,
        wait_layer: Callable[[int], None],
        copies: PageMoves | None = None,
        plan: DevicePlan | None = None,
        *,
        arriving: bool = True,
    ) -> None:
        self.batch = batch
        self.pages_ready = not arriving and copies is None
        self._plan = plan
        self._memory = memory
        self._wait_layer = wait_layer
        self._copies = copies
        self.paged_rows = paged_rows(
            memory.device_arena,
            batch.slot_mapping,
            batch.page_index,
            plan,
            memory.shape.dtype,
            memory.kv_scales,
        )

    def arrive(self, layer: int) -> None:
        self._wait_layer(layer)
        if self._copies is not None:
            self._memory.copy_within(layer, self._copies)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer: int = call.module.layer_idx  # type: ignore[assignment]  # the probe saw 0..n-1
        memory, batch = self._memory, self.batch
        self.arrive(layer)
        pages = (memory.key_pages(layer), memory.value_pages(layer))
        kv_scales = memory.kv_scales(layer)
        write_kv(call.key, call.value, batch.slot_mapping, *pages, kv_scales)
        query = call.query
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        inputs = AttentionInput(query, *pages, batch.page_index, call.kind, kv_scales)
        multi_token_attention(inputs, out, self._plan)
        return out


class WholeModel(Protocol):
    """Computes the same logits as the model, without the model's own code."""

    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        forward_pass: ForwardPass,
    ) -> torch.Tensor: ...


class LengthOnlyCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """A cache that only says how many tokens came before; keys and values are those of the new tokens."""

    def __init__(self, num_tokens: int | torch.Tensor) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self._num_tokens

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


class FlatModel:
    """A transformers model called on one flat batch."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.whole: WholeModel | None = None  # replaces the forward, once all layers are fused
        self.alone = True  # no other rank has a part of it
        self.num_layers: int | None = None  # where it has only some of the module's
        self.first_layer = 0  # of those, in the whole model
        self.counts_from_cache = False  # its layers take positions from the cache (Llama 4 does)
        self.form = ""  # in which the layers run, as a sentence for people; the loader says it
        # All families of transformers 5 know this argument; another model computes every row's logits.
        self._keeps_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    def logits(
        self,
        input_ids: torch.Tensor,  # int64 (tokens)
        positions: torch.Tensor,  # int64 (tokens)
        rows: torch.Tensor,  # int64 (rows)
        forward_pass: ForwardPass,
    ) -> torch.Tensor:  # (rows, vocab)
        """Logits of the given rows; only they are multiplied with the output matrix."""
        if self.whole is not None:
            return self.whole.logits(input_ids, positions, rows, forward_pass)
        past = {}
        if self.counts_from_cache:  # position = tokens in the cache + number of the row
            numbers = torch.arange(len(positions), device=positions.device)
            past = {"past_key_values": LengthOnlyCache(positions - numbers)}
        output = self.module(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            pensieve_pass=forward_pass,
            **past,
            **({"logits_to_keep": rows} if self._keeps_rows else {}),
        )
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_rows else logits[rows]


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, heads, tokens, head_size)
    key: torch.Tensor,  # (1, kv_heads, tokens, head_size)
    value: torch.Tensor,  # (1, kv_heads, tokens, head_size)
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    pensieve_pass: ForwardPass | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every layer."""
    if pensieve_pass is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not pass the forward's keyword arguments on "
            "to its attention"
        )
    call = AttentionCall(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionKind(query.shape[-1] ** -0.5 if scaling is None else scaling),
        attention_mask,
        rest,
    )
    return pensieve_pass.attend(call).unsqueeze(0), None


FAR = 1 << 30  # a position beyond any window; mask functions compute with any index


def probing_mask(*, mask_function: Callable[..., Any], **rest: Any) -> torch.Tensor | None:
    """None for a plain causal mask; otherwise a (1, 1, 1, 1) marker holding `mask_reach`.

    Transformers describes a mask by a function of (batch, head, query position, key position).
    """
    reach = mask_reach(mask_function)
    return None if reach == FAR else torch.full((1, 1, 1, 1), reach, dtype=torch.int64)


def mask_reach(mask_function: Callable[..., Any]) -> int:
    """How many positions a query sees, itself included: FAR if all, 0 if it is not causal at all."""

    def visible(query_position: int, key_position: int) -> bool:
        zero = torch.tensor(0)
        return bool(
            mask_function(zero, zero, torch.tensor(query_position), torch.tensor(key_position))
        )

    try:
        if visible(0, 1) or visible(0, FAR) or not visible(0, 0):
            return 0
        if visible(FAR, 0):
            return FAR
        nearest, furthest = 0, FAR  # position 0 is visible from `nearest`, not from `furthest`
        while furthest - nearest > 1:
            middle = (nearest + furthest) // 2
            if visible(middle, 0):
                nearest = middle
            else:
                furthest = middle
    except IndexError:  # a lookup in a tensor: the mask depends on more than positions
        return 0
    return furthest


def register() -> None:
    """Make both names known to transformers; idempotent."""
    AttentionInterface.register(SERVING, attention_forward)
    AttentionInterface.register(PROBING, attention_forward)
    AttentionMaskInterface.register(PROBING, probing_mask)
