"""The table of all endpoints, as one ASGI application."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pensieve import __version__
from pensieve.api.anthropic import parse as anthropic
from pensieve.api.http.completions import CompletionsEndpoint
from pensieve.api.http.conversations import ConversationEndpoints
from pensieve.api.http.errors import UnservedEndpoint
from pensieve.api.http.exchange import Exchange
from pensieve.api.http.front import Endpoint, Front
from pensieve.api.http.gateway import GatewayMethod, gateway_routes
from pensieve.api.http.messages import MessageEndpoints
from pensieve.api.http.messages import body_of as anthropic_error_body
from pensieve.api.http.openapi import OpenApiEndpoint, document, members_of
from pensieve.api.http.page import MemoryEndpoints, PageEndpoint
from pensieve.api.http.requests import ApiRequests
from pensieve.api.http.response_history import ResponseHistory
from pensieve.api.http.response_places import ResponsePlaces
from pensieve.api.http.responses import ResponseEndpoints
from pensieve.api.http.route import Route
from pensieve.api.http.tokens import TokenEndpoints, parse_detokenize, parse_tokenize
from pensieve.api.json_fields import Fields
from pensieve.api.metrics.families import CONTENT_TYPE
from pensieve.api.openai.request import RequestKind, Served, parse, served_name
from pensieve.api.plugins import Plugin
from pensieve.conversations.daemon import Daemon
from pensieve.errors import DiskFull, NotFound, Unavailable
from pensieve.extras import need
from pensieve.guard.callers import Access, Caller
from pensieve.guard.client_errors import client_text
from pensieve.guard.guard import CallKind
from pensieve.sampling import Sampling
from pensieve.text import ChatTemplate
from pensieve.text.tool_calls import CallStyle

PURPOSE = "the HTTP API"
PLAIN = "text/plain"
USER = {"role": "user", "content": "a"}
SCRAPE = CallKind(Access.REPLICA, is_counted=False)
DELETION = {"is_deletion": True}
OPEN = {"is_open": True}
UNSERVED: Mapping[str, str] = {  # path prefixes of other servers' endpoints
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scores",
    "/score": "scores",
    "/classify": "classification",
    "/pooling": "pooling",
    "/v1/moderations": "moderations",
    "/v1/images": "images",
    "/v1/audio": "audio",
    "/v1/videos": "videos",
    "/v1/realtime": "realtime sessions",
    "/v1/assistants": "assistants (the Responses API is served)",
    "/v1/threads": "threads (the Conversations API is served)",
    "/v1/vector_stores": "vector stores",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/uploads": "uploads in parts (/v1/files is served)",
    "/v1/evals": "evals",
    "/v1/containers": "containers",
    "/api/": "Ollama's own API (OpenAI's is served at /v1)",
}


def application(
    front: Front,
    daemon: Daemon,
    template: ChatTemplate,
    style: CallStyle | None,
    gateway: Iterable[GatewayMethod] = (),
    plugins: Sequence[Plugin] = (),
    metrics: Callable[[], Awaitable[str]] | None = None,
) -> Any:
    """`metrics` returns the text for Prometheus. None: the HTTP server does not serve metrics."""
    routing = need("http", "starlette.routing", PURPOSE)
    requests = ApiRequests(front, daemon, template, style)
    openapi = OpenApiEndpoint()
    table: Sequence[Route] = (
        Route("GET", "/", PageEndpoint(), "The web page", OPEN, answers="text/html"),
        Route("GET", "/openapi.json", openapi, "This document", OPEN),
        *_status_routes(daemon, front, metrics),
        *gateway_routes(gateway, requests),
        *_model_routes(daemon, requests),
        *_chat_routes(daemon, requests),
        *_response_routes(daemon, requests),
        *(route for plugin in plugins for route in plugin.routes(requests)),
    )
    openapi.document = document(table)
    by_path: dict[str, dict[str, Endpoint]] = {}
    for route in table:
        endpoint = Endpoint(front, route.handler, **route.settings)
        by_path.setdefault(route.path, {})[route.method] = endpoint
    unknown_path = Endpoint(
        front, UnknownPath({path: list(each) for path, each in by_path.items()})
    )
    routes = [routing.Route(path, _Methods(each, unknown_path)) for path, each in by_path.items()]
    return routing.Router([*routes, routing.Mount("/", unknown_path)], default=unknown_path)


def _status_routes(
    daemon: Daemon, front: Front, metrics: Callable[[], Awaitable[str]] | None
) -> Iterator[Route]:
    health, memory = HealthEndpoints(daemon), MemoryEndpoints(daemon, front.allowed.is_local)
    yield Route("GET", "/health", health.ready, "Whether new turns are taken", OPEN)
    yield Route("GET", "/health/ready", health.ready, "Whether new turns are taken", OPEN)
    yield Route("GET", "/health/live", health.live, "Whether the daemon runs", OPEN)
    yield Route("GET", "/version", health.version, "The version", OPEN)
    if metrics is not None:
        endpoint, kind = MetricsEndpoint(metrics), {"kind": SCRAPE}
        yield Route("GET", "/metrics", endpoint, "Metrics for Prometheus", kind, answers=PLAIN)
    yield Route(
        *("GET", "/pensieve/memory", memory, "The cache, as a stream of events"),
        answers="text/event-stream",
    )
    explained = "Where a conversation's chunks are"
    yield Route("GET", "/pensieve/explain/{conversation_id}", memory.explain, explained)


def _model_routes(daemon: Daemon, requests: ApiRequests) -> Iterator[Route]:
    models, tokens = ModelEndpoints(daemon, requests), TokenEndpoints(daemon, requests)
    yield Route("GET", "/v1/models", models.all, "The served model, as a list")
    yield Route("GET", "/v1/models/{model:path}", models.one, "The served model")
    by_prompt = members_of(
        lambda given, fields_of: parse_tokenize(given, None, fields_of), {"prompt": "a"}
    )
    by_chat = members_of(
        lambda given, fields_of: parse_tokenize(given, None, fields_of), {"messages": [USER]}
    )
    body = {"anyOf": [by_prompt, by_chat]}
    summary = "The tokens of a text, or of messages as the chat template writes them"
    yield Route("POST", "/tokenize", tokens.tokenize, summary, body=body)
    body = dict(members_of(parse_detokenize, {"tokens": [1]}))
    yield Route("POST", "/detokenize", tokens.detokenize, "The text of tokens", body=body)


def _chat_routes(daemon: Daemon, requests: ApiRequests) -> Iterator[Route]:
    served = Served(Sampling())
    minimal: dict[RequestKind, Mapping[str, Any]] = {
        RequestKind.CHAT: {"model": "m", "messages": [USER]},
        RequestKind.COMPLETION: {"model": "m", "prompt": "a"},
    }
    for kind, summary in (
        (RequestKind.CHAT, "Continue a chat"),
        (RequestKind.COMPLETION, "Continue a text"),
    ):
        body = members_of(partial(_parse, kind, served), minimal[kind])
        endpoint = CompletionsEndpoint(daemon, requests, kind)
        yield Route("POST", kind.value, endpoint, summary, body=body)
    messages, as_anthropic = (
        MessageEndpoints(daemon, requests),
        {"error_body": anthropic_error_body},
    )
    given: Mapping[str, Any] = {"model": "m", "messages": [USER]}
    body = members_of(
        lambda each, fields_of: anthropic.parse(each, served, fields_of), {**given, "max_tokens": 1}
    )
    summary = "Continue a chat (Anthropic's API)"
    yield Route("POST", "/v1/messages", messages.create, summary, as_anthropic, body)
    body = members_of(lambda each, fields_of: anthropic.parse_count(each, served, fields_of), given)
    summary = "Count the tokens of a chat (Anthropic's API)"
    path = "/v1/messages/count_tokens"
    yield Route("POST", path, messages.count_tokens, summary, as_anthropic, body)


def _parse(
    kind: RequestKind, served: Served, given: Any, fields_of: Callable[[Any], Fields]
) -> Any:
    return parse(kind, given, served, fields_of)


def _response_routes(daemon: Daemon, requests: ApiRequests) -> Sequence[Route]:
    history = ResponseHistory(daemon, requests)
    places = ResponsePlaces(daemon, requests, history)
    responses = ResponseEndpoints(daemon, requests, history, places)
    conversations = ConversationEndpoints(daemon, requests, history)
    response, conversation = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"
    items, item = f"{conversation}/items", f"{conversation}/items/{{item_id}}"
    parsed = partial(_parse, RequestKind.RESPONSE, Served(Sampling()))
    body, any_body = members_of(parsed, {"model": "m", "input": "a"}), {"type": "object"}
    return (
        Route("POST", "/v1/responses", responses.create, "Create a response", body=body),
        Route("GET", response, responses.get, "A response"),
        Route("DELETE", response, responses.delete, "Delete a response", DELETION),
        Route("POST", f"{response}/cancel", responses.cancel, "Cancel a response"),
        Route(
            *("POST", "/v1/conversations", conversations.create, "Create a conversation"),
            body=any_body,
        ),
        Route("GET", conversation, conversations.get, "A conversation"),
        Route("POST", conversation, conversations.update, "Change its metadata", body=any_body),
        Route("DELETE", conversation, conversations.delete, "Delete a conversation", DELETION),
        Route("GET", items, conversations.list_items, "Its items"),
        Route("POST", items, conversations.add_items, "Add items", body=any_body),
        Route("GET", item, conversations.get_item, "An item"),
        Route("DELETE", item, conversations.delete_item, "Delete an item"),
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
    """`ready` fails while the daemon drains or cannot store turns. `live` fails only if the process hangs."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    async def ready(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        """Answer if the daemon accepts new turns. Otherwise, raise Unavailable."""
        refusal = self._daemon.store_refusal
        if isinstance(refusal, DiskFull):
            raise Unavailable(client_text(refusal))
        if not self._daemon.serving:
            state = "drains" if self._daemon.draining else "is starting, or cannot take turns"
            raise Unavailable(f"the daemon {state}: it takes no new turns now")
        return {"status": "ok"}

    async def live(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        """Always answer. An answer proves that the event loop runs."""
        return {"status": "ok"}

    async def version(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return {"version": __version__}


class MetricsEndpoint:
    """`GET /metrics`; needs an admin token if the daemon uses tokens."""

    def __init__(self, text: Callable[[], Awaitable[str]]) -> None:
        self._text = text

    async def __call__(self, exchange: Exchange, by: Caller) -> None:
        await exchange.answer_bytes((await self._text()).encode(), CONTENT_TYPE)


class UnknownPath:
    """Refuse an unknown path or method, and suggest a known one."""

    def __init__(self, methods: Mapping[str, Sequence[str]]) -> None:
        self._methods = methods  # by path

    async def __call__(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        path, shown = exchange.path, f"{exchange.method} {exchange.path[:200]}"
        feature = next((name for start, name in UNSERVED.items() if path.startswith(start)), None)
        if feature is not None:
            raise UnservedEndpoint(f"{feature} cannot be used: this server only generates text")
        if path in self._methods:
            allowed = " or ".join(self._methods[path])
            raise NotFound(f"unknown endpoint {shown}: this path takes {allowed}")
        if f"/v1{path}" in self._methods:
            raise NotFound(f"unknown endpoint {shown}: did you mean /v1{path[:200]}?")
        raise NotFound(f"unknown endpoint {shown}")


async def refuse_as_unknown(exchange: Exchange, by: Caller) -> Mapping[str, Any]:
    """Refuse an endpoint that only other daemons may call, as if it were unknown."""
    raise NotFound(f"unknown endpoint {exchange.method} {exchange.path[:200]}")
