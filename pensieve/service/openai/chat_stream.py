"""A chat completion as it comes: chunks, each with what is new of one choice.

    role             the first chunk of each choice
    pieces           thinking (`reasoning_content`), text, calls of tools with their arguments as they come
    finish_reason    the last chunk of each choice
    usage            one chunk without choices, where the request wants it

Logprobs are those of the text's tokens, in the chunk that brings them; text that is withheld for a moment (it
may begin a call) has had its logprobs sent before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pensieve.core.turn import FinishReason
from pensieve.service.openai.answer import (
    ID_PREFIXES,
    Heading,
    PromptTokens,
    Reply,
    logprob_rows,
    usage_of,
)
from pensieve.service.openai.request import Request
from pensieve.service.openai.tool_call_items import call_id
from pensieve.text.reply_pieces import Piece, Text, Thinking
from pensieve.text.tokenizer import Tokenizer
from pensieve.text.tool_calls import CallArguments, CallBegan


class ChatStream:
    def __init__(self, request: Request, heading: Heading, tokenizer: Tokenizer) -> None:
        self._request, self._heading, self._tokenizer = request, heading, tokenizer
        self._begun: set[int] = set()  # choices
        self._has_text: set[int] = set()

    def chunks(
        self, choice: int, pieces: Iterable[Piece], tokens: Reply | None = None
    ) -> list[dict[str, Any]]:
        """For pieces of a choice, which these tokens brought."""
        found = []
        if choice not in self._begun:
            self._begun.add(choice)
            found.append(self._chunk(choice, {"role": "assistant", "content": ""}))
        deltas = [self._delta(choice, each) for each in merged(pieces)]
        logprobs = self._logprobs(choice, tokens)
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            found.append(self._chunk(choice, delta, logprobs=logprobs))
            logprobs = None
        return found

    def end(
        self, choice: int, finish: FinishReason, *, ends_with_call: bool = False
    ) -> dict[str, Any]:
        waits = ends_with_call and finish is FinishReason.STOP
        return self._chunk(choice, {}, "tool_calls" if waits else finish.value)

    def usage(self, replies: Sequence[Reply], prompt: PromptTokens) -> dict[str, Any]:
        return {**self._head(), "choices": [], "usage": usage_of(replies, prompt)}

    def _delta(self, choice: int, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Thinking):
            return {"reasoning_content": piece.text}
        if isinstance(piece, Text):
            return {"content": piece.text}
        if isinstance(piece, CallBegan):
            call = {
                "index": piece.index,
                "id": call_id(self._heading.answer_id, choice, piece.index),
                "type": "function",
                "function": {"name": piece.name, "arguments": ""},
            }
        else:
            call = {"index": piece.index, "function": {"arguments": piece.text}}
        return {"tool_calls": [call]}

    def _logprobs(self, choice: int, tokens: Reply | None) -> dict[str, Any] | None:
        if self._request.sampling.logprobs is None or tokens is None or not tokens.token_ids:
            return None
        is_first = choice not in self._has_text
        rows = logprob_rows(tokens, self._tokenizer, is_first=is_first)
        if not rows:
            return None
        self._has_text.add(choice)
        return {"content": rows, "refusal": None}

    def _chunk(
        self,
        choice: int,
        delta: Mapping[str, Any],
        finish_reason: str | None = None,
        *,
        logprobs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        one = {
            "index": choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self._request.include_usage else {}
        return {**self._head(), "choices": [one], **usage}

    def _head(self) -> dict[str, Any]:
        heading = self._heading
        return {
            "id": ID_PREFIXES[self._request.kind] + heading.answer_id,
            "object": "chat.completion.chunk",
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": None,
        }


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of the same kind as one."""
    found: list[Piece] = []
    for each in pieces:
        last = found[-1] if found else None
        if isinstance(each, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + each.text)
        elif isinstance(each, Thinking) and isinstance(last, Thinking):
            found[-1] = Thinking(last.text + each.text)
        elif (
            isinstance(each, CallArguments)
            and isinstance(last, CallArguments)
            and each.index == last.index
        ):
            found[-1] = CallArguments(last.index, last.text + each.text)
        else:
            found.append(each)
    return found
