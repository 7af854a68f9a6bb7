"""Translate between protobuf messages and our values.

Errors name the invalid field. A PensieveError becomes a gRPC status code with google.rpc details.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import timestamp_pb2

from pensieve.api.grpc import sizes
from pensieve.api.grpc.json_values import TooManyValues, one_object, one_struct, structs
from pensieve.api.json_fields import check_json, read_json
from pensieve.conversations.cancelling import CancelRequest, CancelResult
from pensieve.conversations.constraints import FIELD
from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.live_turn import LiveTurn, RecomputeReason, ReplyTokens
from pensieve.core.constraint import Constraint, ConstraintKind, choice_of
from pensieve.core.turn import PRIORITY_MAX, PRIORITY_MIN, FinishReason, TurnOptions
from pensieve.errors import InvalidArgument, PensieveError, shortened
from pensieve.guard.client_errors import client_text, details, retry_seconds
from pensieve.sampling import Sampling
from pensieve.store import records
from pensieve.text import Message, Part, ToolCall
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import status_pb2

DOMAIN = "pensieve"
PAGE_SIZE = 100
TYPE_PREFIX = "type.googleapis.com/google.rpc."
LAST_TURN_SECONDS = 86_400.0  # for the hint `last_turn`: as if the client returned after a day
AWAY_SECONDS_MAX = 1e9
DETAILS_KEY = "grpc-status-details-bin"
DELTA_BYTES_MAX = 1 << 20  # approximate: the last token of a message may exceed it
BYTES_PER_CHARACTER_MAX = 4
BYTES_PER_LOGPROB_MAX = 20  # of a logprob and its token id
ROLES = {
    pb.ROLE_UNSPECIFIED: "user",
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}
ROLE_NUMBERS = {name: number for number, name in ROLES.items() if number}
FINISH_NUMBERS = {
    FinishReason.STOP.value: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH.value: pb.FINISH_REASON_LENGTH,
    FinishReason.REPETITION.value: pb.FINISH_REASON_REPETITION,
    FinishReason.CANCELLED.value: pb.FINISH_REASON_CANCELLED,
}
PART_NUMBERS = {
    Part.TEXT: pb.PART_KIND_TEXT,
    Part.THINKING: pb.PART_KIND_THINKING,
    Part.TOOL_CALL: pb.PART_KIND_TOOL_CALL,
}
REASON_NUMBERS = {
    RecomputeReason.DROPPED.value: pb.RECOMPUTE_REASON_DROPPED,
    RecomputeReason.ENGINE_RESTARTED.value: pb.RECOMPUTE_REASON_ENGINE_RESTARTED,
    RecomputeReason.FINGERPRINT_CHANGED.value: pb.RECOMPUTE_REASON_FINGERPRINT_CHANGED,
}


# -- in --


def messages_of(given: Sequence[pb.NewMessage], first: int = 0) -> list[Message]:
    """Convert a request's messages. `first`: the number of the first message in errors."""
    check_arguments(given)
    messages = []
    for index, each in enumerate(given, first):
        where, role = f"messages[{index}]", ROLES.get(each.role)
        if role is None:
            raise InvalidArgument(f"{where}.role", "is not a known role")
        if role != "assistant" and (each.tool_calls or each.thinking):
            raise InvalidArgument(where, "only assistant messages have thinking or tool calls")
        calls, thinking = calls_of(each, where), each.thinking or None
        messages.append(
            Message(
                role, each.content, thinking, calls, each.tool_call_id or None, each.name or None
            )
        )
    if not messages:
        raise InvalidArgument("messages", "at least one message is required")
    return messages


