"""Replace the error responses of Ray Serve's HTTP proxy by a 503, which clients retry.

`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `middlewares`. Ray answers 404 while the cluster starts or
ends. If a replica dies before its response begins, Ray sends nothing, and uvicorn sends a 500. Responses of a
daemon have a header that names the replica, and are not changed.
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
        has_begun = is_proxy_error = False

        async def send_unless_proxy_error(message: Any) -> None:
            nonlocal has_begun, is_proxy_error
            if not has_begun and message["status"] == 404:
                is_proxy_error = REPLICA not in dict(message.get("headers", ()))
            has_begun = True
            if not is_proxy_error:
                await send(message)

        await self._app(scope, receive, send_unless_proxy_error)
        if is_proxy_error or not has_begun:
            await answer(503, GONE, "", send)
