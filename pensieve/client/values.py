"""The values that the SDK returns: small frozen dataclasses, made from messages of the wire."""

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
WHOLE_MAX = 2.0**53  # a whole number from here on may have lost digits
TEXT_CHARACTERS_MAX = 60
ITEMS_MAX = 6


def _names(enum: Any, prefix: str) -> dict[Any, str]:
    """The names of an enum's values as the SDK says them, without what is unspecified."""
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
    """The `__repr__` of a dataclass: its class, and the fields that are neither empty nor as by default."""
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
    """The log probability of one token of a reply, and the most probable tokens in its position.

    Attributes:
        logprob: of the token that was sampled.
        alternatives: (token id, log probability) of the most probable ones, as many as were asked for.
    """

    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    __repr__ = shown


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply; `str(delta)` is its text.

    Attributes:
        text: what is new.
        token_ids: the tokens that the text was made from.
        kind: "text", "thinking" or "tool_call", or "unknown" for a kind that only a newer server has.
        logprobs: one for each token, if `logprobs` was given.
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
    """The server begins the reply again: forget the deltas before.  `str(restarted)` is empty.

    Attributes:
        attempt: 2 for the first restart.
    """

    attempt: int
    __repr__ = shown

    @property
    def text(self) -> str:
        """Empty, as a restart adds nothing to the text."""
        return ""

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a turn read and wrote, where they came from, and how long it took.

    Attributes:
        prompt_tokens: all that the reply could see: new, device, host and recomputed tokens together.
        new_tokens: of this turn's messages.
        device_tokens: earlier ones, whose KV was on the device.
        host_tokens: earlier ones, whose KV was swapped in from the host.
        recomputed_tokens: earlier ones, whose KV had to be computed again.
        recompute_reason: "dropped", "engine_restarted" or "fingerprint_changed"; empty if none was.
        output_tokens: of the reply.
        queue_seconds: that the turn waited before the first of its tokens was computed.
        first_token_seconds: from the request's arrival to the first token of the reply.
        total_seconds: from the request's arrival to the end of the reply.
        suspensions: how often the turn had to give way to others that needed its memory.
        shared_tokens: of the device and host tokens, those that were computed for another conversation
            and that this one begins with; later turns count them as their own.
        shared_from: whose they are: "prefix:" and the id of a declared prefix, or the id of a conversation
            under the same prefix_id.
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
    """The whole reply of a turn that is in the history; `str(reply)` is its text.

    Attributes:
        text: all of it.
        token_ids: the tokens that the text was made from.
        finish_reason: "stop" (the model or a stop string ended it), "length" or "cancelled".
        usage: how many tokens were read and written, and how long it took.
        revision: of the conversation, now that this turn is in it.
        turn_id: the server's id of the turn.
        request_id: the client's id of the message.
        replayed: the turn had finished before this request; nothing was computed for it.
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
    """A message of the history.  Its tokens are `num_tokens` of the conversation's, from `first_token`.

    Attributes:
        index: position in the history, from 0.
        role: "system", "user", "assistant" or "tool".
        text: what was said.
        tool_call_id: of a tool's result: the call that it answers.
        revision: of the conversation, once this message was added.
        first_token: position of its first token in the conversation.
        num_tokens: how many tokens it has, those of the chat template included.
        token_ids: the tokens themselves; empty without `include_token_ids`.
        finish_reason: of a reply: "stop", "length" or "cancelled".
        metadata: what was sent with its turn; empty for replies.
        tool_calls: that a client gave with it, in the form of OpenAI's API; those that the model wrote are
            in the text of its reply, unless `cut_replies` puts them here.
        thinking: that a client gave with it, or the model's own with `cut_replies`.
        name: of who speaks, if a client gave it.
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
    """What the server knows of a conversation, without its messages.

    Attributes:
        conversation_id: its name.
        revision: grows with every turn and rewind.
        num_messages: in its history.
        num_tokens: in its history.
        context_max_tokens: the most that the model can be served with.
        metadata: as it was given to `create` or `fork`.
        tools: as they were given to `create`.
        template_options: as they were given to `create`.
        prefix_id: as it was given to `create`.
        running_turn_id: empty while no turn runs.
        created_at: when, in UTC.
        updated_at: when its history changed last, in UTC.
        title: for lists: the `title` of its metadata, else the first words of its first user message. Empty
            before the first message, and in the results of `create`, `fork` and `rewind`.
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
    """What the server knows of a declared prefix.

    Attributes:
        prefix_id: its name.
        num_messages: with which conversations under it begin.
        num_tokens: with which they begin; 0 if the chat template writes nothing fixed before a message.
        num_conversations: that began under it, or as a fork of one that did.
        keep_warm: whether the daemon keeps its KV.
        created_at: when it was declared, in UTC.
        messages: what conversations under it begin with; empty in a list, as the next two.  One of the
            system without a text stands for the tokens of tools.
        tools: as they were given to `create`.
        template_options: as they were given to `create`.
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
        model: a hub's id, the name of a folder, or "built-in".
        fingerprint: of model, tokenizer and chat template.
        state: "loading", "serving", "restarting", "draining" or "read_only"; "unknown" if a newer server
            says so.
        dtype: in which it computes, such as "bfloat16"; empty until the model was loaded, as the next two.
        weights: "native" or "int8".
        device: "cpu", or "cuda:0".
        context_max_tokens: the most that a conversation may have; 0 until the model was loaded.
        version: of pensieve.
        torch_version: of torch.
        transformers_version: of transformers.
        uptime_seconds: since the daemon started.
        sampling: what the model's files recommend, by field, and what a message gets that does not say.
            Empty: nothing, and such replies are greedy; None: a daemon of an earlier version.
        layers: in which form the model's layers run; empty until it was loaded, or of an earlier version.
        kv_dtype: in which its KV is kept, such as "bfloat16" or "int8"; empty likewise.
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
    __repr__ = shown


