"""With every option, tokens are drawn by the probabilities of transformers' own processors."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pensieve.model.sampling import draw as draw_module
from pensieve.model.sampling.draw import uniform_limbs
from pensieve.model.sampling.penalties import TurnLog
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling
from tests.model.sampling.world import OPTIONS, make_logits, make_row, make_turn, token_of

MANY = 64  # number of positions with a compared random draw


def expected_token(row: torch.Tensor, turn: TurnLog) -> int:
    """Apply transformers' processors in their order, then invert the cumulative sum."""
    sampling = turn.sampling
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    scores = processors(torch.tensor([list(turn.tokens)]), row.unsqueeze(0).clone())
    for token_id in set(turn.tokens[turn.prompt_end :]):
        times = turn.tokens[turn.prompt_end :].count(token_id)
        scores[0, token_id] -= sampling.presence_penalty + times * sampling.frequency_penalty
    for token_id, bias in sampling.logit_bias:
        scores[0, token_id] += bias
    if sampling.temperature == 0:
        return int(scores.argmax())
    if sampling.top_n_sigma:  # not in transformers; llama.cpp computes it like this
        lowest = scores.max() - sampling.top_n_sigma * scores.double().std(unbiased=False)
        scores[scores < lowest] = -torch.inf
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    probabilities = warpers(torch.tensor([list(turn.tokens)]), scores.double())[0].softmax(-1)
    high, low = uniform_limbs(sampling.seed, len(turn.tokens))
    uniform = (high * 2**31 + low) / 2**62
    cumulated = 0.0
    by_likelihood = sorted(range(len(row)), key=lambda i: (-scores[0, i].item(), i))
    for token_id in by_likelihood:
        cumulated += probabilities[token_id].item()
        if uniform < cumulated:
            return token_id
    raise AssertionError("the probabilities do not sum to one")


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_draws_by_the_probabilities_of_transformers(name: str) -> None:
    """60 turns share a batch. Each token equals the token drawn from the processors' distribution."""
    logits = make_logits(MANY, 120, seed=len(name))
    rng = random.Random(name)
    turns = [
        make_turn(
            replace(OPTIONS[name], seed=rng.randrange(2**64)),
            context=rng.choices(range(120), k=rng.randrange(1, 200)),
            reply=rng.choices(range(20), k=rng.randrange(30)),
        )
        for _ in range(MANY)
    ]
    sampled = Sampler(120).sample(logits, turns)
    assert [each and each.token_id for each in sampled] == [
        expected_token(row, turn) for row, turn in zip(logits, turns, strict=True)
    ]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=8.0),
        Sampling(temperature=2.0, top_p=0.97),
        Sampling(temperature=5.0, top_p=0.999),
        Sampling(temperature=3.0, min_p=0.001),
        Sampling(temperature=5.0, min_p=0.16),
        Sampling(temperature=5.0, top_k=300),
        Sampling(temperature=5.0, top_k=300, top_p=0.99),
        Sampling(temperature=5.0, top_k=256),
        Sampling(temperature=5.0, top_k=999, top_p=0.9999),
    ],
)
def test_a_token_beyond_the_256_likeliest_is_drawn_like_any_other(sampling: Sampling) -> None:
    logits = make_logits(24, 1000, seed=4)
    turns = [make_turn(replace(sampling, seed=9), context=[0] * (n + 1)) for n in range(24)]
    sampled = Sampler(1000).sample(logits, turns)
    assert [each and each.token_id for each in sampled] == [
        expected_token(row, turn) for row, turn in zip(logits, turns, strict=True)
    ]


def test_the_width_of_the_head_does_not_change_the_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits that are rounded to bfloat16 are often equal, also at the boundary of each first part."""
    logits = make_logits(len(OPTIONS), 600, seed=8).bfloat16()
    turns = [
        make_turn(replace(sampling, seed=n, logprobs=5), context=[5] * 20)
        for n, sampling in enumerate(OPTIONS.values())
    ]
    wide = Sampler(600).sample(logits, turns)
    for widths in ((1,), (2, 3), (7, 50), ()):
        monkeypatch.setattr(draw_module, "HEAD_WIDTHS", widths)
        assert Sampler(600).sample(logits, turns) == wide, widths


def test_the_head_decides_the_draw_if_it_contains_all_kept_tokens() -> None:
    values = make_logits(4, 5000, seed=1)
    values[:, 7] = 20.0
    decided = [
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, min_p=0.01),
        Sampling(temperature=9.0, top_k=20),
        Sampling(temperature=1.0),
    ]
    token_ids = draw_module._draw_from_head(values, [make_row(each) for each in decided], 256)
    assert bool((token_ids >= 0).all())
    undecided = [
        Sampling(temperature=9.0, top_p=0.9),
        Sampling(temperature=99.0, min_p=0.01),
        Sampling(temperature=9.0, top_k=257),
        Sampling(temperature=99.0, top_p=0.999999),
    ]
    rows = [make_row(each) for each in undecided]
    assert draw_module._draw_from_head(values, rows, 256).tolist() == [-1] * 4


@pytest.mark.parametrize(
    ("limbs", "expected"),
    [
        ((0, 0), [0, 0]),
        ((2**30 - 1, 2**31 - 1), [0, 31]),
        ((2**30, 0), [1, 31]),
        ((2**31 - 1, 2**31 - 1), [1, 62]),
    ],
)
def test_extreme_and_middle_random_numbers_choose_the_exact_token(
    monkeypatch: pytest.MonkeyPatch, limbs: tuple[int, int], expected: list[int]
) -> None:
    """2 equal tokens, and 63 almost equal tokens whose weights almost overflow."""
    monkeypatch.setattr(draw_module, "uniform_limbs", lambda seed, position: limbs)
    assert token_of([0.0] * 2, Sampling(temperature=1.0)) == expected[0]
    assert token_of([0.0] * 62 + [-0.01], Sampling(temperature=1.0)) == expected[1]


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 4000 draws of 8 tokens (7 degrees of freedom): 24.3 has probability 0.001."""
    row = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    num_draws = 4000
    turns = [
        make_turn(Sampling(temperature=1.3, seed=17), context=[0] * (1 + n % 200), reply=[])
        for n in range(num_draws)
    ]
    for n, turn in enumerate(turns):
        turn.sampling = replace(turn.sampling, seed=n // 200)
    sampled = Sampler(8).sample(row.expand(num_draws, 8), turns)
    counts = [0] * 8
    for each in sampled:
        assert each is not None
        counts[each.token_id] += 1
    expected = ((row / 1.3).double().softmax(-1) * num_draws).tolist()
    chi_square = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    assert chi_square < 24.3, (chi_square, counts)
