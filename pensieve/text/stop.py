"""Find stop strings in a streamed text.

The first complete match counts. If several matches end at the same character, the longest match counts. The
matcher withholds text that may belong to a match: the longest suffix of the text that is a prefix of a stop
string.

This is the Aho-Corasick automaton. The states are the nodes of the trie of the stop strings. The depth of the
state is the length of the withheld text. If a character does not fit, the automaton falls back to the longest
proper suffix of its state's string that is also a node. A character costs amortised constant time.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class StopResult(NamedTuple):
    """The text that a push released, and the stop string that it completed, if any."""

    released: str  # text that cannot be part of a stop string
    matched: str | None  # the stop string that ended the text


class StopMatcher:
    """Finds stop strings in one reply, and withholds text that may begin a stop string."""

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
        """Add a piece of text. Return the text that is released."""
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
        num_safe = len(text) - self._depth[state]
        self._withheld = text[num_safe:]
        return StopResult(text[:num_safe], None)

    def flush(self) -> str:
        """Return the withheld text at the end of a reply that has no match."""
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
        """Find the fallback of each state. Breadth first, because a fallback is shallower than its state."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self._step(self._fallback[state], character)
                queue.append(child)
            if self._longest[state] is None:
                self._longest[state] = self._longest[self._fallback[state]]
