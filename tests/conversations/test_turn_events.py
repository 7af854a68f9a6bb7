"""Turn events: which subscribers are called, in which order, and what happens if one fails."""

from __future__ import annotations

import pytest

from pensieve.conversations.turn_events import Signal


def test_subscribers_are_called_in_their_order_until_they_unsubscribe() -> None:
    seen: list[str] = []
    signal = Signal[[str]]()

    def first(text: str) -> None:
        seen.append(f"first {text}")

    signal.subscribe(first)
    signal.subscribe(lambda text: seen.append(f"second {text}"))
    signal("a")
    signal.unsubscribe(first)
    signal("b")
    assert seen == ["first a", "second a", "second b"]


def test_a_failing_subscriber_does_not_stop_the_others() -> None:
    seen: list[str] = []
    signal = Signal[[str]]()

    def fail(text: str) -> None:
        raise ValueError(f"of {text}")

    signal.subscribe(fail)
    signal.subscribe(fail)
    signal.subscribe(seen.append)
    with pytest.raises(ValueError, match="of a"):
        signal("a")
    assert seen == ["a"]


def test_a_subscriber_may_unsubscribe_while_it_is_called() -> None:
    seen: list[str] = []
    signal = Signal[[]]()

    def leave() -> None:
        signal.unsubscribe(leave)
        seen.append("left")

    signal.subscribe(leave)
    signal.subscribe(lambda: seen.append("stays"))
    signal()
    signal()
    assert seen == ["left", "stays", "stays"]
