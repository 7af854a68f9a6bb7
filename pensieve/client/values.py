"""What the SDK gives out: small frozen values, made from messages of the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from google.protobuf import json_format

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
RECOMPUTE_REASONS: dict[int, str] = {
    pb.RECOMPUTE_REASON_UNSPECIFIED: "",
    pb.RECOMPUTE_REASON_DROPPED: "dropped",
    pb.RECOMPUTE_REASON_ENGINE_RESTARTED: "engine_restarted",
    pb.RECOMPUTE_REASON_FINGERPRINT_CHANGED: "fingerprint_changed",
}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    logprob: float
    alternatives: tuple[tuple[int, float], ...]  # (token id, log probability)


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply; `str(delta)` is its text."""

    text: str
    token_ids: tuple[int, ...] = ()
    kind: str = (
        "text"  # text, thinking or tool_call; unknown, if a newer server says something else
    )
    logprobs: tuple[TokenLogprob, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Restarted:
    """The turn begins again from nothing: forget what was shown of it.  `str(restarted)` is empty."""

    attempt: int

    @property
    def text(self) -> str:
        return ""

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the tokens of a turn came from, and how long it took.

    prompt_tokens = new_tokens + device_tokens + host_tokens + recomputed_tokens.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    recomputed_tokens: int = 0
    recompute_reason: str = ""  # dropped, engine_restarted or fingerprint_changed
    output_tokens: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    suspensions: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn that is in the history; `str(reply)` is its text."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # stop, length or cancelled
    usage: Usage
    revision: int
    turn_id: str
    request_id: str
    replayed: bool  # it was computed before; nothing was now

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Message:
    index: int
    role: str  # system, user, assistant or tool
    text: str
    tool_call_id: str
    revision: int
    first_token: int
    num_tokens: int
    token_ids: tuple[int, ...]  # empty unless asked for
    finish_reason: str  # of a reply


@dataclass(frozen=True, slots=True)
class ConversationState:
    conversation_id: str
    revision: int
    num_messages: int
    num_tokens: int
    context_max_tokens: int
    metadata: Mapping[str, Any]
    tools: tuple[Mapping[str, Any], ...]
    template_options: Mapping[str, Any]
    prefix_id: str
    running_turn_id: str  # empty while it rests
    created_at: datetime
    updated_at: datetime


def plain(struct: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(json_format.MessageToJson(struct))
    return value


def state_of(given: pb.Conversation) -> ConversationState:
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


def message_of(given: pb.Message) -> Message:
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
    )


def finish_reason_of(number: int) -> str:
    """Empty for what is no reply; unknown, if a newer server knows more reasons."""
    return FINISH_REASONS.get(number, "unknown")


def usage_of(given: pb.Usage) -> Usage:
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
    )
