"""Decode the tokens of a reply as they come, and find the token that ends it.

    token id ─> Detokenizer ─> StopMatcher ─> text of the token
                (withholds      (withholds what may
                 incomplete      begin a stop string)
                 UTF-8)

A reply stops at an end-of-turn token (unless the client ignores it), at a stop token, at a stop string, or
when it only repeats itself. Stop strings and repetition count from `min_tokens` on. A token that ends the
reply by its id is in the log and not in the text. After a stop string the log ends with the token that
completed it, and the text ends before the string. The scheduler decides when a reply has its maximum length
and marks its last token (`is_last`).

Withheld text is released at the end: incomplete UTF-8 as U+FFFD, the beginning of a stop string unchanged.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from pensieve.text.detokenizer import Detokenizer
from pensieve.text.repetition import RepetitionDetector
from pensieve.text.stop import StopMatcher
from pensieve.text.tokenizer import Tokenizer


class ReplyText:
    """The text of one reply. It lives until the turn ends, also while the turn is suspended."""

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
        """`continues_text`: the prompt ends within a text, so a first token keeps its leading space."""
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
            return text, stops  # neither a stop string nor repetition ends the reply yet
        released, matched = self._stop_matcher.push(text)
        if matched is not None:
            return released, True
        self.repeats = repeats and not stops
        if stops or is_last or repeats:
            released += self._stop_matcher.flush()
        return released, stops or repeats
