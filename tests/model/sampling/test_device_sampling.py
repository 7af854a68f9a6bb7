"""A sampler that reads no values back from its device draws the same tokens as one that does."""

from __future__ import annotations

import math

import pytest

from pensieve.core.iteration import SampledToken
from pensieve.kernels.layer import cpu as dense
from pensieve.model.sampling import draw as draw_module
from pensieve.model.sampling import sampler as sampler_module
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling
from tests.model.sampling.world import make_logits, make_row, make_turn, make_turns


@pytest.mark.parametrize("vocab_size", [100, 255, 256, 257, 1000])
def test_sampling_without_reads_from_the_device_draws_the_same_tokens(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = make_logits(len(make_turns()), vocab_size, seed=6).bfloat16()
    logits[5, 7] = math.nan
    logits[6, vocab_size - 1] = math.inf
    looking = Sampler(vocab_size, frozenset({2})).sample(logits, make_turns())
    for module in (draw_module, sampler_module):
        monkeypatch.setattr(module, "reading_is_free", lambda values: False)
    monkeypatch.setattr(dense, "available", lambda dtype: False)
    assert Sampler(vocab_size, frozenset({2})).sample(logits, make_turns()) == looking
    assert [n for n, each in enumerate(looking) if each is None] == [5, 6]


@pytest.mark.parametrize(("top_k", "width"), [(1, 256), (256, 256), (257, 999), (0, 999)])
def test_the_searched_width_covers_all_tokens_that_a_row_may_keep(top_k: int, width: int) -> None:
    sampling = Sampling(temperature=9.0, top_k=top_k)
    assert draw_module._sufficient_width(sampling, 999) == width
    answers = draw_module._draw_from_head(make_logits(1, 999), [make_row(sampling)], width)
    assert answers.item() >= 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_without_compiled_kernels_a_row_that_is_not_finite_fails_alone_too(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "available", lambda dtype: False)
    logits = make_logits(4, 100)
    logits[1, 99] = value
    logits[2] = 3.4e38
    sampled = Sampler(100).sample(logits, [make_turn(Sampling()) for _ in range(4)])
    assert [each is None for each in sampled] == [False, True, False, False]
    assert sampled[2] == SampledToken(0, 0)
