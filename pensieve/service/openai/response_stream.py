"""A response as it comes: events, each with its sequence number, that add up to the whole answer.

    response.created  response.in_progress
    the items of the output, one after the other (output_items)
    response.completed | response.incomplete | response.failed | error

The first two and the last bring the whole response, as it is then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pensieve.core.turn import FinishReason
from pensieve.service.openai.answer import Heading, PromptTokens, Reply, answer, logprob_rows
from pensieve.service.openai.output_items import Event, Names, OutputItems
from pensieve.service.openai.request import Request
from pensieve.text.reply_pieces import Piece, ReplyPieces
from pensieve.text.tokenizer import Tokenizer

NO_REPLY = Reply((), (), FinishReason.STOP)
NO_PROMPT = PromptTokens(0)
LAST_EVENTS = {
    "completed": "response.completed",
    "failed": "response.failed",
    "cancelled": "response.failed",
}
ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})


def unfinished(request: Request, heading: Heading, status: str) -> dict[str, Any]:
    """The response before it has an end, or one without a reply."""
    body = _body(request, NO_REPLY, NO_PROMPT, heading)
    return {**body, "status": status, "incomplete_details": None, "output": [], "usage": None}


def failed(
    request: Request, heading: Heading, code: str, message: str, status: str = "failed"
) -> dict[str, Any]:
    error = {"code": code, "message": message} if status == "failed" else None
    return {**unfinished(request, heading, status), "error": error}


def finished(
    request: Request,
    heading: Heading,
    reply: Reply,
    prompt: PromptTokens,
    items: Sequence[Mapping[str, Any]],
    *,
    is_cut: bool = False,
) -> dict[str, Any]:
    """The whole answer; `is_cut`: somebody ended the reply before its end."""
    body = {**_body(request, reply, prompt, heading), "output": list(items)}
    if is_cut:
        body |= {"status": "incomplete", "incomplete_details": {"reason": "cancelled"}}
    return body


def _body(request: Request, reply: Reply, prompt: PromptTokens, heading: Heading) -> dict[str, Any]:
    """All but the output."""
    sampling = replace(request.sampling, logprobs=None)
    body = answer(replace(request, sampling=sampling), [reply], prompt, heading)
    return body | {
        "background": request.background,
        "top_logprobs": request.sampling.logprobs or 0,
    }


class ResponseStream:
    """What one reader of a response gets."""

    def __init__(self, request: Request, names: Names, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._items = OutputItems(names)
        self._number = 0
        self._has_text = False

    def begin(self, body: Mapping[str, Any]) -> list[Event]:
        """`body`: the response before its reply."""
        return self._numbered(
            [
                {"type": "response.created", "response": dict(body)},
                {"type": "response.in_progress", "response": dict(body)},
            ]
        )

    def tokens(self, cutter: ReplyPieces, tokens: Reply) -> list[Event]:
        """For what these tokens of the reply released.

        Where logprobs are requested, it is token by token: which delta has which must not depend on how many
        tokens came at once.
        """
        if self._request.sampling.logprobs is None:
            return self.pieces(
                piece
                for text, part in zip(tokens.texts, tokens.parts, strict=True)
                for piece in cutter.push(text, part)
            )
        found: list[Event] = []
        for number in range(len(tokens.token_ids)):
            token = _token(tokens, number)
            pieces = cutter.push(token.texts[0], token.parts[0])
            found += self._numbered(self._items.push(pieces, self._rows(token)))
        return found

    def pieces(self, pieces: Iterable[Piece]) -> list[Event]:
        return self._numbered(self._items.push(pieces))

    def items(self, *, is_whole: bool) -> list[dict[str, Any]]:
        """The output, at the end of the reply."""
        self._numbered(self._items.end(is_whole=is_whole))
        return self._items.items

    def end(self, body: Mapping[str, Any]) -> list[Event]:
        """`body`: the whole answer."""
        status = body["status"]
        last = {
            "type": LAST_EVENTS.get(status, "response.incomplete"),
            "response": dict(body),
        }
        return self._numbered([*self._items.end(is_whole=status == "completed"), last])

    def failed(self, body: Mapping[str, Any]) -> list[Event]:
        """There will be no answer; `body` says why."""
        return self._numbered([{"type": "response.failed", "response": dict(body)}])

    def error(self, code: str | None, message: str, param: str | None = None) -> list[Event]:
        return self._numbered([{"type": "error", "code": code, "message": message, "param": param}])

    def _rows(self, tokens: Reply) -> list[dict[str, Any]]:
        rows = logprob_rows(tokens, self._tokenizer, is_first=not self._has_text)
        self._has_text = self._has_text or bool(rows)
        return rows

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        found = []
        for each in events:
            found.append({**each, "sequence_number": self._number})
            self._number += 1
        return found


def _token(tokens: Reply, number: int) -> Reply:
    """One of them."""
    only = slice(number, number + 1)
    return Reply(
        tokens.token_ids[only],
        tokens.texts[only],
        tokens.finish,
        tokens.parts[only],
        tokens.logprobs[only],
    )
