"""Read messages and tools of a chat completion, and the input of a response.

Content is a string, or a list of text parts, which are joined with line ends. Assistant messages may have
thinking (`reasoning_content`) and tool calls. Three groups of fields are ignored: fields that servers add to
a message (`annotations`, a null `refusal`), fields that clients add (`id`, `provider_specific_fields` of
LiteLLM), and cache markers for other providers (`cache_control`).

The input of a response may have several items for one assistant turn, which become one message:

    reasoning  message  function_call  function_call     one assistant message
    function_call_output  function_call_output           two tool messages

A function call joins the assistant message directly before it. An assistant message joins the reasoning
directly before it. All other items begin a new message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pensieve.api.json_fields import Fields, Refusal, check_json, quoted, read_json
from pensieve.api.openai.formats import ToolRules, take_choice
from pensieve.text.message import MESSAGES_MAX, ROLES, Message, ToolCall

CHAT_PARTS = frozenset({"text"})
ADDED = "provider_specific_fields"
OWN_FIELDS = ("annotations", "id", "cache_control", ADDED)  # of a message; ignored
INPUT_PARTS = frozenset({"input_text", "output_text", "text"})
REASONING_PARTS = frozenset({"reasoning_text"})
INPUT_ROLES = ("system", "developer", "user", "assistant")


def take_messages(fields: Fields) -> tuple[tuple[Message, ...], str]:
    """Read the messages. With prefill, return the text of the last message separately."""
    given = fields.items("messages")
    if given is None:
        raise Refusal(fields.where("messages"), "is required", "missing_required_parameter")
    if not 1 <= len(given) <= MESSAGES_MAX:
        raise Refusal(fields.where("messages"), f"a request has 1 to {MESSAGES_MAX} messages")
    where = fields.where("messages")
    messages = messages_of(given, where)
    if not (_take_continues(fields) or _is_prefix(given[-1])):
        return messages, ""
    return messages[:-1], reply_begins(messages, f"{where}[{len(given) - 1}]")


def _take_continues(fields: Fields) -> bool:
    """Read vLLM's fields for prefill. Return whether the reply continues the last message."""
    continues = fields.flag("continue_final_message")
    if fields.flag("add_generation_prompt", not continues) is continues:
        problem = "must be false if continue_final_message is true, and true otherwise"
        raise Refusal(fields.where("add_generation_prompt"), problem, "unsupported_parameter")
    return continues


def _is_prefix(given: Any) -> bool:
    """Return whether a message has `prefix`, which Mistral and DeepSeek use for prefill."""
    return isinstance(given, Mapping) and given.get("prefix") is True


def reply_begins(messages: Sequence[Message], where: str) -> str:
    """Return the text of the last message, which the reply continues."""
    last = messages[-1]
    if last.role != "assistant" or len(messages) == 1:
        raise Refusal(
            where, "cannot be continued: only an assistant message after other messages can"
        )
    if last.tool_calls or last.thinking:
        problem = "cannot be continued: it has thinking or tool calls, and only text can"
        raise Refusal(where, problem, "unsupported_parameter")
    return last.content


def messages_of(given: Sequence[Any], where: str) -> tuple[Message, ...]:
    """Read messages. An error names the first invalid message."""
    last = len(given) - 1
    return tuple(
        _message(Fields(each, f"{where}[{n}]"), may_begin_reply=n == last)
        for n, each in enumerate(given)
    )


def _message(fields: Fields, *, may_begin_reply: bool) -> Message:
    role = fields.needed_text("role")
    if role not in ROLES:
        raise Refusal(fields.where("role"), f"{quoted(role)} is not one of {', '.join(ROLES)}")
    calls: tuple[ToolCall, ...] = ()
    thinking = tool_call_id = None
    if role == "assistant":
        calls = _tool_calls(fields)
        thinking = _thinking(fields)
        fields.only("refusal", "", problem="an earlier refusal is not supported")
    elif role == "tool":
        tool_call_id = fields.needed_text("tool_call_id")
    if not (calls or thinking) and "content" not in fields:
        raise Refusal(fields.where("content"), "is required", "missing_required_parameter")
    content = take_content(fields, "content", CHAT_PARTS)
    name = fields.text("name")
    if fields.flag("prefix") and not may_begin_reply:
        raise Refusal(
            fields.where("prefix"), "is only allowed in the last message", "unsupported_parameter"
        )
    for each in OWN_FIELDS:
        fields.take(each)
    fields.end()
    return Message(role, content, thinking, calls, tool_call_id, name)


def _thinking(fields: Fields) -> str | None:
    """Read thinking under either of its names."""
    first, second = fields.text("reasoning_content"), fields.text("reasoning")
    return first if first is not None else second


def take_content(fields: Fields, name: str, kinds: frozenset[str]) -> str:
    """Read text, or parts of these kinds joined with line ends. Empty if absent."""
    given = fields.take(name)
    if given is None or isinstance(given, str):
        return given or ""
    where = fields.where(name)
    if not isinstance(given, list | tuple):
        raise Refusal(where, "must be a string or a list of parts", "invalid_type")
    return "\n".join(_part(Fields(each, f"{where}[{n}]"), kinds) for n, each in enumerate(given))


