"""Render replies for Anthropic's API, as whole messages or as stream events. Also render errors.

    Thinking, Thinking          {"type": "thinking", "thinking": …, "signature": SIGNATURE}
    Text                        {"type": "text", "text": …}
    CallBegan, CallArguments    {"type": "tool_use", "id": "toolu_…", "name": …, "input": {…}}

Adjacent pieces of thinking become one block, and so do adjacent pieces of text. Each call is a block. The
signature is a placeholder: clients would send thinking without a signature back as text. If the length limit
cuts a call, `input` has only the complete members of its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pensieve.api.openai.answer import Heading
from pensieve.conversations.live_turn import PromptTokens, ReplyTokens
from pensieve.core.turn import FinishReason
from pensieve.text.detokenizer import Detokenizer
from pensieve.text.reply_pieces import CallArguments, CallBegan, Piece, ReplyPieces, Thinking
from pensieve.text.tokenizer import Tokenizer

SIGNATURE = "unsigned"
CLOSING = {"{": "}", "[": "]"}


class MessageEnding(NamedTuple):
    reason: str
    stop_sequence: str | None = None


def message(
    heading: Heading,
    pieces: Iterable[Piece],
    reply: ReplyTokens,
    prompt: PromptTokens,
    ending: MessageEnding,
) -> dict[str, Any]:
    """Return the body of a response that is not streamed. `pieces`: all pieces of the reply."""
    return {
        "id": message_id(heading),
        "type": "message",
        "role": "assistant",
        "model": heading.model,
        "content": blocks_of(pieces, heading.answer_id),
        "stop_reason": ending.reason,
        "stop_sequence": ending.stop_sequence,
        "usage": usage_of(prompt, reply),
    }


def message_id(heading: Heading) -> str:
    return f"msg_{heading.answer_id}"


def call_id(answer_id: str, index: int) -> str:
    """Return the id of a call. It is the same if the answer is repeated."""
    return f"toolu_{answer_id}{index:02d}"


def ending_of(
    finish: FinishReason, ends_with_call: bool, stop_sequence: str | None
) -> MessageEnding:
    if finish is not FinishReason.STOP:  # the API has no separate reason for REPETITION
        return MessageEnding("max_tokens")
    if stop_sequence is not None:
        return MessageEnding("stop_sequence", stop_sequence)
    return MessageEnding("tool_use" if ends_with_call else "end_turn")


def stop_string_of(
    reply: ReplyTokens, tokenizer: Tokenizer, stops: Sequence[str], *, continues_text: bool
) -> str | None:
    """Return the stop string that ended the reply, if any.

    The reply's tokens include the stop string. The reply's text does not.

    `continues_text`: the reply continues a text (prefill), so its first token keeps a leading space.
    """
    if not stops or reply.finish is not FinishReason.STOP:
        return None
    detokenizer = Detokenizer(tokenizer, is_first=not continues_text)
    sampled = "".join(map(detokenizer.push, reply.token_ids)) + detokenizer.flush()
    not_shown = sampled[sum(map(len, reply.texts)) :]
    return min(filter(not_shown.startswith, stops), key=len, default=None)


def usage_of(prompt: PromptTokens, reply: ReplyTokens | None = None) -> dict[str, Any]:
    """Return the usage. Cached tokens are counted separately. Cache writes are always 0."""
    usage: dict[str, Any] = {
        "input_tokens": prompt.num_tokens - prompt.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": prompt.num_cached,
        "output_tokens": len(reply.token_ids) if reply is not None else 0,
    }
    if reply is not None and reply.num_thinking:
        usage["output_tokens_details"] = {"thinking_tokens": reply.num_thinking}
    return usage


def blocks_of(pieces: Iterable[Piece], answer_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    arguments: list[list[str]] = []  # of each call, as sampled
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[-1].append(piece.text)
            continue
        block = empty_block(piece, answer_id)
        if isinstance(piece, CallBegan):
            arguments.append([])
            found.append(block)
            continue
        if not found or found[-1]["type"] != block["type"]:
            found.append(block)
        name = block["type"]
        found[-1][name] += piece.text
    written = map("".join, arguments)
    for block in found:
        if block["type"] == "tool_use":
            block["input"] = complete_members(next(written))
    return found


def empty_block(piece: Piece, answer_id: str) -> dict[str, Any]:
    """Return the empty block for a piece."""
    assert not isinstance(piece, CallArguments), "arguments of a call came before its name"
    if isinstance(piece, CallBegan):
        found = {"type": "tool_use", "id": call_id(answer_id, piece.index), "name": piece.name}
        return {**found, "input": {}}
    if isinstance(piece, Thinking):
        return {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    return {"type": "text", "text": ""}


def complete_members(text: str) -> dict[str, Any]:
    """Return the complete members of a JSON object whose text may be cut off at any point."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = _closed(text)
    return found if isinstance(found, dict) else {}


