"""Find stop strings in a text that arrives in pieces.

The match that counts is the one that is *complete first*. If several are complete with the same character,
the longest counts. The matcher withholds text that may still belong to a match: the longest suffix that is
a prefix of a stop string. Its length is the depth of the state.

This is the automaton of Aho and Corasick. The states are the nodes of the trie of the stop strings. If a
character does not fit, the state falls back to the longest proper suffix of its string that is a node too.
A character costs amortised constant time.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class StopResult(NamedTuple):
    """The text that a piece released, and the stop string that it completed, if any."""

    released: str  # text that cannot be part of a stop string
    matched: str | None  # the stop string that ended the text


class StopMatcher:
    """Match stop strings in one reply, and withhold text that may begin one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "a stop string is not empty"
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._longest: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = 0
        self._withheld = ""
        self.matched: str | None = None

    def push(self, text: str) -> StopResult:
        """Add a piece of text; return the text that it releases."""
        assert self.matched is None, "the text has ended"
        text = self._withheld + text
        state = self._state
        for position in range(len(self._withheld), len(text)):
            state = self._step(state, text[position])
            matched = self._longest[state]
            if matched is not None:
                self.matched, self._withheld = matched, ""
                return StopResult(text[: position + 1 - len(matched)], matched)
        self._state = state
        sure = len(text) - self._depth[state]
        self._withheld = text[sure:]
        return StopResult(text[:sure], None)

    def flush(self) -> str:
        """Return the withheld text, at the end of a reply without a match."""
        withheld, self._withheld, self._state = self._withheld, "", 0
        return withheld

    def _step(self, state: int, character: str) -> int:
        while character not in self._next[state]:
            if not state:
                return 0
            state = self._fallback[state]
        return self._next[state][character]

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, start=1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(depth)
                self._fallback.append(0)
                self._longest.append(None)
            state = self._next[state][character]
        self._longest[state] = stop

    def _link(self) -> None:
        """Find all fallbacks, breadth first, because a fallback is shallower than its state."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self._step(self._fallback[state], character)
                queue.append(child)
            if self._longest[state] is None:
                self._longest[state] = self._longest[self._fallback[state]]
