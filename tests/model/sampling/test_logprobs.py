"""Log probabilities: from which scores they come, and how many alternatives are returned."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
)

from pensieve.core.iteration import SampledToken
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling
from tests.model.sampling.world import make_logits, make_turn, sample_one


def test_logprobs_are_before_temperature_and_cuts_and_after_penalties() -> None:
    row = make_logits(1, 300, seed=3)[0]
    sampling = Sampling(
        temperature=0.1, top_k=1, repetition_penalty=1.8, logit_bias=((11, 1.5),), logprobs=4
    )
    turn = make_turn(sampling, context=list(range(0, 300, 3)))
    sampled = sample_one(row, turn)
    scores = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([list(turn.tokens)]), row[None])[0]
    scores[11] += 1.5
    expected = scores.double().log_softmax(-1)
    top = expected.topk(4)
    assert [each.token_id for each in sampled.top_logprobs] == top.indices.tolist()
    assert [each.logprob for each in sampled.top_logprobs] == pytest.approx(
        top.values.tolist(), abs=1e-12
    )
    assert sampled.logprob == pytest.approx(expected[sampled.token_id].item(), abs=1e-12)


def test_zero_alternatives_report_the_sampled_token_only() -> None:
    sampled = sample_one([0.0, 0.0], make_turn(Sampling(logprobs=0)))
    assert sampled.logprob == pytest.approx(-math.log(2), abs=1e-15)
    assert sampled == SampledToken(0, 0, logprob=sampled.logprob)
    assert sample_one([0.0, 0.0], make_turn(Sampling())) == SampledToken(0, 0)


def test_more_alternatives_than_tokens_report_only_possible_tokens() -> None:
    sampling = Sampling(logprobs=20, min_tokens=1, stop_token_ids=(1,))
    sampled = sample_one([0.0, 5.0, 0.0], make_turn(sampling))
    assert [each.token_id for each in sampled.top_logprobs] == [0, 2]
    assert [each.logprob for each in sampled.top_logprobs] == pytest.approx([-math.log(2)] * 2)


def test_rows_that_want_different_numbers_of_alternatives_share_a_batch() -> None:
    turns = [make_turn(Sampling(logprobs=number)) for number in (0, 2, 1)]
    sampled = Sampler(3).sample(torch.tensor([[1.0, 2.0, 3.0]]).expand(3, 3), turns)
    assert [len(each.top_logprobs) for each in sampled if each is not None] == [0, 2, 1]
    assert len({each.logprob for each in sampled if each is not None}) == 1
