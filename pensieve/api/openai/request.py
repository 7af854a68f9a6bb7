"""Parse request bodies of OpenAI's API.

    body ──parse──> ParsedRequest: a turn or a raw prompt, number of choices, streaming, conversation

Some parameters have no effect on any answer (`user`, `metadata`, `service_tier`, …). Fields for other servers
have no effect either (IGNORED), and `ParsedRequest.ignored` lists them. All other parameters are honoured, or
refused with an error that names the parameter. `stream` and the parameters of stored conversations
(`previous_response_id`, `conversation`, `background`) are read here. An endpoint that does not support such a
parameter refuses it.

Sampling parameters have the same names as in `Sampling`, except the maximum length and logprobs, whose names
differ between endpoints. Parameters that OpenAI's API lacks (`top_k`, `min_p`, `repetition_penalty`,
`min_tokens`, `stop_token_ids`, `ignore_eos`) have the names that other open servers use.

Parsing renders and tokenizes nothing, so it is cheap. If the template or the tokenizer later refuses a value,
`ParsedRequest.param` returns the name of the field in the body.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

from pensieve.api.json_fields import Fields, Refusal, checked_fields, quoted
from pensieve.api.openai.formats import (
    FormatFields,
    refuse_form,
    take_response_format,
    take_text_format,
)
from pensieve.api.openai.messages import take_input, take_messages, take_tools
from pensieve.conversations.draft import NO_SETTINGS, TurnRequest
from pensieve.conversations.heads import ConversationSettings, check_length, check_salt
from pensieve.core.constraint import Constraint
from pensieve.core.turn import TurnOptions
from pensieve.sampling import (
    FLOATS,
    INTEGERS,
    LOGIT_BIAS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
    Sampling,
)
from pensieve.text import ChatTemplate, TemplateSetting
from pensieve.text.message import Message, plain_text
from pensieve.text.tool_calls import CallStyle


class RequestKind(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    RESPONSE = "/v1/responses"


CHOICES_MAX = 16
PROMPT_TOKENS_MAX = 1 << 24  # longer than any context
MESSAGES_PARAMS = {
    RequestKind.CHAT: "messages",
    RequestKind.COMPLETION: "prompt",
    RequestKind.RESPONSE: "input",
}
MESSAGE_FIELDS = frozenset(
    {"messages", "role", "content", "thinking", "tool_calls", "tool_call_id", "name"}
)
ECHOED = (
    *("instructions", "metadata", "previous_response_id", "reasoning", "safety_identifier", "user"),
    *("store", "text", "tool_choice", "tools", "parallel_tool_calls", "prompt_cache_key"),
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
LENGTHS = {  # names of the maximum length; values under two names must be equal
    RequestKind.CHAT: ("max_completion_tokens", "max_tokens"),
    RequestKind.COMPLETION: ("max_tokens",),
    RequestKind.RESPONSE: ("max_output_tokens",),
}
LOGPROBS_INCLUDED = "message.output_text.logprobs"
LATEST = ":latest"  # Ollama's clients append this to the model's name
IGNORED = (  # fields without effect, which clients of other servers send
    *(
        "keep_alive",
        "ttl",
        "draft_model",
    ),  # Ollama, Open WebUI, LM Studio: how a model is loaded and run
    *("cache_prompt", "id_slot", "slot_id", "timings_per_token", "return_progress"),  # llama.cpp
    *("request_id", "priority", "spaces_between_special_tokens"),  # vLLM
    *("usage", "provider", "route", "trace"),  # OpenRouter
    *("chat_id", "session_id", "background_tasks"),  # Open WebUI
    *("litellm_session_id", "litellm_trace_id", "litellm_metadata"),  # LiteLLM
)
# Fields that Pensieve does not support, and the values that are accepted because they have no effect.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1, 1.0),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "safe_prompt": (False,),
    "mirostat": (0,),
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "top_a": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "dynatemp_range": (0, 0.0),
}
TOKEN_ID_DIGITS_MAX = 10


class Served(NamedTuple):
    """What a parser needs to know about the served model and the caller."""

    defaults: Sampling
    models: Collection[str] | None = None  # served names; None: any name
    vocab_size: int | None = None  # None: token ids are not checked
    template_options: Collection[str] | None = None  # allowed names; None: not checked
    call_style: CallStyle | None = None  # the format of the model's tool calls
    knows_developer: bool = True  # the template has the role developer; otherwise, system is used
    tenant: str = ""
    priority: int = 0
    request_id: str = ""

    def turn(
        self,
        messages: tuple[Message, ...],
        sampling: Sampling,
        given: Mapping[str, Any],
        constraint: Constraint | None = None,
        settings: ConversationSettings = NO_SETTINGS,
        reply_begins: str = "",
        *,
        continues_text: bool = False,
    ) -> TurnRequest:
        """Return the turn for a body.

        `continues_text`: the reply continues an unfinished text instead of beginning a message.
        """
        continues_text = continues_text or bool(reply_begins)
        return TurnRequest(
            "",
            messages,
            TurnOptions(
                sampling, self.priority, constraint=constraint, continues_text=continues_text
            ),
            self.tenant,
            self.request_id,
            given_sampling=given,
            settings=settings,
            reply_begins=reply_begins,
        )


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed body: the turn to run, and parameters of the answer.

    The turn names no conversation. Its settings have the template options and the tools, in the shape of a
    chat completion's `tools`. A text completion has no messages.
    """

    kind: RequestKind
    model: str
    turn: TurnRequest  # for the first choice; the others have the same turn with other seeds
    prompt: str | tuple[int, ...] | None = None  # only for text completions
    num_choices: int = 1
    stream: bool = False
    include_usage: bool = False  # only for streams
    previous_response_id: str = ""  # only for responses
    conversation: str = ""  # only for responses
    background: bool = False  # only for responses
    store: bool | None = None  # None: the daemon's default
    prompt_cache_key: str = ""
    params: Mapping[str, str] = field(default_factory=dict)  # our field names -> names in the body
    echoed: Mapping[str, Any] = field(default_factory=dict)  # parameters that a response repeats
    ignored: Sequence[str] = ()  # fields without effect, listed in a response header

    @property
    def sampling(self) -> Sampling:
        return self.turn.options.sampling

    @property
    def continues_text(self) -> bool:
        """Whether the reply continues a text, so that its first token keeps a leading space."""
        return self.turn.options.continues_text

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self.turn.settings.tools

    def param(self, name: str) -> str:
        """Return the name of a field in the body, for errors of the template, tokenizer or engine."""
        if name in MESSAGE_FIELDS:
            return MESSAGES_PARAMS[self.kind]
        return self.params.get(name, name)


