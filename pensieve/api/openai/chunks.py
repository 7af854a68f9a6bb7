"""Chat completions and text completions as they come: chunks, each with what is new of one choice.

    role             the first chunk of each choice of a chat
    pieces           text; of a chat also thinking (`reasoning_content`), and calls with their arguments
    finish_reason    the last chunk of each choice
    usage            one chunk without choices, where the request wants it

Logprobs are those of the text's tokens, in the chunk that brings them; text that is withheld for a moment (it
may begin a call) has had its logprobs sent before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pensieve.api.openai.answer import (
    ID_PREFIXES,
    Heading,
    PromptTokens,
    Reply,
    call_id,
    logprob_columns,
    logprob_rows,
    usage_of,
)
from pensieve.api.openai.request import Request, RequestKind
from pensieve.core.turn import FinishReason
from pensieve.text.reply_pieces import Piece, Text, Thinking
from pensieve.text.tokenizer import Tokenizer
from pensieve.text.tool_calls import CallArguments, CallBegan


class _Stream:
    """The chunks of all choices of a request."""

    def __init__(self, request: Request, heading: Heading, tokenizer: Tokenizer) -> None:
        self._request, self._heading, self._tokenizer = request, heading, tokenizer

    def usage(self, replies: Sequence[Reply], prompt: PromptTokens) -> dict[str, Any]:
        return {**self._head(), "choices": [], "usage": usage_of(replies, prompt)}

    def _chunk(
        self,
        choice: int,
        new: Mapping[str, Any],
        finish_reason: str | None = None,
        *,
        logprobs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        one = {"index": choice, **new, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._request.include_usage else {}
        return {**self._head(), "choices": [one], **usage}

    def _head(self) -> dict[str, Any]:
        heading, kind = self._heading, self._request.kind
        is_chat = kind is RequestKind.CHAT
        return {
            "id": ID_PREFIXES[kind] + heading.answer_id,
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": None,
        }


class ChatStream(_Stream):
    def __init__(self, request: Request, heading: Heading, tokenizer: Tokenizer) -> None:
        super().__init__(request, heading, tokenizer)
        self._begun: set[int] = set()  # choices
        self._has_text: set[int] = set()

    def chunks(
        self, choice: int, pieces: Iterable[Piece], tokens: Reply | None = None
    ) -> list[dict[str, Any]]:
        """For pieces of a choice, which these tokens brought."""
        found = []
        if choice not in self._begun:
            self._begun.add(choice)
            found.append(self._chunk(choice, {"delta": {"role": "assistant", "content": ""}}))
        deltas = [self._delta(choice, each) for each in merged(pieces)]
        logprobs = self._logprobs(choice, tokens)
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            found.append(self._chunk(choice, {"delta": delta}, logprobs=logprobs))
            logprobs = None
        return found

    def end(
        self, choice: int, finish: FinishReason, *, ends_with_call: bool = False
    ) -> dict[str, Any]:
        waits = ends_with_call and finish is FinishReason.STOP
        return self._chunk(choice, {"delta": {}}, "tool_calls" if waits else finish.value)

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


class CompletionStream(_Stream):
    def __init__(self, request: Request, heading: Heading, tokenizer: Tokenizer) -> None:
        super().__init__(request, heading, tokenizer)
        self._num_characters: dict[int, int] = {}  # that were sent, by choice

    def chunks(self, choice: int, pieces: Iterable[Piece], tokens: Reply) -> list[dict[str, Any]]:
        """For some of a choice's tokens; the prompt was no chat, so their parts do not count."""
        sent = self._num_characters.get(choice, 0)
        text, logprobs = "".join(tokens.texts), None
        if self._request.sampling.logprobs is not None:
            rows = logprob_rows(tokens, self._tokenizer, is_first=not sent)
            logprobs = logprob_columns(rows, sent)
        self._num_characters[choice] = sent + len(text)
        return [self._chunk(choice, {"text": text}, logprobs=logprobs)]

    def end(
        self, choice: int, finish: FinishReason, *, ends_with_call: bool = False
    ) -> dict[str, Any]:
        return self._chunk(choice, {"text": ""}, finish.value)


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
