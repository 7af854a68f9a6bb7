"""Run a model to find out whether it can be served exactly.

Nothing here depends on the name of a model.  A model is served if

1. its attention accepts our implementation, and every layer calls it exactly once per forward, in
   order, with `layer_idx` 0 … n-1 (recurrent layers never call it; modeling code that bypasses the
   interface or drops the forward's arguments fails here, too);
2. these calls ask for plain causal attention: no mask except the causal one, no window (the mask function is
   examined, so a window longer than the prompts is found, too), and no argument that we would ignore
   (soft caps, sinks, biases, ...);
3. all layers have the same number of heads, and keys and values have the same size;
4. two prompts, computed together in scattered pages and uneven pieces, give the same logits as each prompt
   alone with the model's own attention;
5. its logits are finite;
6. a slice's result does not change when its neighbor in the batch is at a far position (rotary types
   that depend on length read the largest position of the whole batch);
7. at far positions, up to the last position of the context, the attention gets the same inputs as in the
   model's own forward with a cache of that length (some models scale queries beyond a length, and take the
   length from the cache).

`_observe` checks 1 to 3 in one forward pass with the attention implementation "pensieve-probe"
(`model.attention`).  The masks of this implementation tell how far a query sees.

A fused layer is used only if it also agrees with the original layer at far positions (`model.fuse`).  If KV
is stored in less precision than the model's dtype, check 4 is repeated with that format: the difference must
be rounding.  The scales of fp8 KV are chosen before that, from the prompts' keys and values.

The probe fails with UnsupportedModel, whose message is the reason.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pensieve.core.iteration import Slice
from pensieve.errors import UnsupportedModel, one_line
from pensieve.kernels import PAGE_SLOTS
from pensieve.kernels.kv_format import FP8, exponents_for
from pensieve.kernels.layer.protocol import PagedRows
from pensieve.model import attention
from pensieve.model.attention import AttentionCall, FlatModel, LengthOnlyCache, PagedPass
from pensieve.model.batch import Batch
from pensieve.model.fuse import Fused, fuse
from pensieve.model.kv.memory import KVMemory
from pensieve.model.layer_range import BlankTable
from pensieve.model.shape import ModelShape

INT8_DIFFERENCE = 0.15  # part of the logits' range; weights or keys in a wrong order cause far more
# Shares of the logits' range.  If replaced layers have experts, the larger limit applies.  Each layer alone
# agrees with its module, but rounding in a layer can send rows to other experts in all later layers.
LOW_PRECISION_MIN, LOW_PRECISION_MAX = 1e-2, 5e-2
NOT_FUSED = Fused(0, 0, "")
_CHUNK_TOKENS = 8
_PROMPT_TOKENS = (45, 12)  # the first is longer than a page
_NEAR, _FAR = 33, 12  # numbers of rows that compare a layer with its replacement
_FAR_BLOCK = 4  # rows checked at each far position
# Arguments of an attention call that do not change its result.  Dropout is 0 outside of training, positions
# and caches are ours, and the others request outputs that nothing uses.
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


class FusionFailed(Exception):
    """The model with replaced layers fails or differs; its original weights are already freed."""


def probe(
    flat: FlatModel,
    *,
    context_max: int | None = None,
    fuse_layers: bool = True,
    int8: bool = False,
    kv_dtype: str = "auto",
) -> ModelShape:
    """Check a model and return its shape; afterwards it uses our attention, and its layers are fused.

    A lower `context_max` can make a model acceptable: its sliding window or its change of rotary frequencies
    may lie beyond that context.  `int8` rounds the weights.  With `int8`, or a `kv_dtype` other than "auto",
    only the median over rows of logits must agree.  The shape stores `kv_dtype`.
    """
    attention.register()
    module = flat.module
    own_max = _context_max(module)
    if context_max is not None and context_max > own_max:
        raise UnsupportedModel(
            f"it was made for {own_max} tokens; --context-max {context_max} is more"
        )
    context_max = context_max or own_max
    try:
        with torch.inference_mode():
            prompts = _prompts(module, context_max)
            plain = [_plain_logits(module, prompt) for prompt in prompts]
            _check_finite(module, plain)
            tolerance = _tolerance(module, prompts, plain)
            _set_implementation(module, attention.PROBING)
            shape = _observe(flat, prompts[0], context_max)
            _set_implementation(module, attention.SERVING)
            _check_far_positions(flat, prompts[0], context_max)
            fused = _fuse_or_fail(flat, prompts[0], context_max, int8) if fuse_layers else NOT_FUSED
            num_replaced = fused.num_layers + fused.num_products
            if fused.has_experts and shape.dtype != torch.float32:
                tolerance = LOW_PRECISION_MAX
            if int8:
                if not num_replaced:
                    raise UnsupportedModel("none of its weights can be int8 on this device")
                tolerance = INT8_DIFFERENCE
            try:
                _compare(flat, shape, prompts, plain, tolerance, _CHUNK_TOKENS)
                if num_replaced or module.device.type != "cpu":
                    # The kernels take only pages of PAGE_SLOTS; with other pages torch attends.
                    _compare(flat, shape, prompts, plain, tolerance, PAGE_SLOTS)
                _check_far_neighbor(flat, shape, prompts[0], own_max)
            except Exception as error:
                if num_replaced:
                    raise FusionFailed(one_line(error)) from error
                raise
            if kv_dtype != "auto":
                if kv_dtype == FP8.name:
                    exponents = _kv_exponents(flat, shape, prompts)
                    shape = replace(shape, kv_exponents=exponents)
                shape = replace(shape, kv_dtype=kv_dtype)
                _check_rounded_kv(flat, shape, prompts, plain)
    except (UnsupportedModel, FusionFailed):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{_reason_prefix(module)}the probe failed with {type(error).__name__}: {one_line(error)}"
        ) from error
    return shape


@torch.inference_mode()
def with_scales_of_all(flat: FlatModel, shape: ModelShape) -> ModelShape:
    """Return a stage's shape with fp8 scales that are chosen from the real activations of earlier stages.

    All stages must call this at the same time, after they are connected.  The probe of a single stage sees
    only made-up activations.
    """
    prompts = _prompts(flat.module, shape.context_max)
    plain = replace(shape, kv_dtype="auto", kv_exponents=())
    return replace(shape, kv_exponents=_kv_exponents(flat, plain, prompts))


class _ObservingPass:
    """Record sizes and dtypes, check masks and arguments, and compute no attention.

    A layer that sees only some positions is recorded, not refused at once.  If nothing else is refused, the
    error suggests a lower context.
    """

    paged_rows: PagedRows | None = None
    pages_ready = False

    def __init__(self, context_max: int) -> None:
        self._context_max = context_max
        self.layers: list[Any] = []
        self.limited_reach: dict[Any, int] = {}  # how many positions a layer sees, if not all
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
                "but a page holds keys and values of one size"
            )
        self.layers.append(layer)
        self.sizes.add((query.shape[1], key.shape[1], key.shape[2]))
        self.dtypes.update((query.dtype, key.dtype, value.dtype))
        return torch.zeros_like(query)

    def wait_for_pages(self, layer: int) -> None:
        """Do nothing: no pages move."""

    def _check_mask(self, layer: Any, attention_mask: torch.Tensor | None) -> None:
        if attention_mask is None:
            return
        reach = int(attention_mask.flatten()[0]) if attention_mask.numel() == 1 else 0
        if reach == 0:
            raise UnsupportedModel(f"layer {layer} uses a mask that is not causal")
        self._note_reach(layer, reach)

    def _note_reach(self, layer: Any, reach: int) -> None:
        if reach < self._context_max:
            self.limited_reach[layer] = min(reach, self.limited_reach.get(layer, reach))

    def check_reach(self) -> None:
        if self.limited_reach:
            layer, reach = min(self.limited_reach.items(), key=lambda item: item[1])
            raise UnsupportedModel(
                f"layer {layer} sees at most {reach} positions (a sliding window or chunks), "
                f"fewer than the context of {self._context_max}. Serve it with --context-max {reach}"
            )

    def _check_arguments(self, layer: Any, call: AttentionCall) -> None:
        for name, given in call.other_arguments.items():
            if given is None or name in HARMLESS:
                continue
            if name == "sliding_window":
                self._note_reach(layer, int(given))
                continue
            shown = f" = {given}" if isinstance(given, int | float) else ""
            meaning = f" ({MEANING[name]})" if name in MEANING else ""
            raise UnsupportedModel(
                f"layer {layer} passes {name}{shown} to its attention, which is not supported{meaning}"
            )
        causal = call.other_arguments.get("is_causal")
        if not (getattr(call.module, "is_causal", True) if causal is None else causal):
            raise UnsupportedModel(f"layer {layer} is not causal")


def _reason_prefix(module: Any) -> str:
    """Return what the model declares about layers that do not fit KV pages, or an empty string.

    Such layers keep a recurrent state beside KV, or their queries see only chosen keys.
    """
    config = module.config.get_text_config()
    if getattr(module, "_is_stateful", False):
        return "it keeps a recurrent state beside KV (state-space layers or linear attention): "
    if chosen := getattr(config, "index_topk", None):
        return f"its queries see only {chosen} keys that an index chooses (sparse attention): "
    return ""


def _observe(flat: FlatModel, prompt: list[int], context_max: int) -> ModelShape:
    """Measure the shape with one prompt at positions 0 … n-1.

    Raise UnsupportedModel if the attention is not plain causal attention.
    """
    observer = _ObservingPass(context_max)
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
            f"{_reason_prefix(module)}none of its layers calls the attention interface"
        )
    if observer.layers != list(range(num_layers)):
        raise UnsupportedModel(
            f"{_reason_prefix(module)}layer {silent[0]} never calls the attention interface"
            if silent
            else f"its attention is called for layers {observer.layers}, expected 0 to "
            f"{num_layers - 1} once each, in this order"
        )
    if len(observer.sizes) > 1 or len(observer.dtypes) > 1:
        raise UnsupportedModel(
            f"its layers differ in heads or types: {sorted(observer.sizes)}, "
            f"{sorted(str(dtype) for dtype in observer.dtypes)}"
        )
    observer.check_reach()
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


def _fuse_or_fail(flat: FlatModel, prompt: list[int], context_max: int, int8: bool) -> Fused:
    positions = _near_and_far(context_max)
    try:
        fused = fuse(flat, prompt[: len(positions)], positions, int8=int8)
    except Exception as error:
        raise FusionFailed(one_line(error)) from error
    flat.form = fused.form
    return fused


def _near_and_far(context_max: int) -> list[int]:
    """Return the first positions of the context, then ever sparser positions up to the last."""
    last = context_max - 1
    far = (round(_NEAR * (last / _NEAR) ** (step / _FAR)) for step in range(1, _FAR + 1))
    return sorted({*range(min(_NEAR, context_max)), *(min(each, last) for each in far)})


def _context_max(module: Any) -> int:
    context_max = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(context_max, int) or context_max < 1:
        raise UnsupportedModel("its config names no max_position_embeddings")
    return context_max


def _prompts(module: Any, context_max: int) -> list[list[int]]:
    rng = random.Random(0)
    vocab_size = module.get_input_embeddings().weight.shape[0]
    return [
        [rng.randrange(vocab_size) for _ in range(min(length, context_max))]
        for length in _PROMPT_TOKENS
    ]


def _plain_logits(module: Any, prompt: Sequence[int]) -> torch.Tensor:
    """Return the logits of the model's own attention on one prompt alone, (tokens, vocab)."""
    ids = torch.tensor([prompt], device=module.device)
    logits: torch.Tensor = module(input_ids=ids, use_cache=False).logits[0]
    return logits.float()


