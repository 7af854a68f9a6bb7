"""Write conversations as JSON lines or Markdown, and read JSON lines.

    {"id": "trip", "metadata": {}, "tools": [], "template_options": {}, "messages": [
        {"role": "user", "content": "Where to?"}, {"role": "assistant", "content": "To Oslo."}]}

A line contains one conversation, with messages in the format of OpenAI's API. It is written message by
message, so its length is not limited by memory. The model's thinking is in `reasoning_content`, its calls in
`tool_calls`. If a call has no id, it gets the id that its answer names, or an id made from its position.
Exporting an imported line gives the same line again. For an import, only `messages` is required, as in files
for fine-tuning."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pensieve.api.json_fields import LINE_ENDS, Fields, check_json, read_json
from pensieve.api.openai.messages import messages_of
from pensieve.client import ConversationState, Message
from pensieve.errors import InvalidArgument
from pensieve.text.message import Message as TemplateMessage


@dataclass(frozen=True)
class ParsedConversation:
    """A conversation that was read from a line."""

    conversation_id: str | None  # None: the line has no id
    metadata: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    template_options: Mapping[str, Any]
    system_prompt: str
    messages: Sequence[Mapping[str, Any]]  # after the system prompt


def line_of(state: ConversationState, messages: Iterable[Message]) -> Iterator[str]:
    """Yield the pieces of a line, including the newline."""
    head = {
        "id": state.conversation_id,
        "metadata": state.metadata,
        "tools": state.tools,
        "template_options": state.template_options,
    }
    yield _json(head)[:-1] + ', "messages": ['
    separator = ""
    for each in _with_ids(messages):
        yield separator + _json(each)
        separator = ", "
    yield "]}\n"


def _with_ids(messages: Iterable[Message]) -> Iterator[dict[str, Any]]:
    """Yield messages in the format of OpenAI's API, with ids for calls that have none."""
    held: list[dict[str, Any]] = []  # a message with calls, and the answers to it so far
    for number, each in enumerate(messages):
        if each.role == "system" and not each.text:
            continue  # an empty system message exists only for the tokens of the tools
        if held and each.role != "tool":
            yield from _with_call_ids(held)
            held = []
        made = openai_message(each)
        if held or any(not call["id"] for call in each.tool_calls):
            made["number"] = number
            held.append(made)
        else:
            yield made
    yield from _with_call_ids(held)


def _with_call_ids(held: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a message with calls and the answers to it. Calls without an id get one."""
    if not held:
        return
    calls = held[0]["tool_calls"]
    known = {call["id"] for call in calls}
    answers = [each["tool_call_id"] for each in held[1:] if each["tool_call_id"]]
    unclaimed = [each for each in answers if each not in known]
    for index, call in enumerate(calls):
        if not call["id"]:
            call["id"] = unclaimed.pop(0) if unclaimed else f"call_{held[0]['number']}_{index}"
    for each in held:
        del each["number"]
        yield each


def openai_message(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.thinking:
        made["reasoning_content"] = message.thinking
    if message.tool_calls:
        made["tool_calls"] = [dict(each) for each in message.tool_calls]
    if message.tool_call_id or message.role == "tool":
        made["tool_call_id"] = message.tool_call_id
    if message.name:
        made["name"] = message.name
    return made


def parse_line(line: str | bytes) -> ParsedConversation:
    """Parse a line. Raises InvalidArgument, which names the wrong field."""
    # A line has no limit of its own. The daemon limits the size of a conversation.
    fields = Fields(read_json(line, "the line", math.inf), "")
    conversation_id = fields.text("id")
    metadata, options = fields.object("metadata") or {}, fields.object("template_options") or {}
    tools, given = fields.items("tools") or (), fields.items("messages") or ()
    fields.end()
    for name, value in (("metadata", metadata), ("template_options", options), ("tools", tools)):
        check_json(value, name)
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidArgument(f"tools[{number}]", "must be a JSON object")
    for number, each in enumerate(given):
        check_json(each, f"messages[{number}]")
    messages = list(messages_of(given, "messages"))
    system_prompt = ""
    if messages and messages[0].role in ("system", "developer"):
        system_prompt = messages.pop(0).content
    return ParsedConversation(
        conversation_id, metadata, tools, options, system_prompt, list(map(_for_sdk, messages))
    )


def _for_sdk(message: TemplateMessage) -> dict[str, Any]:
    """Return a message in the form that `Conversation.create` accepts."""
    calls = [
        {
            "id": call.id or "",
            "function": {"name": call.name, "arguments": _json(call.arguments)},
        }
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": message.content,
        "tool_call_id": message.tool_call_id,
        "tool_calls": calls,
        "reasoning_content": message.thinking,
        "name": message.name,
    }


def markdown_of(state: ConversationState, messages: Iterable[Message]) -> Iterator[str]:
    """Yield the pieces of a conversation in Markdown."""
    yield f"# {state.conversation_id}\n"
    for each in messages:
        if each.text or each.role != "system":
            yield f"\n## {each.role}\n\n{each.text.rstrip()}\n"


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(LINE_ENDS)
