"""The messages of Anthropic's API, as a template takes them.

A message is a string or a list of blocks.  Neighbours of one role are read as one, and become

    system       a system message
    user         a tool's message for each `tool_result`, then a user's message with the text
    assistant    one message: thinking, text and calls

Their blocks of text are lines.  Those of the assistant are joined as they are: an answer cuts one text into
blocks where a call or thinking was between, so what a client sends back is the text that it was given.

A `tool_result` answers a `tool_use` of the assistant just before, whose tool it thereby names.  One with
`is_error` says so in its text, since templates have no other place for it.  Thinking is passed on, and the
template decides how much of it the model sees; `redacted_thinking` was another model's.

What has no meaning here (`cache_control`, `signature`, `caller`) changes nothing, and passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pensieve.service.openai import Refusal
from pensieve.service.openai.fields import Fields, quoted
from pensieve.text.message import Message, ToolCall

ROLES = ("user", "assistant", "system")
ERROR = "Error: "  # before the text of a tool's answer that is one


@dataclass(slots=True)
class RoleRun:
    """What one role says before another one does."""

    role: str
    texts: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)

    def messages(self, where: str) -> list[Message]:
        if self.role == "assistant":
            thinking = "\n\n".join(filter(None, self.thinking)) or None
            text = "".join(self.texts)
            return [Message("assistant", text, thinking, tuple(self.calls))]
        if not (self.texts or self.results):
            raise Refusal(f"{where}.content", "must not be empty")
        own = [Message(self.role, "\n".join(self.texts))] if self.texts else []
        return [*self.results, *own]


def take_messages(fields: Fields) -> tuple[Message, ...]:
    """With the system prompt in front."""
    system = _system(fields)
    given, where = fields.items("messages"), fields.where("messages")
    if given is None:
        raise Refusal(where, "is required", "missing_required_parameter")
    found: list[Message] = [] if system is None else [system]
    run: RoleRun | None = None
    calls: Mapping[str, str] = {}  # the tools that the assistant called last, by the calls' ids
    place = where
    for number, each in enumerate(given):
        place = f"{where}[{number}]"
        one = Fields(each, place)
        role = one.needed_text("role")
        if role not in ROLES:
            raise Refusal(one.where("role"), f"{quoted(role)} is not one of {', '.join(ROLES)}")
        if run is None and role == "assistant":
            raise Refusal(one.where("role"), "the first message is the user's")
        if run is not None and role != run.role:
            found += run.messages(f"{where}[{number - 1}]")
            if run.role == "assistant":
                calls = {call.id: call.name for call in run.calls if call.id is not None}
        if run is None or role != run.role:
            run = RoleRun(role)
        _take_content(one, run, calls)
        one.end()
    if run is None:
        raise Refusal(where, "at least one message is required")
    if run.role == "assistant":
        problem = "the last message is the user's: a reply cannot be begun for the model"
        raise Refusal(place, problem, "unsupported_parameter")
    return (*found, *run.messages(place))


def _system(fields: Fields) -> Message | None:
    """None where it is empty: templates have a system prompt of their own, or none."""
    run = RoleRun("system")
    if "system" in fields:
        _take_content(fields, run, {}, "system")
    text = "\n".join(run.texts)
    return Message("system", text) if text else None


def _take_content(
    fields: Fields, run: RoleRun, calls: Mapping[str, str], name: str = "content"
) -> None:
    given, where = fields.take(name), fields.where(name)
    if given is None:
        raise Refusal(where, "is required", "missing_required_parameter")
    if isinstance(given, str):
        run.texts.append(given)
        return
    if not isinstance(given, list | tuple):
        raise Refusal(where, "must be a string or a list of blocks", "invalid_type")
    for number, each in enumerate(given):
        block = Fields(each, f"{where}[{number}]")
        kind = block.needed_text("type")
        if kind == "text":
            run.texts.append(_text(block))
        elif run.role == "user" and kind == "tool_result":
            run.results.append(_result(block, calls))
        elif run.role == "assistant" and kind == "thinking":
            run.thinking.append(block.needed_text("thinking"))
            block.text("signature")
        elif run.role == "assistant" and kind == "redacted_thinking":
            block.text("data")
        elif run.role == "assistant" and kind == "tool_use":
            run.calls.append(_call(block))
        else:
            raise _not_text(block, kind)
        _end(block)


def _text(block: Fields) -> str:
    block.items("citations")  # of documents, which an answer of ours never had
    return block.needed_text("text")


def _call(block: Fields) -> ToolCall:
    call_id, name = block.needed_text("id"), block.needed_text("name")
    arguments = block.object("input")
    if arguments is None:
        raise Refusal(block.where("input"), "is required", "missing_required_parameter")
    block.object("caller")
    return ToolCall(name, arguments, call_id)


def _result(block: Fields, calls: Mapping[str, str]) -> Message:
    call_id = block.needed_text("tool_use_id")
    if call_id not in calls:
        problem = f"there is no tool_use {quoted(call_id)} in the assistant's message before"
        raise Refusal(block.where("tool_use_id"), problem)
    is_error = block.flag("is_error")
    given, where = block.take("content"), block.where("content")
    if given is None or isinstance(given, str):
        text = given or ""
    elif isinstance(given, list | tuple):
        text = "\n".join(
            _result_text(Fields(each, f"{where}[{n}]")) for n, each in enumerate(given)
        )
    else:
        raise Refusal(where, "must be a string or a list of blocks", "invalid_type")
    return Message(
        "tool", ERROR + text if is_error else text, tool_call_id=call_id, name=calls[call_id]
    )


def _result_text(block: Fields) -> str:
    kind = block.needed_text("type")
    if kind != "text":
        raise _not_text(block, kind)
    text = _text(block)
    _end(block)
    return text


def _not_text(block: Fields, kind: str) -> Refusal:
    problem = f"{quoted(kind)} is not supported here: content is text, and calls of tools"
    return Refusal(block.where("type"), problem, "unsupported_parameter")


def _end(block: Fields) -> None:
    block.object("cache_control")
    block.text("toolset_name")
    block.end()
