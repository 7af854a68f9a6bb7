"""Messages as a chat template sees them: plain values, but for their roles, which count as the template's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pensieve.text.message import ROLES, Arguments, Message, ToolCall, plain, plain_text
from pensieve.text.template_text import written

REPLY = "\udfff"  # stands in for the reply before the messages of a delta

# A template may join a role to a control token ("<|" + role + "|>"), so roles are marked as its own text.
ROLE = {role: written(role) for role in ROLES}


def skeleton(answer: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The exchange that stands in for all earlier turns; if `answer` is a tool's, the reply calls it."""
    reply: dict[str, Any] = {"role": ROLE["assistant"], "content": REPLY}
    if answer is not None:
        call = ToolCall(answer.get("name", "f"), {}, answer.get("tool_call_id"))
        reply["tool_calls"] = [_call_as_template_sees(call)]
    return [{"role": ROLE["user"], "content": "."}, reply]


def as_template_sees(message: Message) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "role": ROLE[message.role],
        "content": plain_text(message.content, "content"),
    }
    if message.tool_calls:
        seen["tool_calls"] = [_call_as_template_sees(call) for call in message.tool_calls]
        seen["content"] = seen["content"] or None
    if message.thinking is not None:
        thinking = plain_text(message.thinking, "thinking")
        seen |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thinking)
    if message.tool_call_id is not None:
        seen["tool_call_id"] = plain_text(message.tool_call_id, "tool_call_id")
    if message.name is not None:
        seen["name"] = plain_text(message.name, "name")
    return seen


def _call_as_template_sees(call: ToolCall) -> dict[str, Any]:
    function = {
        "name": plain_text(call.name, "tool_calls"),
        "arguments": Arguments(plain(call.arguments, "tool_calls")),
    }
    seen: dict[str, Any] = {"type": "function", "function": function}
    if call.id is not None:
        seen["id"] = plain_text(call.id, "tool_calls")
    return seen
