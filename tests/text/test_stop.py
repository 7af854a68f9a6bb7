"""The stop string that is completed first ends the reply. If several end together, the longest counts."""

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.text import StopMatcher


def feed(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None, str]:
    """Return all released text, the match, and the flushed text."""
    matcher = StopMatcher(stops)
    released = ""
    for piece in pieces:
        result = matcher.push(piece)
        released += result.released
        if result.matched is not None:
            return released, result.matched, ""
    return released, None, matcher.flush()


def test_text_ends_before_the_stop_string() -> None:
    assert feed(("\n\n",), ["one\n", "\ntwo"]) == ("one", "\n\n", "")


def test_text_that_may_begin_a_stop_string_is_withheld() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("the E") == ("the ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("T") == ("ENT", None)
    assert matcher.push("E") == ("", None)
    assert matcher.flush() == "E"


def test_the_longest_of_two_matches_with_the_same_end_counts() -> None:
    assert feed(("b", "aab"), ["xaab"]) == ("x", "aab", "")


def test_the_match_that_is_complete_first_counts_even_if_it_begins_later() -> None:
    assert feed(("abcd", "bc"), ["abcd"]) == ("a", "bc", "")


def test_a_stop_string_found_inside_the_beginning_of_another() -> None:
    assert feed(("aabaac", "ba"), ["aaba"]) == ("aa", "ba", "")


def test_without_stop_strings_everything_is_released_at_once() -> None:
    assert StopMatcher(()).push("text") == ("text", None)


def test_no_text_may_follow_a_match() -> None:
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
    """After each character, exactly the text that may begin a stop string is held back."""
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


def test_every_small_pair_of_stop_strings_on_every_small_text() -> None:
    for stops in product(words(3), repeat=2):
        for text in product("ab", repeat=6):
            check_against_naive(stops, "".join(text))


def test_every_small_stop_string_on_every_longer_text() -> None:
    for stop in words(5):
        for text in product("ab", repeat=8):
            check_against_naive((stop,), "".join(text))


@settings(derandomize=True, max_examples=200)
@given(
    st.lists(st.text("abc", min_size=3, max_size=6), max_size=4).map(tuple),
    st.text("abc"),
    st.data(),
)
def test_the_result_is_the_same_however_the_text_is_cut_into_pieces(
    stops: tuple[str, ...], text: str, data: st.DataObject
) -> None:
    pieces = []
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    released, matched, flushed = feed(stops, pieces)
    assert (released + flushed, matched) == naive(stops, text)


def num_lines_run(function: Callable[[], object]) -> int:
    """Return how many lines of Python a call executes. Unlike time, it is independent of other processes."""
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return num_lines


def test_sixteen_long_stop_strings_cost_linear_time() -> None:
    """Every character of this text extends or nearly completes all of the stop strings."""

    def push(length: int, num_pieces: int) -> None:
        for _ in range(num_pieces):
            matchers[length].push("aaaaa")

    matchers = {
        length: StopMatcher(tuple("a" * (length - 1) + chr(ord("b") + i) for i in range(16)))
        for length in (4, 128)
    }
    for length in matchers:
        push(length, 100)  # from now on, they hold back as much as possible
    short, long = (num_lines_run(partial(push, length, 500)) for length in (4, 128))
    twice = num_lines_run(lambda: push(128, 1000))
    assert long <= 1.1 * short
    assert twice <= 2.1 * long