def _part(fields: Fields, kinds: frozenset[str]) -> str:
    kind = fields.needed_text("type")
    if kind not in kinds:
        problem = f"{quoted(kind)} is not supported: content is text"
        raise Refusal(fields.where("type"), problem, "unsupported_parameter")
    text = fields.needed_text("text")
    fields.take("annotations")
    fields.take("logprobs")  # no effect: from an answer that the client sends back
    fields.take("cache_control")
    fields.end()
    return text


def _tool_calls(fields: Fields) -> tuple[ToolCall, ...]:
    given, where = fields.items("tool_calls") or (), fields.where("tool_calls")
    return tuple(_tool_call(Fields(each, f"{where}[{n}]")) for n, each in enumerate(given))


def _tool_call(fields: Fields) -> ToolCall:
    call_id = fields.needed_text("id")
    fields.only("type", "function")
    fields.take("index")  # no effect: from a stream that the client has assembled
    function = fields.fields("function")
    if function is None:
        raise Refusal(fields.where("function"), "is required", "missing_required_parameter")
    call = ToolCall(function.needed_text("name"), take_arguments(function), call_id)
    function.take(ADDED)
    function.end()
    fields.take(ADDED)
    fields.end()
    return call


def take_arguments(fields: Fields) -> Mapping[str, Any]:
    """Read the arguments of a tool call: a JSON object as text. Empty text means an empty object."""
    text, where = fields.needed_text("arguments"), fields.where("arguments")
    if not text.strip():
        return {}
    found = read_json(text, where)
    check_json(found, where)
    if not isinstance(found, dict):
        raise Refusal(where, "must be a JSON object as text")
    return found


def take_tools(fields: Fields, *, is_nested: bool) -> ToolRules:
    """Read the tools and the rules for calls. Return the tools in the shape of a chat completion.

    `is_nested`: the description of a function is in the tool's member `function`, not in the tool itself.
    """
    given, where = fields.items("tools") or (), fields.where("tools")
    strict: dict[int, str] = {}
    tools = tuple(
        _tool(Fields(each, f"{where}[{n}]"), is_nested, n, strict) for n, each in enumerate(given)
    )
    return take_choice(fields, ToolRules(tools, strict), is_nested=is_nested)


def _tool(
    fields: Fields, is_nested: bool, number: int, strict: dict[int, str]
) -> Mapping[str, Any]:
    """Read a tool. If it is strict, add its index and path to `strict`."""
    kind = fields.needed_text("type")
    if kind != "function":
        problem = f"{quoted(kind)} is not supported: a tool is a function"
        raise Refusal(fields.where("type"), problem, "unsupported_parameter")
    function = fields.fields("function") if is_nested else fields
    if function is None:
        raise Refusal(fields.where("function"), "is required", "missing_required_parameter")
    described: dict[str, Any] = {"name": function.needed_text("name")}
    if (description := function.text("description")) is not None:
        described["description"] = description
    if (parameters := function.object("parameters")) is not None:
        described["parameters"] = parameters
    if function.flag("strict"):
        strict[number] = function.where("strict")
    function.end()
    fields.take("cache_control")
    fields.end()
    return {"type": "function", "function": described}


# -- the input of a response --


def take_input(fields: Fields) -> tuple[Message, ...]:
    """Read the instructions as a system message, and the input."""
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
    """Append items to these messages. `where`: the name of the list in the body."""
    for number, each in enumerate(given):
        _add(messages, Fields(each, f"{where}[{number}]"))
        if len(messages) > MESSAGES_MAX:
            raise Refusal(where, f"a request has at most {MESSAGES_MAX} messages")


def _add(messages: list[Message], fields: Fields) -> None:
    """Add an item as a new message, or to the last assistant message."""
    kind = fields.text("type") or "message"
    fields.text("id")
    fields.text("status")
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if kind == "message":
        message = _item_message(fields)
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


def _item_message(fields: Fields) -> Message:
    role = fields.needed_text("role")
    if role not in INPUT_ROLES:
        raise Refusal(
            fields.where("role"), f"{quoted(role)} is not one of {', '.join(INPUT_ROLES)}"
        )
    fields.text("phase")
    return Message(role, _needed_content(fields, "content"))


def _needed_content(fields: Fields, name: str) -> str:
    if name not in fields:
        raise Refusal(fields.where(name), "is required", "missing_required_parameter")
    return take_content(fields, name, INPUT_PARTS)


def _call(fields: Fields) -> ToolCall:
    name = fields.needed_text("name")
    return ToolCall(name, take_arguments(fields), fields.needed_text("call_id"))


def _reasoning(fields: Fields) -> str:
    """Read the text of reasoning. A summary is ignored, because it is not the model's thinking."""
    fields.only("encrypted_content", "", problem="encrypted reasoning cannot be read")
    fields.items("summary")
    return take_content(fields, "content", REASONING_PARTS)
