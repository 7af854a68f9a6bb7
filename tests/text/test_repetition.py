"""A reply that only repeats itself is detected, and no other reply is."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

import pytest

from pensieve.builtin import MODEL_PATH
from pensieve.sampling import STOP_REPETITION
from pensieve.text import Tokenizer
from pensieve.text.repetition import REPEATS, STRIDE, RepetitionDetector


def noticed_after(tokens: Sequence[int], num_tokens: int = STOP_REPETITION) -> int | None:
    detector = RepetitionDetector(num_tokens)
    for number, token in enumerate(tokens, start=1):
        if detector.push(token):
            return number
    return None


def expected(tokens: Sequence[int], num_tokens: int) -> int | None:
    """Return the expected result by the definition, without a search."""
    for length in range(STRIDE, len(tokens) + 1, STRIDE):
        for period in range(1, num_tokens + 1):
            size = max(num_tokens, REPEATS * period)
            end = tokens[length - size : length]
            if size <= length and end[period:] == end[:-period]:
                return length
    return None


def test_a_repeated_sentence_is_detected_soon_after_the_limit() -> None:
    before = [1, 2, 3]
    found = noticed_after([*before, *range(100, 120)] + [*range(200, 221)] * 50)
    assert found is not None
    assert found - 23 in range(STOP_REPETITION, STOP_REPETITION + STRIDE)


def test_a_long_paragraph_is_detected_at_its_fourth_repeat_and_a_longer_one_never() -> None:
    found = noticed_after([*range(STOP_REPETITION)] * 6)
    assert found == REPEATS * STOP_REPETITION
    assert noticed_after([*range(STOP_REPETITION + 1)] * 9) is None


@pytest.mark.parametrize("seed", range(40))
def test_exactly_periodic_token_sequences_are_detected(seed: int) -> None:
    """In patterns with few different tokens, the ends match by chance in many positions."""
    draw = random.Random(seed)
    num_tokens = draw.randrange(4, 40)
    tokens: list[int] = []
    while len(tokens) < 600:
        pattern = draw.choices(range(draw.choice((2, 3, 50))), k=draw.randrange(1, 60))
        tokens += (pattern * draw.randrange(1, 7))[: draw.randrange(1, 200)]
    assert noticed_after(tokens, num_tokens) == expected(tokens, num_tokens)


def test_token_ids_that_share_bytes_are_not_mixed_up() -> None:
    """A match that starts in the middle of a token id does not count."""
    tokens = [(0x0101 << (8 * (number % 3))) for number in range(700)]
    assert noticed_after(tokens, 64) == expected(tokens, 64)
    odd = [0x01010101 if number % 97 else number for number in range(700)]
    assert noticed_after(odd, 64) == expected(odd, 64)


CODE = "".join(
    f"def test_{name}_{kind}() -> None:\n    assert {name}({number}) == {number + 1}\n\n\n"
    for number, (name, kind) in enumerate(
        (name, kind) for name in ("add", "sub", "mul", "div") for kind in string.ascii_lowercase
    )
)
INNOCENT = {
    "code": CODE,
    "a table": "".join(f"| {n} | {n * n} | {'yes' if n % 2 else 'no'} |\n" for n in range(300)),
    "the line of a table": "|" + "---|" * 60,
    "a numbered list": "".join(f"{n}. Buy milk\n" for n in range(300)),
    "counting": " ".join(map(str, range(600))),
    "JSON": ",\n".join(f'{{"id": {n}, "name": null, "tags": []}}' for n in range(200)),
    "spaces": "x" + " " * 150 + "y" + " " * 150 + "z",
    "a line of dashes": "-" * 200,
    "laughter": "ha " * 100,
    "a sentence, twenty times": "I will not talk. " * 20,
    "ten rows of zeros": ("0, " * 10 + "\n") * 8,
    "a song": "".join(f"{n} green bottles hanging on the wall,\n" * 2 for n in range(10, 0, -1)),
}


@pytest.mark.parametrize("name", INNOCENT)
def test_requested_repetitive_texts_are_not_detected(name: str) -> None:
    tokens = Tokenizer.load(MODEL_PATH).encode(INNOCENT[name]).ids
    assert len(tokens) > STRIDE
    assert noticed_after(tokens) is None


def test_random_tokens_are_never_detected() -> None:
    assert noticed_after(random.Random(0).choices(range(20), k=20_000)) is None
