"""The paths of all endpoints, as one ASGI application."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pensieve import __version__
from pensieve.api.http.completions import CompletionsEndpoint
from pensieve.api.http.conversations import ConversationEndpoints
from pensieve.api.http.exchange import Exchange
from pensieve.api.http.front import Endpoint, Front, Handler
from pensieve.api.http.gateway import GatewayMethod, gateway_routes
from pensieve.api.http.messages import MessageEndpoints
from pensieve.api.http.messages import body_of as anthropics
from pensieve.api.http.page import MemoryEndpoints, PageEndpoint
from pensieve.api.http.requests import ApiRequests
from pensieve.api.http.response_places import ResponsePlaces
from pensieve.api.http.responses import ResponseEndpoints
from pensieve.api.http.stored import StoredConversations
from pensieve.api.openai.request import RequestKind, served_name
from pensieve.api.plugins import Plugin
from pensieve.conversations.daemon import Daemon
from pensieve.errors import DiskFull, NotFound, Unavailable
from pensieve.extras import need
from pensieve.guard.callers import Caller
from pensieve.guard.client_errors import client_text
from pensieve.text import ChatTemplate
from pensieve.text.tool_calls import CallStyle

PURPOSE = "the HTTP API"
DELETION = {"is_deletion": True}
Route = tuple[str, str, Handler, Mapping[str, Any]]  # method, path, and settings of its Endpoint


def application(
    front: Front,
    daemon: Daemon,
    template: ChatTemplate,
    style: CallStyle | None,
    gateway: Iterable[GatewayMethod] = (),
    plugins: Sequence[Plugin] = (),
) -> Any:
    routing = need("http", "starlette.routing", PURPOSE)
    requests = ApiRequests(front, daemon, template, style)
    models, health = ModelEndpoints(daemon, requests), HealthEndpoints(daemon)
    messages = MessageEndpoints(daemon, requests)
    memory = MemoryEndpoints(daemon, front.allowed.is_local)
    as_anthropic = {"error_body": anthropics}
    table: Sequence[Route] = (
        ("GET", "/", PageEndpoint(), {"is_open": True}),
        ("GET", "/pensieve/memory", memory, {}),
        ("GET", "/pensieve/explain/{conversation_id}", memory.explain, {}),
        *gateway_routes(gateway, requests),
        ("GET", "/health", health.health, {"is_open": True}),
        ("GET", "/version", health.version, {"is_open": True}),
        ("GET", "/v1/models", models.all, {}),
        ("GET", "/v1/models/{model:path}", models.one, {}),
        (
            "POST",
            "/v1/chat/completions",
            CompletionsEndpoint(daemon, requests, RequestKind.CHAT),
            {},
        ),
        (
            "POST",
            "/v1/completions",
            CompletionsEndpoint(daemon, requests, RequestKind.COMPLETION),
            {},
        ),
        ("POST", "/v1/messages", messages.create, as_anthropic),
        ("POST", "/v1/messages/count_tokens", messages.count_tokens, as_anthropic),
        *(route for plugin in plugins for route in plugin.routes(requests)),
        *_of_responses(daemon, requests),
    )
    by_path: dict[str, dict[str, Endpoint]] = {}
    for method, path, handler, settings in table:
        by_path.setdefault(path, {})[method] = Endpoint(front, handler, **settings)
    nothing = Endpoint(front, not_here)
    routes = [routing.Route(path, _Methods(each, nothing)) for path, each in by_path.items()]
    return routing.Router([*routes, routing.Mount("/", nothing)], default=nothing)


def _of_responses(daemon: Daemon, requests: ApiRequests) -> Sequence[Route]:
    stored = StoredConversations(daemon, requests)
    places = ResponsePlaces(daemon, requests, stored)
    responses = ResponseEndpoints(daemon, requests, stored, places)
    conversations = ConversationEndpoints(daemon, requests, stored)
    one_response, one = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"
    return (
        ("POST", "/v1/responses", responses.create, {}),
        ("GET", one_response, responses.get, {}),
        ("DELETE", one_response, responses.delete, DELETION),
        ("POST", f"{one_response}/cancel", responses.cancel, {}),
        ("POST", "/v1/conversations", conversations.create, {}),
        ("GET", one, conversations.get, {}),
        ("POST", one, conversations.update, {}),
        ("DELETE", one, conversations.delete, DELETION),
        ("GET", f"{one}/items", conversations.list_items, {}),
        ("POST", f"{one}/items", conversations.add_items, {}),
        ("GET", f"{one}/items/{{item_id}}", conversations.get_item, {}),
        ("DELETE", f"{one}/items/{{item_id}}", conversations.delete_item, {}),
    )


class _Methods:
    def __init__(self, endpoints: Mapping[str, Endpoint], otherwise: Endpoint) -> None:
        self._endpoints, self._otherwise = endpoints, otherwise

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if method == "OPTIONS":
            endpoint = next(iter(self._endpoints.values()))
        else:
            endpoint = self._endpoints.get(method, self._otherwise)
        await endpoint(scope, receive, send)


class ModelEndpoints:
    def __init__(self, daemon: Daemon, requests: ApiRequests) -> None:
        self._daemon, self._requests = daemon, requests
        self._since = int(time.time())

    async def all(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return {"object": "list", "data": [self._model(self._requests.models[0])]}

    async def one(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return self._model(served_name(exchange.values["model"], self._requests.models))

    def _model(self, name: str) -> Mapping[str, Any]:
        ready = self._daemon.engine.ready
        length = {"max_model_len": ready.context_max} if ready is not None else {}
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "pensieve",
            **length,
        }


class HealthEndpoints:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    async def health(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        """Answer if new turns are taken, else raise Unavailable."""
        refusal = self._daemon.store_refusal
        if isinstance(refusal, DiskFull):
            raise Unavailable(client_text(refusal))
        if not self._daemon.serving:
            raise Unavailable("the daemon does not take turns at present")
        return {"status": "ok"}

    async def version(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return {"version": __version__}


async def not_here(exchange: Exchange, by: Caller) -> Mapping[str, Any]:
    """Refuse an unknown path, or an endpoint that this server does not have."""
    if exchange.path == "/v1/embeddings":
        raise NotFound("there are no embeddings here: the model that is served writes text")
    raise NotFound(f"there is nothing at {exchange.method} {exchange.path[:200]}")
