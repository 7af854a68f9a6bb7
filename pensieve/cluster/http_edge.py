"""Answer 503 where Ray Serve's HTTP proxy would answer by itself.

`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `middlewares`. Ray answers 404 while the cluster starts or
ends, and nothing (uvicorn makes that a 500) if a replica died before its answer began. Clients retry a 503.
Answers of a daemon name its replica and stay unchanged.
"""

from __future__ import annotations

from typing import Any

from pensieve.cluster.http_forward import GONE, REPLICA, answer


def middlewares() -> list[Any]:
    """Return the middlewares. Used in RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    from starlette.middleware import Middleware

    return [Middleware(HttpEdge)]


class HttpEdge:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = is_over = False

        async def corrected(message: Any) -> None:
            nonlocal has_begun, is_over
            if not has_begun and message["status"] == 404:
                is_over = REPLICA not in dict(message.get("headers", ()))
            has_begun = True
            if not is_over:
                await send(message)

        await self._app(scope, receive, corrected)
        if is_over or not has_begun:
            await answer(503, GONE, "", send)
