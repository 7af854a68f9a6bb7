"""The random number of a position, and its use as a factor, exact to the last bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pensieve.model.sampling import draw as draw_module
from pensieve.model.sampling.draw import philox4x32, uniform_limbs


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    def words(text: str) -> Any:
        return tuple(int(word, 16) for word in text.split())

    assert philox4x32(words(counter), words(key)) == words(expected)


def test_the_random_number_depends_on_all_bits_of_seed_and_position() -> None:
    points = [
        (0, 0),
        (1, 0),
        (2**32, 0),
        (2**63, 0),
        (0, 1),
        (0, 2),
        (0, 2**32),
        (2**64 - 1, 80_000),
    ]
    assert len({uniform_limbs(seed, position) for seed, position in points}) == len(points)
    assert uniform_limbs(0, 0) == (0x6627E8D5 >> 1, 0xE169C58D >> 1)
    assert all(0 <= limb < 2**31 for point in points for limb in uniform_limbs(*point))


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 1000, 151_936, 2**20])
def test_the_sum_of_a_rows_weights_does_not_overflow_the_scaling(vocab_size: int) -> None:
    assert 2**60 <= vocab_size * 2 ** draw_module._weight_bits(vocab_size) < 2**62


def test_scaling_by_the_random_number_is_exact_to_the_last_bit() -> None:
    rng = random.Random(5)
    masses = [0, 1, 2**31 - 1, 2**31, 2**62 - 1] + [rng.randrange(2**62) for _ in range(500)]
    draws = [0, 1, 2**31 - 1, 2**31, 2**62 - 1] + [rng.randrange(2**62) for _ in range(500)]
    draws = draws[::-1]
    scaled = draw_module._scale(
        torch.tensor(masses),
        torch.tensor([draw >> 31 for draw in draws]),
        torch.tensor([draw & 0x7FFFFFFF for draw in draws]),
    )
    assert scaled.tolist() == [mass * draw >> 62 for mass, draw in zip(masses, draws, strict=True)]
