"""A turn's way from token ids to text: what is released, and when the reply ends.

    token id ─> Detokenizer ─> StopMatcher ─> text of the sample
                (withholds      (withholds what may
                 incomplete      begin a stop string)
                 UTF-8)

A reply ends with STOP at an end-of-turn token (unless `ignore_eos`), at a stop token or at a stop
string (looked for from `min_tokens` on), and with LENGTH when its context is as long as it may get;
the first of these that holds, in this order, is reported.  A token that ends the turn by its id is in
the log and not in the text; after a stop string the log ends with the token that completed it, the
text before the string.
What was withheld is flushed at the end: incomplete UTF-8 as U+FFFD, the beginning of a stop string
as itself.

It lives in `Turn.decoding` as long as the turn does, so a suspension changes nothing.
"""

from __future__ import annotations

from pensieve.core.sampling import Sampling
from pensieve.core.turn import FinishReason, Turn
from pensieve.text.detokenizer import Detokenizer
from pensieve.text.stop import StopMatcher
from pensieve.text.tokenizer import Tokenizer


class Decoding:
    """The executor's memory of one turn."""

    __slots__ = ("_detokenizer", "_stop_matcher", "end_token_ids", "sampling_state")

    def __init__(
        self, sampling: Sampling, tokenizer: Tokenizer, eos_token_ids: frozenset[int]
    ) -> None:
        eos = frozenset() if sampling.ignore_eos else eos_token_ids
        self.end_token_ids = eos | frozenset(sampling.stop_token_ids)
        self.sampling_state: object | None = None  # the sampler's: penalty counts
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_matcher = StopMatcher(sampling.stop)

    def accept(self, turn: Turn, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that this token releases, and whether it ends the turn.

        The token is not in `turn.tokens` yet: the core's commit appends it.
        """
        released = ""
        if token_id not in self.end_token_ids:
            text = self._detokenizer.push(token_id)
            if turn.num_output_tokens + 1 < turn.sampling.min_tokens:
                return text, None  # no stop string ends the reply yet
            released, stopped = self._push(text)
            if stopped:
                return released, FinishReason.STOP
            if len(turn.tokens) + 1 < turn.length_max:
                return released, None
            finish = FinishReason.LENGTH
        else:
            finish = FinishReason.STOP
        flushed, stopped = self._push(self._detokenizer.flush())
        if stopped:
            return released + flushed, FinishReason.STOP
        return released + flushed + self._stop_matcher.flush(), finish

    def _push(self, text: str) -> tuple[str, bool]:
        released, matched = self._stop_matcher.push(text)
        return released, matched is not None
