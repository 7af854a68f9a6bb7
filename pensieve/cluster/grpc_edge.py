"""Pensieve's gRPC services in Ray Serve's gRPC proxy, as raw bytes.

`grpc_options.grpc_servicer_functions` names `add_services`. Ray replaces the handler of each method by its
own handler, which routes the call to a replica. This module wraps Ray's handlers and adds what Ray lacks:

* **Messages stay bytes** in both directions.
* **The deadline** is sent as metadata, so that the daemon knows it. Ray itself forwards only cancellations.
* **Errors keep their details.** Ray passes on the trailing metadata if a method returns a message, but drops
  them if the method raises. So a replica ends a failed call with an empty message, and puts the error into
  the call's context (grpc_forward.py). This module removes the empty message.
* **Missing replicas are UNAVAILABLE**, which clients retry. Ray itself answers INTERNAL if the replica is
  dead, and NOT_FOUND while the cluster ends. Errors from a daemon are not changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from pensieve.cluster.grpc_methods import REPLICA, TIMEOUT, Method, methods

ABSENT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.NOT_FOUND)
# Ray sets the status code or its number.
RAYS_OWN = frozenset({*ABSENT, *(each.value[0] for each in ABSENT)})
GONE = "the replica of this call is gone or ending; retry, and another replica takes the call"
Unary = Callable[[Any, Any], Awaitable[bytes]]
Stream = Callable[[Any, Any], AsyncIterator[bytes]]
Handler = Any  # grpc.RpcMethodHandler, which is generic only for type checkers


def add_services(_: Any, server: grpc.aio.Server) -> None:
    """Add the services. Used in `grpc_options.grpc_servicer_functions`."""
    server.add_generic_rpc_handlers((Services(),))


class Services(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        # Ray replaces this table by one with its own handlers.
        self._method_handlers = {each.path: _handler(each) for each in methods()}
        self._methods = {each.path: each for each in methods()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        path = handler_call_details.method
        handler = self._method_handlers.get(path)
        return None if handler is None else _wrap(self._methods[path], handler)


class Call:
    """The context of a call as Ray sees it: gRPC's context, with the deadline added to its metadata."""

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
    return getattr(grpc, f"{method.kind}_rpc_method_handler")(None)  # no serializers: bytes


def _wrap(method: Method, handler: Any) -> Handler:
    """Wrap Ray's handler."""
    wrap: Any = _stream if method.gives_stream else _unary
    return handler._replace(**{method.kind: wrap(getattr(handler, method.kind))})


def _unary(behaviour: Unary) -> Unary:
    async def call(request: Any, context: Any) -> bytes:
        response = await behaviour(request, Call(context))
        if not any(name == REPLICA for name, _ in context.trailing_metadata() or ()):
            _replace_rays_errors(context)  # without metadata of a replica, the error is Ray's own
        return response

    return call


def _stream(behaviour: Stream) -> Stream:
    async def call(request: Any, context: Any) -> AsyncIterator[bytes]:
        has_failed = False
        async for response in behaviour(request, Call(context)):
            has_failed = bool(context.code())  # true for the last, empty message of a failed call
            if not has_failed:
                yield response
        if not has_failed:
            _replace_rays_errors(context)

    return call


def _replace_rays_errors(context: Any) -> None:
    """Replace Ray's own INTERNAL (dead replica) or NOT_FOUND (ending cluster) by UNAVAILABLE."""
    if context.code() not in RAYS_OWN:
        return
    context.set_code(grpc.StatusCode.UNAVAILABLE)
    context.set_details(GONE)