def _check_finite(module: Any, plain: Sequence[torch.Tensor]) -> None:
    """Check finiteness first: NaN differs from itself, so later checks would report a wrong reason."""
    if all(bool(logits.isfinite().all()) for logits in plain):
        return
    for name, weights in module.named_parameters():
        if not weights.isfinite().all():
            raise UnsupportedModel(f"its weights hold NaN or infinity, first in {name}")
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    raise UnsupportedModel(f"its logits are not finite in {dtype}. Try another --dtype")


def _set_implementation(module: Any, implementation: str) -> None:
    module.set_attn_implementation(implementation)
    if module.config.get_text_config()._attn_implementation != implementation:
        raise UnsupportedModel(
            f"{type(module).__name__} does not support setting its attention implementation"
        )


def _compare(
    flat: FlatModel,
    shape: ModelShape,
    prompts: list[list[int]],
    plain: list[torch.Tensor],
    tolerance: float,
    chunk_tokens: int,
) -> None:
    """Raise UnsupportedModel unless the logits over pages equal the plain logits."""
    exact = shape.dtype == torch.float32 and tolerance < LOW_PRECISION_MIN
    paged = _scattered_pages(shape, prompts, chunk_tokens, flat.module.device)
    difference = _difference(_logits_over_pages(flat, paged, prompts), torch.cat(plain), exact)
    if not difference <= tolerance:
        raise UnsupportedModel(
            f"{_reason_prefix(flat.module)}its logits through our attention differ from its own by "
            f"{difference:.1e} of their range (rounding explains at most {tolerance:.1e})"
        )


