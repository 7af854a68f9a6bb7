"""ConversationService's methods with JSON instead of protobuf messages, for HTTP.

The methods call the same handlers as gRPC, so both accept and return the same values. The fields have the
names in the proto. An int64 is a string, as in protobuf's JSON format.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf import json_format

from pensieve.api.grpc import sizes
from pensieve.api.grpc.conversation import ConversationService
from pensieve.api.json_fields import check_json
from pensieve.errors import InvalidArgument
from pensieve.v1 import conversation_pb2 as pb

SERVICE = "ConversationService"
DEPTH_MAX = 80  # nesting depth of the JSON
VALUES_MAX = 1 << 16
AUDITED_IDS = ("conversation_id", "prefix_id")
Json = dict[str, Any]


class JsonCall(Protocol):
    """A call, as the HTTP gateway provides it."""

    @property
    def forwarding_key(self) -> str: ...  # set by the daemon that forwarded the call, or empty
    def headers(self) -> Mapping[str, str]: ...
    def set_audited_ids(self, ids: Mapping[str, str]) -> None:
        """Set the ids of the call for the audit log."""

    async def write(self, piece: Json) -> None: ...


@dataclass(frozen=True)
class JsonMethod:
    name: str
    is_deletion: bool
    # Returns None after writing a stream.
    handler: Callable[[Any, JsonCall], Awaitable[Json | None]]


def json_methods(service: ConversationService) -> Iterator[JsonMethod]:
    """Yield all methods that take a single request."""
    for method in pb.DESCRIPTOR.services_by_name[SERVICE].methods:
        if not method.client_streaming:
            kind: Any = getattr(pb, method.input_type.name)
            handler = _handler_of(getattr(service, method.name), kind)
            yield JsonMethod(method.name, method.name.startswith("Delete"), handler)


def _handler_of(call: Any, kind: Any) -> Callable[[Any, JsonCall], Awaitable[Json | None]]:
    async def handler(value: Any, json_call: JsonCall) -> Json | None:
        request = _parse(kind, value)
        if isinstance(request, pb.SendMessageRequest) and not request.request_id:
            request.request_id = json_call.forwarding_key
        json_call.set_audited_ids({name: getattr(request, name, "") for name in AUDITED_IDS})
        answer = await call(request, _Context(json_call))
        return None if answer is None else _to_json(answer)

    return handler


class _Context:
    """The part of gRPC's context that the handlers use."""

    def __init__(self, call: JsonCall) -> None:
        self._call = call

    def time_remaining(self) -> None:
        """There is no deadline."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._call.headers().items())

    async def write(self, message: Any) -> None:
        await self._call.write(_to_json(message))


def _parse(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise InvalidArgument("body", "must be a JSON object")
    check_json(value, "body", VALUES_MAX)  # protobuf fails for strings that are not valid Unicode
    try:
        request = json_format.ParseDict(value, kind(), max_recursion_depth=DEPTH_MAX)
    except (
        json_format.ParseError,
        ValueError,
        TypeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        problem = " ".join(str(error).split())[:200]
        # The message quotes the value, which may have any characters.
        problem = problem.encode("ascii", "backslashreplace").decode()
        raise InvalidArgument("body", f"is not a valid {kind.DESCRIPTOR.name}: {problem}") from None
    sizes.check(kind, request.SerializeToString())
    return request


def _to_json(message: Any) -> Json:
    value: Json = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return value
