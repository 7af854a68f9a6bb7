"""The values that the SDK returns: small frozen dataclasses, made from protobuf messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from google.protobuf import json_format

from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import jobs_pb2

T = TypeVar("T")
WHOLE_MAX = 2.0**53  # above this, a double may not be the exact number that was sent
TEXT_CHARACTERS_MAX = 60
ITEMS_MAX = 6


def _names(enum: Any, prefix: str) -> dict[Any, str]:
    """Return an enum's names by value, in lower case and without `prefix`. Omit the unspecified value."""
    return {number: name.removeprefix(prefix).lower() for name, number in enum.items() if number}


ROLES: dict[pb.Role.ValueType, str] = _names(pb.Role, "ROLE_")
ROLE_NUMBERS: dict[str, pb.Role.ValueType] = {name: number for number, name in ROLES.items()}
FINISH_REASONS: dict[int, str] = {0: "", **_names(pb.FinishReason, "FINISH_REASON_")}
KINDS: dict[int, str] = {0: "text", **_names(pb.PartKind, "PART_KIND_")}
RECOMPUTE_REASONS: dict[int, str] = {0: "", **_names(pb.RecomputeReason, "RECOMPUTE_REASON_")}
STATES: dict[int, str] = _names(pb.ServerState, "SERVER_STATE_")
JOB_STATES: dict[int, str] = _names(jobs_pb2.JobState, "JOB_STATE_")
JOB_OUTCOMES: dict[int, str] = {0: "", **_names(jobs_pb2.JobOutcome, "JOB_OUTCOME_")}
RESULT_KINDS: dict[str, jobs_pb2.ResultKind.ValueType] = {
    "all": jobs_pb2.RESULT_KIND_UNSPECIFIED,
    "answers": jobs_pb2.RESULT_KIND_ANSWERS,
    "errors": jobs_pb2.RESULT_KIND_ERRORS,
}


def shown(value: Any) -> str:
    """Format a dataclass for `__repr__`: its class, and the fields that differ from their default."""
    named = {each.name: (getattr(value, each.name), each.default) for each in fields(value)}
    parts = [
        f"{name}={_short(given)}"
        for name, (given, default) in named.items()
        if given != default and given not in ("", (), {})
    ]
    return f"{type(value).__name__}({', '.join(parts)})"


def _short(given: Any) -> str:
    if isinstance(given, str):
        if len(given) <= TEXT_CHARACTERS_MAX:
            return repr(given)
        return f"{given[:TEXT_CHARACTERS_MAX] + '…'!r} ({len(given):,} characters)"
    if isinstance(given, float):
        return f"{given:.4g}"
    if isinstance(given, datetime):
        return given.isoformat(timespec="seconds")
    if isinstance(given, tuple) and len(given) > ITEMS_MAX:
        first = ", ".join(_short(item) for item in given[:ITEMS_MAX])
        return f"({first}, … {len(given):,} in all)"
    if isinstance(given, Mapping):
        items = ", ".join(f"{key!r}: {_short(item)}" for key, item in [*given.items()][:ITEMS_MAX])
        return f"{{{items}{', …' if len(given) > ITEMS_MAX else ''}}}"
    return repr(given)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one token of a reply, and the most probable tokens at its position.

    Attributes:
        logprob: log probability of the sampled token.
        alternatives: (token id, log probability) of each of the most probable tokens. `logprobs` of the
            request sets their number.
    """

    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    __repr__ = shown


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply. `str(delta)` is its text.

    Attributes:
        text: the new text.
        token_ids: the tokens of this text.
        kind: "text", "thinking" or "tool_call"; "unknown" if the server is newer and has another kind.
        logprobs: one entry for each token, if the request set `logprobs`.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    kind: str = "text"
    logprobs: tuple[TokenLogprob, ...] = ()
    __repr__ = shown

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Restarted:
    """The server begins the reply again: discard all earlier deltas. `str(restarted)` is empty.

    Attributes:
        attempt: the number of the attempt; 2 for the first restart.
    """

    attempt: int
    __repr__ = shown

    @property
    def text(self) -> str:
        """Empty, because a restart adds nothing to the text."""
        return ""

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Usage:
    """The number of tokens of a turn, where the KV of its prompt came from, and its times.

    Attributes:
        prompt_tokens: all tokens before the reply: the sum of new, device, host and recomputed tokens.
        new_tokens: tokens of this turn's messages.
        device_tokens: earlier tokens whose KV was on the device.
        host_tokens: earlier tokens whose KV was swapped in from the host.
        recomputed_tokens: earlier tokens whose KV had to be computed again.
        recompute_reason: "dropped", "engine_restarted" or "fingerprint_changed"; empty if nothing was
            recomputed.
        output_tokens: tokens of the reply.
        queue_seconds: time before the computation of the turn began.
        first_token_seconds: time from the arrival of the request to the first token of the reply.
        total_seconds: time from the arrival of the request to the end of the reply.
        suspensions: how often the turn was suspended because other turns needed its memory.
        shared_tokens: the part of the device and host tokens that was computed for another conversation
            with the same beginning. Later turns of this conversation count these tokens as its own.
        shared_from: a source of the shared tokens: "prefix:" and the id of a declared prefix, or the id of a
            conversation with the same beginning; empty if the source is a turn that was not stored.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    recomputed_tokens: int = 0
    recompute_reason: str = ""
    output_tokens: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    suspensions: int = 0
    shared_tokens: int = 0
    shared_from: str = ""
    __repr__ = shown


