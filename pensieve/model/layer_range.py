"""Keep one stage of a model: some consecutive layers, plus the embeddings or LM head if it needs them.

The transformers module keeps its list of layers.  Before any weight is read, each layer of another stage is
replaced by a layer that does nothing:

    first stage     embeddings   0 … k-1              (nothing …)   norm
    middle stage    (blank)      (nothing …) k … l-1  (nothing …)   norm
    last stage      (blank)      (nothing …) l … n-1                norm   LM head

The empty layer just before the stage's own layers is the entry: it returns the hidden states that the
previous stage has sent.  The empty layer just after the own layers is the exit: it sends hidden states to the
next stage (parallel/stages.py).  So the model's code around its layers (masks, rotations, factors) runs in
each stage, but acts only on the stage's own layers.

The embedding table and the LM head are large, so only stages that need them have them.  A stage
without the embedding table has a blank table, which returns a random but fixed row for each token.  The
check at model load (probe.py) runs the layers on these rows.

A stage numbers its layers from 0, because its KV memory has only these layers.  A model whose layers compute
something that depends on their number cannot be divided; `number_from_zero` checks this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from pensieve.errors import UnsupportedModel

BLANK_ROWS = 499  # random rows of a blank table
_PROMPT_TOKENS = 9


class LayerRange(NamedTuple):
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


class OtherStageLayer(torch.nn.Module):
    """Stand in for a layer of another stage: return the input, or the result of `exchange` if set."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        super().__init__()
        for name, value in attributes.items():  # some models' own loops read a layer's attributes
            setattr(self, name, value)
        self.exchange: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states if self.exchange is None else self.exchange(hidden_states)


class BlankTable(torch.nn.Module):
    """Stand in for embeddings that another stage has."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self._width, self._dtype = table.weight.shape[1], table.weight.dtype
        self.weight = torch.empty(table.weight.shape[0], 0, device="cpu")  # callers read its length
        self._rows: torch.Tensor | None = None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._rows is None:
            random = torch.Generator().manual_seed(0)
            rows = torch.randn(BLANK_ROWS, self._width, generator=random)
            self._rows = rows.to(token_ids.device, self._dtype)
        return torch.nn.functional.embedding(token_ids % BLANK_ROWS, self._rows)


class NoLmHead(torch.nn.Module):
    """Stand in for an LM head that another stage has."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class StagePart(NamedTuple):
    """The part of a module that `cut` has kept."""

    layers: LayerRange
    entry: OtherStageLayer | None  # None in the first stage
    exit: OtherStageLayer | None  # None in the last stage


def divide_layers(num_layers: int, num_stages: int, head_layers: Fraction) -> list[LayerRange]:
    """Divide the layers so that the stage with the most weights has as few weights as possible.

    The last stage also has the LM head, which is as large as `head_layers` layers.
    """
    assert 1 <= num_stages <= num_layers
    num_others = num_stages - 1

    def largest(num_last: int) -> Fraction:
        others = -(-(num_layers - num_last) // num_others)
        return max(Fraction(others), num_last + head_layers)

    most = num_layers - num_others
    num_last = min(range(most, 0, -1), key=largest) if num_others else num_layers
    each, remainder = divmod(num_layers - num_last, max(num_others, 1))
    counts = [each + (index < remainder) for index in range(num_others)] + [num_last]
    stops = list(accumulate(counts))
    return [LayerRange(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def cut(
    module: Any, layers: Sequence[tuple[Any, str, Any]], index: int, num_stages: int
) -> StagePart:
    """Keep one stage of a module; `layers` lists (parent, name, layer) in order."""
    table, head = module.get_input_embeddings(), module.get_output_embeddings()
    if head is None:
        raise UnsupportedModel("it has no LM head, so it cannot be divided into stages")
    layer_sizes = [_num_parameters(layer) for _, _, layer in layers]
    head_layers = Fraction(head.weight.numel() * len(layers), sum(layer_sizes))
    own = divide_layers(len(layers), num_stages, head_layers)[index]
    others: dict[int, OtherStageLayer] = {}
    for number, (parent, name, layer) in enumerate(layers):
        if not own.first <= number < own.stop:
            attributes = {
                key: value for key, value in vars(layer).items() if not key.startswith("_")
            }
            others[number] = OtherStageLayer(attributes)
            setattr(parent, name, others[number])
    if index < num_stages - 1:
        module.set_output_embeddings(NoLmHead())
    if index > 0 and not (index == num_stages - 1 and module.config.tie_word_embeddings):
        module.set_input_embeddings(BlankTable(table))
    return StagePart(own, others.get(own.first - 1), others.get(own.stop))


def number_from_zero(module: Any, layers: Sequence[torch.nn.Module], first: int) -> None:
    """Number a stage's layers from 0; raise UnsupportedModel if that changes their results."""
    if not first:
        return
    ids = torch.arange(_PROMPT_TOKENS, device=module.device)[None]
    with torch.inference_mode():
        before = module(input_ids=ids, use_cache=False).logits
        for layer in layers:
            for each in layer.modules():
                if isinstance(getattr(each, "layer_idx", None), int):
                    each.layer_idx -= first  # type: ignore[operator, assignment]
        after = module(input_ids=ids, use_cache=False).logits
    if not torch.equal(before, after):
        raise UnsupportedModel(
            "the results of its layers depend on their numbers, so it cannot be divided into stages"
        )


def _num_parameters(module: torch.nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())
