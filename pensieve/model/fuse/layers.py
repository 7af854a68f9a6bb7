"""Layers and products replaced by faster ones, by pattern: what a model does is measured, not its name.

On a CPU the faster ones are compiled (`kernels.dense`), on a GPU joined (`kernels.joined`).

One forward over a prompt is watched.  Whatever is found is checked against what the module itself
answered, before it takes the module's place:

**A decoder layer** is replaced as a whole if what happened in it has this form, in this order:

    [norm] → products of one input: queries, keys, values → [norms of queries and keys] → rotation of
    halves → attention → a product → [norm] → + → [norm] → products of one input: gate and up →
    act(gate) · up → a product → [norm] → +

where a norm is the root-mean-square kind, brackets mean "may be missing", and what is added to the
residual may be multiplied by a number the layer holds.  That is Llama and nearly everything after it.

**The whole model** is replaced if every layer was, and what surrounds them is a table of embeddings (times a
number), one pair of rotations for all layers, a norm and an output product (times a number).  Then an
iteration is a loop over compiled layers and nothing else.

**Any other product** (torch's Linear, GPT-2's Conv1D) keeps its place in the module's own code and gets
packed weights; products that the same parent calls with the same input become one.

Weights are packed layer by layer and the originals given up as they go, so the model exists only once,
but for a table of embeddings that is the output matrix, too.
The load probe compares the result with the plain model; if it does not agree, the loader starts over
without any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

from pensieve.kernels.layer import cpu as dense
from pensieve.kernels.layer import cuda as joined
from pensieve.model.attention import FlatModel, ForwardPass

# Of the largest change that a layer makes, and of the largest value of a norm.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
NORM_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def kernels_on(device: torch.device) -> Any:
    """The module that replaced parts are made of: both have the same names."""
    return dense if device.type == "cpu" else joined


def fuse(flat: FlatModel, prompt: Sequence[int], *, int8: bool = False) -> tuple[int, int]:
    """Replace what can be; the numbers of layers replaced whole, and of single products packed.

    With `int8` the weights inside of layers are rounded, once a layer has proved to have the pattern.
    """
    module = flat.module
    first = next(module.parameters())
    kernels = kernels_on(first.device)
    if not kernels.available(first.dtype):
        return 0, 0
    layers = _decoder_layers(module)
    num_layers = len(layers)
    records, outside, logits = _watch(flat, prompt, [layer for _, _, layer in layers])
    surroundings = _surroundings(flat, records, outside, prompt, logits)
    workspace = kernels.Workspace()
    num_packed = _pack_products(module, [one for one in outside if _is_product(one)])
    fused: list[FusedLayer] = []
    outside.clear()
    while layers:  # given up one by one, each before the next is packed
        parent, name, layer = layers.pop()
        record = records.pop()
        found = _recognise(layer, record, workspace, int8)
        if found is not None:
            setattr(parent, name, found)
            fused.append(found)
        else:
            products = [one for one in record.happened if _is_product(one)]
            num_packed += _pack_products(layer, products, int8)
    if surroundings is not None and len(fused) == num_layers:
        head = surroundings.head_place()
        assert isinstance(head, PackedProduct)
        flat.whole = FusedModel(surroundings, fused[::-1], head.packed)
    return len(fused), num_packed


# -- watching --


class _Seen(NamedTuple):
    """One leaf module's call."""

    module: torch.nn.Module
    given: torch.Tensor
    answer: Any
    others: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # arguments beside the first


@dataclass
class _Attended:
    """One call of the attention."""

    heads: tuple[int, int, int]
    scaling: float
    rest: dict[str, Any]
    answer: torch.Tensor


@dataclass
class _Layer:
    """One layer's call."""

    given: torch.Tensor | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    answer: Any = None
    happened: list[_Seen | _Attended] = field(default_factory=list)


class _CausalPass:
    """A forward pass over one prompt from its beginning: plain causal attention."""

    pages: Any = None

    def __init__(self, seen: Callable[[_Attended], None] = lambda attended: None) -> None:
        self._seen = seen

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
        heads = (query.shape[1], key.shape[1], query.shape[2])
        self._seen(_Attended(heads, scaling, rest, answer))
        return answer

    def arrive(self, layer: int) -> None:
        """Nothing moves."""


