"""A reply that says the same over and over is noticed, and others are not."""

from __future__ import annotations

import random

import pytest

from pensieve.cli.chat_talk import PERIOD_TOKENS_MAX, REPEATED_TOKENS_MIN, Repetition


def noticed_after(tokens: list[int]) -> int | None:
    repetition = Repetition()
    for number, token in enumerate(tokens, start=1):
        if repetition.push([token]):
            return number
    return None


def test_a_sentence_is_noticed_once_it_has_come_often_enough() -> None:
    assert (
        noticed_after([1, 2, 3, *([7, 8, 9, 10, 11, 12, 13, 14] * 50)])
        == 3 + 8 + REPEATED_TOKENS_MIN
    )


def test_a_paragraph_is_noticed_when_it_comes_for_the_third_time() -> None:
    paragraph = list(range(100))
    assert noticed_after(paragraph * 5) == 300
    assert noticed_after(list(range(PERIOD_TOKENS_MAX)) * 3) == 3 * PERIOD_TOKENS_MAX
    assert noticed_after(list(range(PERIOD_TOKENS_MAX + 1)) * 9) is None


def test_several_tokens_at_once_are_as_good_as_one_by_one() -> None:
    repetition = Repetition()
    assert not repetition.push([1, 2, 3, 4] * 10)
    assert repetition.push([1, 2, 3, 4])


@pytest.mark.parametrize(
    "tokens",
    [
        [5] * REPEATED_TOKENS_MIN,  # a row of dashes
        [each for number in range(60) for each in (1, 2, number, 3)],  # a numbered list
        [each for number in range(60) for each in (1, 2, 3, 4, 5, 6, 7, 8, number)],  # a table
        random.Random(0).choices(range(20), k=2000),
    ],
)
def test_rows_lists_tables_and_prose_are_no_repetition(tokens: list[int]) -> None:
    assert noticed_after(tokens) is None