def _check_rounded_kv(
    flat: FlatModel, shape: ModelShape, prompts: list[list[int]], plain: list[torch.Tensor]
) -> None:
    rows = _logits_over_pages(
        flat, _scattered_pages(shape, prompts, PAGE_SLOTS, flat.module.device), prompts
    )
    difference = _difference(rows, torch.cat(plain), exact=False)
    if not difference <= INT8_DIFFERENCE:
        raise UnsupportedModel(
            f"with --kv-dtype {shape.kv_dtype}, its logits differ from those without it by {difference:.1e} "
            f"of their range (rounding explains at most {INT8_DIFFERENCE:.1e})"
        )


def _kv_exponents(
    flat: FlatModel, shape: ModelShape, prompts: list[list[int]]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Return the exponents of the fp8 scales, chosen from the prompts' keys and values."""
    memory, tables = _scattered_pages(shape, prompts, PAGE_SLOTS, flat.module.device)
    memory.device_arena.zero_()
    _logits_over_pages(flat, (memory, tables), prompts)
    largest = memory.device_arena.abs().amax(dim=(1, 4, 5))  # (layers, 2, kv_heads)
    return tuple(
        (tuple(keys), tuple(values)) for keys, values in exponents_for(largest.cpu()).tolist()
    )


def _logits_over_pages(
    flat: FlatModel,
    paged: tuple[KVMemory, list[array[int]]],
    prompts: list[list[int]],
) -> torch.Tensor:
    """Return the logits of both prompts, computed in scattered pages and uneven pieces."""
    memory, tables = paged
    device, chunk_tokens = flat.module.device, memory.chunk_tokens
    tokens = [array("I", prompt) for prompt in prompts]
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for pieces in _pieces([len(prompt) for prompt in prompts]):
        slices = [
            Slice(number, start, stop, tokens[number][start:stop], tables[number], True)
            for number, start, stop in pieces
        ]
        logits = _paged_logits(flat, memory, Batch.from_slices(slices, chunk_tokens, device))
        parts = torch.split(logits, [stop - start for _, start, stop in pieces])
        for (number, _, _), part in zip(pieces, parts, strict=True):
            rows[number].append(part)
    return torch.cat([part for parts in rows for part in parts])


class _Recorder:
    """Keep the first rows of queries, keys and values; compute no attention.

    Without attention, two runs with batches of the same size record bit-identical rows, unless the model
    treats the positions of the two runs differently.
    """

    paged_rows: PagedRows | None = None
    pages_ready = False

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.recorded: list[torch.Tensor] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.recorded += [
            each[: self._num_rows].clone() for each in (call.query, call.key, call.value)
        ]
        return torch.zeros_like(call.query)

    def wait_for_pages(self, layer: int) -> None:
        """Do nothing: no pages move."""


def _check_far_positions(flat: FlatModel, prompt: list[int], context_max: int) -> None:
    """Compare rows at far positions with the model's own computation after a cache of that length.

    The cache only knows its length.  Attention is left out, so earlier keys are not needed.  Only the inputs
    of the attention can differ.
    """
    num_rows = min(_FAR_BLOCK, context_max)
    device = flat.module.device
    ids = torch.tensor(prompt[:num_rows], device=device)
    rows = torch.arange(num_rows, device=device)
    for first in sorted({context_max // 4, context_max // 2, context_max - num_rows}):
        first = min(first, context_max - num_rows)
        expected = _Recorder(num_rows)
        flat.module(
            input_ids=ids[None],
            past_key_values=LengthOnlyCache(first),
            use_cache=True,
            pensieve_pass=expected,
        )

        def differing_layer(first: int = first, expected: _Recorder = expected) -> int | None:
            actual = _Recorder(num_rows)
            flat.logits(ids, first + rows, rows[:0], actual)
            pairs = zip(actual.recorded, expected.recorded, strict=True)
            wrong = [index for index, pair in enumerate(pairs) if not _near(*pair)]
            return wrong[0] // 3 if wrong else None

        if differing_layer() is None:
            continue
        flat.counts_from_cache = True
        if (layer := differing_layer()) is not None:
            raise UnsupportedModel(
                f"at position {first}, the attention of layer {layer} gets other inputs in Pensieve's "
                f"batched forward than in the model's own forward after a cache of {first} tokens"
            )


def _near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both are equal except for the last bits."""
    worst = (actual - expected).abs().max()
    return bool(worst <= 8 * torch.finfo(expected.dtype).eps * expected.abs().max())


def _check_far_neighbor(
    flat: FlatModel, shape: ModelShape, prompt: list[int], own_max: int
) -> None:
    """Compare a prompt's rows in two batches: beside a token at position 0, and beside a token far away.

    The far token's position lies beyond the model's trained length.  If the operator has lowered the context,
    no token can be that far, so the last position of the context is used.
    """
    kinds = torch.nn.Embedding | BlankTable
    embeddings = [each for each in flat.module.modules() if isinstance(each, kinds)]
    # A second table holds positions.  Such a model has no rotary frequencies, and its positions end with the
    # table.
    is_last = len(embeddings) > 1 or shape.context_max < own_max
    far = shape.context_max - 1 if is_last else 4 * shape.context_max
    reference = _inputs_beside(flat, prompt, 0)

    def is_changed(neighbor: int) -> bool:
        return not all(map(torch.equal, reference, _inputs_beside(flat, prompt, neighbor)))

    if not is_changed(far):
        return
    harmless, harmful = 0, far
    while harmful - harmless > 1:
        middle = (harmless + harmful) // 2
        harmless, harmful = (harmless, middle) if is_changed(middle) else (middle, harmful)
    longest = min(harmful, own_max - 1)
    raise UnsupportedModel(
        "its rotary frequencies depend on the longest context in the batch, so one conversation would "
        f"change another. Serve it with --context-max {longest}"
    )


def _inputs_beside(flat: FlatModel, prompt: list[int], neighbor: int) -> list[torch.Tensor]:
    """Return the attention's inputs of a prompt in a batch with a token at position `neighbor`."""
    recorder = _Recorder(len(prompt))
    device = flat.module.device
    positions = torch.tensor([*range(len(prompt)), neighbor], device=device)
    ids = torch.tensor([*prompt, prompt[0]], device=device)
    flat.logits(ids, positions, positions[:0], recorder)
    return recorder.recorded


def _scattered_pages(
    shape: ModelShape, prompts: list[list[int]], chunk_tokens: int, device: torch.device
) -> tuple[KVMemory, list[array[int]]]:
    """Return a memory just large enough, and a scattered page table for each prompt."""
    counts = [-(-len(prompt) // chunk_tokens) for prompt in prompts]
    memory = KVMemory(shape, sum(counts), 0, chunk_tokens, device)
    free = list(range(sum(counts)))
    tables = [array("i", [free.pop(-1 if i % 2 else 0) for i in range(n)]) for n in counts]
    return memory, tables


def _pieces(lengths: list[int]) -> list[list[tuple[int, int, int]]]:
    """Return iterations of (prompt, start, stop): uneven pieces, then single tokens."""
    first, second = lengths
    cuts = [0, min(5, first), min(13, first), max(first - 2, 0), max(first - 1, 0), first]
    other = [0, min(7, second), min(8, second), max(second - 1, 0), second, second]
    return [
        [
            (number, start, stop)
            for number, bounds in ((0, cuts), (1, other))
            for start, stop in [(bounds[step], bounds[step + 1])]
            if start < stop
        ]
        for step in range(5)
    ]


def _paged_logits(flat: FlatModel, memory: KVMemory, batch: Batch) -> torch.Tensor:
    """Return the logits of every row, (tokens, vocab)."""
    rows = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
    forward_pass = PagedPass(batch, memory, wait_layer=lambda layer: None)
    return flat.logits(batch.input_ids, batch.positions, rows, forward_pass).float()


def _difference(actual: torch.Tensor, expected: torch.Tensor, exact: bool) -> float:
    """Return the difference of the logits, as a share of the expected range.

    Rounding alone may send a token to another expert, which changes the token's row.  A wrong attention
    changes nearly all rows.  So in low precision the median over rows counts, not the maximum.
    """
    span = (expected.max() - expected.min()).clamp_min(1e-12)
    by_row = (actual - expected).abs().amax(dim=1) / span
    return float(by_row.max() if exact else by_row.median())


def _tolerance(module: Any, prompts: list[list[int]], plain: list[torch.Tensor]) -> float:
    """Return the largest difference of logits that rounding can cause.

    In low precision, measure the difference between two of the model's own attention implementations, which
    are both correct.  A scaling error of 10 % causes well over twice this difference.
    """
    dtype = next(module.parameters()).dtype
    if dtype == torch.float32:
        return 1e-4
    try:
        _set_implementation(module, "sdpa")
        other = [_plain_logits(module, prompt) for prompt in prompts]
    except Exception:  # a model that only supports eager attention
        return LOW_PRECISION_MIN
    measured = 2 * _difference(torch.cat(other), torch.cat(plain), exact=False)
    return min(max(measured, LOW_PRECISION_MIN), LOW_PRECISION_MAX)
