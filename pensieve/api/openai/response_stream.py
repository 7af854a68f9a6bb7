"""Stream a response as events with sequence numbers.

    response.created  response.in_progress
    the items of the output, one after the other
        Thinking    reasoning        added  part added  text delta…  text done  part done  done
        Text        message          added  part added  text delta…  text done  part done  done
        a call      function_call    added              arguments delta…  arguments done   done
    response.completed | response.incomplete | response.failed | error

The first two events and the last event have the whole response in its current state. An item ends when an
item of another kind begins; a call also ends when the next call begins. So only the last item is open. If the
reply is empty, there is a message without text.

The logprobs of tokens are in the delta with their text. Text is withheld if it may begin a call. If it turns
out to be text, its logprobs come with the next delta. If it does begin a call, its logprobs are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from pensieve.api.openai.answer import Heading, logprob_rows, response_body
from pensieve.api.openai.request import ParsedRequest
from pensieve.conversations.live_turn import NO_TOKENS, PromptTokens, ReplyTokens
from pensieve.text.reply_pieces import (
    CallArguments,
    CallBegan,
    Piece,
    ReplyPieces,
    Text,
    Thinking,
    merged,
)
from pensieve.text.tokenizer import Tokenizer

NO_PROMPT = PromptTokens(0)
LAST_EVENTS = {
    "completed": "response.completed",
    "failed": "response.failed",
    "cancelled": "response.failed",
}
ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})


def unfinished_body(request: ParsedRequest, heading: Heading, status: str) -> dict[str, Any]:
    """Return the body of a response that has no reply yet."""
    body = response_body(request, NO_TOKENS, NO_PROMPT, heading, [])
    return {**body, "status": status, "incomplete_details": None, "usage": None}


def failed_body(
    request: ParsedRequest, heading: Heading, code: str, message: str, status: str = "failed"
) -> dict[str, Any]:
    error = {"code": code, "message": message} if status == "failed" else None
    return {**unfinished_body(request, heading, status), "error": error}


def finished_body(
    request: ParsedRequest,
    heading: Heading,
    reply: ReplyTokens,
    prompt: PromptTokens,
    items: Sequence[Mapping[str, Any]],
    *,
    is_cut: bool = False,
) -> dict[str, Any]:
    """Return the whole body. `is_cut`: the reply was ended early."""
    body = response_body(request, reply, prompt, heading, list(items))
    if is_cut:
        body |= {"status": "incomplete", "incomplete_details": {"reason": "cancelled"}}
    return body


class ResponseStream:
    def __init__(
        self, request: ParsedRequest, names: Names, tokenizer: Tokenizer, cutter: ReplyPieces
    ) -> None:
        self._request, self._tokenizer, self._cutter = request, tokenizer, cutter
        self._items = OutputItems(names)
        self._number = 0
        self._has_text = False

    def begin(self, body: Mapping[str, Any]) -> list[Event]:
        return self._number_events(
            [
                {"type": "response.created", "response": dict(body)},
                {"type": "response.in_progress", "response": dict(body)},
            ]
        )

    def tokens(self, tokens: ReplyTokens) -> list[Event]:
        """Return the events for these tokens of the reply.

        With logprobs, tokens are handled one by one, so that the events do not depend on how many tokens
        arrive at once.
        """
        if self._request.sampling.logprobs is None:
            return self.pieces(tokens.pieces(self._cutter))
        found: list[Event] = []
        for number in range(len(tokens.token_ids)):
            token = _token(tokens, number)
            pieces = token.pieces(self._cutter)
            found += self._number_events(self._items.push(pieces, self._rows(token)))
        return found

    def withheld_events(self, tail: ReplyTokens) -> list[Event]:
        """Return the events for text that was withheld until the end of the reply."""
        return self.pieces([*tail.pieces(self._cutter), *self._cutter.end()])

    def pieces(self, pieces: Iterable[Piece]) -> list[Event]:
        return self._number_events(self._items.push(pieces))

    def items(self, *, is_whole: bool) -> list[dict[str, Any]]:
        self._number_events(self._items.end(is_whole=is_whole))
        return self._items.items

    def end(self, body: Mapping[str, Any]) -> list[Event]:
        status = body["status"]
        last = {
            "type": LAST_EVENTS.get(status, "response.incomplete"),
            "response": dict(body),
        }
        return self._number_events([*self._items.end(is_whole=status == "completed"), last])

    def failed(self, body: Mapping[str, Any]) -> list[Event]:
        """Return the event of a failed response. `body` has the reason."""
        return self._number_events([{"type": "response.failed", "response": dict(body)}])

    def error(self, code: str | None, message: str, param: str | None = None) -> list[Event]:
        return self._number_events(
            [{"type": "error", "code": code, "message": message, "param": param}]
        )

    def _rows(self, tokens: ReplyTokens) -> list[dict[str, Any]]:
        rows = logprob_rows(tokens, self._tokenizer, is_first=not self._has_text)
        self._has_text = self._has_text or bool(rows)
        return rows

    def _number_events(self, events: Iterable[Event]) -> list[Event]:
        found = []
        for each in events:
            found.append({**each, "sequence_number": self._number})
            self._number += 1
        return found


def _token(tokens: ReplyTokens, number: int) -> ReplyTokens:
    only = slice(number, number + 1)
    columns = tokens.parts[only], tokens.logprobs[only]
    return ReplyTokens(tokens.token_ids[only], tokens.texts[only], tokens.finish, *columns)


Event = dict[str, Any]  # ResponseStream adds the sequence number
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class Names(Protocol):
    """Provides the ids of items."""

    def item_id(self, prefix: str, part: int = 0) -> str: ...
    def call_id(self, number: int) -> str: ...


class OutputItems:
    def __init__(self, names: Names) -> None:
        self.items: list[dict[str, Any]] = []
        self._names = names
        self._is_open = False  # the last item is open
        self._text: list[str] = []  # text of the open item
        self._rows: list[Mapping[str, Any]] = []  # logprobs of the open item
        self._waiting: list[Mapping[str, Any]] = []  # logprobs for the next delta of text
        self._num_calls = 0

    def push(
        self, pieces: Iterable[Piece], logprobs: Sequence[Mapping[str, Any]] = ()
    ) -> list[Event]:
        """Return the events for pieces that arrived together, with the logprobs of their tokens."""
        events: list[Event] = []
        self._waiting += logprobs
        for piece in merged(pieces):
            if isinstance(piece, CallBegan):
                self._waiting = []
                events += self._close("completed")
                events += self._open(_call(piece.name, self._names.call_id(self._num_calls)))
                self._num_calls += 1
            elif isinstance(piece, CallArguments):
                self._waiting = []
                events.append(self._delta("response.function_call_arguments.delta", piece.text))
            elif isinstance(piece, Thinking):
                events += self._ensure_open("reasoning")
                events.append(self._delta("response.reasoning_text.delta", piece.text))
            else:
                events += self._ensure_open("message")
                events.append(self._text_delta(piece.text))
        return events

    def end(self, *, is_whole: bool) -> list[Event]:
        """Return the last events. If `is_whole` is False, the last item is marked as incomplete."""
        events = [] if self.items else self._ensure_open("message")
        if self._waiting and self._is_open and self.items[-1]["type"] == "message":
            events.append(self._text_delta(""))
        return events + self._close("completed" if is_whole else "incomplete")

    def _ensure_open(self, kind: str) -> list[Event]:
        if self._is_open and self.items[-1]["type"] == kind:
            return []
        return self._close("completed") + self._open(
            _reasoning() if kind == "reasoning" else _message()
        )

    def _open(self, item: dict[str, Any]) -> list[Event]:
        prefix = PREFIXES[item["type"]]
        item = {"id": self._names.item_id(prefix, len(self.items)), **item}
        self.items.append(item)
        self._is_open, self._text, self._rows = True, [], []
        added = [self._event("response.output_item.added", item=_copy(item))]
        if item["type"] == "function_call":
            return added
        part = _part(item["type"], "", [])
        return [*added, self._part_event("response.content_part.added", part=part)]

    def _delta(self, kind: str, text: str) -> Event:
        self._text.append(text)
        if self.items[-1]["type"] == "function_call":
            return self._item_event(kind, delta=text)
        return self._part_event(kind, delta=text)

    def _text_delta(self, text: str) -> Event:
        rows, self._waiting = self._waiting, []
        self._rows += rows
        return {**self._delta("response.output_text.delta", text), "logprobs": rows}

    def _close(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self.items[-1], "".join(self._text)
        if item["type"] == "function_call":
            item |= {"arguments": text, "status": "completed" if _is_object(text) else "incomplete"}
            done = self._item_event(
                "response.function_call_arguments.done", arguments=text, name=item["name"]
            )
            return [done, self._event("response.output_item.done", item=_copy(item))]
        part = _part(item["type"], text, self._rows)
        item |= {"content": [part], "status": status}
        if item["type"] == "message":
            done = self._part_event("response.output_text.done", text=text, logprobs=self._rows)
        else:
            done = self._part_event("response.reasoning_text.done", text=text)
        return [
            done,
            self._part_event("response.content_part.done", part=part),
            self._event("response.output_item.done", item=_copy(item)),
        ]

    def _event(self, kind: str, **values: Any) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, **values}

    def _item_event(self, kind: str, **values: Any) -> Event:
        return self._event(kind, item_id=self.items[-1]["id"], **values)

    def _part_event(self, kind: str, **values: Any) -> Event:
        return self._item_event(kind, content_index=0, **values)


def _reasoning() -> dict[str, Any]:
    return {
        "type": "reasoning",
        "summary": [],
        "content": [],
        "encrypted_content": None,
        "status": "in_progress",
    }


def _message() -> dict[str, Any]:
    return {"type": "message", "status": "in_progress", "role": "assistant", "content": []}


def _call(name: str, call_id: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": "",
        "status": "in_progress",
    }


def _part(kind: str, text: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(rows)}


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(each) if isinstance(each, list) else each for name, each in item.items()}


def _is_object(text: str) -> bool:
    """Return whether the arguments are a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def pieces_of(items: Iterable[Mapping[str, Any]]) -> list[Piece]:
    """Return the pieces that make up these items."""
    found: list[Piece] = []
    num_calls = 0
    for item in items:
        if item["type"] == "function_call":
            found += [
                CallBegan(num_calls, item["name"]),
                CallArguments(num_calls, item["arguments"]),
            ]
            num_calls += 1
        else:
            text = "".join(part["text"] for part in item["content"])
            found.append(Thinking(text) if item["type"] == "reasoning" else Text(text))
    return found
