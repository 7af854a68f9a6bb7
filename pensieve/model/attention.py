"""Connect transformers models to our attention over pages (kernels/attention/paged.py computes it).

`AttentionInterface.register` makes "pensieve" a name that `set_attn_implementation` accepts.  State shared by
all layers of an iteration travels as a keyword argument of the forward (`pensieve_pass`).  Modeling code that
follows the interface passes this argument to every attention call.  There is no global state.

No mask is registered under "pensieve", so transformers builds none: causality follows from the slices.  The
load probe uses "pensieve-probe", which registers a mask function.  This function builds no mask either: it
returns None for a plain causal mask, and a marker for any other mask.  The attention call receives the
marker.  So the probe sees which mask each layer would use, whatever the config says.

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
    """One layer's call of the attention, with its rows."""

    module: torch.nn.Module  # its `layer_idx` is the layer
    query: torch.Tensor  # (tokens, heads, head_size)
    key: torch.Tensor  # (tokens, kv_heads, head_size)
    value: torch.Tensor  # (tokens, kv_heads, head_size)
    kind: AttentionKind
    mask: torch.Tensor | None  # from `probing_mask`
    other_arguments: Mapping[str, Any]  # the probe checks them, serving ignores them


class ForwardPass(Protocol):
    """The object that a forward passes to every layer's attention: one per iteration, or the probe's."""

    @property
    def paged_rows(self) -> PagedRows | None:
        """The pages, if fused layers compute the attention themselves; None if they must call `attend`."""

    @property
    def pages_ready(self) -> bool:
        """Whether all layers' pages are ready, so that calling `wait_for_pages` is unnecessary."""

    def wait_for_pages(self, layer: int) -> None:
        """Wait until the layer's pages hold what the iteration needs.  Fused layers call this themselves."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the layer's attention, (tokens, heads, head_size)."""


class PagedPass:
    """Run the attention of one iteration over paged memory."""

    def __init__(
        self,
        batch: Batch,
        memory: KVMemory,
        wait_layer: Callable[[int], None],
        copies: PageMoves | None = None,
        plan: DevicePlan | None = None,
        *,
        swap_ins_outstanding: bool = True,
    ) -> None:
        self.batch = batch
        self.pages_ready = not swap_ins_outstanding and copies is None
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

    def wait_for_pages(self, layer: int) -> None:
        self._wait_layer(layer)
        if self._copies is not None:
            self._memory.copy_within(layer, self._copies)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer: int = call.module.layer_idx  # type: ignore[assignment]  # the load probe checked 0..n-1
        memory, batch = self._memory, self.batch
        self.wait_for_pages(layer)
        pages = (memory.key_pages(layer), memory.value_pages(layer))
        kv_scales = memory.kv_scales(layer)
        write_kv(call.key, call.value, batch.slot_mapping, *pages, kv_scales)
        query = call.query
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        inputs = AttentionInput(query, *pages, batch.page_index, call.kind, kv_scales)
        multi_token_attention(inputs, out, self._plan)
        return out


class WholeModel(Protocol):
    """Compute the same logits as the model, without the model's own code."""

    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        forward_pass: ForwardPass,
    ) -> torch.Tensor: ...


class LengthOnlyCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """A cache that only knows the number of earlier tokens; it returns the keys and values it is given."""

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
    """Call a transformers model on one flat batch."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.whole: WholeModel | None = None  # replaces the forward if all layers are fused
        self.alone = True  # no other rank has a part of the model
        self.num_layers: int | None = None  # number of layers of a stage; None: all layers
        self.first_layer = 0  # number of a stage's first layer in the whole model
        self.counts_from_cache = False  # its layers take positions from the cache (Llama 4 does)
        self.form = ""  # tells people how the layers run; set by the loader
        # All families of transformers 5 know this argument.  Other models compute every row's logits.
        self._keeps_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    def logits(
        self,
        input_ids: torch.Tensor,  # int64 (tokens)
        positions: torch.Tensor,  # int64 (tokens)
        rows: torch.Tensor,  # int64 (rows)
        forward_pass: ForwardPass,
    ) -> torch.Tensor:  # (rows, vocab)
        """Return the logits of the given rows; only these rows are multiplied by the output matrix."""
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
    **other_arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in one layer.  Transformers calls this function in every layer."""
    if pensieve_pass is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not pass the forward's keyword arguments "
            "to its attention"
        )
    call = AttentionCall(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionKind(query.shape[-1] ** -0.5 if scaling is None else scaling),
        attention_mask,
        other_arguments,
    )
    return pensieve_pass.attend(call).unsqueeze(0), None


FAR = 1 << 30  # a position beyond any window; mask functions accept any index


def probing_mask(*, mask_function: Callable[..., Any], **rest: Any) -> torch.Tensor | None:
    """Return None for a plain causal mask, otherwise a (1, 1, 1, 1) marker holding `mask_reach`.

    Transformers describes a mask by a function of (batch, head, query position, key position).
    """
    reach = mask_reach(mask_function)
    return None if reach == FAR else torch.full((1, 1, 1, 1), reach, dtype=torch.int64)


def mask_reach(mask_function: Callable[..., Any]) -> int:
    """Return how many positions a query sees, including its own: FAR for all, 0 if not causal."""

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
        nearest, furthest = 0, FAR  # position 0 is visible from `nearest` but not from `furthest`
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
    """Register both names with transformers; idempotent."""
    AttentionInterface.register(SERVING, attention_forward)
    AttentionInterface.register(PROBING, attention_forward)
    AttentionMaskInterface.register(PROBING, probing_mask)
