"""An HTTP request that goes past Ray.

Streams of gRPC do the same (direct.py).  The proxy asks the replica for it by a key in the request's scope.
The replica answers with a header that says where its daemon is; the proxy sends the request there, and the
client gets the daemon's answer.  A replica of an older version, during a roll, answers through Ray as usual.

    waiting    Ray looks for a replica.  What Ray says itself (no replica, the replica's refusal) goes to the
               client, and Ray is told when the client leaves
    direct     the replica has said where its daemon is.  Ray's call only waits now: what it sends is dropped,
               it is not told that the client left, and it ends with the hold
    over       the daemon's answer has ended, the client has left, or the replica has let go; before the
               answer's beginning that is a 503, and later it cuts the answer off

A 404 of Ray's own becomes a 503: Ray has no application while the cluster starts or ends, and clients do not
try again after a 404.

The body has to be at hand, since Ray's side may read it only once.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pensieve.cluster.direct import DIRECT, Holds, Way, held, read
from pensieve.cluster.http_forward import GONE, REPLICA, HttpForward, answer

REQUEST_ID = b"x-request-id"  # by which Ray's logs know it
PAST_RAY = "pensieve.past_ray"  # in the scope: nothing that a client can send


async def hold_http(holds: Holds, address: str, name: str, send: Any) -> None:
    """The replica's side."""
    ticket = holds.ticket()
    way = Way(address, holds.address, ticket, name)
    try:
        headers = [(DIRECT.encode(), way.written().encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await holds.hold(ticket)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        holds.forget(ticket)


class HttpDirect:
    """The proxy's side: `app` is Ray's."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._forward = HttpForward()

    async def __call__(self, scope: Any, body: bytes | None, receive: Any, send: Any) -> None:
        call = _Call(receive, send)
        rays = asyncio.ensure_future(
            self._app({**scope, PAST_RAY: True}, call.receive_for_ray, call.send_of_ray)
        )
        try:
            await asyncio.wait([rays, call.way], return_when=asyncio.FIRST_COMPLETED)
            if call.way.done():
                await self._go_on(call, scope, body, rays)
                await asyncio.wait([rays])
                if not rays.cancelled():
                    rays.exception()  # what became of Ray's call is not the client's
            else:
                await rays
        finally:
            rays.cancel()

    async def _go_on(
        self, call: _Call, scope: Any, body: bytes | None, rays: asyncio.Future[Any]
    ) -> None:
        way = call.way.result()
        try:
            async with held(way) as gone:
                request = asyncio.ensure_future(
                    self._forward(way.daemon, way.replica, scope, body, call.send)
                )
                try:
                    ends = [request, gone, call.left, rays]
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    request.cancel()
                    await asyncio.wait([request])
                if not request.cancelled():
                    await request  # what went wrong in it
        except OSError:
            pass  # the replica cannot be reached
        if not (call.has_begun or call.left.done()):
            await answer(503, GONE, way.replica, call.send)


class _Call:
    """What the client's side of a request brings and takes, as Ray sees it and as it is."""

    def __init__(self, receive: Any, send: Any) -> None:
        self.way: asyncio.Future[Way] = asyncio.get_running_loop().create_future()
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_begun = False
        self._receive, self._send, self._rays_answer = receive, send, RaysAnswer(send)
        self._request_id: list[tuple[bytes, bytes]] = []

    async def send(self, message: Any) -> None:
        self.has_begun = True
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *self._request_id]}
        await self._send(message)

    async def receive_for_ray(self) -> Any:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            if not self.left.done():
                self.left.set_result(None)
            if self.way.done():  # Ray ends its call when the replica does
                await asyncio.Future()
        return message

    async def send_of_ray(self, message: Any) -> None:
        if self.way.done():
            return
        headers = dict(message.get("headers", ()))
        if message["type"] == "http.response.start" and DIRECT.encode() in headers:
            self._request_id = [each for each in headers.items() if each[0] == REQUEST_ID]
            self.way.set_result(read(headers[DIRECT.encode()].decode()))
        else:
            await self._rays_answer(message)


class RaysAnswer:
    """What Ray says itself, on its way to the client."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._is_over = False

    async def __call__(self, message: Any) -> None:
        if self._is_over:
            return
        is_404 = message["type"] == "http.response.start" and message["status"] == 404
        if is_404 and REPLICA not in dict(message.get("headers", ())):
            self._is_over = True
            await answer(503, GONE, "", self._send)
        else:
            await self._send(message)