def turn_request(
    request: pb.SendMessageRequest,
    tenant: str,
    defaults: Sampling,
    priority_max: int = PRIORITY_MAX,
    traceparent: str = "",
) -> TurnRequest:
    """Convert a request to a turn. Priorities above `priority_max` are lowered to it."""
    if not PRIORITY_MIN <= request.priority <= PRIORITY_MAX:
        raise InvalidArgument("priority", f"must lie in {PRIORITY_MIN}..{PRIORITY_MAX}")
    messages, given = tuple(messages_of(request.messages)), given_sampling(request.sampling)
    options = TurnOptions(
        defaults.with_given(given),
        min(request.priority, priority_max),
        away_seconds(request.hints),
        constraint=constraint_of(request),
    )
    return TurnRequest(
        request.conversation_id,
        messages,
        options,
        tenant,
        request.request_id,
        request.expected_revision if request.HasField("expected_revision") else None,
        request.create_if_missing,
        one_object("metadata", request.metadata) if request.HasField("metadata") else {},
        given,
        traceparent,
        cache_salt=request.cache_salt,
    )


def given_sampling(given: pb.Sampling) -> dict[str, Any]:
    """Return the fields of `Sampling` that a request sets."""
    values: dict[str, Any] = {}
    for field, value in given.ListFields():
        if isinstance(value, Mapping):
            values[field.name] = tuple(sorted(value.items()))
        elif isinstance(value, Sequence):
            values[field.name] = tuple(value)
        else:
            values[field.name] = value
    return values


def away_seconds(hints: pb.Hints) -> float:
    """Return how long after the turn the client expects to send the next message, in seconds."""
    seconds = hints.expected_return_seconds
    if not 0.0 <= seconds <= AWAY_SECONDS_MAX:  # also rejects NaN
        raise InvalidArgument(
            "hints.expected_return_seconds", f"must lie in 0..{AWAY_SECONDS_MAX:g}"
        )
    return LAST_TURN_SECONDS if hints.last_turn else seconds


def cancel(request: pb.CancelTurnRequest, tenant: str) -> CancelRequest:
    if request.turn_id and request.request_id:
        raise InvalidArgument("request_id", "must not be combined with turn_id")
    keep_tokens = request.keep_tokens if request.HasField("keep_tokens") else None
    if keep_tokens is not None and keep_tokens < 0:
        raise InvalidArgument("keep_tokens", "must not be negative")
    if request.attempt < 0:
        raise InvalidArgument("attempt", "must not be negative")
    return CancelRequest(
        request.conversation_id,
        request.turn_id,
        request.request_id,
        keep_tokens,
        request.attempt,
        tenant,
    )


def constraint_of(request: pb.SendMessageRequest) -> Constraint | None:
    if not request.HasField("constraint"):
        return None
    name = request.constraint.WhichOneof("kind")
    if name is None:
        raise InvalidArgument(FIELD, "has no kind")
    given = request.constraint
    if name == "choice":
        return choice_of(tuple(given.choice.choices))
    if name == "json_object":
        return (
            Constraint(ConstraintKind.JSON_OBJECT) if given.json_object else None
        )  # `json_object: false` means no constraint
    return Constraint(ConstraintKind(name), getattr(given, name))


def check_arguments(messages: Iterable[pb.NewMessage]) -> None:
    """Refuse arguments of tool calls that have too many bytes in total, before parsing any of them."""
    if (
        sum(len(c.arguments) for each in messages for c in each.tool_calls)
        > sizes.TOOL_CALLS_BYTES_MAX
    ):
        raise InvalidArgument(
            "messages",
            "the arguments of all tool calls together may have at most "
            f"{sizes.TOOL_CALLS_BYTES_MAX:,} bytes",
        )


def calls_of(message: pb.NewMessage, where: str) -> tuple[ToolCall, ...]:
    """Read the tool calls of a message; `where` is its name in errors."""
    calls = []
    for number, each in enumerate(message.tool_calls):
        path = f"{where}.tool_calls[{number}]"
        if not each.name:
            raise InvalidArgument(f"{path}.name", "is missing")
        arguments: Any = {}
        if each.arguments.strip():
            arguments = read_json(each.arguments, f"{path}.arguments")
            check_json(arguments, f"{path}.arguments")
        if not isinstance(arguments, dict):
            raise InvalidArgument(f"{path}.arguments", "must be a JSON object as text")
        calls.append(ToolCall(each.name, arguments, each.id or None))
    return tuple(calls)