@dataclass(frozen=True, slots=True)
class Job:
    """A batch job at one moment.

    Attributes:
        job_id: its name.
        tenant: whose it is.
        name: as it was given to `create`.
        sha256: of the file, in hexadecimal digits.
        num_bytes: the length of the file.
        endpoint: as it was given to `create`.
        check_only: as it was given to `create`.
        state: "receiving", "checking", "waiting" (for its turn among the jobs), "running", "paused" or
            "ended"; "unknown" if a newer server says so, as the next one.
        outcome: once it has ended: "completed", "cancelled", "failed" or "checked"; empty before.
        problem: why it has failed, in one line; empty as a rule.
        num_lines: that have a request.
        num_answered: of these, those that have an answer,
        num_refused: those with which something is wrong,
        num_running: and those that are being computed.
        prompt_tokens: of what was answered.
        saved_tokens: of these, those that were not computed, because another request of the job begins with
            them.
        output_tokens: of the answers.
        tokens_per_second: prompt and output tokens of the latest time; 0 while it does not run.
        seconds_left: until it has ended, as it goes now; None while nobody can say.
        created_at: when its file had begun to come, in UTC.
        started_at: when it ran first; None before.
        ended_at: when it ended; None before.
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
    """A value with the fields that a message of the wire has under the same names, and with `others`."""
    names = kind.__annotations__.keys() & given.DESCRIPTOR.fields_by_name.keys() - others.keys()
    return kind(**{name: getattr(given, name) for name in names}, **others)


def plain(struct: Any) -> dict[str, Any]:
    """A JSON object of the wire as a dict; 7 comes back as 7 and not as 7.0, and so does 7.0."""
    text = json_format.MessageToJson(struct)
    value: dict[str, Any] = json.loads(text, parse_float=_number)
    return value


def _number(text: str) -> float | int:
    """Numbers of the wire are doubles; one that was whole when it was sent is whole again."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < WHOLE_MAX else number


def state_of(given: pb.Conversation) -> ConversationState:
    """From a conversation of the wire."""
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
    """From a declared prefix of the wire."""
    return _value(PrefixState, given, created_at=given.create_time.ToDatetime(UTC))


def whole_prefix_of(given: pb.GetPrefixResponse) -> PrefixState:
    """The same with its messages, tools and options."""
    return replace(
        prefix_of(given.prefix),
        messages=tuple(message_of(each) for each in given.messages),
        tools=tuple(plain(tool) for tool in given.tools),
        template_options=plain(given.template_options),
    )


def info_of(given: pb.ServerInfo) -> ServerInfo:
    """From a daemon's description of the wire.  Fields of `sampling` that are not set are left out."""
    sampling = {each.name: value for each, value in given.recommended_sampling.ListFields()}
    return _value(
        ServerInfo,
        given,
        state=STATES.get(given.state, "unknown"),
        sampling=sampling if given.HasField("recommended_sampling") else None,
    )


def message_of(given: pb.Message) -> Message:
    """From a message of the wire; a role that only a newer server has is "unknown"."""
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
    """The name of a reason; empty for messages that are no reply, "unknown" for a newer server's reason."""
    return FINISH_REASONS.get(number, "unknown")


def usage_of(given: pb.Usage) -> Usage:
    """From a usage of the wire."""
    reason = RECOMPUTE_REASONS.get(given.recompute_reason, "unknown")
    return _value(Usage, given, recompute_reason=reason)


def job_of(given: jobs_pb2.Job) -> Job:
    """From a job of the wire."""
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
