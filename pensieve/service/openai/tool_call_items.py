"""A reply cut into what it thought, its text and its calls; and calls as the members of an answer.

Calls are looked for where the request brought tools; else they stay text.  Their ids follow from the answer's
id, so an answer that is made again has the same ones.

A call that broke off (`text.reply_pieces`) is in the answer with as much of its arguments as there is: a
client that streams has seen them too.  Only an answer that ends with a whole call says that it waits for
tools.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pensieve.core.turn import FinishReason
from pensieve.text.parts import Part
from pensieve.text.reply_pieces import Piece, ReplyPieces, Text, Thinking
from pensieve.text.tool_calls import CallArguments, CallBegan, CallStyle


class SampledCall(NamedTuple):
    """A call as it was sampled."""

    name: str
    arguments: str
    is_whole: bool


class CutReply(NamedTuple):
    """One choice."""

    thinking: str
    content: str
    calls: Sequence[SampledCall]
    ends_with_call: bool

    def finish_reason(self, finish: FinishReason) -> str:
        """As a chat completion names it."""
        waits = self.ends_with_call and finish is FinishReason.STOP
        return "tool_calls" if waits else finish.value


def cut_reply(
    texts: Sequence[str],
    parts: Sequence[Part],
    style: CallStyle | None,
    tools: Sequence[Mapping[str, Any]],
) -> CutReply:
    """What the tokens of a reply released, each with its part (none: all is text)."""
    cutter = ReplyPieces(style if tools else None, tools)
    pieces: list[Piece] = []
    for text, part in zip(texts, parts or [Part.TEXT] * len(texts), strict=True):
        pieces += cutter.push(text, part)
    pieces += cutter.end()
    arguments: list[list[str]] = [[] for _ in range(cutter.num_calls)]
    for each in pieces:
        if isinstance(each, CallArguments):
            arguments[each.index].append(each.text)
    whole = {each.index for each in cutter.calls}
    calls = [
        SampledCall(each.name, "".join(arguments[each.index]), each.index in whole)
        for each in pieces
        if isinstance(each, CallBegan)
    ]
    thinking = "".join(each.text for each in pieces if isinstance(each, Thinking))
    content = "".join(each.text for each in pieces if isinstance(each, Text))
    return CutReply(thinking, content, calls, cutter.ends_with_call)


def call_id(answer_id: str, choice: int, index: int) -> str:
    """The id of a call; the same whenever the answer is made."""
    words = f"{answer_id}/{choice}/{index}".encode()
    return f"call_{hashlib.blake2b(words, digest_size=12).hexdigest()}"


def message_calls(
    calls: Sequence[SampledCall], answer_id: str, choice: int
) -> list[dict[str, Any]]:
    """As the message of a chat completion has them."""
    return [
        {
            "id": call_id(answer_id, choice, n),
            "type": "function",
            "function": {"name": each.name, "arguments": each.arguments},
        }
        for n, each in enumerate(calls)
    ]


def call_items(calls: Sequence[SampledCall], answer_id: str) -> list[dict[str, Any]]:
    """As the output of a response has them."""
    ids = [call_id(answer_id, 0, n) for n in range(len(calls))]
    return [
        {
            "id": f"fc_{each_id.removeprefix('call_')}",
            "type": "function_call",
            "call_id": each_id,
            "name": each.name,
            "arguments": each.arguments,
            "status": "completed" if each.is_whole else "incomplete",
        }
        for each_id, each in zip(ids, calls, strict=True)
    ]
