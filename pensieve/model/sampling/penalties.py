"""Keep a turn's log for the sampler, and derive penalties, biases and masks from it.

`TurnLog` lives in the executor as long as the turn does.  It starts with the turn's context and receives each
collected token.  So it may lack the last token before the token to draw (`Row.is_ahead`).

`Penalties` is derived from the log: which ids the context contains, and how often this reply used each id.
`follow` adds the tokens that were appended to the log since its last call.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pensieve.core.iteration import TurnStart
from pensieve.model.sampling.masks import TokenMask
from pensieve.model.transfer import indices, upload
from pensieve.sampling import Sampling


@dataclass(slots=True, eq=False)
class TurnLog:
    """A turn's tokens and sampling options."""

    sampling: Sampling
    tokens: array[int]  # 'I': the turn's context and the collected tokens of its reply
    prompt_end: int
    attempt_id: int = 0
    penalties: Penalties | None = None  # created when a row needs them

    @classmethod
    def of(cls, start: TurnStart) -> TurnLog:
        return cls(start.sampling, start.context[:], len(start.context), start.attempt_id)


class Row(NamedTuple):
    """A token to draw: its turn's log, its position in the log, and its mask."""

    log: TurnLog
    position: int
    mask: TokenMask | None = None  # None allows any token

    @property
    def sampling(self) -> Sampling:
        return self.log.sampling

    @property
    def is_ahead(self) -> bool:
        """Whether the log lacks the previous token, which is still being computed."""
        return self.position > len(self.log.tokens)


def counts_reply(sampling: Sampling) -> bool:
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


@dataclass(slots=True)
class Penalties:
    """Adjustments of one turn's logits; `seen` and `counts` follow the log."""

    num_followed: int  # tokens of the log that `seen` and `counts` include
    seen: Tensor  # (vocab,) bool: the context contains this id; empty if no option needs it
    counts: Tensor  # (vocab,) int32: how often this reply used this id; empty if no option needs it
    bias: tuple[Tensor, Tensor] | None  # ids, and the numbers to add to their logits
    ending_ids: Tensor  # ids that may not come before min_tokens

    @classmethod
    def of(cls, sampling: Sampling, eos_token_ids: frozenset[int], values: Tensor) -> Penalties:
        vocab_size, device = values.shape[1], values.device
        num_seen = vocab_size if sampling.repetition_penalty != 1 else 0
        num_counts = vocab_size if counts_reply(sampling) else 0
        biases: dict[int, float] = {}
        for token_id, bias in sampling.logit_bias:
            if token_id < vocab_size:
                biases[token_id] = biases.get(token_id, 0.0) + bias
        ending_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ending_ids |= eos_token_ids
        return cls(
            num_followed=0,
            seen=torch.zeros(num_seen, dtype=torch.bool, device=device),
            counts=torch.zeros(num_counts, dtype=torch.int32, device=device),
            bias=(
                indices(list(biases), device),
                upload(torch.tensor(list(biases.values()), dtype=torch.float32), device),
            )
            if biases
            else None,
            ending_ids=indices(
                sorted(token_id for token_id in ending_ids if token_id < vocab_size), device
            ),
        )

    def follow(self, log: TurnLog) -> None:
        if len(self.seen):
            ids = _ids_of(log.tokens[self.num_followed :], self.seen)
            self.seen.index_fill_(0, ids, True)
        if len(self.counts):
            ids = _ids_of(log.tokens[max(self.num_followed, log.prompt_end) :], self.counts)
            self.counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self.num_followed = len(log.tokens)


def _ids_of(tokens: array[int], like: Tensor) -> Tensor:
    """Return a copy of the `tokens` that are valid indices of `like`.

    A tensor that shared the log's memory would keep the log from growing.
    """
    if not tokens:
        return torch.empty(0, dtype=torch.int64, device=like.device)
    ids = torch.frombuffer(tokens, dtype=torch.int32).to(torch.int64)
    return upload(ids[(ids >= 0) & (ids < len(like))], like.device)