def page_of(request: Any) -> tuple[int, int]:
    """Return the page size, and the number in the page token (0 without a token)."""
    size, token = request.page_size or PAGE_SIZE, request.page_token
    if not 1 <= size <= records.PAGE_SIZE_MAX:
        raise InvalidArgument("page_size", f"must lie in 1..{records.PAGE_SIZE_MAX}")
    if token and not (token.isascii() and token.isdigit()):
        raise InvalidArgument("page_token", "is not a token of this server")
    return size, int(token[:18] or 0)


# -- out --


def conversation(found: records.StoredConversation, context_max: int) -> pb.Conversation:
    """Return the protobuf message. Fields that are larger than this version accepts are left out."""
    result = pb.Conversation(
        conversation_id=found.conversation_id,
        revision=found.revision,
        num_messages=found.num_messages,
        num_tokens=found.num_tokens,
        context_max_tokens=context_max,
        prefix_id=found.prefix_id,
        create_time=timestamp(found.created_at),
        update_time=timestamp(found.updated_at),
        title=found.title,
    )
    _fill(result, "metadata", [found.metadata], sizes.METADATA_BYTES_MAX)
    _fill(result, "tools", found.tools, sizes.TOOLS_BYTES_MAX)
    options = [found.template_options]
    _fill(result, "template_options", options, sizes.TEMPLATE_OPTIONS_BYTES_MAX)
    if found.running_turn_id is not None:
        result.running_turn_id = str(found.running_turn_id)
    return result


def _fill(result: pb.Conversation, name: str, values: Sequence[Any], bytes_max: int) -> None:
    """Set a field of JSON objects. If it is too large, add its name to `fields_left_out` instead."""
    try:
        converted = structs(values)
    except TooManyValues:
        converted = []
    if len(converted) != len(values) or sum(each.ByteSize() for each in converted) > bytes_max:
        result.fields_left_out.append(name)
    elif name == "tools":
        result.tools.extend(converted)
    else:
        getattr(result, name).CopyFrom(converted[0])


def prefix(found: records.StoredPrefix) -> pb.Prefix:
    stored = found.conversation
    return pb.Prefix(
        prefix_id=found.prefix_id,
        num_messages=stored.num_messages,
        num_tokens=stored.num_tokens,
        num_conversations=found.num_conversations,
        keep_warm=found.keep_warm,
        create_time=timestamp(stored.created_at),
    )


def whole_prefix(
    found: records.StoredPrefix, messages: Iterable[records.StoredMessage]
) -> pb.GetPrefixResponse:
    stored = found.conversation
    return pb.GetPrefixResponse(
        prefix=prefix(found),
        messages=[message(each) for each in messages],
        tools=structs(stored.tools),
        template_options=one_struct(stored.template_options),
    )


def timestamp(seconds: float) -> timestamp_pb2.Timestamp:
    return timestamp_pb2.Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))


def message(found: records.StoredMessage) -> pb.Message:
    return pb.Message(
        index=found.index,
        role=ROLE_NUMBERS.get(found.role, pb.ROLE_UNSPECIFIED),
        content=found.content,
        tool_call_id=found.tool_call_id,
        revision=found.revision,
        first_token=found.first_token_index,
        num_tokens=found.num_tokens,
        token_ids=found.token_ids or (),
        finish_reason=FINISH_NUMBERS.get(found.finish_reason or "", pb.FINISH_REASON_UNSPECIFIED),
        metadata=one_struct(found.extra.get("metadata", {})),
        tool_calls=stored_calls(found.extra),
        thinking=found.extra.get("thinking") or "",
        name=found.extra.get("name") or "",
    )


def stored_calls(extra: Mapping[str, Any]) -> list[pb.ToolCall]:
    """Return the tool calls of a stored message."""
    return [
        pb.ToolCall(
            id=each["id"] or "",
            name=each["name"],
            arguments=json.dumps(each["arguments"], ensure_ascii=False),
        )
        for each in extra.get("tool_calls", ())
    ]


def started(live: LiveTurn) -> pb.TurnStarted:
    return pb.TurnStarted(
        turn_id=str(live.turn_id),
        revision=live.first_revision,
        request_id=live.request_id,
        replayed=live.replayed,
        attempt=live.attempt,
    )


