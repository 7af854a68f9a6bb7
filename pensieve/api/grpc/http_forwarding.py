"""Forward HTTP requests to the owners of conversations, and answer requests that others forward.

    client ──HTTP──> HttpForwarder ──ForwardHttp──> HttpAnswers ──> the owner's ASGI application
                     counts, audits                 runs the turn

The daemon that received the request authenticates the caller, counts the call and reads the body. Then it
sends the request to the owner, without the headers that contain the caller's token. If the daemons share a
secret, the request names the caller. Otherwise it has the caller's token as gRPC metadata. The daemon passes
the answer on piece by piece, with backpressure from a slow client. If the client disconnects, the owner's
application sees a disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any
from urllib.parse import unquote

import grpc

from pensieve.api.forwarded import FORWARDED, ForwardedRequest, HttpRequest
from pensieve.api.grpc.forwarding import Forwarder
from pensieve.api.grpc.peers import Metadata
from pensieve.errors import DeadlineExceeded, InvalidArgument, OwnedElsewhere, Unavailable
from pensieve.guard.callers import Caller, caller
from pensieve.guard.request_bodies import BODY_SECONDS
from pensieve.v1 import replica_pb2 as pb
from pensieve.v1 import replica_pb2_grpc

PIECE_BYTES = 512 << 10
HEADERS_KEPT_BACK = (  # not forwarded: about the connection, the caller and the web page's origin
    *(b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"content-length"),
    *(b"upgrade", b"te", b"trailer", b"expect", b"host", b"origin", b"cookie"),
)
TOKENS = (b"authorization", b"x-api-key")
ANSWER_KEPT_BACK = ("connection", "transfer-encoding")
METHOD = re.compile("[A-Z]{1,16}")
NOT_REPEATABLE = (  # suffixes of the paths of requests that must not be sent twice
    *("/items", "/RewindConversation", "/DeleteConversation", "/v1/batches"),
)


class HttpForwarder:
    """Runs on the event loop of the daemon that received the request."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    async def __call__(self, request: HttpRequest, by: Caller, owner: OwnedElsewhere, /) -> bool:
        """Let the owner answer. Return False if this daemon has become the owner and must answer itself."""
        request.forwarding_key = request.forwarding_key or secrets.token_hex(16)
        call = HttpCall(
            request, self._forwarder.peers.metadata(tokens_of(request.scope["headers"]))
        )
        try:
            return await self._forwarder.forward(owner, by.tenant, call)
        except grpc.aio.AioRpcError as error:
            name = error.code().name
            raise Unavailable(
                f"{owner.replica} at {owner.address} closed the connection before the end of its"
                f" answer: {name} {error.details()}"
            ) from error


class HttpCall:
    """A call of ForwardHttp."""

    def __init__(self, request: HttpRequest, metadata: Metadata) -> None:
        is_deletion = request.scope["method"] == "DELETE"  # a second deletion would be a 404
        self.may_repeat = not (is_deletion or request.scope["path"].endswith(NOT_REPEATABLE))
        self._request, self._metadata = request, metadata

    def begin(self, address: str, channel: grpc.aio.Channel) -> Any:
        stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        return stub.ForwardHttp(self._messages(), metadata=self._metadata)

    def answer(self, call: Any) -> AsyncIterator[pb.ForwardHttpResponse]:
        messages: AsyncIterator[pb.ForwardHttpResponse] = aiter(call)
        return messages

    async def pass_on(self, message: pb.ForwardHttpResponse) -> None:
        if message.HasField("head"):
            headers = [(each.name.decode(), each.value.decode()) for each in message.head.headers]
            kept = [each for each in headers if each[0] not in ANSWER_KEPT_BACK]
            self._request.pass_on_head(message.head.status, kept)
        elif message.body:
            await self._request.write(message.body)
        else:
            await self._request.end_bytes()

    async def _messages(self) -> AsyncIterator[pb.ForwardHttpRequest]:
        scope, body = self._request.scope, self._request.received or b""
        host, port = scope.get("client") or ("", 0)
        headers = [
            pb.HttpHeader(name=name, value=value)
            for name, value in scope["headers"]
            if name not in HEADERS_KEPT_BACK and name not in TOKENS
        ]
        headers.append(pb.HttpHeader(name=b"content-length", value=str(len(body)).encode()))
        yield pb.ForwardHttpRequest(
            head=pb.HttpRequest(
                method=scope["method"],
                path=scope["path"],
                query=scope.get("query_string", b""),
                headers=headers,
                client_host=host,
                client_port=port,
                retry_key=self._request.forwarding_key,
            )
        )
        for start in range(0, len(body), PIECE_BYTES):
            yield pb.ForwardHttpRequest(body=body[start : start + PIECE_BYTES])


