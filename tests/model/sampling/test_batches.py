"""No row depends on the others in its batch; extreme and infinite values fail alone."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from pensieve.core.iteration import SampledToken
from pensieve.model.sampling import sampler as sampler_module
from pensieve.model.sampling.penalties import TurnLog
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling
from tests.model.sampling.world import (
    OPTIONS,
    make_logits,
    make_turn,
    sample_one,
    token_of,
)


@pytest.mark.parametrize("vocab_size", [37, 1003])
def test_no_row_depends_on_other_rows_in_the_batch(vocab_size: int) -> None:
    """A row alone, shuffled, among NaN rows, or in small passes: every bit of its logprob is equal."""
    rng = random.Random(vocab_size)
    options = list(OPTIONS.values())
    logits = make_logits(2 * len(options), vocab_size, seed=vocab_size)
    sampler = Sampler(vocab_size, frozenset({2}))

    def make_turns() -> list[TurnLog]:
        draws = random.Random(7)
        return [
            make_turn(
                replace(options[n % len(options)], seed=n, logprobs=3 if n % 3 else None),
                context=draws.choices(range(37), k=10),
                reply=draws.choices(range(37), k=5),
            )
            for n in range(len(logits))
        ]

    together = sampler.sample(logits, make_turns())
    alone = [sampler.sample(logits[n : n + 1], [turn])[0] for n, turn in enumerate(make_turns())]
    assert together == alone
    for _ in range(3):
        order = rng.sample(range(len(logits)), len(logits))
        turns = make_turns()
        shuffled = logits[order].clone()
        broken = set(rng.sample(range(len(order)), 5))
        for at in broken:
            shuffled[at, rng.randrange(vocab_size)] = math.nan
        answers = sampler.sample(shuffled, [turns[n] for n in order])
        for at, n in enumerate(order):
            assert answers[at] == (None if at in broken else together[n])


def test_small_passes_give_the_same_result_as_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(len(OPTIONS), 50)

    def turns() -> list[TurnLog]:
        samplings = (
            replace(each, logprobs=(None, 0, 2)[n % 3]) for n, each in enumerate(OPTIONS.values())
        )
        return [make_turn(sampling, context=[3], reply=[4]) for sampling in samplings]

    whole = Sampler(50).sample(logits, turns())
    for elements in (1, 100, 149, 150):
        monkeypatch.setattr(sampler_module, "CPU_PASS_ELEMENTS_MAX", elements)
        assert Sampler(50).sample(logits, turns()) == whole


def test_the_number_of_threads_does_not_change_the_result() -> None:
    logits = make_logits(3, 40_000)
    turns = [make_turn(Sampling(temperature=2.0, seed=n, logprobs=2)) for n in range(3)]
    num_threads = torch.get_num_threads()
    answers = []
    try:
        for each in (1, 2):
            torch.set_num_threads(each)
            answers.append(Sampler(40_000).sample(logits, turns))
            answers.append([Sampler(40_000).sample(logits[:1], turns[:1])[0], *answers[-1][1:]])
    finally:
        torch.set_num_threads(num_threads)
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, logprobs=2)])
def test_a_row_that_is_not_finite_fails_alone(value: float, sampling: Sampling) -> None:
    logits = make_logits(3, 100)
    logits[1, 99] = value
    sampled = Sampler(100).sample(logits, [make_turn(sampling) for _ in range(3)])
    assert [each is None for each in sampled] == [False, True, False]
    logits[1, 50] = -value
    assert Sampler(100).sample(logits, [make_turn(sampling) for _ in range(3)])[1] is None


def test_enormous_finite_logits_are_not_taken_for_infinite_ones() -> None:
    row = [3.4e38] * 7 + [3.3e38]
    assert token_of(row, Sampling()) == 0
    assert token_of(row, Sampling(repetition_penalty=0.01), context=[7]) == 7
    assert token_of([-3.4e38, -3.3e38], Sampling(repetition_penalty=100.0), context=[1]) == 0


def test_columns_beyond_the_vocabulary_are_ignored() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, 99.0, math.nan]])
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3, logprobs=5)):
        (sampled,) = Sampler(3).sample(logits, [make_turn(sampling)])
        assert sampled is not None
        assert sampled.token_id < 3
        assert all(each.token_id < 3 for each in sampled.top_logprobs)


def test_token_ids_beyond_the_logits_are_ignored() -> None:
    sampling = Sampling(
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        logit_bias=((900, 5.0),),
        min_tokens=9,
        stop_token_ids=(900,),
    )
    turn = make_turn(sampling, context=[900, 2**31 + 5], reply=[900])
    assert Sampler(1000).sample(torch.tensor([[1.0, 2.0]]), [turn]) == [SampledToken(0, 1)]


def test_bfloat16_logits_give_the_same_result_as_their_float32_values() -> None:
    logits = make_logits(len(OPTIONS), 64).bfloat16()
    turns = [make_turn(replace(each, logprobs=2), reply=[4]) for each in OPTIONS.values()]
    assert Sampler(64).sample(logits, turns) == Sampler(64).sample(logits.float(), turns)


def test_the_callers_logits_are_not_changed() -> None:
    logits = make_logits(len(OPTIONS), 50)
    before = logits.clone()
    Sampler(50).sample(logits, [make_turn(each, reply=[4]) for each in OPTIONS.values()])
    assert torch.equal(logits, before)


def test_an_empty_batch_samples_nothing() -> None:
    assert Sampler(5).sample(torch.empty(0, 5), []) == []


def test_the_log_can_grow_after_it_was_read() -> None:
    turn = make_turn(Sampling(repetition_penalty=1.1, frequency_penalty=0.1), reply=[1])
    sample_one([1.0] * 9, turn)
    turn.tokens.append(3)
    assert turn.tokens[-1] == 3


EXTREMES: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, 1e-300, 1.0, 100.0),
    "top_p": (1e-300, 0.5, 1.0),
    "top_k": (0, 1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 1.0, 100.0),
    "presence_penalty": (-2.0, 0.0, 2.0),
    "frequency_penalty": (-2.0, 0.0, 2.0),
    "seed": (0, 2**64 - 1),
    "min_tokens": (0, 512),
    "stop_token_ids": ((), tuple(range(64))),
    "ignore_eos": (False, True),
    "logprobs": (None, 0, 20),
    "logit_bias": ((), tuple((n, 100.0 if n % 2 else -100.0) for n in range(64))),
}


def test_every_pair_of_extreme_values_samples_a_token() -> None:
    samplings = []
    for (one, ones), (other, others) in itertools.combinations(EXTREMES.items(), 2):
        for value, other_value in itertools.product(ones, others):
            for temperature in (0.0, 1.0):
                pair: dict[str, Any] = {"temperature": temperature, one: value, other: other_value}
                samplings.append(Sampling(**pair))
    assert all(sampling.problem(64) is None for sampling in samplings)
    rows = torch.stack(
        [
            make_logits(1, 64)[0],
            torch.zeros(64),
            torch.linspace(-1.0, 1.0, 64) * 3e38,
            torch.full((64,), -1e-40),
        ]
    )
    for row in rows:
        turns = [make_turn(each, context=[5, 6], reply=[6, 63]) for each in samplings]
        sampled = Sampler(64, frozenset({0})).sample(row.expand(len(turns), 64), turns)
        for each, sampling in zip(sampled, samplings, strict=True):
            assert each is not None, sampling
            assert 0 <= each.token_id < 64, sampling
            assert (each.logprob is None) == (sampling.logprobs is None)
            assert each.logprob is None or -math.inf < each.logprob <= 1e-9, sampling