def deltas(tokens: ReplyTokens) -> Iterator[pb.TurnDelta]:
    """Yield a message for each run of tokens of one kind. Runs are split at DELTA_BYTES_MAX."""
    parts, start, num_bytes = tokens.parts, 0, 0
    for end in range(1, len(parts)):
        num_bytes += _bytes_max(tokens, end - 1)
        if parts[end] is not parts[start] or num_bytes > DELTA_BYTES_MAX:
            yield from _run_deltas(tokens, start, end)
            start, num_bytes = end, 0
    if parts:
        yield from _run_deltas(tokens, start, len(parts))


def _bytes_max(tokens: ReplyTokens, number: int) -> int:
    """Return an upper bound for the bytes that a token takes in a message."""
    text = tokens.texts[number] if number < len(tokens.texts) else ""
    alternatives = len(tokens.logprobs[number][1]) if tokens.logprobs else 0
    return BYTES_PER_CHARACTER_MAX * len(text) + BYTES_PER_LOGPROB_MAX * (1 + alternatives)


def _run_deltas(tokens: ReplyTokens, start: int, stop: int) -> Iterator[pb.TurnDelta]:
    """Yield the message of a run. If its text is too long, its beginning is yielded in earlier messages."""
    text, characters_max = (
        "".join(tokens.texts[start:stop]),
        DELTA_BYTES_MAX // BYTES_PER_CHARACTER_MAX,
    )
    kind = PART_NUMBERS[tokens.parts[start]]
    while len(text) > characters_max:
        yield pb.TurnDelta(text=text[:characters_max], kind=kind)
        text = text[characters_max:]
    result = pb.TurnDelta(text=text, token_ids=tokens.token_ids[start:stop], kind=kind)
    for logprob, top in tokens.logprobs[start:stop]:
        result.logprobs.add(
            logprob=logprob,
            alternatives=[
                pb.Alternative(token_id=each.token_id, logprob=each.logprob) for each in top
            ],
        )
    yield result


def completed(live: LiveTurn) -> pb.TurnCompleted:
    assert live.finish is not None
    assert live.revision is not None
    figures = dict(live.figures)
    reason = str(figures.pop("recompute_reason", ""))
    known = {field.name for field in pb.Usage.DESCRIPTOR.fields}
    return pb.TurnCompleted(
        finish_reason=FINISH_NUMBERS[live.finish.value],
        usage=pb.Usage(
            recompute_reason=REASON_NUMBERS.get(reason, pb.RECOMPUTE_REASON_UNSPECIFIED),
            **{name: value for name, value in figures.items() if name in known},
        ),
        revision=live.revision,
    )


def cancelled(found: CancelResult) -> pb.CancelTurnResponse:
    return pb.CancelTurnResponse(
        was_running=found.was_running,
        finish_reason=FINISH_NUMBERS.get(found.finish_reason, pb.FINISH_REASON_UNSPECIFIED),
    )


# -- errors --


def status_code(error: PensieveError) -> grpc.StatusCode:
    code: grpc.StatusCode = getattr(grpc.StatusCode, error.grpc_status)
    return code


def status(error: PensieveError) -> status_pb2.Status:
    """Return a google.rpc.Status with ErrorInfo and further details."""
    result = status_pb2.Status(code=status_code(error).value[0], message=client_text(error))
    _detail(
        result,
        "ErrorInfo",
        status_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=details(error)),
    )
    if isinstance(error, InvalidArgument):
        violation = status_pb2.BadRequest.FieldViolation(
            field=shortened(error.field), description=shortened(error.problem)
        )
        _detail(result, "BadRequest", status_pb2.BadRequest(field_violations=[violation]))
    if (seconds := retry_seconds(error)) is not None:
        retry = status_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(seconds * 1000))
        _detail(result, "RetryInfo", retry)
    return result


def _detail(result: status_pb2.Status, name: str, detail: Any) -> None:
    result.details.add(type_url=TYPE_PREFIX + name, value=detail.SerializeToString())
