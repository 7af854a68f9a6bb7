"""gRPC's methods with JSON over HTTP, for the web page and for clients without gRPC.

    POST /pensieve.v1.ConversationService/METHOD     the body has the fields as JSON, named as in the proto;
                                                     SendMessage answers with a stream of events

The methods come from api/grpc/json_methods.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from pensieve.api.http.exchange import Exchange, event
from pensieve.api.http.front import Handler
from pensieve.api.http.requests import ApiRequests
from pensieve.api.http.route import Route
from pensieve.guard.callers import Caller

PREFIX = "/pensieve.v1.ConversationService/"


class GatewayMethod(Protocol):
    """A method that takes a JSON value, and returns a JSON value or writes a stream of values."""

    @property
    def name(self) -> str: ...
    @property
    def is_deletion(self) -> bool: ...
    @property
    def handler(self) -> Callable[[Any, Any], Awaitable[dict[str, Any] | None]]: ...


class GatewayCall:
    """The HTTP request, as a method sees it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def forwarding_key(self) -> str:
        return self._exchange.forwarding_key

    def headers(self) -> Mapping[str, str]:
        return self._exchange.headers

    def set_audited_ids(self, ids: Mapping[str, str]) -> None:
        self._exchange.values = ids  # for the audit log

    async def write(self, piece: dict[str, Any]) -> None:
        if not self._exchange.is_stream:
            self._exchange.begin_events()
        await self._exchange.write(event(piece))


def gateway_routes(methods: Iterable[GatewayMethod], requests: ApiRequests) -> Iterator[Route]:
    for method in methods:
        settings = {"is_deletion": method.is_deletion}
        yield Route(
            *("POST", f"{PREFIX}{method.name}", _handler_of(method, requests)),
            *(f"gRPC's {method.name} with JSON", settings, {"type": "object"}),
        )


def _handler_of(method: GatewayMethod, requests: ApiRequests) -> Handler:
    async def handler(exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
        answer = await method.handler(await requests.json(exchange, by), GatewayCall(exchange))
        if answer is None:
            await exchange.end_events()
        return answer

    return handler
