"""Which tokens top-k, top-p, min-p and a tiny temperature keep."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch

from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling
from tests.model.sampling.world import make_turn, token_of


def tokens_drawn(row: list[float], sampling: Sampling, num_draws: int = 200) -> set[int]:
    turns = [make_turn(sampling, context=[0] * (n + 1)) for n in range(num_draws)]
    sampled = Sampler(len(row)).sample(torch.tensor(row).expand(num_draws, len(row)), turns)
    return {each.token_id for each in sampled if each is not None}


def test_a_tiny_top_p_keeps_one_token() -> None:
    assert tokens_drawn([1.0, 1.1, 0.9], Sampling(temperature=1.0, top_p=1e-9)) == {1}
    assert tokens_drawn([0.0] * 5, Sampling(temperature=1.0, top_p=1e-300)) == {0}


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    row = [math.log(0.5), math.log(0.3), math.log(0.2)]
    assert tokens_drawn(row, Sampling(temperature=1.0, top_p=0.49)) == {0}
    assert tokens_drawn(row, Sampling(temperature=1.0, top_p=0.51)) == {0, 1}
    assert tokens_drawn(row, Sampling(temperature=1.0, top_p=0.81)) == {0, 1, 2}


def test_top_k_larger_than_the_vocabulary_keeps_everything() -> None:
    row = [0.1, 0.2, 0.3, 0.0]
    assert tokens_drawn(row, Sampling(temperature=1.0, top_k=2**31 - 1)) == {0, 1, 2, 3}
    assert tokens_drawn(row, Sampling(temperature=1.0, top_k=4)) == {0, 1, 2, 3}


def test_top_k_keeps_the_lowest_ids_among_equal_tokens() -> None:
    assert tokens_drawn([0.0] * 9, Sampling(temperature=1.0, top_k=2)) == {0, 1}
    assert tokens_drawn([0.0, 1.0, 1.0, 1.0, 0.0], Sampling(temperature=1.0, top_k=2)) == {1, 2}


def test_minus_zero_ties_with_zero() -> None:
    assert tokens_drawn([-0.0, 0.0, -0.0], Sampling(temperature=1.0, top_k=1)) == {0}
    assert token_of([-1.0, -0.0, 0.0], Sampling(logprobs=1)) == 1


def test_min_p_one_keeps_the_likeliest_and_its_equals() -> None:
    assert tokens_drawn([1.0, 2.0, 2.0, 1.999], Sampling(temperature=1.0, min_p=1.0)) == {1, 2}


def test_min_p_is_relative_to_the_likeliest_token() -> None:
    row = [0.0, math.log(0.5), math.log(0.25), math.log(0.24)]
    assert tokens_drawn(row, Sampling(temperature=1.0, min_p=0.245)) == {0, 1, 2}


def test_top_n_sigma_keeps_tokens_near_the_largest_logit_at_any_temperature() -> None:
    row = [4.0, 3.0, 1.9, 0.0]  # the standard deviation is 1.479
    deviation = statistics.pstdev(row)
    for temperature in (0.5, 8.0):
        for count, kept in (
            (0.5, {0}),
            (1.0, {0, 1}),
            (2.1 / deviation + 1e-3, {0, 1, 2}),
            (3.0, {0, 1, 2, 3}),
        ):
            sampling = Sampling(temperature=temperature, top_n_sigma=count)
            drawn = tokens_drawn(row, sampling, num_draws=1000)
            assert drawn <= kept
            assert drawn == kept or temperature < 1


def test_top_n_sigma_does_not_count_tokens_that_cannot_be_drawn() -> None:
    row = [4.0, 3.0, -9.0, -9.0, 3.9]
    masked = Sampling(
        temperature=1.0, top_n_sigma=1.0, stop_token_ids=(2, 3), min_tokens=9, ignore_eos=True
    )
    assert tokens_drawn(row, masked) == {0, 4}
    assert tokens_drawn(row, replace(masked, min_tokens=0)) == {0, 1, 4}
    assert tokens_drawn([1.0, 1.0], Sampling(temperature=1.0, top_n_sigma=0.1)) == {0, 1}


def test_top_n_sigma_of_one_turn_does_not_affect_another() -> None:
    rows = torch.tensor([[4.0, 3.0, 1.9, 0.0]]).expand(400, 4)
    turns = [
        make_turn(Sampling(temperature=8.0, top_n_sigma=0.5 * (n % 2)), context=[0] * (n + 1))
        for n in range(400)
    ]
    sampled = Sampler(4).sample(rows, turns)
    assert {each.token_id for each in sampled[1::2] if each} == {0}
    assert {each.token_id for each in sampled[::2] if each} == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-30, 1e-9])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature: float) -> None:
    row = [3e38, -3e38, 3.1e38, 0.0]
    assert tokens_drawn(row, Sampling(temperature=temperature), num_draws=20) == {2}
    assert tokens_drawn([5.0, 5.0, 4.0], Sampling(temperature=temperature)) == {0, 1}


def test_a_subnormal_temperature_survives_a_process_that_flushes_subnormal_numbers() -> None:
    torch.set_flush_denormal(True)
    try:
        assert token_of([5.0, 5.5, 4.0], Sampling(temperature=1e-310, logprobs=1)) == 1
    finally:
        torch.set_flush_denormal(False)


def test_greedy_takes_the_lowest_id_of_equals_on_both_paths() -> None:
    row = torch.zeros(5000)
    row[[4999, 77, 2048]] = 1.0
    assert token_of(row, Sampling()) == 77
    assert token_of(row, Sampling(logprobs=2)) == 77
    assert token_of(row, Sampling(logit_bias=((0, -1.0),))) == 77