def _decoder_layers(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """(parent, name, layer): the outermost list of modules whose members each hold one attention."""
    for parent in module.modules():
        if isinstance(parent, torch.nn.ModuleList) and len(parent):
            holders = [_attention_of(layer) for layer in parent]
            if all(each is not None for each in holders):
                return [(parent, name, layer) for name, layer in parent.named_children()]
    return []


def _attention_of(layer: torch.nn.Module) -> torch.nn.Module | None:
    found = [each for each in layer.modules() if hasattr(each, "layer_idx")]
    return found[-1] if found else None


def _watch(
    flat: FlatModel, prompt: Sequence[int], layers: Sequence[torch.nn.Module]
) -> tuple[list[_Layer], list[_Seen], torch.Tensor]:
    """What happened in each layer, what outside of them, and the logits."""
    records = [_Layer() for _ in layers]
    outside: list[_Seen] = []
    inside: list[_Layer] = []

    def enter(record: _Layer) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            record.given = args[0] if args else kwargs.get("hidden_states")
            record.arguments = kwargs
            inside.append(record)

        return hook

    def leave(module: Any, args: tuple[Any, ...], answer: Any) -> None:
        inside.pop().answer = answer

    def leaf(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any
    ) -> None:
        if not args or isinstance(module, torch.nn.Dropout | torch.nn.Identity):
            return
        seen = _Seen(module, args[0], answer, (args[1:], kwargs))
        if not inside:
            outside.append(seen)
        elif len(args) == 1 and not kwargs and isinstance(answer, torch.Tensor):
            inside[-1].happened.append(seen)

    def attended(one: _Attended) -> None:
        if inside:
            inside[-1].happened.append(one)

    handles = []
    for layer, record in zip(layers, records, strict=True):
        handles.append(layer.register_forward_pre_hook(enter(record), with_kwargs=True))
        handles.append(layer.register_forward_hook(leave))
    for each in flat.module.modules():
        if not list(each.children()):
            handles.append(each.register_forward_hook(leaf, with_kwargs=True))
    try:
        ids = torch.tensor(prompt, device=flat.module.device)
        positions = torch.arange(len(ids), device=ids.device)
        logits = flat.logits(ids, positions, positions, _CausalPass(attended))
    finally:
        for handle in handles:
            handle.remove()
    return records, outside, logits


# -- a whole layer --


class FusedLayer(torch.nn.Module):
    """In the place of a decoder layer: the same call, the same answer."""

    def __init__(
        self,
        inner: Any,  # a Layer of `dense` or `joined`
        layer_idx: int,
        scaling: float,
        rest: dict[str, Any],
        in_tuple: bool,
        attributes: dict[str, Any],
    ) -> None:
        super().__init__()
        for name, value in attributes.items():  # what the model's own loop may ask a layer for
            setattr(self, name, value)
        self.layer_idx = layer_idx
        self.inner = inner
        self._scaling = scaling
        self._rest = rest
        self._in_tuple = in_tuple

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        pensieve_pass: ForwardPass,
        **__: Any,
    ) -> Any:
        out = self.run(hidden_states[0].contiguous(), position_embeddings, pensieve_pass)
        return (out.unsqueeze(0),) if self._in_tuple else out.unsqueeze(0)

    @property
    def weight_bytes(self) -> int:
        return int(self.inner.weight_bytes)

    def run(
        self,
        residual: torch.Tensor,  # (tokens, hidden), contiguous
        embeddings: tuple[torch.Tensor, torch.Tensor],
        forward_pass: ForwardPass,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The next layer's residual, of all rows or of those that are `kept` (int64, contiguous)."""
        pages = forward_pass.pages
        if pages is not None and self.inner.fits(pages):
            forward_pass.arrive(self.layer_idx)
            pages.turn_by(embeddings)
            whole: torch.Tensor = self.inner.whole(residual, pages, kept)
            return whole
        cosines, sines = (each[0].contiguous() for each in embeddings)
        query, key, value = self.inner.before_attention(residual, cosines, sines)
        attended = forward_pass.attend(self, query, key, value, None, self._scaling, self._rest)
        if kept is not None:
            residual, attended = residual[kept], attended[kept]
        after: torch.Tensor = self.inner.after_attention(residual, attended.contiguous())
        return after


class _Norms(NamedTuple):
    """A call of a norm."""

    norm: Any
    given: torch.Tensor
    answer: torch.Tensor


def _recognise(
    layer: torch.nn.Module, record: _Layer, workspace: Any, int8: bool
) -> FusedLayer | None:
    given, embeddings = record.given, record.arguments.get("position_embeddings")
    answer = record.answer[0] if isinstance(record.answer, tuple) else record.answer
    whole = isinstance(record.answer, tuple) and len(record.answer) != 1
    if given is None or whole or not isinstance(answer, torch.Tensor):
        return None
    if not _are_rotations(embeddings, given):
        return None
    parts = _parts(record.happened, given)
    if parts is None:
        return None
    attention, pack = parts
    in_tuple = isinstance(record.answer, tuple)
    index: int = _attention_of(layer).layer_idx  # type: ignore[union-attr, assignment]
    plain = {name: value for name, value in vars(layer).items() if not name.startswith("_")}

    def built(factor: float, pieces: dict[str, Any]) -> FusedLayer:
        inner = kernels_on(given.device).Layer(
            heads=attention.heads,
            index=index,
            scaling=attention.scaling,
            factor=factor,
            workspace=workspace,
            **pieces,
        )
        return FusedLayer(inner, index, attention.scaling, attention.rest, in_tuple, plain)

    exact = pack(int8=False)
    for factor in (1.0, *{v for v in plain.values() if isinstance(v, float) and v != 1.0}):
        fused = built(factor, exact)
        with torch.inference_mode():
            got = fused(given, position_embeddings=embeddings, pensieve_pass=_CausalPass())
        got = got[0] if in_tuple else got
        change, size = (answer - given).abs().max(), answer.abs().max()
        rounding = torch.finfo(given.dtype).eps * size
        if float((got - answer).abs().max()) <= float(TOLERANCE[given.dtype] * change + rounding):
            return built(factor, pack(int8=True)) if int8 else fused
    return None


def _are_rotations(embeddings: Any, given: torch.Tensor) -> bool:
    return (
        isinstance(embeddings, tuple)
        and len(embeddings) == 2
        and all(
            each.dtype in (given.dtype, torch.float32)
            and each.dim() == 3
            and each.shape[:2] == given.shape[:2]
            for each in embeddings
        )
    )


def _parts(
    happened: Sequence[_Seen | _Attended], given: torch.Tensor
) -> tuple[_Attended, Callable[..., dict[str, Any]]] | None:
    """The attention, and what packs the arguments of dense.Layer; None if it went another way."""
    places = [i for i, one in enumerate(happened) if isinstance(one, _Attended)]
    if len(places) != 1:
        return None
    attention = happened[places[0]]
    assert isinstance(attention, _Attended)
    norms: dict[str, Any] = {}
    products: dict[str, list[_Seen]] = {"in": [], "out": [], "mlp_in": [], "mlp_out": []}

    # Before the attention.
    normed = given
    for one in happened[: places[0]]:
        assert isinstance(one, _Seen)
        if _is_product(one):
            if one.given is not normed:
                return None
            products["in"].append(one)
            continue
        norm = _norm(one)
        if norm is None:
            return None
        if one.given is given and not products["in"]:
            norms["attention_before"], normed = norm, one.answer
        elif "query_norm" not in norms:
            norms["query_norm"] = norm
        elif "key_norm" not in norms:
            norms["key_norm"] = norm
        else:
            return None

    # After it.
    activation: _Seen | None = None
    loose: list[_Norms] = []  # norms since the last product
    for one in happened[places[0] + 1 :]:
        assert isinstance(one, _Seen)
        if _is_product(one):
            if not products["out"]:
                products["out"].append(one)
            elif not products["mlp_in"]:
                if not _place(loose, one, norms):
                    return None
                products["mlp_in"].append(one)
            elif one.given is products["mlp_in"][0].given:
                products["mlp_in"].append(one)
            elif not products["mlp_out"]:
                products["mlp_out"].append(one)
            else:
                return None
            loose = []
        elif not list(one.module.parameters()) and activation is None and products["mlp_in"]:
            activation = one
        else:
            norm = _norm(one)
            if norm is None:
                return None
            loose.append(_Norms(norm, one.given, one.answer))
    if len(loose) > 1 or activation is None or not products["mlp_out"]:
        return None
    if loose:
        norms["mlp_after"] = loose[0].norm
    return _packed(attention, norms, products, activation)


def _place(loose: list[_Norms], product: _Seen, norms: dict[str, Any]) -> bool:
    """Norms between the attention's product and the first of the MLP: which side of the sum?"""
    if loose and product.given is loose[-1].answer:
        norms["mlp_before"] = loose.pop().norm
    if loose:
        norms["attention_after"] = loose.pop().norm
    return not loose


def _packed(
    attention: _Attended,
    norms: dict[str, Any],
    products: dict[str, list[_Seen]],
    activation: _Seen,
) -> tuple[_Attended, Callable[..., dict[str, Any]]] | None:
    num_heads, num_kv_heads, head_size = attention.heads
    name = _activation(activation.module)
    gates = products["mlp_in"]
    if len(gates) == 2 and gates[0].answer is not activation.given:
        gates = gates[::-1]
    width = sum(one.answer.shape[-1] for one in gates)
    inputs = sum(one.answer.shape[-1] for one in products["in"])
    hidden = products["in"][0].given.shape[-1] if products["in"] else 0
    fits = (
        name is not None
        and len(gates) <= 2
        and width % 2 == 0
        and products["mlp_out"][0].given.shape[-1] == width // 2
        and inputs == (num_heads + 2 * num_kv_heads) * head_size
        and products["out"][0].given.shape[-1] == num_heads * head_size
        and all(one.answer.shape[-1] == hidden for one in (*products["out"], *products["mlp_out"]))
        and ("query_norm" in norms) == ("key_norm" in norms)
        and all(
            len(norm.weight) == hidden for side, norm in norms.items() if side[:3] in ("att", "mlp")
        )
    )
    if not fits:
        return None
    if "query_norm" in norms and not (
        len(norms["query_norm"].weight) in (head_size, num_heads * head_size)
        and len(norms["key_norm"].weight) in (head_size, num_kv_heads * head_size)
    ):
        return None
    even = all(size % 2 == 0 for size in (hidden, num_heads * head_size, width // 2))
    if not even:  # pairs of bfloat16
        return None

    def pack(int8: bool) -> dict[str, Any]:
        return {
            "attention_in": _pack(products["in"], int8=int8),
            "attention_out": _pack(products["out"], int8=int8),
            "mlp_in": _pack(gates, name, int8=int8),
            "mlp_out": _pack(products["mlp_out"], int8=int8),
            "norms": norms,
        }

    return attention, pack


def _is_product(one: _Seen | _Attended) -> bool:
    return (
        isinstance(one, _Seen)
        and type(one.module) in (torch.nn.Linear, Conv1D)
        and one.module.weight.dtype == one.given.dtype
        and kernels_on(one.given.device).available(one.given.dtype)
    )


def _weight(module: torch.nn.Module) -> torch.Tensor:
    """(outputs, inputs)"""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return weight.T if type(module) is Conv1D else weight


def _pack(products: Sequence[_Seen], activation: str | None = None, *, int8: bool = False) -> Any:
    return kernels_on(products[0].given.device).Packed(
        [_weight(one.module) for one in products],
        [one.module.bias for one in products],
        activation,
        int8=int8,
    )


def _norm(seen: _Seen) -> Any:
    """The weights with which this call was x / rms(x) · weight."""
    parameters = list(seen.module.parameters())
    if len(parameters) != 1 or parameters[0].dim() != 1:
        return None
    width = len(parameters[0])
    if seen.given.shape[-1] % width or seen.given.shape != seen.answer.shape:
        return None
    numbers = [each for each in vars(seen.module).values() if isinstance(each, float)]
    small = seen.given * 1e-3  # there eps shows
    pairs = [(seen.given, seen.answer), (small, seen.module(small))]
    best: tuple[float, Any] | None = None
    for eps in numbers:
        for weight in (parameters[0].float(), 1 + parameters[0].float()):
            norm = kernels_on(seen.given.device).Norm(weight.contiguous(), eps)
            off = [_off(norm, given, answer) for given, answer in pairs]
            fits = all(worst <= NORM_TOLERANCE[seen.given.dtype] for worst, _ in off)
            mean = sum(mean for _, mean in off)
            if fits and (best is None or mean < best[0]):
                best = mean, norm
    return None if best is None else best[1]


def _off(norm: Any, given: torch.Tensor, answer: torch.Tensor) -> tuple[float, float]:
    """How far the norm is from the answer, at most and on average, by the largest value."""
    width = len(norm.weight)
    rows = given.float().view(*given.shape[:-1], -1, width)
    got = rows / (rows.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    right = answer.float()
    difference = (got.flatten(-2) - right).abs() / right.abs().max().clamp_min(1e-12)
    return float(difference.max()), float(difference.mean())


def _activation(module: torch.nn.Module) -> str | None:
    x = torch.linspace(-8, 8, 257)
    with torch.inference_mode():
        y = module(x)
    for name, right in (("silu", F.silu(x)), ("gelu_tanh", F.gelu(x, approximate="tanh"))):
        if torch.allclose(y, right, atol=1e-6):
            return name
    return None


# -- the whole model --


@dataclass(frozen=True)
class _Surroundings:
    """What stands around the layers."""

    table: torch.nn.Embedding
    table_factor: float
    rotations: Callable[[torch.Tensor, torch.Tensor], Any]  # of (1, tokens, …), (1, tokens)
    norm: Any
    head_place: Callable[[], Any]  # what stands now where the output product stood
    head_factor: float


class FusedModel:
    """The whole forward of a model all of whose layers are fused."""

    def __init__(self, around: _Surroundings, layers: Sequence[FusedLayer], head: Any) -> None:
        self._around = around
        self._layers = layers
        self._head = head
        for layer, then in pairwise(layers):
            layer.inner.followed_by(then.inner)
        layers[-1].inner.followed_by(head)

    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        forward_pass: ForwardPass,
    ) -> torch.Tensor:
        """float32 (rows, vocab)"""
        around = self._around
        hidden: torch.Tensor = around.table(input_ids)
        if around.table_factor != 1:
            hidden = hidden * around.table_factor
        embeddings = around.rotations(hidden[None], positions[None])
        for layer in self._layers[:-1]:
            hidden = layer.run(hidden, embeddings, forward_pass)
        hidden = self._layers[-1].run(hidden, embeddings, forward_pass, rows)
        logits = torch.empty(
            (len(rows), self._head.outputs), dtype=torch.float32, device=hidden.device
        )
        self._head.multiply(around.norm(hidden), logits)
        return logits if around.head_factor == 1 else logits.mul_(around.head_factor)


def _surroundings(
    flat: FlatModel,
    records: Sequence[_Layer],
    outside: Sequence[_Seen],
    prompt: Sequence[int],
    logits: torch.Tensor,
) -> _Surroundings | None:
    """None where anything is not as expected."""
    first, last = records[0].given if records else None, records[-1].answer if records else None
    last = last[0] if isinstance(last, tuple) else last
    embeddings = records[0].arguments.get("position_embeddings") if records else None
    if first is None or any(
        record.arguments.get("position_embeddings") is not embeddings for record in records
    ):
        return None
    tables = [one for one in outside if isinstance(one.module, torch.nn.Embedding)]
    rotations = [one for one in outside if one.answer is embeddings]
    norms = [one for one in outside if one.given is last]
    heads = [one for one in outside if _is_product(one)]
    if not len(tables) == len(rotations) == len(norms) == len(heads) == 1:
        return None
    chained = all(
        after.given is (one.answer[0] if isinstance(one.answer, tuple) else one.answer)
        for one, after in pairwise(records)
    )
    table, head = tables[0], heads[0]
    norm = _norm(norms[0])
    table_factor = _factor(table.answer, first)
    head_factor = _factor(head.answer[0], logits)
    turning = _turning(rotations[0])
    again = turning(first, torch.arange(len(prompt), device=first.device)[None])
    if (
        norm is None
        or not chained
        or table_factor is None
        or head_factor is None
        or not torch.equal(head.given, norms[0].answer)
        or _factor(64 * head.answer[0], _with_larger_logits(flat, prompt, head.module, 64)) is None
        or not all(
            torch.equal(one, other) for one, other in zip(again, embeddings or (), strict=True)
        )
    ):
        return None
    return _Surroundings(
        table=table.module,  # type: ignore[arg-type]
        table_factor=table_factor,
        rotations=turning,
        norm=norm,
        head_place=partial(getattr, *_places(flat.module)[id(head.module)]),
        head_factor=head_factor,
    )


def _turning(seen: _Seen) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """The call that gave the rotations, for other positions: its one tensor beside the first."""
    args, kwargs = seen.others

    def turning(hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        def put(argument: Any) -> Any:
            return positions if isinstance(argument, torch.Tensor) else argument

        named = {name: put(argument) for name, argument in kwargs.items()}
        return seen.module(hidden, *map(put, args), **named)

    return turning


def _with_larger_logits(
    flat: FlatModel, prompt: Sequence[int], head: torch.nn.Module, times: int
) -> torch.Tensor:
    """What becomes of an output product that is so much larger: a cap would show."""
    hook = head.register_forward_hook(lambda module, args, answer: answer * times)
    try:
        ids = torch.tensor(prompt, device=flat.module.device)
        positions = torch.arange(len(ids), device=ids.device)
        return flat.logits(ids, positions, positions, _CausalPass())
    finally:
        hook.remove()


def _factor(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """The number that one was multiplied by to become the other."""
    if before.shape != after.shape:
        return None
    wide, right = before.double(), after.double()
    factor = float((wide * right).sum() / (wide * wide).sum())
    worst = float((wide * factor - right).abs().max() / right.abs().max())
    if not worst <= torch.finfo(after.dtype).eps:  # nor NaN
        return None
    return 1.0 if torch.equal(before, after) else factor


# -- single products --


class _Together:
    """Packed weights of products that get the same input; each part takes its columns."""

    def __init__(self, packed: Any, sizes: Sequence[int]) -> None:
        self.packed = packed
        self._sizes = list(sizes)
        self._given: torch.Tensor | None = None
        self._answers: list[torch.Tensor | None] = []

    def answer(self, part: int, given: torch.Tensor) -> torch.Tensor:
        if given is not self._given or self._answers[part] is None:
            rows = given.reshape(-1, given.shape[-1])
            out = torch.empty((len(rows), sum(self._sizes)), dtype=given.dtype, device=given.device)
            self.packed.multiply(rows, out)
            whole = out.view(*given.shape[:-1], out.shape[1])
            self._given, self._answers = given, list(torch.split(whole, self._sizes, dim=-1))
        answer = self._answers[part]
        assert answer is not None
        self._answers[part] = None
        if not any(each is not None for each in self._answers):
            self._given = None
        return answer


class PackedProduct(torch.nn.Module):
    """In the place of a Linear."""

    def __init__(self, together: _Together, part: int, like: torch.nn.Module) -> None:
        super().__init__()
        weight: torch.Tensor = like.weight  # type: ignore[assignment]
        self.weight = weight.new_empty(0)  # some code asks for its type
        self.bias = None
        self._together = together
        self._part = part

    @property
    def weight_bytes(self) -> int:
        """Of all that are multiplied together, told by the first."""
        return self.packed.panels.nbytes if self._part == 0 else 0

    @property
    def packed(self) -> Any:
        return self._together.packed

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self._together.answer(self._part, given)


def _pack_products(module: torch.nn.Module, seen: Sequence[Any], int8: bool = False) -> int:
    places = _places(module)
    count = 0
    for group in _groups([one for one in seen if id(one.module) in places], places):
        together = _Together(_pack(group, int8=int8), [one.answer.shape[-1] for one in group])
        for part, one in enumerate(group):
            parent, name = places[id(one.module)]
            setattr(parent, name, PackedProduct(together, part, one.module))
            count += 1
    return count


def _places(module: torch.nn.Module) -> dict[int, tuple[torch.nn.Module, str]]:
    """The parent and name of each module, by its id."""
    return {
        id(child): (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
    }


def _groups(
    seen: Sequence[_Seen], places: dict[int, tuple[torch.nn.Module, str]]
) -> Iterator[list[_Seen]]:
    """Consecutive calls with one input by one parent; a module that is called twice stays alone."""
    calls: dict[int, int] = {}
    for one in seen:
        calls[id(one.module)] = calls.get(id(one.module), 0) + 1
    group: list[_Seen] = []
    for one in seen:
        if group and not (
            one.given is group[0].given
            and places[id(one.module)][0] is places[id(group[0].module)][0]
            and calls[id(one.module)] == calls[id(group[0].module)] == 1
        ):
            yield group
            group = []
        if calls[id(one.module)] > 0:
            group.append(one)
            if calls[id(one.module)] > 1:
                calls[id(one.module)] = 0  # once is enough
    if group:
        yield group
