"""The daemon's gRPC server: sockets, options, health, start and stop.

OPTIONS replace unsafe defaults of gRPC. With the defaults, two servers may share a port (so_reuseport), a
client that does not respond is never detected (`ping_timeout_ms`), a compressed request may unpack to a
thousand times its size, windows grow to megabytes, and the number of connections is unlimited.
guard/request_bodies.py limits the bodies of calls that are not authenticated yet.

`close` sets the health to NOT_SERVING, so that load balancers use other daemons. Then it refuses new turns,
and running turns finish or are interrupted. Then it closes connections, engine and store, in this order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc

from pensieve.api.forwarded import ForwardHttp
from pensieve.api.grpc import sizes
from pensieve.api.grpc.admin import AdminService, ServerFacts
from pensieve.api.grpc.admin_socket import socket_address
from pensieve.api.grpc.conversation import ConversationService
from pensieve.api.grpc.forwarding import (
    Forwarder,
    ForwardingService,
    OwnerLookup,
    SharedConversationService,
)
from pensieve.api.grpc.http_forwarding import HttpAnswers, HttpForwarder
from pensieve.api.grpc.interceptor import GuardInterceptor
from pensieve.api.grpc.json_methods import json_methods
from pensieve.api.grpc.peers import Peers
from pensieve.api.grpc.reflection import HEALTH, Reflection
from pensieve.api.grpc.replica import ReplicaService
from pensieve.api.metrics.listener import Answers, MetricsListener
from pensieve.api.metrics.scrape import Scrape
from pensieve.api.plugins import Plugin
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.threads import LoopLag
from pensieve.errors import AddressInUse, ConfigError, DeadlineExceeded, NotFound
from pensieve.guard.audit import Audit, AuditLog
from pensieve.guard.callers import Token, caller, limits_of
from pensieve.guard.exposure import METRICS_ON_HTTP, Listening, check_exposure, is_loopback
from pensieve.guard.guard import Guard
from pensieve.guard.reload import Reloaded, watch_tokens
from pensieve.v1 import admin_pb2_grpc, conversation_pb2_grpc, replica_pb2, replica_pb2_grpc
from pensieve.v1 import status_pb2 as pb

WINDOW_BYTES = 16 << 10  # bytes of a request that gRPC receives before we read them
HEADER_BYTES_MAX = 4 << 10
STREAMS_MAX = 4096  # of one connection
PENDING_MAX = STREAMS_MAX  # calls that wait to be accepted; gRPC cancels any further call
IDENTITY = 1  # gRPC's bit for "no compression"
SERVICES = (
    "",
    "pensieve.v1.ConversationService",
    "pensieve.v1.AdminService",
)
STRANGERS_WATCH_SECONDS = 300.0
STOP_SECONDS = 0.5  # for watches to end
REPLICA = replica_pb2.DESCRIPTOR.services_by_name["ReplicaService"]
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", sizes.REQUEST_BYTES_MAX),
    ("grpc.max_send_message_length", sizes.RESPONSE_BYTES_MAX),
    ("grpc.max_metadata_size", HEADER_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", HEADER_BYTES_MAX),
    ("grpc.server.max_pending_requests", PENDING_MAX),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_MAX),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # the probe would enlarge every window to megabytes
    ("grpc.compression_enabled_algorithms_bitset", IDENTITY),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class Health:
    """The service grpc.health.v1, with the messages of status.proto."""

    def __init__(self, services: Sequence[str] = SERVICES) -> None:
        self._services = services
        self._serving = False
        self._changed = asyncio.Event()

    def set(self, serving: bool) -> None:
        self._serving = serving
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> Any:
        if service not in self._services:
            return pb.HealthCheckResponse.SERVING_STATUS_SERVICE_UNKNOWN
        if self._serving:
            return pb.HealthCheckResponse.SERVING_STATUS_SERVING
        return pb.HealthCheckResponse.SERVING_STATUS_NOT_SERVING

    async def check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            raise NotFound("no such service")
        return pb.HealthCheckResponse(status=self._status(request.service))

    async def watch(self, request: pb.HealthCheckRequest, context: Any) -> None:
        seconds = None if caller().known else STRANGERS_WATCH_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await self._watch(request, context)
        except TimeoutError:
            raise DeadlineExceeded(
                f"a watch without a token ends after {seconds:g} s; watch again"
            ) from None

    async def _watch(self, request: pb.HealthCheckRequest, context: Any) -> None:
        sent = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != sent:
                await context.write(pb.HealthCheckResponse(status=status))
                sent = status
            await changed.wait()

    def handlers(self) -> Any:
        def method(make: Any, behaviour: Any) -> Any:
            return make(
                behaviour,
                request_deserializer=pb.HealthCheckRequest.FromString,
                response_serializer=pb.HealthCheckResponse.SerializeToString,
            )

        return grpc.method_handlers_generic_handler(
            HEALTH,
            {
                "Check": method(grpc.unary_unary_rpc_method_handler, self.check),
                "Watch": method(grpc.unary_stream_rpc_method_handler, self.watch),
            },
        )


class Listener(Protocol):
    @property
    def url(self) -> str: ...
    async def listen(self) -> None: ...
    async def close(self) -> None: ...


class _OneQueue:
    """Registers services only as generic handlers.

    gRPC queues PENDING_MAX calls for each registered method, but PENDING_MAX in total for generic handlers.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Do nothing, because the generic handlers already have these methods."""


class Server:
    """A daemon with its sockets and plugins.

    `other_listeners`: listeners for other protocols. They open after the gRPC sockets and close before the
    daemon.
    """

    def __init__(
        self, daemon: Daemon, listening: Listening, plugins: Sequence[Plugin] = ()
    ) -> None:
        check_exposure(listening)
        self.daemon = daemon
        self.plugins = plugins
        more = [each.service for each in plugins]
        has_peers = listening.hand_over or daemon.claims is not None
        if has_peers:
            more.append(REPLICA)
        self.health = Health((*SERVICES, *(each.full_name for each in more)))
        self.stopping = asyncio.Event()  # set to stop the server
        self.failure: BaseException | None = None  # the error, if the server stops unexpectedly
        self.address = ""
        self.other_listeners: list[Listener] = []
        self.listening = listening
        path = listening.audit_log
        self._audit_log = AuditLog(path) if path is not None else None
        self.audit = Audit(self._audit_log, asyncio.get_running_loop().time)
        self.guard = Guard(
            (*listening.tokens, *listening.peer_tokens),
            daemon.admission.allowances,
            audit=self.audit,
            refusals=daemon.refusals,
        )
        self._loop_lag = LoopLag()
        self._background: list[asyncio.Task[None]] = []
        self._certificates: Reloaded[grpc.ServerCertificateConfiguration] | None = None
        self._server = grpc.aio.server(
            interceptors=[GuardInterceptor(self.guard)], options=_options(listening)
        )
        services: Any = _OneQueue(self._server)
        self._forwarders: list[Forwarder] = []
        self.forwarder: Forwarder | None = None  # forwards calls about conversations
        self.forward_http: ForwardHttp | None = None  # for the HTTP listener
        # The ASGI application for HTTP. It answers forwarded requests even if no HTTP port is open.
        self.http_application: Callable[[], Any] = _no_application
        over_grpc = over_http = ConversationService(daemon)
        if daemon.claims is not None:
            self._peers = Peers(daemon.claims.replica, listening.peer_secret, listening.peers)
            self.forwarder = self._forwarder_of(daemon.claims)
            self.forward_http = HttpForwarder(self.forwarder)
            over_grpc = ForwardingService(daemon, self.forwarder)
            over_http = SharedConversationService(daemon)
        conversation_pb2_grpc.add_ConversationServiceServicer_to_server(over_grpc, services)
        self.json_methods = tuple(json_methods(over_http))
        for plugin in plugins:
            plugin.add_service(services, self._forwarder_of if daemon.claims is not None else None)
        self._scrape = Scrape(
            daemon,
            plugins,
            self._loop_lag.quantiles,
            lambda: self._facts().audit_lines_lost,
        )
        self._metrics = MetricsListener(
            Answers(self._scrape.text, lambda: daemon.serving, self._may_scrape)
        )
        self.admin = AdminService(daemon, self.stopping.set, self._facts, self._scrape.text)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self.admin, services)
        if has_peers:
            replica = ReplicaService(daemon, HttpAnswers(lambda: self.http_application()))
            replica_pb2_grpc.add_ReplicaServiceServicer_to_server(replica, services)
        self._server.add_generic_rpc_handlers((self.health.handlers(),))
        daemon.events.serving.subscribe(self.health.set)
        daemon.events.failed.subscribe(self._fail)
        self._server.add_generic_rpc_handlers(Reflection(more).handlers())

    def _forwarder_of(self, claims: OwnerLookup) -> Forwarder:
        self._forwarders.append(Forwarder(claims, self._peers))
        return self._forwarders[-1]

    async def listen(self) -> str:
        """Open the sockets, and return the address. Turns are refused until the daemon serves."""
        listening = self.listening
        if listening.address:
            self._listen_on_port()
        if listening.socket is not None:
            self._listen_locally(listening.socket)
        if listening.metrics and listening.metrics != METRICS_ON_HTTP:
            await self._metrics.listen(listening.metrics)
        loop = asyncio.get_running_loop()
        self._background.append(loop.create_task(self._loop_lag.measure()))
        if listening.token_file is not None:
            watching = loop.create_task(
                watch_tokens(
                    listening.token_file,
                    listening.tokens,
                    self._use_tokens,
                    self.audit.tokens_reloaded,
                )
            )
            watching.add_done_callback(self._on_watcher_end)
            self._background.append(watching)
        await self._server.start()
        for listener in self.other_listeners:
            await listener.listen()
        self.audit.started(self.address)
        return self.address

    def _use_tokens(self, tokens: Sequence[Token]) -> None:
        limits = limits_of(tokens)
        self.guard.use((*tokens, *self.listening.peer_tokens))
        self.daemon.use_limits(limits)

    def _on_watcher_end(self, watching: asyncio.Task[None]) -> None:
        """Stop the daemon. Without the watcher, tokens that are removed from the file would stay valid."""
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self._fail(error)

    @property
    def metrics_address(self) -> str:
        """HOST:PORT, with the actual port; "" if metrics are not served."""
        if self.listening.metrics == METRICS_ON_HTTP:
            return next((each.url.partition("://")[2] for each in self.other_listeners), "")
        return self._metrics.address

    @property
    def metrics_url(self) -> str:
        """The URL to scrape; "" if metrics are not served."""
        listening = self.listening
        is_https = listening.metrics == METRICS_ON_HTTP and listening.tls_cert is not None
        address = self.metrics_address
        return f"{'https' if is_https else 'http'}://{address}/metrics" if address else ""

    async def metrics_text(self) -> str:
        """Return the metrics in Prometheus' format."""
        return await self._scrape.text()

    def _may_scrape(self, authorization: str, peer: str) -> bool:
        """Return whether a caller may read the metrics.

        Operators may read them. Other callers may if the daemon has no tokens, or if the metrics address is
        local.
        """
        listening = self.listening
        if not listening.tokens or is_loopback(listening.metrics.rpartition(":")[0]):
            return True
        if self.guard.is_operator(authorization):
            return True
        self.audit.refused("metrics", peer, "UNAUTHENTICATED", "")
        return False

    def _listen_on_port(self) -> None:
        listening = self.listening
        host = listening.address.rpartition(":")[0]
        try:
            if listening.tls_cert is not None and listening.tls_key is not None:
                client_ca = listening.tls_client_ca
                files = certificates(
                    *(listening.tls_cert, listening.tls_key, client_ca),
                    self.audit.certificate_reloaded,
                )
                self._certificates = files  # gRPC calls `if_changed` while it listens
                credentials = grpc.dynamic_ssl_server_credentials(
                    files.value,
                    files.if_changed,  # type: ignore[arg-type]  # gRPC accepts None: unchanged
                    require_client_authentication=client_ca is not None,
                )
                bound = self._server.add_secure_port(listening.address, credentials)
            else:
                bound = self._server.add_insecure_port(listening.address)
        except RuntimeError:
            bound = 0
        if not bound:
            raise AddressInUse(
                f"cannot listen on {listening.address}: the port is in use, perhaps by another daemon. "
                "Choose another address with --address (port 0: any free port)"
            )
        self.address = f"{host}:{bound}"

    def _listen_locally(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # no daemon uses it, because this daemon has locked the data folder
        before = os.umask(0o177)
        try:
            self._server.add_insecure_port(socket_address(path))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {path}") from error
        finally:
            os.umask(before)

    def _facts(self) -> ServerFacts:
        port = int(self.address.rpartition(":")[2] or 0)
        lost = self._audit_log.num_lost if self._audit_log is not None else 0
        return ServerFacts(self._loop_lag.quantiles(), port, self.listening.connections_max, lost)

    async def wait_for_store(self) -> None:
        """Wait until the store threads respond. Return at once while the server stops."""
        if not self.stopping.is_set():
            await self.daemon.threads.wait_for_store()

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.stopping.set()

    async def close(self, drain_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain_seconds
        await self.daemon.drain(drain_seconds)
        # Wait also for answers of other daemons that are being forwarded to clients.
        while any(each.num_running for each in self._forwarders) and loop.time() < deadline:
            if self.daemon.hurried:
                break
            await asyncio.sleep(0.02)
        for task in self._background:
            task.cancel()
        await asyncio.gather(
            *(each.close() for each in self.other_listeners), self._metrics.close()
        )
        await self._server.stop(STOP_SECONDS)
        for forwarder in self._forwarders:
            await forwarder.close()
        await self.daemon.close()
        self.audit.stopped()
        if self._audit_log is not None:
            await asyncio.to_thread(self._audit_log.close)
        if self.listening.socket is not None:
            with contextlib.suppress(FileNotFoundError):
                self.listening.socket.unlink()


def _no_application() -> Any:
    raise ConfigError("this daemon has no HTTP API")


def certificates(
    cert: Path,
    key: Path,
    client_ca: Path | None,
    on_reload: Callable[[str], None] = lambda problem: None,
) -> Reloaded[grpc.ServerCertificateConfiguration]:
    """Load the certificate, and reload it when its files change. gRPC calls the result in its threads."""

    def read() -> grpc.ServerCertificateConfiguration:
        try:
            pair = (key.read_bytes(), cert.read_bytes())
            ca = client_ca.read_bytes() if client_ca else None
        except OSError as error:
            flags = {key: "--tls-key", cert: "--tls-cert", client_ca: "--tls-client-ca"}
            flag = next(
                (flags[path] for path in flags if str(path) == error.filename), "--tls-cert"
            )
            raise ConfigError(f"{flag}: cannot read {error.filename}: {error.strerror}") from error
        return grpc.ssl_server_certificate_configuration([pair], ca)

    return Reloaded("the certificate", (cert, key, client_ca), read, on_reload)


def _options(listening: Listening) -> tuple[tuple[str, int], ...]:
    timeout = int(listening.ping_timeout_seconds * 1000)
    return (
        *OPTIONS,
        ("grpc.max_allowed_incoming_connections", listening.connections_max),
        ("grpc.keepalive_time_ms", int(listening.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),
    )
