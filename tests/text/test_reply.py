"""From token ids to released text, and how a reply ends."""

from __future__ import annotations

from typing import Any

from pensieve.core.turn import FinishReason
from pensieve.sampling import Sampling
from pensieve.text.reply import ReplyText
from tests.model.world import letter_tokenizer

A, B, C, D = 26, 27, 28, 29  # "a" to "d"
EURO = [100, 101, 102]


def run(token_ids: list[int], *, length: int = 99, **fields: Any) -> list[object]:
    """Return the text of each token, or (text, finish) for the token that ends the turn."""
    sampling = Sampling(**fields)
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {2})
    reply = ReplyText(
        letter_tokenizer(), ends, sampling.stop, sampling.min_tokens, sampling.stop_repetition
    )
    answers: list[object] = []
    for number, token_id in enumerate(token_ids, 1):
        is_last = number == length
        text, stopped = reply.push(token_id, is_last)
        if stopped or is_last:
            finish = FinishReason.STOP if stopped else FinishReason.LENGTH
            answers.append((text, FinishReason.REPETITION if reply.repeats else finish))
            break
        answers.append(text)
    return answers


def test_tokens_release_their_text() -> None:
    assert run([A, B, C]) == ["a", "b", "c"]


def test_an_end_of_turn_token_ends_the_reply_and_is_not_in_its_text() -> None:
    assert run([A, 2, B]) == ["a", ("", FinishReason.STOP)]


def test_ignore_eos_continues_but_stop_token_ids_still_end_the_reply() -> None:
    answers = run([A, 2, B, 1], ignore_eos=True, stop_token_ids=(1,))
    assert answers == ["a", "", "b", ("", FinishReason.STOP)]


def test_the_text_of_a_stop_token_is_not_released() -> None:
    assert run([A, B], stop_token_ids=(B,)) == ["a", ("", FinishReason.STOP)]


def test_the_text_ends_before_a_stop_string() -> None:
    assert run([A, B, C, D], stop=("bc",)) == ["a", "", ("", FinishReason.STOP)]


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    answers = run([B, C, A, B, C], stop=("bc",), min_tokens=4)
    assert answers == ["b", "c", "a", "", ("", FinishReason.STOP)]


def test_the_beginning_of_a_stop_string_is_released_if_it_is_not_completed() -> None:
    assert run([A, B, D, B], stop=("bc",)) == ["a", "", "bd", ""]


def test_the_beginning_of_a_stop_string_is_flushed_at_the_end() -> None:
    assert run([A, B], length=2, stop=("bc",)) == ["a", ("b", FinishReason.LENGTH)]
    assert run([A, B, 2], stop=("bc",)) == ["a", "", ("b", FinishReason.STOP)]


def test_the_length_limit_ends_the_reply_with_the_last_token_that_fits() -> None:
    assert run([A, B, C, D], length=3) == ["a", "b", ("c", FinishReason.LENGTH)]


def test_a_stop_string_completed_by_the_last_token_is_a_stop() -> None:
    assert run([A, B], length=2, stop=("b",)) == ["a", ("", FinishReason.STOP)]


def test_incomplete_utf8_is_withheld_and_flushed_as_a_replacement() -> None:
    assert run([*EURO, A]) == ["", "", "€", "a"]
    assert run(EURO[:2], length=2) == ["", ("\ufffd", FinishReason.LENGTH)]


def test_the_flush_of_incomplete_utf8_may_complete_a_stop_string() -> None:
    answers = run([A, EURO[0]], length=2, stop=("a\ufffd",))
    assert answers == ["", ("", FinishReason.STOP)]


def test_a_reply_that_repeats_itself_ends_and_releases_what_was_withheld() -> None:
    answers = run([A, B, C, D] * 30, stop=("dabx",), stop_repetition=32)
    assert len(answers) == 32
    assert answers[-1] == ("d", FinishReason.REPETITION)


def test_repetition_ends_nothing_before_min_tokens_and_an_end_token_counts_first() -> None:
    answers = run([A] * 100, stop_repetition=32, min_tokens=40)
    assert len(answers) == 48
    assert run([A] * 47 + [2], stop_repetition=32, min_tokens=40)[-1] == ("", FinishReason.STOP)
    assert len(run([A] * 100, length=100)) == 100


def test_repetition_before_min_tokens_cuts_no_character() -> None:
    answers = run(EURO * 20, stop_repetition=16, min_tokens=50)
    assert "".join(map(str, answers[:48])) == "€" * 16
