"""Conversations as text: a line of JSON with messages in the form of OpenAI's API, or Markdown for people.

    {"id": "trip", "metadata": {}, "tools": [], "template_options": {}, "messages": [
        {"role": "user", "content": "Where to?"}, {"role": "assistant", "content": "To Oslo."}]}

A line is written message by message and so needs no memory for its length.  What the model has thought and
which tools it called is in the text of its reply, as it wrote it; what a client gave is in
`reasoning_content` and `tool_calls`.  A line that is read may have nothing but `messages`, as files for
fine-tuning do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pensieve.client import ConversationState, Message
from pensieve.errors import InvalidArgument
from pensieve.service.openai.chat_messages import take_messages
from pensieve.service.openai.fields import Fields, check_json
from pensieve.service.openai.json_text import LINE_ENDS, read_json
from pensieve.text.message import Message as TemplateMessage


@dataclass(frozen=True)
class Given:
    """A conversation that was read."""

    conversation_id: str | None  # None: the line has none
    metadata: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    template_options: Mapping[str, Any]
    system_prompt: str
    messages: Sequence[Mapping[str, Any]]  # behind the system prompt


def line_of(state: ConversationState, messages: Iterable[Message]) -> Iterator[str]:
    """The pieces of a line; its end is the last."""
    head = {
        "id": state.conversation_id,
        "metadata": state.metadata,
        "tools": state.tools,
        "template_options": state.template_options,
    }
    yield _json(head)[:-1] + ', "messages": ['
    separator = ""
    for each in messages:
        if each.role == "system" and not each.text:
            continue  # it stands for the tokens of tools
        yield separator + _json(openai_message(each))
        separator = ", "
    yield "]}\n"


def openai_message(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.thinking:
        made["reasoning_content"] = message.thinking
    if message.tool_calls:
        made["tool_calls"] = list(message.tool_calls)
    if message.tool_call_id or message.role == "tool":
        made["tool_call_id"] = message.tool_call_id
    if message.name:
        made["name"] = message.name
    return made


def given_of(line: str | bytes) -> Given:
    """What a line says; InvalidArgument names what is wrong with it."""
    fields = Fields(read_json(line, "the line"), "")
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
    messages = list(take_messages(Fields({"messages": given}))) if given else []
    system_prompt = ""
    if messages and messages[0].role in ("system", "developer"):
        system_prompt = messages.pop(0).content
    return Given(
        conversation_id, metadata, tools, options, system_prompt, list(map(_for_sdk, messages))
    )


def _for_sdk(message: TemplateMessage) -> dict[str, Any]:
    """A message as `Conversation.create` takes it."""
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
    """The pieces of a text for people."""
    yield f"# {state.conversation_id}\n"
    for each in messages:
        if each.text or each.role != "system":
            yield f"\n## {each.role}\n\n{each.text.rstrip()}\n"


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(LINE_ENDS)
