"""Parse request bodies of Anthropic's API into the same `ParsedRequest` as OpenAI's.

Some parameters have no effect on any answer (`metadata`, `cache_control`, `service_tier`). All others are
honoured, or refused with an error that names the parameter. The defaults are the model's, not Anthropic's.
Two parameters depend on the model's chat template:

    thinking               sets the template's switch for thinking, if any; `budget_tokens` has no effect
    output_config.effort   sets the template's `reasoning_effort`; `high` is the API's default and is always
                           accepted

Adjacent messages with the same role are merged. The result is, by role:

    system       a system message
    user         a tool message for each `tool_result`, then a user message with the text
    assistant    one message with thinking, text and tool calls

Text blocks are joined with line ends. Only text blocks of the assistant are joined without line ends, because
a reply has several text blocks only if calls or thinking are between them. A `tool_result` must answer a
`tool_use` of the preceding assistant message. With `is_error`, the text of the tool message begins with
"Error: ". `redacted_thinking` is dropped. If the last message is from the assistant, the reply continues its
text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pensieve.api.json_fields import Fields, Refusal, checked_fields, quoted
from pensieve.api.openai.formats import (
    FormatFields,
    ToolRules,
    refuse_form,
    require_call,
    take_output_format,
)
from pensieve.api.openai.messages import reply_begins
from pensieve.api.openai.request import ParsedRequest, RequestKind, Served, take_model
from pensieve.conversations.heads import ConversationSettings
from pensieve.sampling import STOP_STRINGS_MAX
from pensieve.text.message import Message, ToolCall

EFFORTS = ("low", "medium", "high", "xhigh", "max")
UNSUPPORTED_THREAD = "thread_unsupported_request"
SWITCHES = ("enable_thinking", "thinking")  # names of the switch for thinking in chat templates
PARAMS = {  # our names of parameters -> names in this API, for errors
    "stop": "stop_sequences",
    "template_options": "thinking",
}


def parse(
    body: Any, served: Served, fields_of: Callable[[Any], Fields] = checked_fields
) -> ParsedRequest:
    """Parse a message request. An InvalidArgument names the invalid parameter."""
    fields = fields_of(body)
    prompt, given = _prompt(fields, served), _given_sampling(fields)
    # min_tokens is 0, because max_tokens may be smaller than the default of min_tokens.
    sampling = served.defaults.with_given({"min_tokens": 0, **given})
    if problem := sampling.problem(served.vocab_size):
        raise Refusal(PARAMS.get(problem[0], problem[0]), problem[1])
    stream = fields.flag("stream")
    fields.text("service_tier")
    if (metadata := fields.fields("metadata")) is not None:
        metadata.text("user_id")
        metadata.end()
    fields.end()
    constraint = prompt.form.constraint
    begins = prompt.reply_begins
    turn = served.turn(prompt.messages, sampling, given, constraint, prompt.settings, begins)
    params = {**PARAMS, **prompt.form.params}
    return ParsedRequest(RequestKind.CHAT, prompt.model, turn, stream=stream, params=params)


def parse_count(
    body: Any, served: Served, fields_of: Callable[[Any], Fields] = checked_fields
) -> ParsedRequest:
    """Parse a request to count tokens."""
    fields = fields_of(body)
    prompt = _prompt(fields, served)
    fields.end()
    settings, begins = prompt.settings, prompt.reply_begins
    turn = served.turn(prompt.messages, served.defaults, {}, None, settings, begins)
    return ParsedRequest(RequestKind.CHAT, prompt.model, turn, params=PARAMS)


class MessagePrompt(NamedTuple):
    """The fields that message requests and token counts share."""

    model: str
    messages: tuple[Message, ...]
    settings: ConversationSettings
    form: FormatFields  # the required form of the reply
    reply_begins: str  # text that the reply continues (prefill)


def _prompt(fields: Fields, served: Served) -> MessagePrompt:
    fields.object("cache_control")
    fields.only("speed", "standard")
    fields.only("mcp_servers", [])
    _thread(fields)
    effort, form = _output(fields, served.template_options)
    model = take_model(fields, served.models)
    messages, begins = take_messages(fields)
    rules = _tools(fields)
    options = {**_thinking(fields, served.template_options), **effort}
    settings = ConversationSettings("", tools=rules.tools, template_options=options)
    form = rules.constrain(form, served.call_style)
    if begins:
        refuse_form(form)
    return MessagePrompt(model, messages, settings, form, begins)


def _thinking(fields: Fields, known: Collection[str] | None) -> dict[str, Any]:
    given = fields.fields("thinking")
    if given is None:
        return {}
    kind = given.needed_text("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        problem = f"{quoted(kind)} is not one of enabled, disabled, adaptive"
        raise Refusal(given.where("type"), problem)
    if kind != "disabled":
        given.only("display", "summarized", problem="thinking is always part of the answer")
    budget = given.integer("budget_tokens") if kind == "enabled" else None
    if budget is not None and budget < 1:
        raise Refusal(given.where("budget_tokens"), "must be at least 1")
    given.end()
    switch = next((each for each in SWITCHES if known is None or each in known), None)
    return {} if switch is None else {switch: kind != "disabled"}


def _output(fields: Fields, known: Collection[str] | None) -> tuple[dict[str, Any], FormatFields]:
    given = fields.fields("output_config")
    if given is None:
        return {}, FormatFields()
    form = take_output_format(given)
    effort, where = given.text("effort"), given.where("effort")
    given.end()
    return _effort(effort, where, known), form


def _effort(effort: str | None, where: str, known: Collection[str] | None) -> dict[str, Any]:
    if effort is not None and effort not in EFFORTS:
        raise Refusal(where, f"{quoted(effort)} is not one of {', '.join(EFFORTS)}")
    if effort is None or known is None or "reasoning_effort" in known:
        return {} if effort is None else {"reasoning_effort": effort}
    if effort != "high":
        raise Refusal(where, "is not supported by this model's template", "unsupported_parameter")
    return {}


def _thread(fields: Fields) -> None:
    """Refuse threads on the server, with a code that makes clients send the whole history."""
    if fields.take("thread") not in (None, False):
        problem = "is not supported: send the whole history; only its new part is computed"
        raise Refusal(fields.where("thread"), problem, UNSUPPORTED_THREAD)


# -- sampling --


def _given_sampling(fields: Fields) -> dict[str, Any]:
    """Read the fields of `Sampling` that the body sets."""
    values: dict[str, Any] = {name: fields.number(name) for name in ("temperature", "top_p")}
    values |= {name: fields.integer(name) for name in ("top_k", "max_tokens")}
    if values["max_tokens"] is None:
        raise Refusal("max_tokens", "is required", "missing_required_parameter")
    values["stop"] = _stop(fields)
    return {name: value for name, value in values.items() if value is not None}


def _stop(fields: Fields) -> tuple[str, ...] | None:
    given, where = fields.items("stop_sequences"), fields.where("stop_sequences")
    if given is None:
        return None
    if not all(isinstance(each, str) for each in given):
        raise Refusal(where, "must be a list of strings", "invalid_type")
    if len(given) > STOP_STRINGS_MAX:
        raise Refusal(where, f"at most {STOP_STRINGS_MAX} strings")
    return tuple(given)


# -- tools --


def _tools(fields: Fields) -> ToolRules:
    """Read tools, in the shape of a chat completion."""
    given, where = fields.items("tools") or (), fields.where("tools")
    strict: dict[int, str] = {}
    tools = tuple(_tool(Fields(each, f"{where}[{n}]"), n, strict) for n, each in enumerate(given))
    rules = ToolRules(tools, strict)
    choice, where = fields.fields("tool_choice"), fields.where("tool_choice")
    if choice is None:
        return rules
    kind = choice.needed_text("type")
    if kind not in ("auto", "none", "any", "tool"):
        problem = f"{quoted(kind)} is not one of auto, any, tool, none"
        raise Refusal(choice.where("type"), problem)
    if choice.flag("disable_parallel_tool_use") and tools:
        rules = replace(rules, single=choice.where("disable_parallel_tool_use"))
    names = [choice.needed_text("name")] if kind == "tool" else None
    choice.end()
    if kind == "none":
        return ToolRules()
    return rules if kind == "auto" else require_call(rules, where, names)


def _tool(fields: Fields, number: int, strict: dict[int, str]) -> Mapping[str, Any]:
    """Read a tool. If it is strict, add its index and path to `strict`."""
    kind = fields.text("type") or "custom"
    if kind != "custom":
        problem = f"{quoted(kind)} is not supported: only custom tools are supported, which the client runs"
        raise Refusal(fields.where("type"), problem, "unsupported_parameter")
    described: dict[str, Any] = {"name": fields.needed_text("name")}
    if (description := fields.text("description")) is not None:
        described["description"] = description
    schema = fields.object("input_schema")
    if schema is None:
        raise Refusal(fields.where("input_schema"), "is required", "missing_required_parameter")
    described["parameters"] = schema
    if fields.flag("strict"):
        strict[number] = fields.where("strict")
    fields.only("defer_loading", False)
    fields.only("allowed_callers", ["direct"])
    fields.only("input_examples", [])
    fields.flag("eager_input_streaming")  # arguments are always streamed
    fields.object("cache_control")
    fields.end()
    return {"type": "function", "function": described}


ROLES = ("user", "assistant", "system")
ERROR = "Error: "  # prefix of failed tool results


@dataclass(slots=True)
class RoleRun:
    """Adjacent messages with the same role."""

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


def take_messages(fields: Fields) -> tuple[tuple[Message, ...], str]:
    """Read the system prompt and messages. Return a last assistant message's text (prefill) separately."""
    system = _system(fields)
    given, where = fields.items("messages"), fields.where("messages")
    if given is None:
        raise Refusal(where, "is required", "missing_required_parameter")
    found: list[Message] = [] if system is None else [system]
    run: RoleRun | None = None
    calls: Mapping[str, str] = {}  # names of the tools of the last assistant message, by call id
    place = where
    for number, each in enumerate(given):
        place = f"{where}[{number}]"
        message_fields = Fields(each, place)
        role = message_fields.needed_text("role")
        if role not in ROLES:
            raise Refusal(
                message_fields.where("role"), f"{quoted(role)} is not one of {', '.join(ROLES)}"
            )
        if run is None and role == "assistant":
            raise Refusal(message_fields.where("role"), "must be user in the first message")
        if run is not None and role != run.role:
            found += run.messages(f"{where}[{number - 1}]")
            if run.role == "assistant":
                calls = {call.id: call.name for call in run.calls if call.id is not None}
        if run is None or role != run.role:
            run = RoleRun(role)
        _take_content(message_fields, run, calls)
        message_fields.end()
    if run is None:
        raise Refusal(where, "at least one message is required")
    last = run.messages(place)
    if run.role == "assistant":
        return tuple(found), reply_begins([*found, *last], place)
    return (*found, *last), ""


def _system(fields: Fields) -> Message | None:
    """Return the system message, or None if it is empty. A template can then use its default prompt."""
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
    block.items("citations")  # no effect: they refer to documents, which are not supported
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
        problem = f"the preceding assistant message has no tool_use {quoted(call_id)}"
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
    problem = f"{quoted(kind)} is not supported here: content is text and tool calls"
    return Refusal(block.where("type"), problem, "unsupported_parameter")


def _end(block: Fields) -> None:
    block.object("cache_control")
    block.text("toolset_name")
    block.end()
