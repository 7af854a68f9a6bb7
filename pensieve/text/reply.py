"""Decode the tokens of a reply as they are sampled, and find the token that ends the reply.

    token id ─> Detokenizer ─> StopMatcher ─> text of the token
                (withholds      (withholds what may
                 incomplete      begin a stop string)
                 UTF-8)

A reply stops at an end-of-turn token (unless the client ignores these tokens), at a stop token, at a stop
string, or when it only repeats itself. Stop strings and repetition have no effect until the reply has
`min_tokens` tokens. An end-of-turn token or stop token is in the log, but not in the text. If a stop string
ends the reply, the log ends with the token that completed the string, and the text ends before the string.
The scheduler decides when a reply has its maximum length, and marks its last token (`is_last`).

Withheld text is released at the end of the reply: incomplete UTF-8 as U+FFFD, the start of a stop string
unchanged.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from pensieve.text.detokenizer import Detokenizer
from pensieve.text.repetition import RepetitionDetector
from pensieve.text.stop import StopMatcher
from pensieve.text.tokenizer import Tokenizer


class ReplyText:
    """The text of one reply. Used until the turn ends, also across suspensions of the turn."""

    __slots__ = (
        *("_detokenizer", "_min_tokens", "_num_tokens", "_repetition", "_stop_matcher"),
        *("end_token_ids", "repeats"),
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_token_ids: AbstractSet[int],
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        stop_repetition: int = 0,
        *,
        continues_text: bool = False,
    ) -> None:
        """`continues_text`: the prompt ends within a text, so the first token keeps its leading space."""
        self.end_token_ids = end_token_ids
        self._detokenizer = Detokenizer(tokenizer, is_first=not continues_text)
        self._stop_matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._repetition = RepetitionDetector(stop_repetition) if stop_repetition else None
        self.repeats = False  # whether the reply was stopped because it only repeats itself

    def push(self, token_id: int, is_last: bool) -> tuple[str, bool]:
        """Return the text that this token releases, and whether the reply stops with it."""
        self._num_tokens += 1
        stops = token_id in self.end_token_ids
        repeats = self._repetition is not None and self._repetition.push(token_id)
        repeats = repeats and self._num_tokens >= self._min_tokens
        text = "" if stops else self._detokenizer.push(token_id)
        if stops or is_last or repeats:
            text += self._detokenizer.flush()
        if self._num_tokens < self._min_tokens:
            return text, stops  # stop strings and repetition do not count yet
        released, matched = self._stop_matcher.push(text)
        if matched is not None:
            return released, True
        self.repeats = repeats and not stops
        if stops or is_last or repeats:
            released += self._stop_matcher.flush()
        return released, stops or repeats
