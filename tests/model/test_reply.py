"""From token ids to released text, and the three ways a reply ends."""

from __future__ import annotations

from array import array

from pensieve.core.sampling import Sampling
from pensieve.core.turn import FinishReason, Turn
from pensieve.model.reply import Decoding
from tests.model.world import LetterTokenizer

A, B, C, D = 26, 27, 28, 29  # "a" to "d"
EURO = [100, 101, 102]


def run(token_ids: list[int], *, length: int = 99, **fields: object) -> list[object]:
    """What each token answers: its text, or (text, finish) where it ends the turn."""
    turn = Turn(0, "c", array("I", [5, 6, 7]), 0, 3, 3 + length, Sampling(**fields))
    decoding = Decoding(turn.sampling, LetterTokenizer(), frozenset({2}))
    answers: list[object] = []
    for token_id in token_ids:
        text, finish = decoding.accept(turn, token_id)
        turn.tokens.append(token_id)
        answers.append(text if finish is None else (text, finish))
        if finish is not None:
            break
    return answers


def test_tokens_release_their_text() -> None:
    assert run([A, B, C]) == ["a", "b", "c"]


def test_an_end_of_turn_token_ends_it_and_is_not_in_the_text() -> None:
    assert run([A, 2, B]) == ["a", ("", FinishReason.STOP)]


def test_ignore_eos_goes_on_but_still_honours_stop_token_ids() -> None:
    answers = run([A, 2, B, 1], ignore_eos=True, stop_token_ids=(1,))
    assert answers == ["a", "", "b", ("", FinishReason.STOP)]


def test_a_stop_token_with_a_text_does_not_show_it() -> None:
    assert run([A, B], stop_token_ids=(B,)) == ["a", ("", FinishReason.STOP)]


def test_the_text_ends_before_a_stop_string() -> None:
    assert run([A, B, C, D], stop=("bc",)) == ["a", "", ("", FinishReason.STOP)]


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    answers = run([B, C, A, B, C], stop=("bc",), min_tokens=4)
    assert answers == ["b", "c", "a", "", ("", FinishReason.STOP)]


def test_the_beginning_of_a_stop_string_is_released_when_it_goes_on_otherwise() -> None:
    assert run([A, B, D, B], stop=("bc",)) == ["a", "", "bd", ""]


def test_the_beginning_of_a_stop_string_is_flushed_at_the_end() -> None:
    assert run([A, B], length=2, stop=("bc",)) == ["a", ("b", FinishReason.LENGTH)]
    assert run([A, B, 2], stop=("bc",)) == ["a", "", ("b", FinishReason.STOP)]


def test_length_ends_it_with_the_last_token_that_fits() -> None:
    assert run([A, B, C, D], length=3) == ["a", "b", ("c", FinishReason.LENGTH)]


def test_a_stop_string_completed_by_the_last_token_is_a_stop() -> None:
    assert run([A, B], length=2, stop=("b",)) == ["a", ("", FinishReason.STOP)]


def test_incomplete_utf8_is_withheld_and_flushed_as_a_replacement() -> None:
    assert run([*EURO, A]) == ["", "", "€", "a"]
    assert run(EURO[:2], length=2) == ["", ("\ufffd", FinishReason.LENGTH)]


def test_the_flush_of_incomplete_utf8_may_complete_a_stop_string() -> None:
    answers = run([A, EURO[0]], length=2, stop=("a\ufffd",))
    assert answers == ["", ("", FinishReason.STOP)]
