"""gRPC's ConversationService with JSON over HTTP, for the page and for whoever speaks no gRPC.

    POST /pensieve.v1.ConversationService/METHOD     a request's fields as JSON, by their names in the proto
                                     the answer in the same form; of SendMessage a stream

The methods are those that gRPC calls, so what they take, check and answer is the same.  What the proto calls
int64 is text in JSON, as protobuf has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import json_format

from pensieve.api.grpc import sizes
from pensieve.api.grpc.auth import Caller
from pensieve.api.grpc.conversation import ConversationService
from pensieve.api.http.bodies import Bodies
from pensieve.api.http.exchange import Exchange, event
from pensieve.api.http.front import Act
from pensieve.api.openai.fields import check_json
from pensieve.conversations.daemon import Daemon
from pensieve.errors import InvalidArgument
from pensieve.v1 import conversation_pb2 as pb

SERVICE = "pensieve.v1.ConversationService"
DEPTH_MAX = 80  # of the JSON: messages, and values in them
VALUES_MAX = 1 << 16
AUDITED = {name: f"/{SERVICE}/{name}" for name in ("DeleteConversation", "DeletePrefix")}


class Context:
    """What a method of gRPC's asks of its call, for one that came over HTTP."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def time_remaining(self) -> None:
        """HTTP has no deadlines."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._exchange.headers.items())

    async def write(self, message: Any) -> None:
        if not self._exchange.is_stream:
            self._exchange.begin_events()
        await self._exchange.write(event(_written(message)))


class Gateway:
    def __init__(self, daemon: Daemon, bodies: Bodies) -> None:
        self._service, self._bodies = ConversationService(daemon), bodies

    def routes(self) -> Iterator[tuple[str, str, Act, Mapping[str, Any]]]:
        """One for each method that takes one request."""
        for method in pb.DESCRIPTOR.services_by_name["ConversationService"].methods:
            if method.client_streaming:
                continue
            settings = {"deletes": AUDITED[method.name]} if method.name in AUDITED else {}
            yield "POST", f"/{SERVICE}/{method.name}", self._act_of(method), settings

    def _act_of(self, method: Any) -> Act:
        kind: Any = getattr(pb, method.input_type.name)
        call = getattr(self._service, method.name)

        async def act(exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
            request = _read(kind, await self._bodies.json(exchange, by))
            answer = await call(request, Context(exchange))
            if answer is not None:
                return _written(answer)
            await exchange.end_events()
            return None

        return act


def _read(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise InvalidArgument("body", "must be a JSON object")
    check_json(value, "body", VALUES_MAX)  # protobuf breaks at what is no text
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
        problem = problem.encode("ascii", "backslashreplace").decode()  # it quotes the value
        raise InvalidArgument("body", f"is no {kind.DESCRIPTOR.name}: {problem}") from None
    sizes.check(kind, request.SerializeToString())
    return request


def _written(message: Any) -> dict[str, Any]:
    given: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return given
