"""Who may speak to the history service: whoever has the secret that all of its daemons share."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

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
        if handler is None or handler_call_details.method.startswith("/grpc.health."):
            return handler
        given = next(
            (
                str(value).encode()
                for name, value in handler_call_details.invocation_metadata or ()
                if name == "authorization"
            ),
            b"",
        )
        is_known = not self._wanted or hmac.compare_digest(given, self._wanted)
        return handler._replace(
            stream_stream=_guarded(handler.stream_stream, is_known),
            unary_unary=_guarded(handler.unary_unary, is_known),
        )


def _guarded(act: Any, is_known: bool) -> Any:
    if act is None:
        return None

    async def guarded(request: Any, context: Any) -> Any:
        if not is_known:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "this needs the secret that all daemons share"
            )
        try:
            return await act(request, context)
        except PensieveError as error:
            await context.abort(grpc.StatusCode[error.grpc_status], " ".join(str(error).split()))

    return guarded