@dataclass(frozen=True, slots=True)
class Reply:
    """The whole reply of a turn that is in the history. `str(reply)` is its text.

    Attributes:
        text: the whole text.
        token_ids: the tokens of this text.
        finish_reason: "stop" (the model or a stop string ended the reply), "length", "repetition" (the reply
            only repeated itself) or "cancelled".
        usage: the number of tokens, and the times.
        revision: the conversation's revision after this turn.
        turn_id: the server's id of the turn.
        request_id: the client's id of the message.
        replayed: True if the turn had already finished before this request, so nothing was computed.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    revision: int
    turn_id: str
    request_id: str
    replayed: bool
    __repr__ = shown

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the history.

    Attributes:
        index: position in the history, from 0.
        role: "system", "user", "assistant" or "tool".
        text: the content.
        tool_call_id: for the result of a tool: the id of the tool call.
        revision: the conversation's revision after this message was added.
        first_token: position of the message's first token in the conversation.
        num_tokens: number of tokens, including the tokens that the chat template adds.
        token_ids: the tokens; empty without `include_token_ids`.
        finish_reason: for a reply: "stop", "length", "repetition" or "cancelled".
        metadata: the metadata that was sent with the turn; empty for replies.
        tool_calls: tool calls in the form of OpenAI's API. Calls that a client sent are always here. Calls of
            the model are here only with `cut_replies`; otherwise they are in `text`.
        thinking: reasoning text that a client sent. The model's own is here only with `cut_replies`.
        name: the speaker's name, if a client sent one.
    """

    index: int
    role: str
    text: str
    tool_call_id: str
    revision: int
    first_token: int
    num_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str
    metadata: Mapping[str, Any]
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    thinking: str = ""
    name: str = ""
    __repr__ = shown


@dataclass(frozen=True, slots=True)
class ConversationState:
    """The state of a conversation, without its messages.

    Attributes:
        conversation_id: its id.
        revision: a number that grows with every turn and rewind.
        num_messages: messages in the history.
        num_tokens: tokens in the history.
        context_max_tokens: the largest context that the model is served with.
        metadata: as given to `create` or `fork`.
        tools: as given to `create`.
        template_options: as given to `create`.
        prefix_id: as given to `create`.
        running_turn_id: the turn that is running; empty if none.
        created_at: time of creation, in UTC.
        updated_at: time of the last change, in UTC.
        title: the `title` of the metadata, or else the first words of the first user message. Empty before
            the first message, and in the results of `create`, `fork` and `rewind`.
    """

    conversation_id: str
    revision: int
    num_messages: int
    num_tokens: int
    context_max_tokens: int
    metadata: Mapping[str, Any]
    tools: tuple[Mapping[str, Any], ...]
    template_options: Mapping[str, Any]
    prefix_id: str
    running_turn_id: str
    created_at: datetime
    updated_at: datetime
    title: str = ""
    __repr__ = shown


