"""Turns, rows and logits made by hand, with every option that the sampler tests draw with."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import torch

from pensieve.core.iteration import SampledToken
from pensieve.model.sampling.penalties import Row, TurnLog
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling


def make_turn(
    sampling: Sampling, context: list[int] | None = None, reply: list[int] | None = None
) -> TurnLog:
    context = [1, 2, 3] if context is None else context
    return TurnLog(sampling, array("I", context + (reply or [])), len(context))


def make_row(sampling: Sampling) -> Row:
    turn = make_turn(sampling)
    return Row(turn, len(turn.tokens))


def make_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def sample_one(
    row: torch.Tensor | list[float], turn: TurnLog, eos: frozenset[int] = frozenset()
) -> SampledToken:
    row = torch.as_tensor(row, dtype=torch.float32)
    (sampled,) = Sampler(row.shape[0], eos).sample(row.unsqueeze(0), [turn])
    assert sampled is not None
    return sampled


def token_of(row: torch.Tensor | list[float], sampling: Sampling, **context: list[int]) -> int:
    return sample_one(row, make_turn(sampling, **context)).token_id


OPTIONS = {
    "temperature only": Sampling(temperature=1.0),
    "cold": Sampling(temperature=0.3),
    "hot": Sampling(temperature=4.0),
    "top_k": Sampling(temperature=1.0, top_k=7),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "top_k before top_p": Sampling(temperature=1.0, top_k=5, top_p=0.6),
    "min_p": Sampling(temperature=1.5, min_p=0.1),
    "top_n_sigma": Sampling(temperature=1.5, top_n_sigma=1.5),
    "all cuts": Sampling(temperature=1.2, top_k=40, top_p=0.95, min_p=0.02),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.7),
    "repetition below one": Sampling(temperature=1.0, repetition_penalty=0.6),
    "greedy repetition": Sampling(repetition_penalty=2.5),
    "presence": Sampling(temperature=1.0, presence_penalty=2.0),
    "frequency": Sampling(temperature=1.0, frequency_penalty=1.3),
    "negative frequency": Sampling(temperature=0.8, frequency_penalty=-0.7),
    "bias": Sampling(temperature=1.0, logit_bias=((3, 5.0), (4, -100.0))),
    "everything": Sampling(
        temperature=0.9,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias=((3, 4.0), (9, -3.0)),
    ),
}  # fmt: skip


def make_turns() -> list[TurnLog]:
    """Return turns with every option several times; some have min_tokens and logprobs."""
    rng = random.Random(11)
    return [
        make_turn(
            replace(
                sampling,
                seed=rng.randrange(2**64),
                logprobs=rng.choice((None, 0, 3)),
                min_tokens=rng.choice((0, 0, 4)),
            ),
            context=rng.choices(range(300), k=rng.randrange(1, 50)),
            reply=rng.choices(range(20), k=rng.randrange(1, 8)),
        )
        for sampling in [*OPTIONS.values(), Sampling(), Sampling(logprobs=2)] * 4
    ]
