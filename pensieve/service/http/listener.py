"""The socket of HTTP: uvicorn in the service's own loop, with bounds that it does not have by itself.

* A connection that begins a request has HEAD_SECONDS to send its head; the body's time is `Incoming`'s.
* One that sends nothing is closed after IDLE_SECONDS, the first time as after an answer.
* There are CONNECTIONS_MAX of them, apart from gRPC's; more are closed at once.
* A client that takes nothing of its answer for STALL_SECONDS is cut off; until then what it has not taken is
  a few windows of a stream, or an answer, and counts for its tenant (`unread_bytes`).

The daemon ends it: connections that wait are closed, those that are answered end with their turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

from pensieve.errors import AddressInUse, ConfigError
from pensieve.extras import need
from pensieve.service.grpc.server import Listening, Server, is_loopback
from pensieve.service.http.certificates import Certificates
from pensieve.service.http.front import Allowed, Front
from pensieve.service.http.routes import application
from pensieve.text import ChatTemplate
from pensieve.text.tool_calls import CallStyle

PURPOSE = "the HTTP API"
HEAD_SECONDS = 10.0
IDLE_SECONDS = 75
HEAD_BYTES_MAX = 32 << 10
BACKLOG = 1024
CONNECTIONS_MAX = 10_240
STALL_SECONDS = 30.0  # that a client may take nothing of what is sent
CLOSE_SECONDS = 2.0  # for answers that are on their way when the daemon ends


def serve_http(server: Server, template: ChatTemplate, style: CallStyle | None = None) -> None:
    """Have a server listen for HTTP too, once it listens; `style`: how the model writes calls of tools."""
    of = server.listening
    is_local = is_loopback(of.http.rpartition(":")[0]) and not of.tokens
    front = Front(server.guard, Allowed(of.http_hosts, of.http_origins, is_local))
    server.beside.append(
        HttpListener(
            of,
            lambda: application(front, server.daemon, template, style, server.batch_jobs),
            server.audit.certificate_reloaded,
        )
    )


class HttpListener:
    def __init__(
        self,
        listening: Listening,
        make: Callable[[], Any],
        on_reload: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """`make` gives the application, when the socket is about to answer; `on_reload` as Certificates'."""
        need("http", "uvicorn", PURPOSE)
        need("http", "starlette", PURPOSE)
        self._listening, self._make, self._on_reload = listening, make, on_reload
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    @property
    def url(self) -> str:
        """Where it listens."""
        scheme = "http" if self._listening.tls_cert is None else "https"
        return f"{scheme}://{self.address}"

    async def listen(self) -> None:
        uvicorn = need("http", "uvicorn", PURPOSE)
        bound = _bound(self._listening.http)
        host = self._listening.http.rpartition(":")[0]
        self.address = f"{host}:{bound.getsockname()[1]}"
        config = uvicorn.Config(
            self._make(),
            http=_protocol(CONNECTIONS_MAX),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            backlog=BACKLOG,
            **self._tls(),
        )
        logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())
        logging.getLogger("uvicorn.error").propagate = False  # of what strangers send it would tell
        server = self._server = _server(uvicorn)(config)
        self._serving = asyncio.get_running_loop().create_task(server.serve(sockets=[bound]))
        while not server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            self._serving.result()

    def _tls(self) -> dict[str, Any]:
        of = self._listening
        if of.tls_cert is None or of.tls_key is None:
            return {}
        certificates = Certificates(of.tls_cert, of.tls_key, of.tls_client_ca, self._on_reload)
        return {"ssl_context_factory": lambda config, default: certificates.context}

    async def close(self) -> None:
        """What is answered has a moment to end."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving


def _bound(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno is None or isinstance(error, socket.gaierror):
            raise ConfigError(f"cannot listen on {address}: {error}") from error
        raise AddressInUse(f"cannot listen on {address} for HTTP: {error.strerror}") from error


def _server(uvicorn: Any) -> Any:
    class Server(uvicorn.Server):  # type: ignore[misc]
        """Signals are the daemon's."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server


def _protocol(connections_max: int) -> Any:
    protocol = need("http", "uvicorn.protocols.http.h11_impl", PURPOSE)
    h11 = need("http", "h11", PURPOSE)

    class Protocol(protocol.H11Protocol):  # type: ignore[misc, name-defined]
        """A connection, with a deadline for each head of a request."""

        _deadline: asyncio.TimerHandle | None = None
        _look: asyncio.TimerHandle | None = None
        _in_head = False  # the deadline is that of a head, or of a body that nobody wants

        def connection_made(self, transport: Any) -> None:
            if len(self.connections) >= connections_max:
                self.transport = transport
                transport.abort()
                return
            super().connection_made(transport)
            self._close_after(IDLE_SECONDS)
            self._look_again(0)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._answers:
                self._close_after(None)
            elif not self._in_head:
                self._close_after(HEAD_SECONDS, in_head=True)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:
                self._close_after(HEAD_SECONDS, in_head=True)
            else:
                self._close_after(None)  # uvicorn has a timer for what comes next

        def connection_lost(self, exc: Exception | None) -> None:
            self._close_after(None)
            if self._look is not None:
                self._look.cancel()
            super().connection_lost(exc)

        def _look_again(self, left_before: int) -> None:
            """Give a client up that has taken nothing since the last look; `close` would wait for it."""
            left = self.transport.get_write_buffer_size()
            if left_before and left >= left_before:
                self.transport.abort()
                return
            self._look = self.loop.call_later(STALL_SECONDS, self._look_again, left)

        @property
        def _answers(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _close_after(self, seconds: float | None, *, in_head: bool = False) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            self._in_head, self._deadline = in_head, None
            if seconds is not None and not self.transport.is_closing():
                self._deadline = self.loop.call_later(seconds, self.transport.abort)

    return Protocol
