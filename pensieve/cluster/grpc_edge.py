"""Pensieve's gRPC services inside Ray Serve's gRPC proxy: what comes in and what goes out, as raw bytes.

`grpc_options.grpc_servicer_functions` names `add_services`. Ray replaces the behaviour of each method by its
own, which routes the call to a replica. Around that we put what Ray does not do:

* **Messages stay bytes** in both directions.
* **The deadline** travels as metadata, so that the daemon knows it (Ray passes on a cancellation only).
* **An error keeps its details.** Ray carries trailing metadata with a message, and drops them with an
  exception. So a replica ends a failed call with an empty message whose context has the error
  (grpc_forward.py). Here that message is taken out again.
* **A replica that died** is UNAVAILABLE, which clients retry, and not Ray's INTERNAL. So is a cluster that
  ends, which Ray does not know any more (NOT_FOUND). An error that a message brought came from a daemon and
  stays as it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from pensieve.cluster.grpc_methods import REPLICA, TIMEOUT, Method, methods

ABSENT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.NOT_FOUND)
RAYS_OWN = frozenset({*ABSENT, *(each.value[0] for each in ABSENT)})  # Ray writes either
GONE = "the replica that had this call is gone or is about to end; another one takes its calls"
Unary = Callable[[Any, Any], Awaitable[bytes]]
Stream = Callable[[Any, Any], AsyncIterator[bytes]]
Handler = Any  # grpc.RpcMethodHandler, which is generic for type checkers alone


def add_services(_: Any, server: grpc.aio.Server) -> None:
    """For `grpc_options.grpc_servicer_functions`."""
    server.add_generic_rpc_handlers((Services(),))


class Services(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        # Ray reads this table, and puts one with its own behaviours in its place.
        self._method_handlers = {each.path: _handler(each) for each in methods()}
        self._methods = {each.path: each for each in methods()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        path = handler_call_details.method
        handler = self._method_handlers.get(path)
        return None if handler is None else _around(self._methods[path], handler)


class Call:
    """The context of a call as Ray sees it: the real one, with the deadline among its metadata."""

    def __init__(self, context: Any) -> None:
        self._context = context
        left = context.time_remaining()
        deadline = () if left is None else ((TIMEOUT, f"{left:.3f}"),)
        self._metadata = (*(context.invocation_metadata() or ()), *deadline)

    def invocation_metadata(self) -> Any:
        return self._metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _handler(method: Method) -> Handler:
    return getattr(grpc, f"{method.kind}_rpc_method_handler")(None)  # without serializers: bytes


def _around(method: Method, handler: Any) -> Handler:
    """Ray's handler with ours around it."""
    around: Any = _stream if method.gives_stream else _unary
    return handler._replace(**{method.kind: around(getattr(handler, method.kind))})


def _unary(
    behaviour: Callable[[Any, Any], Awaitable[bytes]],
) -> Callable[[Any, Any], Awaitable[bytes]]:
    async def call(request: Any, context: Any) -> bytes:
        response = await behaviour(request, Call(context))
        if not any(name == REPLICA for name, _ in context.trailing_metadata() or ()):
            _correct(context)  # there was no message, in whose context they are
        return response

    return call


def _stream(
    behaviour: Callable[[Any, Any], AsyncIterator[bytes]],
) -> Callable[[Any, Any], AsyncIterator[bytes]]:
    async def call(request: Any, context: Any) -> AsyncIterator[bytes]:
        has_failed = False
        async for response in behaviour(request, Call(context)):
            has_failed = bool(context.code())  # this empty message has brought it, and is the last
            if not has_failed:
                yield response
        if not has_failed:
            _correct(context)

    return call


def _correct(context: Any) -> None:
    """Make UNAVAILABLE of what Ray says itself: a replica is gone (INTERNAL), or all are (NOT_FOUND)."""
    if context.code() not in RAYS_OWN:
        return
    context.set_code(grpc.StatusCode.UNAVAILABLE)
    context.set_details(GONE)