@dataclass(frozen=True, slots=True)
class PrefixState:
    """The state of a declared prefix.

    Attributes:
        prefix_id: its id.
        num_messages: number of messages in the prefix.
        num_tokens: number of tokens in the prefix; 0 if the chat template writes no constant text before the
            first message.
        num_conversations: number of conversations that were created from the prefix, and of their forks.
        keep_warm: whether the daemon keeps the KV of the prefix.
        created_at: when the prefix was declared, in UTC.
        messages: the messages; empty in a list. A system message without text stands for the tokens of the
            tools.
        tools: as given to `create`; empty in a list.
        template_options: as given to `create`; empty in a list.
    """

    prefix_id: str
    num_messages: int
    num_tokens: int
    num_conversations: int
    keep_warm: bool
    created_at: datetime
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    __repr__ = shown


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Which model a daemon serves, and how.

    Attributes:
        model: a hub id, the name of a folder, or "built-in".
        fingerprint: identifies model, tokenizer and chat template.
        state: "loading", "serving", "restarting", "draining" or "read_only"; "unknown" if the server is newer
            and has another state.
        dtype: the data type of the computation, such as "bfloat16"; empty until the model is loaded.
        weights: "native" or "int8"; empty until the model is loaded.
        device: "cpu" or "cuda:0"; empty until the model is loaded.
        context_max_tokens: the largest context of a conversation; 0 until the model is loaded.
        version: version of pensieve.
        torch_version: version of torch.
        transformers_version: version of transformers.
        uptime_seconds: seconds since the daemon started.
        sampling: the default sampling parameters, by name; None if the daemon has an earlier version.
        sampling_from_model: True: the defaults come from the model's files. False: they are Pensieve's.
        layers: how the model's layers run. Empty until the model is loaded, and if the daemon has an earlier
            version.
        kv_dtype: the data type of the KV cache, such as "bfloat16" or "int8". Empty in the same cases as
            `layers`.
    """

    model: str
    fingerprint: str
    state: str
    dtype: str
    weights: str
    device: str
    context_max_tokens: int
    version: str
    torch_version: str
    transformers_version: str
    uptime_seconds: float
    sampling: Mapping[str, float] | None = None
    layers: str = ""
    kv_dtype: str = ""
    sampling_from_model: bool = False
    __repr__ = shown


@dataclass(frozen=True, slots=True)
class Job:
    """The state of a batch job at one moment.

    Attributes:
        job_id: the id of the job.
        tenant: the tenant that owns the job.
        name: as given to `create`.
        sha256: hash of the file, in hexadecimal digits.
        num_bytes: length of the file.
        endpoint: as given to `create`.
        check_only: as given to `create`.
        state: "receiving", "checking", "waiting" (in the queue of jobs), "running", "paused" or "ended";
            "unknown" if the server is newer and has another state.
        outcome: empty until the job has ended; then "completed", "cancelled", "failed" or "checked", or
            "unknown" if the server is newer and has another outcome.
        problem: why the job failed, in one line; empty if it did not fail.
        num_lines: lines with a request.
        num_answered: lines with an answer.
        num_refused: lines with an error.
        num_running: lines that are being computed.
        prompt_tokens: prompt tokens of the answered lines.
        saved_tokens: the part of the prompt tokens that was not computed, because other requests of the job
            have the same beginning.
        output_tokens: tokens of the answers.
        tokens_per_second: recent rate of prompt and output tokens; 0 while the job does not run.
        seconds_left: estimated time to the end; None if unknown.
        created_at: when the upload of the file began, in UTC.
        started_at: when the job first ran; None before.
        ended_at: when the job ended; None before.
    """

    job_id: str
    tenant: str
    name: str
    sha256: str
    num_bytes: int
    endpoint: str
    check_only: bool
    state: str
    outcome: str
    problem: str
    num_lines: int
    num_answered: int
    num_refused: int
    num_running: int
    prompt_tokens: int
    saved_tokens: int
    output_tokens: int
    tokens_per_second: float
    seconds_left: float | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    __repr__ = shown


def _value(kind: type[T], given: Any, **others: Any) -> T:
    """Build a value from the protobuf fields with the same names, and from `others`."""
    names = kind.__annotations__.keys() & given.DESCRIPTOR.fields_by_name.keys() - others.keys()
    return kind(**{name: getattr(given, name) for name in names}, **others)


def plain(struct: Any) -> dict[str, Any]:
    """Convert a protobuf Struct to a dict. Whole numbers become int: 7, not 7.0."""
    text = json_format.MessageToJson(struct)
    value: dict[str, Any] = json.loads(text, parse_float=_number)
    return value


def _number(text: str) -> float | int:
    """Return a whole number as int. In a Struct, all numbers are doubles."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < WHOLE_MAX else number


