"""The HTTP socket: uvicorn on the service's event loop, with limited connections (connections.py).

At most CONNECTIONS_MAX connections are open, or fewer if the limit of open files is lower. The soft limit of
open files is raised as far as possible. Further connections get a 503.

When the daemon closes the socket, idle connections are closed at once. The others are closed when their
answers are complete, or after CLOSE_SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from pensieve.api.forwarded import ForwardHttp
from pensieve.api.http.connections import HEAD_BYTES_MAX, IDLE_SECONDS, protocol
from pensieve.api.http.front import Allowed, Front, own_names
from pensieve.api.http.gateway import GatewayMethod
from pensieve.api.http.routes import application
from pensieve.api.plugins import Plugin
from pensieve.conversations.daemon import Daemon
from pensieve.errors import AddressInUse, ConfigError
from pensieve.extras import need
from pensieve.guard.exposure import METRICS_ON_HTTP, Listening, is_loopback
from pensieve.guard.guard import Guard
from pensieve.guard.reload import Reloaded
from pensieve.text import ChatTemplate
from pensieve.text.tool_calls import CallStyle

log = logging.getLogger("pensieve")
PURPOSE = "the HTTP API"
BACKLOG = 1024
ACCEPTED_AT_ONCE = 16  # connections accepted per loop step, so that streams continue
CONNECTIONS_MAX = 10_240
FILES_KEPT = 512  # open files reserved for gRPC and the history
CLOSE_SECONDS = 2.0  # time for unfinished answers when the daemon stops


class GuardedServer(Protocol):
    """The part of the gRPC server that HTTP uses."""

    daemon: Daemon
    guard: Guard
    listening: Listening
    plugins: Sequence[Plugin]
    other_listeners: list[Any]  # listeners that open and close with the server
    forward_http: ForwardHttp | None  # forwards requests to the owner of a conversation
    http_application: Callable[[], Any]  # answers forwarded requests

    async def metrics_text(self) -> str: ...
    @property
    def json_methods(self) -> Iterable[GatewayMethod]: ...


def serve_http(
    server: GuardedServer, template: ChatTemplate, style: CallStyle | None = None
) -> None:
    """Add HTTP to the server: answer forwarded requests, and listen if an address is set.

    `style`: the format in which the model writes tool calls.
    """
    listening = server.listening
    host = listening.http.rpartition(":")[0]
    is_open = not listening.tokens and listening.tls_client_ca is None
    given_names = frozenset(each.lower() for each in listening.http_hosts)
    hosts = own_names(host) | given_names if is_open else frozenset({"*"})
    is_local = is_loopback(host) and not listening.tokens
    allowed = Allowed(hosts, listening.http_origins, is_local)
    front = Front(server.guard, allowed, server.forward_http)

    @cache
    def make_application() -> Any:
        return application(
            *(front, server.daemon, template, style, server.json_methods, server.plugins),
            server.metrics_text if listening.metrics == METRICS_ON_HTTP else None,
        )

    server.http_application = make_application
    if not listening.http:
        return
    server.other_listeners.append(
        HttpListener(listening, make_application, server.guard.audit.certificate_reloaded)
    )


def connections_max() -> int:
    """Return CONNECTIONS_MAX, or less if the limit of open files requires it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + FILES_KEPT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        with contextlib.suppress(OSError, ValueError):  # then the soft limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return CONNECTIONS_MAX
    maximum = max(soft - FILES_KEPT, soft // 2)
    log.warning(
        "at most %s connections over HTTP, because the limit of open files is %s."
        " For %s connections, raise the limit to %s (ulimit -n; LimitNOFILE of systemd)",
        *(f"{each:,}" for each in (maximum, soft, CONNECTIONS_MAX, wanted)),
    )
    return maximum


class HttpListener:
    def __init__(
        self,
        listening: Listening,
        make_application: Callable[[], Any],
        on_reload: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """`make_application`: called when the socket opens. `on_reload`: see Reloaded."""
        need("http", "uvicorn", PURPOSE)
        need("http", "starlette", PURPOSE)
        need("http", "python_multipart", PURPOSE)
        self._listening, self._make_application, self._on_reload = (
            listening,
            make_application,
            on_reload,
        )
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    @property
    def url(self) -> str:
        scheme = "http" if self._listening.tls_cert is None else "https"
        return f"{scheme}://{self.address}"

    async def listen(self) -> None:
        uvicorn = need("http", "uvicorn", PURPOSE)
        bound = bound_socket(self._listening.http)
        host = self._listening.http.rpartition(":")[0]
        self.address = f"{host}:{bound.getsockname()[1]}"
        config = uvicorn.Config(
            self._make_application(),
            http=protocol(connections_max()),
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
            backlog=ACCEPTED_AT_ONCE,
            **self._tls(),
        )
        logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())
        # uvicorn would log the input of any client.
        logging.getLogger("uvicorn.error").propagate = False
        server = self._server = _quiet_server_class(uvicorn)(config)
        self._serving = asyncio.get_running_loop().create_task(server.serve(sockets=[bound]))
        while not server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            self._serving.result()
        # `backlog` is used for two numbers: the connections accepted per loop step, and the length of the
        # socket's queue. Only the first should be small, so set the second again.
        bound.listen(BACKLOG)

    def _tls(self) -> dict[str, Any]:
        listening = self._listening
        if listening.tls_cert is None or listening.tls_key is None:
            return {}
        context = tls_context(
            listening.tls_cert, listening.tls_key, listening.tls_client_ca, self._on_reload
        )
        return {"ssl_context_factory": lambda config, default: context}

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving


def bound_socket(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, int(port)), family=family, backlog=BACKLOG)
        # Accepted connections inherit this option. asyncio sets it only if the socket's `proto` is TCP, but
        # here `proto` is 0. Without TCP_NODELAY, the first token on a kept-alive connection waits 40 ms for
        # a delayed acknowledgement.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bound
    except OSError as error:
        if error.errno is None or isinstance(error, socket.gaierror):
            raise ConfigError(f"cannot listen on {address}: {error}") from error
        raise AddressInUse(f"cannot listen on {address} for HTTP: {error.strerror}") from error


def tls_context(
    cert: Path,
    key: Path,
    client_ca: Path | None,
    on_reload: Callable[[str], None] = lambda problem: None,
) -> ssl.SSLContext:
    """Return a context whose handshakes use the current certificate.

    Changed files are loaded into a new context, which replaces the old context if loading succeeds. So a
    certificate is never used with the key of another certificate.
    """

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(cert, key, lambda: "")  # no password prompt
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot use {cert} with its key: {_reason(error)}") from error
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(client_ca)
            except (OSError, ValueError) as error:
                raise ConfigError(f"cannot use {client_ca}: {_reason(error)}") from error
        return context

    name = "the certificate of HTTP"
    files = Reloaded(name, (cert, key, client_ca), read, on_reload)

    class Context(ssl.SSLContext):
        def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
            files.if_changed()
            return files.value.wrap_bio(*args, **kwargs)

    return Context(ssl.PROTOCOL_TLS_SERVER)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _quiet_server_class(uvicorn: Any) -> Any:
    class QuietServer(uvicorn.Server):  # type: ignore[misc]
        """A server that leaves signals to the daemon."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return QuietServer