def _closed(text: str) -> Any:
    """Parse the text up to the last comma or bracket outside strings. Close all open brackets first."""
    open_brackets: list[str] = []
    end = 0  # before the last comma, or after the last bracket
    in_string = is_escaped = False
    for number, character in enumerate(text):
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            in_string = True
        elif character == ",":
            end = number
        elif character in CLOSING:
            open_brackets.append(CLOSING[character])
            end = number + 1
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
            end = number + 1
    try:
        return json.loads(text[:end] + "".join(reversed(open_brackets)))
    except (ValueError, RecursionError):
        return {}


TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(
    status: int, message: str, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the body of an error. For other statuses than in TYPES, the type is api_error."""
    error = {"type": TYPES.get(status, "api_error"), "message": message}
    return {"type": "error", "error": error | ({"details": details} if details else {})}


DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}


class MessageStream:
    """Renders a message as events.

    message_start, ping                                with the number of prompt tokens
    content_block_start, deltas, content_block_stop    once for each block, one after the other
    message_delta                                      why the message ended, and the final usage
    message_stop
    """

    def __init__(self, heading: Heading, prompt: PromptTokens, cutter: ReplyPieces) -> None:
        """`prompt`: the counts that are known before the turn runs."""
        self._heading, self._prompt, self._cutter = heading, prompt, cutter
        self._begun = False
        self._block = ""  # type of the open block
        self._index = -1  # index of the last block

    def tokens(self, tokens: ReplyTokens) -> list[dict[str, Any]]:
        """Return the events for these tokens. The first call also returns the start of the message."""
        return self.events(tokens.pieces(self._cutter))

    def withheld_events(self, tail: ReplyTokens) -> list[dict[str, Any]]:
        """Return the events for text that was withheld until the end of the reply."""
        pieces = [*tail.pieces(self._cutter), *self._cutter.end()]
        return self.events(pieces) if pieces else []

    def events(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        found = self._begin()
        for piece in pieces:
            if isinstance(piece, CallArguments):
                delta = {"type": "input_json_delta", "partial_json": piece.text}
                found.append(self._delta(delta))
                continue
            block = empty_block(piece, self._heading.answer_id)
            kind = block["type"]
            if kind != self._block or isinstance(piece, CallBegan):
                found += self._stop()
                self._index += 1
                self._block = kind
                if kind == "thinking":
                    block |= {"signature": ""}  # the signature follows at the end of the block
                found.append(self._block_event("content_block_start", content_block=block))
            if not isinstance(piece, CallBegan):
                found.append(self._delta({"type": DELTAS[kind], kind: piece.text}))
        return found

    def end(
        self, reply: ReplyTokens, prompt: PromptTokens, ending: MessageEnding
    ) -> list[dict[str, Any]]:
        """Return the last events. `prompt` must include the cached tokens."""
        delta = {"stop_reason": ending.reason, "stop_sequence": ending.stop_sequence}
        return [
            *self._begin(),
            *self._stop(),
            {"type": "message_delta", "delta": delta, "usage": usage_of(prompt, reply)},
            {"type": "message_stop"},
        ]

    def _begin(self) -> list[dict[str, Any]]:
        if self._begun:
            return []
        self._begun = True
        start: dict[str, Any] = {
            "id": message_id(self._heading),
            "type": "message",
            "role": "assistant",
            "model": self._heading.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(self._prompt),
        }
        return [{"type": "message_start", "message": start}, {"type": "ping"}]

    def _stop(self) -> list[dict[str, Any]]:
        kind, self._block = self._block, ""
        if not kind:
            return []
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        signed = [self._delta(signature)] if kind == "thinking" else []
        return [*signed, self._block_event("content_block_stop")]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return self._block_event("content_block_delta", delta=delta)

    def _block_event(self, name: str, **values: Any) -> dict[str, Any]:
        return {"type": name, "index": self._index, **values}