def state_of(given: pb.Conversation) -> ConversationState:
    """Convert a protobuf Conversation."""
    return _value(
        ConversationState,
        given,
        metadata=plain(given.metadata),
        tools=tuple(plain(tool) for tool in given.tools),
        template_options=plain(given.template_options),
        created_at=given.create_time.ToDatetime(UTC),
        updated_at=given.update_time.ToDatetime(UTC),
    )


def prefix_of(given: pb.Prefix) -> PrefixState:
    """Convert a protobuf Prefix."""
    return _value(PrefixState, given, created_at=given.create_time.ToDatetime(UTC))


def whole_prefix_of(given: pb.GetPrefixResponse) -> PrefixState:
    """Convert a protobuf Prefix with its messages, tools and options."""
    return replace(
        prefix_of(given.prefix),
        messages=tuple(message_of(each) for each in given.messages),
        tools=tuple(plain(tool) for tool in given.tools),
        template_options=plain(given.template_options),
    )


def info_of(given: pb.ServerInfo) -> ServerInfo:
    """Convert a protobuf ServerInfo. `sampling` has only the fields that are set."""
    sampling = {each.name: value for each, value in given.default_sampling.ListFields()}
    return _value(
        ServerInfo,
        given,
        state=STATES.get(given.state, "unknown"),
        sampling=sampling if given.HasField("default_sampling") else None,
        sampling_from_model=given.defaults_from_model,
    )


def message_of(given: pb.Message) -> Message:
    """Convert a protobuf Message. A role that this version does not know is "unknown"."""
    return _value(
        Message,
        given,
        role=ROLES.get(given.role, "unknown"),
        text=given.content,
        token_ids=tuple(given.token_ids),
        finish_reason=finish_reason_of(given.finish_reason),
        metadata=plain(given.metadata),
        tool_calls=tuple(
            {
                "id": each.id,
                "type": "function",
                "function": {"name": each.name, "arguments": each.arguments},
            }
            for each in given.tool_calls
        ),
    )


def finish_reason_of(number: int) -> str:
    """Return the name of a finish reason; empty for a message that is not a reply."""
    return FINISH_REASONS.get(number, "unknown")


def usage_of(given: pb.Usage) -> Usage:
    """Convert a protobuf Usage."""
    reason = RECOMPUTE_REASONS.get(given.recompute_reason, "unknown")
    return _value(Usage, given, recompute_reason=reason)


def job_of(given: jobs_pb2.Job) -> Job:
    """Convert a protobuf Job."""
    return _value(
        Job,
        given,
        state=JOB_STATES.get(given.state, "unknown"),
        outcome=JOB_OUTCOMES.get(given.outcome, "unknown"),
        seconds_left=given.seconds_left if given.HasField("seconds_left") else None,
        created_at=given.create_time.ToDatetime(UTC),
        started_at=given.start_time.ToDatetime(UTC) if given.HasField("start_time") else None,
        ended_at=given.end_time.ToDatetime(UTC) if given.HasField("end_time") else None,
    )
