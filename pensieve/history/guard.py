"""Admit only callers that have the secret which all daemons of a shared history have.

gRPC receives the request of a method that takes one message, of up to 256 MiB, before it calls the method.
So a stranger's call gets a handler that takes a stream of messages and reads none. To a client both look the
same.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from pensieve.errors import PensieveError

Handler = Any
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls without the secret, and gives errors of ours their status."""

    def __init__(self, secret: str) -> None:
        self._wanted = f"Bearer {secret}".encode() if secret else b""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        is_health = handler_call_details.method.startswith("/grpc.health.")
        if not self._is_known(handler_call_details):
            return _health_of_all(handler) if is_health else REFUSAL
        if is_health:
            return handler
        return handler._replace(
            stream_stream=_with_statuses(handler.stream_stream),
            unary_unary=_with_statuses(handler.unary_unary),
        )

    def _is_known(self, details: grpc.HandlerCallDetails) -> bool:
        given = next(
            (
                str(value).encode()
                for name, value in details.invocation_metadata or ()
                if name == "authorization"
            ),
            b"",
        )
        return not self._wanted or hmac.compare_digest(given, self._wanted)


async def _refuse(requests: Any, context: Any) -> NoReturn:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "this needs the secret that all daemons share"
    )
    raise AssertionError("abort raises")


REFUSAL: Handler = grpc.stream_stream_rpc_method_handler(_refuse)


def _health_of_all(handler: Handler) -> Handler:
    """Answer a stranger's health call for the whole server, whichever service it names."""
    request = handler.request_deserializer(b"")

    async def check(requests: Any, context: Any) -> Any:
        return await handler.unary_unary(request, context)

    async def watch(requests: Any, context: Any) -> None:
        await handler.unary_stream(request, context)

    if handler.unary_unary is not None:
        return grpc.stream_unary_rpc_method_handler(
            check, response_serializer=handler.response_serializer
        )
    return grpc.stream_stream_rpc_method_handler(
        watch, response_serializer=handler.response_serializer
    )


def _with_statuses(act: Any) -> Any:
    if act is None:
        return None

    async def acting(request: Any, context: Any) -> Any:
        try:
            return await act(request, context)
        except PensieveError as error:
            await context.abort(grpc.StatusCode[error.grpc_status], " ".join(str(error).split()))

    return acting
