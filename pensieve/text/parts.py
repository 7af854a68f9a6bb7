"""Find the part of a reply that a token belongs to: thinking, text or a tool call.

Only the ids of control tokens decide. So text that looks like a control token does not begin another part. A
control token belongs to the part that it opens or closes. A `PartMarker` also reads the last tokens of the
prompt, because some templates open the thinking in the generation prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from pensieve.text.tokenizer import Tokenizer


class Part(StrEnum):
    """A kind of text in a reply."""

    TEXT = "text"
    THINKING = "thinking"
    TOOL_CALL = "tool_call"


_OPENING = {
    "<think>": Part.THINKING,
    "[THINK]": Part.THINKING,
    "<tool_call>": Part.TOOL_CALL,
    "<|python_start|>": Part.TOOL_CALL,
    "<|tool_call_start|>": Part.TOOL_CALL,
    "<｜tool▁calls▁begin｜>": Part.TOOL_CALL,
    # These have no closing token: the part lasts until the end of the reply.
    "[TOOL_CALLS]": Part.TOOL_CALL,
    "<|python_tag|>": Part.TOOL_CALL,
}
THINKING_MARKS = ("<think>", "[THINK]"), ("</think>", "[/THINK]")  # opening and closing marks
_CLOSING = (
    *THINKING_MARKS[1],
    *("</tool_call>", "<|python_end|>", "<|tool_call_end|>", "<｜tool▁calls▁end｜>"),
)


class PartMarker:
    """Assigns the tokens of one reply, in order, to parts."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = ()) -> None:
        self._opening = {
            token_id: part
            for text, part in _OPENING.items()
            if (token_id := tokenizer.token_id(text)) is not None
        }
        self._closing = {tokenizer.token_id(text) for text in _CLOSING} - {None}
        self._ends = tokenizer.eos_token_ids
        self._part = Part.TEXT
        for token_id in prompt_ids:
            self.push(token_id)

    def push(self, token_id: int) -> Part:
        """Return the part that this token belongs to."""
        self._part = self._opening.get(token_id, self._part)
        part = self._part
        if token_id in self._closing or token_id in self._ends:
            self._part = Part.TEXT
        return part