def tokens_of(
    request: ParsedRequest, template: ChatTemplate, context_max: int, now: datetime
) -> list[int]:
    """Return the tokens of the whole prompt. Any thread may call this. `now`: for templates with a date."""
    if isinstance(request.prompt, tuple):
        return list(request.prompt)
    if request.prompt is not None:
        check_length("prompt", len(request.prompt), context_max)
        template.tokenizer.check_text(request.prompt, "prompt")
        return list(template.tokenizer.encode_prompt(request.prompt))
    messages, settings = request.turn.messages, request.turn.settings
    check_length("messages", request.turn.num_characters, context_max)
    begins = request.turn.reply_begins
    setting = TemplateSetting(settings.tools, settings.template_options, now, begins)
    return list(chain.from_iterable(template.opening(messages, setting)))


def parse(
    kind: RequestKind,
    body: Any,
    served: Served,
    fields_of: Callable[[Any], Fields] = checked_fields,
) -> ParsedRequest:
    """Parse a body. An InvalidArgument names the invalid parameter."""
    fields = fields_of(body)
    values: dict[str, Any] = {"model": take_model(fields, served.models)}
    sampling_fields = take_sampling(kind, fields, served.defaults, served.vocab_size)
    ignored: list[str] = []
    if "stream_options" in fields and fields.peek("stream") is not True:
        ignored.append("stream_options")
    form, settings = _form(kind, fields, ignored), NO_SETTINGS
    if kind is RequestKind.COMPLETION:
        values |= _completion(fields, served.vocab_size)
    else:
        is_chat = kind is RequestKind.CHAT
        _verbosity(fields, ignored)
        values |= _chat(fields) if is_chat else _response(fields)
        rules = take_tools(fields, is_nested=is_chat)
        form = rules.constrain(form, served.call_style)
        options = _template_options(fields, is_chat, served.template_options)
        if rules.tools or options:
            settings = ConversationSettings("", tools=rules.tools, template_options=options)
    messages: tuple[Message, ...] = values.pop("messages", ())
    begins: str = values.pop("reply_begins", "")
    if begins:
        refuse_form(form)
    if form.constraint is not None and sampling_fields.sampling.ignore_eos:
        raise Refusal("ignore_eos", "cannot be combined with a constraint, which ends the reply")
    params = {"template_options": "chat_template_kwargs", **sampling_fields.params, **form.params}
    values |= _stream(fields)
    values |= _storage(fields)
    cache_salt = fields.text("cache_salt") or ""
    check_salt(cache_salt)
    _take_without_effect(fields)
    for name, allowed in NEUTRAL.items():
        fields.only(name, *allowed)
    ignored += [name for name in IGNORED if fields.take(name) is not None]
    fields.end()
    if not served.knows_developer:
        messages = tuple(map(_as_system, messages))
    if kind is RequestKind.RESPONSE:
        values["echoed"] = {name: body[name] for name in ECHOED if body.get(name) is not None}
    turn = served.turn(
        *(
            messages,
            sampling_fields.sampling,
            sampling_fields.given,
            form.constraint,
            settings,
            begins,
        ),
        continues_text=kind is RequestKind.COMPLETION,
    )
    turn = replace(turn, cache_salt=cache_salt)
    return ParsedRequest(kind, turn=turn, params=params, ignored=ignored, **values)


