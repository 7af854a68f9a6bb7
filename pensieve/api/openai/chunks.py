"""Stream chat completions and text completions: each chunk has new data of one choice.

    role             the first chunk of each choice of a chat
    pieces           text; in a chat also thinking (`reasoning_content`) and tool calls
    finish_reason    the last chunk of each choice
    usage            one chunk without choices, if the request wants it

Logprobs are in the chunk of their tokens. If text is withheld because it may begin a call, its logprobs are
sent before the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pensieve.api.openai.answer import (
    ID_PREFIXES,
    Heading,
    call_id,
    finish_fields,
    logprob_columns,
    logprob_rows,
    usage_of,
)
from pensieve.api.openai.request import ParsedRequest, RequestKind
from pensieve.conversations.live_turn import NO_TOKENS, PromptTokens, ReplyTokens
from pensieve.core.turn import FinishReason
from pensieve.text.reply_pieces import Piece, ReplyPieces, Text, Thinking, merged
from pensieve.text.tokenizer import Tokenizer
from pensieve.text.tool_calls import CallBegan


class ChoiceStream:
    """Makes the chunks of one choice."""

    def __init__(
        self,
        request: ParsedRequest,
        heading: Heading,
        tokenizer: Tokenizer,
        cutter: ReplyPieces,
        choice: int = 0,
    ) -> None:
        self._request, self._heading, self._tokenizer = request, heading, tokenizer
        self._cutter, self._choice = cutter, choice

    def tokens(self, tokens: ReplyTokens) -> list[dict[str, Any]]:
        """Return the chunks for these tokens of the reply."""
        return self._chunks(tokens.pieces(self._cutter), tokens)

    def withheld_events(self, tail: ReplyTokens) -> list[dict[str, Any]]:
        """Return the chunks for text that was withheld until the end of the reply."""
        pieces = [*tail.pieces(self._cutter), *self._cutter.end()]
        return self._chunks(pieces, NO_TOKENS) if pieces else []

    def end(self, finish: FinishReason) -> dict[str, Any]:
        raise NotImplementedError

    def _chunks(self, pieces: Iterable[Piece], tokens: ReplyTokens) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _chunk(
        self,
        new: Mapping[str, Any],
        ending: Mapping[str, str] | None = None,
        *,
        logprobs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        reason = {"finish_reason": None} if ending is None else ending
        choice = {"index": self._choice, **new, "logprobs": logprobs, **reason}
        usage = {"usage": None} if self._request.include_usage else {}
        return {**_head(self._request, self._heading), "choices": [choice], **usage}


class ChatStream(ChoiceStream):
    _has_begun = False
    _has_text = False

    def end(self, finish: FinishReason) -> dict[str, Any]:
        return self._chunk({"delta": {}}, finish_fields(finish, self._cutter.ends_with_call))

    def _chunks(self, pieces: Iterable[Piece], tokens: ReplyTokens) -> list[dict[str, Any]]:
        found = []
        if not self._has_begun:
            self._has_begun = True
            found.append(self._chunk({"delta": {"role": "assistant", "content": ""}}))
        deltas = [self._delta(each) for each in merged(pieces)]
        logprobs = self._logprobs(tokens)
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            found.append(self._chunk({"delta": delta}, logprobs=logprobs))
            logprobs = None
        return found

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Thinking):
            return {"reasoning_content": piece.text}
        if isinstance(piece, Text):
            return {"content": piece.text}
        if isinstance(piece, CallBegan):
            call = {
                "index": piece.index,
                "id": call_id(self._heading.answer_id, self._choice, piece.index),
                "type": "function",
                "function": {"name": piece.name, "arguments": ""},
            }
        else:
            call = {"index": piece.index, "function": {"arguments": piece.text}}
        return {"tool_calls": [call]}

    def _logprobs(self, tokens: ReplyTokens) -> dict[str, Any] | None:
        if self._request.sampling.logprobs is None or not tokens.token_ids:
            return None
        continues = self._has_text or self._request.continues_text
        rows = logprob_rows(tokens, self._tokenizer, is_first=not continues)
        if not rows:
            return None
        self._has_text = True
        return {"content": rows, "refusal": None}


class CompletionStream(ChoiceStream):
    _num_characters = 0  # characters sent so far

    def end(self, finish: FinishReason) -> dict[str, Any]:
        return self._chunk({"text": ""}, finish_fields(finish))

    def _chunks(self, pieces: Iterable[Piece], tokens: ReplyTokens) -> list[dict[str, Any]]:
        """Return the chunks of a text completion, in which all tokens are text."""
        sent, text, logprobs = self._num_characters, "".join(tokens.texts), None
        if self._request.sampling.logprobs is not None:
            continues = sent > 0 or self._request.continues_text
            rows = logprob_rows(tokens, self._tokenizer, is_first=not continues)
            logprobs = logprob_columns(rows, sent)
        self._num_characters = sent + len(text)
        return [self._chunk({"text": text}, logprobs=logprobs)]


def usage_chunk(
    request: ParsedRequest, heading: Heading, replies: Sequence[ReplyTokens], prompt: PromptTokens
) -> dict[str, Any]:
    """Return the last chunk, with usage and no choices."""
    return {**_head(request, heading), "choices": [], "usage": usage_of(replies, prompt)}


def _head(request: ParsedRequest, heading: Heading) -> dict[str, Any]:
    is_chat = request.kind is RequestKind.CHAT
    return {
        "id": ID_PREFIXES[request.kind] + heading.answer_id,
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": heading.created,
        "model": heading.model,
        "system_fingerprint": None,
    }
