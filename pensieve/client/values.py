"""The values that the SDK returns: small frozen dataclasses, made from messages of the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from google.protobuf import json_format

from pensieve.client.shown import shown
from pensieve.v1 import conversation_pb2 as pb

ROLES: dict[pb.Role.ValueType, str] = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}
ROLE_NUMBERS: dict[str, pb.Role.ValueType] = {name: number for number, name in ROLES.items()}
FINISH_REASONS: dict[int, str] = {
    pb.FINISH_REASON_UNSPECIFIED: "",
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "cancelled",
}
KINDS: dict[int, str] = {
    pb.PART_KIND_UNSPECIFIED: "text",
    pb.PART_KIND_TEXT: "text",
    pb.PART_KIND_THINKING: "thinking",
    pb.PART_KIND_TOOL_CALL: "tool_call",
}
WHOLE_MAX = 2.0**53  # a whole number from here on may have lost digits
RECOMPUTE_REASONS: dict[int, str] = {
    pb.RECOMPUTE_REASON_UNSPECIFIED: "",
    pb.RECOMPUTE_REASON_DROPPED: "dropped",
    pb.RECOMPUTE_REASON_ENGINE_RESTARTED: "engine_restarted",
    pb.RECOMPUTE_REASON_FINGERPRINT_CHANGED: "fingerprint_changed",
}
STATES: dict[int, str] = {
    pb.SERVER_STATE_LOADING: "loading",
    pb.SERVER_STATE_SERVING: "serving",
    pb.SERVER_STATE_RESTARTING: "restarting",
    pb.SERVER_STATE_DRAINING: "draining",
    pb.SERVER_STATE_READ_ONLY: "read_only",
}


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
    return ConversationState(
        given.conversation_id,
        given.revision,
        given.num_messages,
        given.num_tokens,
        given.context_max_tokens,
        plain(given.metadata),
        tuple(plain(tool) for tool in given.tools),
        plain(given.template_options),
        given.prefix_id,
        given.running_turn_id,
        given.create_time.ToDatetime(UTC),
        given.update_time.ToDatetime(UTC),
    )


def prefix_of(given: pb.Prefix) -> PrefixState:
    """From a declared prefix of the wire."""
    return PrefixState(
        given.prefix_id,
        given.num_messages,
        given.num_tokens,
        given.num_conversations,
        given.keep_warm,
        given.create_time.ToDatetime(UTC),
    )


def whole_prefix_of(given: pb.GetPrefixResponse) -> PrefixState:
    """The same with its messages, tools and options."""
    return replace(
        prefix_of(given.prefix),
        messages=tuple(message_of(each) for each in given.messages),
        tools=tuple(plain(tool) for tool in given.tools),
        template_options=plain(given.template_options),
    )


def info_of(given: pb.ServerInfo) -> ServerInfo:
    """From a daemon's description of the wire."""
    return ServerInfo(
        given.model,
        given.fingerprint,
        STATES.get(given.state, "unknown"),
        given.dtype,
        given.weights,
        given.device,
        given.context_max_tokens,
        given.version,
        given.torch_version,
        given.transformers_version,
        given.uptime_seconds,
        _named(given.recommended_sampling) if given.HasField("recommended_sampling") else None,
        given.layers,
        given.kv_dtype,
    )


def _named(given: pb.Sampling) -> dict[str, float]:
    """Whole numbers stay whole, and what is not set is left out."""
    return {each.name: value for each, value in given.ListFields()}


def message_of(given: pb.Message) -> Message:
    """From a message of the wire; a role that only a newer server has is "unknown"."""
    return Message(
        given.index,
        ROLES.get(given.role, "unknown"),
        given.content,
        given.tool_call_id,
        given.revision,
        given.first_token,
        given.num_tokens,
        tuple(given.token_ids),
        finish_reason_of(given.finish_reason),
        plain(given.metadata),
        tuple(
            {
                "id": each.id,
                "type": "function",
                "function": {"name": each.name, "arguments": each.arguments},
            }
            for each in given.tool_calls
        ),
        given.thinking,
        given.name,
    )


def finish_reason_of(number: int) -> str:
    """The name of a reason; empty for messages that are no reply, "unknown" for a newer server's reason."""
    return FINISH_REASONS.get(number, "unknown")


def usage_of(given: pb.Usage) -> Usage:
    """From a usage of the wire."""
    return Usage(
        given.prompt_tokens,
        given.new_tokens,
        given.device_tokens,
        given.host_tokens,
        given.recomputed_tokens,
        RECOMPUTE_REASONS.get(given.recompute_reason, "unknown"),
        given.output_tokens,
        given.queue_seconds,
        given.first_token_seconds,
        given.total_seconds,
        given.suspensions,
        given.shared_tokens,
        given.shared_from,
    )