def take_model(fields: Fields, models: Collection[str] | None) -> str:
    """Read the model's name. Raises Refusal if this model is not served."""
    return served_name(fields.needed_text("model"), models)


def served_name(name: str, models: Collection[str] | None) -> str:
    """Return the name of a served model, without the tag `:latest`. Raises Refusal for an unknown model."""
    if models is not None and name not in models:
        name = name.removesuffix(LATEST)
    if not name or (models is not None and name not in models):
        served = f"; this server has {', '.join(sorted(models))}" if models else ""
        raise Refusal("model", f"unknown model {quoted(name)}{served}", "model_not_found")
    return name


def _as_system(message: Message) -> Message:
    """Return a developer message as a system message, which every template knows."""
    return replace(message, role="system") if message.role == "developer" else message


# -- parameters of one endpoint --


def _chat(fields: Fields) -> dict[str, Any]:
    fields.only("modalities", ["text"])
    fields.only("echo", False)
    fields.only("add_special_tokens", False)
    fields.object("prediction")  # no effect: only a hint for speed
    fields.only("functions", problem="is no longer supported: use tools")
    fields.only("function_call", problem="is no longer supported: use tool_choice")
    messages, begins = take_messages(fields)
    return {
        "messages": messages,
        "reply_begins": begins,
        "num_choices": _num_choices(fields),
    }


def _completion(fields: Fields, vocab_size: int | None) -> dict[str, Any]:
    num_choices = _num_choices(fields)
    fields.only("best_of", num_choices, problem="must equal n, because choices are not ranked")
    fields.only("echo", False)
    fields.only("add_special_tokens", True)
    fields.only(
        "suffix", "", problem="is not supported: the model cannot fill in text before a suffix"
    )
    return {"prompt": _prompt(fields, vocab_size), "num_choices": num_choices}


def _response(fields: Fields) -> dict[str, Any]:
    background = fields.flag("background")
    fields.only("truncation", "disabled")
    fields.only("prompt", problem="there are no stored prompts")
    fields.integer("max_tool_calls")  # no effect: only for tools that run on the server
    previous, conversation = fields.text("previous_response_id"), _conversation(fields)
    if previous and conversation:
        raise Refusal("previous_response_id", "cannot be combined with conversation")
    return {
        "messages": take_input(fields),
        "previous_response_id": previous or "",
        "conversation": conversation or "",
        "background": background,
    }


def _conversation(fields: Fields) -> str | None:
    given = fields.take("conversation")
    if given is None or isinstance(given, str):
        return given
    inner = Fields(given, fields.where("conversation"))
    found = inner.needed_text("id")
    inner.end()
    return found


def _prompt(fields: Fields, vocab_size: int | None) -> str | tuple[int, ...]:
    given = fields.take("prompt")
    if isinstance(given, list | tuple) and len(given) == 1 and not is_token_id(given[0]):
        given = given[0]  # a list with one prompt
    if given is None:
        raise Refusal("prompt", "is required", "missing_required_parameter")
    if isinstance(given, str):
        if not given:
            raise Refusal("prompt", "must not be empty")
        return plain_text(given, "prompt")
    if not isinstance(given, list | tuple):
        raise Refusal("prompt", "must be a string or a list of token ids", "invalid_type")
    if not given:
        raise Refusal("prompt", "must not be empty")
    if isinstance(given[0], str | list | tuple):
        problem = "several prompts in one request are not supported: send a request for each"
        raise Refusal("prompt", problem, "unsupported_parameter")
    if len(given) > PROMPT_TOKENS_MAX:
        raise Refusal("prompt", f"holds more than {PROMPT_TOKENS_MAX:,} token ids")
    end = 2**32 if vocab_size is None else vocab_size
    if not all(type(each) is int and 0 <= each < end for each in given):
        raise Refusal("prompt", f"token ids must be integers in 0..{end - 1}")
    return tuple(given)


