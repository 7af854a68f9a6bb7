"""Calls of tools that clients give with a message of the assistant, from the wire and back.

Their arguments are text, the JSON of an object, which is read on the loop: so those of one request have
ARGUMENTS_BYTES_MAX together, which take some twenty milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pensieve.errors import InvalidArgument
from pensieve.service.grpc.sizes import TOOL_CALLS_BYTES_MAX as ARGUMENTS_BYTES_MAX
from pensieve.service.openai.fields import check_json
from pensieve.service.openai.json_text import read_json
from pensieve.text import ToolCall
from pensieve.v1 import conversation_pb2 as pb


def check_arguments(messages: Iterable[pb.NewMessage]) -> None:
    """Refuse more of them than one request may have, before any is read."""
    if sum(len(c.arguments) for each in messages for c in each.tool_calls) > ARGUMENTS_BYTES_MAX:
        raise InvalidArgument(
            "messages", f"arguments of tool calls have {ARGUMENTS_BYTES_MAX:,} bytes together"
        )


def calls_of(message: pb.NewMessage, where: str) -> tuple[ToolCall, ...]:
    """The calls of one message; `where` is its name in errors."""
    calls = []
    for number, each in enumerate(message.tool_calls):
        path = f"{where}.tool_calls[{number}]"
        if not each.name:
            raise InvalidArgument(f"{path}.name", "is missing")
        arguments: Any = {}
        if each.arguments.strip():
            arguments = read_json(each.arguments, f"{path}.arguments")
            check_json(arguments, f"{path}.arguments")
        if not isinstance(arguments, dict):
            raise InvalidArgument(f"{path}.arguments", "must be the JSON of an object")
        calls.append(ToolCall(each.name, arguments, each.id or None))
    return tuple(calls)


def stored_calls(extra: Mapping[str, Any]) -> list[pb.ToolCall]:
    """Of a message of the history, from what the store keeps beside its text."""
    return [
        pb.ToolCall(
            id=each["id"] or "",
            name=each["name"],
            arguments=json.dumps(each["arguments"], ensure_ascii=False),
        )
        for each in extra.get("tool_calls", ())
    ]
