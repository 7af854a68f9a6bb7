"""The match that is complete first counts; of several complete with the same character, the longest."""

import time
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.text import StopMatcher


def feed(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None, str]:
    """(all that was released, the match, what the flush gave)"""
    matcher = StopMatcher(stops)
    released = ""
    for piece in pieces:
        result = matcher.push(piece)
        released += result.released
        if result.matched is not None:
            return released, result.matched, ""
    return released, None, matcher.flush()


def test_text_ends_before_the_stop_string():
    assert feed(("\n\n",), ["one\n", "\ntwo"]) == ("one", "\n\n", "")


def test_what_may_begin_a_stop_string_is_withheld():
    matcher = StopMatcher(("END",))
    assert matcher.push("the E") == ("the ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("T") == ("ENT", None)
    assert matcher.push("E") == ("", None)
    assert matcher.flush() == "E"


def test_of_two_matches_with_one_last_character_the_longest_counts():
    assert feed(("b", "aab"), ["xaab"]) == ("x", "aab", "")


def test_the_match_that_is_complete_first_counts_even_if_it_begins_later():
    assert feed(("abcd", "bc"), ["abcd"]) == ("a", "bc", "")


def test_a_stop_string_found_inside_the_beginning_of_another():
    assert feed(("aabaac", "ba"), ["aaba"]) == ("aa", "ba", "")


def test_without_stop_strings_everything_is_released_at_once():
    assert StopMatcher(()).push("text") == ("text", None)


def test_no_text_may_follow_a_match():
    matcher = StopMatcher(("a",))
    matcher.push("a")
    with pytest.raises(AssertionError):
        matcher.push("b")


def naive(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    for stop in range(1, len(text) + 1):
        ending = [each for each in stops if text[:stop].endswith(each)]
        if ending:
            longest = max(ending, key=len)
            return text[: stop - len(longest)], longest
    return text, None


def words(longest: int) -> list[str]:
    return ["".join(w) for n in range(1, longest + 1) for w in product("ab", repeat=n)]


def check_against_naive(stops: tuple[str, ...], text: str) -> None:
    """One character at a time; after each, exactly what may begin a stop string is withheld."""
    matcher = StopMatcher(stops)
    released = ""
    for end in range(1, len(text) + 1):
        result = matcher.push(text[end - 1])
        released += result.released
        until, matched = naive(stops, text[:end])
        assert result.matched == matched, (stops, text)
        if matched is not None:
            assert released == until, (stops, text)
            return
        begins = [
            n for n in range(1, end + 1) if any(s.startswith(text[end - n : end]) for s in stops)
        ]
        assert len(released) == end - max(begins, default=0), (stops, text)
    assert released + matcher.flush() == text


def test_every_small_pair_of_stop_strings_on_every_small_text():
    for stops in product(words(3), repeat=2):
        for text in product("ab", repeat=6):
            check_against_naive(stops, "".join(text))


def test_every_small_stop_string_on_every_longer_text():
    for stop in words(5):
        for text in product("ab", repeat=8):
            check_against_naive((stop,), "".join(text))


@settings(derandomize=True, max_examples=200)
@given(
    st.lists(st.text("abc", min_size=3, max_size=6), max_size=4).map(tuple),
    st.text("abc"),
    st.data(),
)
def test_however_the_text_is_cut_into_pieces(stops, text, data):
    pieces = []
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    released, matched, flushed = feed(stops, pieces)
    assert (released + flushed, matched) == naive(stops, text)


def test_sixteen_long_stop_strings_cost_linear_time():
    """Every character of this text extends or nearly completes all of the stop strings."""
    matcher = StopMatcher(tuple("a" * 127 + chr(ord("b") + i) for i in range(16)))
    started = time.perf_counter()
    for _ in range(20_000):
        matcher.push("aaaaa")
    assert time.perf_counter() - started < 2.0