# -- common parameters --


def _num_choices(fields: Fields) -> int:
    found = fields.integer("n")
    if found is not None and not 1 <= found <= CHOICES_MAX:
        raise Refusal("n", f"must lie in 1..{CHOICES_MAX}")
    return 1 if found is None else found


def _form(kind: RequestKind, fields: Fields, ignored: list[str]) -> FormatFields:
    """Read the required form of the reply. The names of the fields depend on the endpoint."""
    if kind is not RequestKind.RESPONSE:
        return take_response_format(fields)
    if (text := fields.fields("text")) is None:
        return FormatFields()
    found = take_text_format(text)
    _verbosity(text, ignored)
    text.end()
    return found


def _verbosity(fields: Fields, ignored: list[str]) -> None:
    """Read a hint for the length of replies. It has no effect; other values than the default are reported."""
    if fields.text("verbosity") not in (None, "medium"):
        ignored.append(fields.where("verbosity"))


def _template_options(
    fields: Fields, is_chat: bool, known: Collection[str] | None
) -> dict[str, Any]:
    """Read template options. The reasoning effort sets `reasoning_effort`, or else `enable_thinking`."""
    options = take_template_options(fields, known)
    where, effort = _effort(fields, is_chat)
    if effort is None:
        return options
    if effort not in EFFORTS:
        raise Refusal(where, f"{quoted(effort)} is not one of {', '.join(EFFORTS)}")
    if known is None or "reasoning_effort" in known:
        return {"reasoning_effort": effort, **options}
    if "enable_thinking" in known and effort in ("none", "medium"):
        return {"enable_thinking": effort == "medium", **options}
    raise Refusal(where, "is not supported by this model's template", "unsupported_parameter")


def take_template_options(fields: Fields, known: Collection[str] | None) -> dict[str, Any]:
    """Return the options in `chat_template_kwargs`. Refuse options that the template does not know."""
    options = dict(fields.object("chat_template_kwargs") or {})
    for name in options:
        if known is not None and name not in known:
            names = ", ".join(sorted(known)) or "none"
            problem = (
                f"has {quoted(name)}, which this model's template does not know; known: {names}"
            )
            raise Refusal(fields.where("chat_template_kwargs"), problem, "unsupported_parameter")
    return options


def _effort(fields: Fields, is_chat: bool) -> tuple[str, str | None]:
    """Return the endpoint's name for the reasoning effort, and its value."""
    if is_chat:
        return "reasoning_effort", fields.text("reasoning_effort")
    reasoning = fields.fields("reasoning")
    if reasoning is None:
        return "reasoning.effort", None
    effort = reasoning.text("effort")
    reasoning.only("summary", "auto", problem="reasoning is not summarised")
    reasoning.end()
    return "reasoning.effort", effort


def _stream(fields: Fields) -> dict[str, bool]:
    stream, include_usage = fields.flag("stream"), False
    if (options := fields.fields("stream_options")) is not None:
        include_usage = options.flag("include_usage")
        options.flag("include_obfuscation")
        options.end()
    return {"stream": stream, "include_usage": include_usage and stream}


def _storage(fields: Fields) -> dict[str, Any]:
    return {
        "store": fields.switch("store"),
        "prompt_cache_key": fields.text("prompt_cache_key") or "",
    }


def _take_without_effect(fields: Fields) -> None:
    """Read parameters without effect. Their types are checked, because a response repeats some of them."""
    for name in ("user", "safety_identifier", "service_tier"):
        fields.text(name)
    fields.text("prompt_cache_retention")
    fields.object("prompt_cache_options")
    metadata, where = fields.object("metadata"), fields.where("metadata")
    if metadata and not all(isinstance(each, str) for each in metadata.values()):
        raise Refusal(where, "must hold strings", "invalid_type")


# -- sampling --


class SamplingFields(NamedTuple):
    sampling: Sampling
    given: Mapping[str, Any]  # fields that the body sets
    params: Mapping[str, str]  # our field names -> names in the body, if different