def tokens_of(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return the client's token as gRPC metadata, for daemons that share no secret."""
    given = {name: value.decode("latin-1") for name, value in headers}
    if authorization := given.get(b"authorization"):
        return [("authorization", authorization)]
    if key := given.get(b"x-api-key"):
        return [("authorization", f"Bearer {key}")]
    return []


async def fetch_path(
    channel: grpc.aio.Channel, metadata: Metadata, path: str, query: str, seconds: float
) -> bytes:
    """GET a path from another daemon for the current caller. Raises Unavailable unless the status is 200."""

    async def request() -> AsyncIterator[pb.ForwardHttpRequest]:
        head = pb.HttpRequest(method="GET", path=path, query=query.encode())
        yield pb.ForwardHttpRequest(head=head)

    stub: Any = replica_pb2_grpc.ReplicaServiceStub(channel)
    status, body = 0, bytearray()
    try:
        async for message in stub.ForwardHttp(request(), metadata=metadata, timeout=seconds):
            if message.HasField("head"):
                status = message.head.status
            body += message.body
    except grpc.aio.AioRpcError as error:
        raise Unavailable(f"{error.code().name} {error.details()}") from error
    if status != 200:
        raise Unavailable(f"the daemon answered with status {status}")
    return bytes(body)


class HttpAnswers:
    """Answers requests that other daemons forward. Runs on the event loop of the owner."""

    def __init__(self, application: Callable[[], Any]) -> None:
        """`application` returns the daemon's ASGI application."""
        self._application = application

    async def answer(self, requests: Any, context: Any) -> None:
        messages = aiter(requests)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                head = await anext(messages, None)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the head of the request did not arrive within {BODY_SECONDS:g} s"
            ) from None
        if head is None or not head.HasField("head"):
            raise InvalidArgument("head", "is missing: the first message must have it")
        forwarded = ForwardedRequest(caller(), head.head.retry_key)
        answer = _Answer(messages, context, forwarded)
        application = self._application()
        running = asyncio.get_running_loop().create_task(
            application(_scope(head.head, forwarded, context.peer()), answer.receive, answer.send)
        )
        try:
            await asyncio.wait({running})
        finally:  # also if the other daemon cancels the call because its client has disconnected
            answer.has_disconnected.set()
            await asyncio.wait({running})
        running.result()
        if forwarded.owner is not None:
            raise forwarded.owner


class _Answer:
    """An ASGI server's side of one request."""

    def __init__(self, messages: Any, context: Any, forwarded: ForwardedRequest) -> None:
        self.has_disconnected = asyncio.Event()  # set when the client has disconnected
        self._messages, self._context, self._forwarded = messages, context, forwarded
        self._has_body = False  # the whole body was received

    async def receive(self) -> dict[str, Any]:
        if self._has_body:
            await self.has_disconnected.wait()
            return {"type": "http.disconnect"}
        message = await anext(self._messages, None)
        if message is None:
            self._has_body = True
            return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.request", "body": message.body, "more_body": True}

    async def send(self, event: dict[str, Any]) -> None:
        if event["type"] == "http.response.start":
            headers = [pb.HttpHeader(name=name, value=value) for name, value in event["headers"]]
            head = pb.HttpResponse(status=event["status"], headers=headers)
            await self._write(pb.ForwardHttpResponse(head=head))
            return
        body = event.get("body", b"")
        for start in range(0, len(body), PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            await self._write(pb.ForwardHttpResponse(body=piece))
        if not event.get("more_body"):
            await self._write(pb.ForwardHttpResponse(body=b""))

    async def _write(self, message: pb.ForwardHttpResponse) -> None:
        if self._forwarded.owner is not None or self.has_disconnected.is_set():
            return
        with contextlib.suppress(grpc.aio.InternalError, grpc.aio.UsageError):  # a disconnect
            await self._context.write(message)


def _scope(head: pb.HttpRequest, forwarded: ForwardedRequest, peer: str) -> dict[str, Any]:
    """Return the ASGI scope. Only a daemon may name the client's address; otherwise it is `peer`."""
    if not METHOD.fullmatch(head.method) or not head.path.startswith("/"):
        raise InvalidArgument("head", "is not an HTTP request")
    host, port = head.client_host, head.client_port
    if not forwarded.caller.is_peer:
        host, port = _host_and_port(peer)
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": head.method,
        "path": head.path,
        "raw_path": b"",
        "root_path": "",
        "query_string": head.query,
        "headers": [(each.name, each.value) for each in head.headers],
        "client": (host or "unknown", port),
        "server": None,
        FORWARDED: forwarded,
    }


def _host_and_port(peer: str) -> tuple[str, int]:
    """Return host and port of a peer that is given in gRPC's notation."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else 0
