"""The input of a response, as messages.

The API cuts what an assistant did in one turn into items: its reasoning, its text, each of its calls.  A
template wants them together again:

    reasoning  message  function_call  function_call     one assistant's message
    function_call_output  function_call_output           a tool's message each

So an assistant's message grows until another role follows.  Reasoning begins a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pensieve.service.openai.chat_messages import take_arguments, take_content
from pensieve.service.openai.fields import Fields, Refusal, quoted
from pensieve.text.message import MESSAGES_MAX, Message, ToolCall

TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
REASONING_PARTS = frozenset({"reasoning_text"})
ROLES = ("system", "developer", "user", "assistant")


def take_input(fields: Fields) -> tuple[Message, ...]:
    """With the instructions in front, as a system prompt."""
    instructions = fields.text("instructions")
    messages = [] if instructions is None else [Message("system", instructions)]
    given, where = fields.take("input"), fields.where("input")
    if given is None:
        raise Refusal(where, "is required", "missing_required_parameter")
    if isinstance(given, str):
        return (*messages, Message("user", given))
    if not isinstance(given, list | tuple):
        raise Refusal(where, "must be a string or a list of items", "invalid_type")
    if not given:
        raise Refusal(where, "must not be empty")
    add_items(messages, given, where)
    return tuple(messages)


def add_items(messages: list[Message], given: Sequence[Any], where: str) -> None:
    """Behind these messages; `where`: what the body calls the list."""
    for number, each in enumerate(given):
        _add(messages, Fields(each, f"{where}[{number}]"))
        if len(messages) > MESSAGES_MAX:
            raise Refusal(where, f"a request has at most {MESSAGES_MAX} messages")


def _add(messages: list[Message], fields: Fields) -> None:
    """One item: a message of its own, or more of the assistant's last."""
    kind = fields.text("type") or "message"
    fields.text("id")
    fields.text("status")
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if kind == "message":
        message = _message(fields)
        is_reasoning = last is not None and not (last.content or last.tool_calls)
        if last is not None and is_reasoning and message.role == "assistant":
            messages[-1] = replace(last, content=message.content)
        else:
            messages.append(message)
    elif kind == "function_call":
        call = _call(fields)
        if last is None:
            messages.append(Message("assistant", tool_calls=(call,)))
        else:
            messages[-1] = replace(last, tool_calls=(*last.tool_calls, call))
    elif kind == "function_call_output":
        call_id = fields.needed_text("call_id")
        output = _needed_content(fields, "output")
        messages.append(Message("tool", output, tool_call_id=call_id))
    elif kind == "reasoning":
        thinking = _reasoning(fields)
        if thinking:
            messages.append(Message("assistant", thinking=thinking))
    else:
        problem = f"{quoted(kind)} is not supported"
        raise Refusal(fields.where("type"), problem, "unsupported_parameter")
    fields.end()


def _message(fields: Fields) -> Message:
    role = fields.needed_text("role")
    if role not in ROLES:
        raise Refusal(fields.where("role"), f"{quoted(role)} is not one of {', '.join(ROLES)}")
    fields.text("phase")
    return Message(role, _needed_content(fields, "content"))


def _needed_content(fields: Fields, name: str) -> str:
    if name not in fields:
        raise Refusal(fields.where(name), "is required", "missing_required_parameter")
    return take_content(fields, name, TEXT_PARTS)


def _call(fields: Fields) -> ToolCall:
    name = fields.needed_text("name")
    return ToolCall(name, take_arguments(fields), fields.needed_text("call_id"))


def _reasoning(fields: Fields) -> str:
    """Its text; a summary of it is not what the model thought."""
    fields.only("encrypted_content", "", problem="encrypted reasoning cannot be read")
    fields.items("summary")
    return take_content(fields, "content", REASONING_PARTS)