def take_sampling(
    kind: RequestKind, fields: Fields, defaults: Sampling, vocab_size: int | None
) -> SamplingFields:
    """Read sampling parameters. A Refusal names the invalid parameter as the body does."""
    values: dict[str, Any] = {name: fields.number(name) for name in FLOATS}
    values |= {name: fields.integer(name) for name in INTEGERS if name != "max_tokens"}
    length_param, values["max_tokens"] = _length(LENGTHS[kind], fields)
    values["logprobs"] = _logprobs(kind, fields)
    values["stop"] = _stop(fields)
    values["stop_token_ids"] = _stop_token_ids(fields)
    values["logit_bias"] = _logit_bias(fields)
    values["ignore_eos"] = fields.switch("ignore_eos")
    given = {name: value for name, value in values.items() if value is not None}
    sampling = defaults.with_given(given)
    is_completion = kind is RequestKind.COMPLETION
    params = {
        "max_tokens": length_param,
        "logprobs": "logprobs" if is_completion else "top_logprobs",
    }
    if problem := sampling.problem(vocab_size):
        raise Refusal(params.get(problem[0], problem[0]), problem[1])
    return SamplingFields(sampling, given, params)


def _length(names: tuple[str, ...], fields: Fields) -> tuple[str, int | None]:
    found = {name: value for name in names if (value := fields.integer(name)) is not None}
    if len(set(found.values())) > 1:
        first, second = found
        raise Refusal(fields.where(second), f"differs from {first}: use one of them")
    return next(iter(found.items()), (names[0], None))


def _logprobs(kind: RequestKind, fields: Fields) -> int | None:
    if kind is RequestKind.COMPLETION:
        return fields.integer("logprobs")
    if kind is RequestKind.CHAT:
        wanted, switch = fields.flag("logprobs"), "logprobs: true"
    else:
        wanted, switch = _includes_logprobs(fields), f"{LOGPROBS_INCLUDED!r} in include"
    alternatives = fields.integer("top_logprobs") or 0
    if alternatives and not wanted:
        raise Refusal(fields.where("top_logprobs"), f"needs {switch}")
    return alternatives if wanted else None


def _includes_logprobs(fields: Fields) -> bool:
    """Return whether `include` lists logprobs. Raises Refusal for values that are not supported."""
    given = fields.items("include") or ()
    for index, each in enumerate(given):
        if each not in (LOGPROBS_INCLUDED, "reasoning.encrypted_content"):
            problem = f"only {LOGPROBS_INCLUDED!r} is supported"
            raise Refusal(f"{fields.where('include')}[{index}]", problem, "unsupported_parameter")
    return LOGPROBS_INCLUDED in given


def _stop(fields: Fields) -> tuple[str, ...] | None:
    given = fields.take("stop")
    if given is None:
        return None
    strings = [given] if isinstance(given, str) else given
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise Refusal(fields.where("stop"), "must be a string or a list of strings", "invalid_type")
    if len(strings) > STOP_STRINGS_MAX:
        raise Refusal(fields.where("stop"), f"at most {STOP_STRINGS_MAX} strings")
    return tuple(strings)


def _stop_token_ids(fields: Fields) -> tuple[int, ...] | None:
    given = fields.items("stop_token_ids")
    if given is None:
        return None
    where = fields.where("stop_token_ids")
    if len(given) > STOP_TOKEN_IDS_MAX:
        raise Refusal(where, f"at most {STOP_TOKEN_IDS_MAX} ids")
    if not all(is_token_id(each) for each in given):
        raise Refusal(where, "must be a list of token ids", "invalid_type")
    return tuple(given)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...] | None:
    """Read logit_bias. Its token ids are strings, because JSON keys are strings."""
    given, where = fields.object("logit_bias"), fields.where("logit_bias")
    if given is None:
        return None
    if len(given) > LOGIT_BIAS_MAX:
        raise Refusal(where, f"at most {LOGIT_BIAS_MAX} entries")
    for key in given:
        digits = key.isascii() and key.isdigit() and len(key) <= TOKEN_ID_DIGITS_MAX
        if not digits or key != str(int(key)) or not is_token_id(int(key)):
            raise Refusal(where, f"the key {quoted(key)} is not a token id")
    entries = Fields(given, where)
    found = ((int(key), entries.number(key)) for key in given)
    return tuple(sorted((token_id, bias) for token_id, bias in found if bias is not None))


def is_token_id(value: Any) -> bool:
    """Return whether the value is a token id of any vocabulary."""
    return type(value) is int and 0 <= value < 2**32
