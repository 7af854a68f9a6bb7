"""A replica: a Ray Serve replica that runs an ordinary daemon as its child and forwards calls to it.

Ray decides when and on which node a replica starts, checks its health, and ends it. The replica has these
tasks:

    start      run the daemon, with Ray's name of this replica, and wait until it serves; its data folder may
               be one that an earlier replica has used (slots.py)
    calls      forward each gRPC method and each HTTP request (grpc_forward.py, http_forward.py)
    health     check that the daemon runs, answers and serves; it has RESTART_SECONDS to restart its engine;
               after any other failure, Ray replaces the replica
    end        Ray sends no new calls and waits for the running calls; the daemon drains, and all calls end
               within its drain_timeout

If a replica is killed, its daemon is killed with it (die_with_parent.py). If the daemon dies, the replica
exits (deployments.py). Calls in progress then fail with UNAVAILABLE.

This module follows Ray's conventions, but can be imported without Ray. deployments.py makes the class a
deployment.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc

from pensieve.cluster.child_process import ChildProcess
from pensieve.cluster.grpc_forward import GrpcForward, Response
from pensieve.cluster.grpc_methods import Method, health, methods
from pensieve.cluster.http_forward import HttpForward
from pensieve.cluster.settings import (
    ClusterSettings,
    make_folders,
    replica_command,
    store_environment,
)
from pensieve.cluster.slots import Slot, take_slot
from pensieve.errors import Unavailable
from pensieve.v1 import status_pb2

log = logging.getLogger("ray.serve")

START_SECONDS = 1800.0  # for a large model on a slow disk
HEALTH_SECONDS = 5.0
RESTART_SECONDS = 600.0
ROUTERS_SECONDS = 2.0  # time until no router sends calls to an ending replica
FLAG = "_shutting_down"  # attribute that Ray sets on an actor; not part of Ray's public interface
EXIT_SECONDS = 20.0  # time for a daemon to exit after its turns have ended
NEEDS_TOKENS = (
    "without tokens (serve.token_file), only programs on the cluster's own machine may call it"
)


class DaemonReplica:
    """A daemon with a method for each RPC, named as Ray expects. `add_methods` creates these methods."""

    settings: ClusterSettings
    daemon: ChildProcess
    slot: Slot
    grpc: GrpcForward
    http: HttpForward

    async def start_daemon(self, settings: ClusterSettings, name: str, host: str) -> None:
        self.settings = settings
        make_folders(settings)
        self.slot = take_slot(settings.data_folder / "replicas")  # held until this process ends
        command = replica_command(settings, name, host, self.slot)
        environment = {"PENSIEVE_LOG_FORMAT": "text", **store_environment(settings)}
        self.daemon = ChildProcess(command, environment, pass_fds=(self.slot.lock,))
        addresses = await self.daemon.start(START_SECONDS)
        log.info("replica %s serves %s", name, addresses)
        self.grpc = GrpcForward(addresses["grpc"], name)
        self.http = HttpForward(addresses["http"], name)
        self._served_at = time.monotonic()
        self._health = grpc.aio.insecure_channel(addresses["grpc"])

    async def check_daemon(self) -> None:
        """Raise an error if the daemon does not serve."""
        self.daemon.check()
        answer = await health(self._health, HEALTH_SECONDS)
        if answer.status == status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING:
            self._served_at = time.monotonic()
        elif time.monotonic() - self._served_at > RESTART_SECONDS:
            raise Unavailable(f"the engine has not served for {RESTART_SECONDS:g} s")

    async def drain(self) -> None:
        """Wait until the routers send no more calls, and then drain the daemon."""
        await asyncio.sleep(ROUTERS_SECONDS)
        await self.daemon.stop(self.settings.drain_seconds + EXIT_SECONDS)

    async def end_daemon(self) -> None:
        if not hasattr(self, "daemon"):
            return
        await self.daemon.stop(self.settings.drain_seconds + EXIT_SECONDS)
        if hasattr(self, "grpc"):
            await self.grpc.close()
            await self.http.close()
            await self._health.close()

    def may_call(self, peer: str) -> bool:
        """Return whether a client at this address may call. If tokens are used, the daemon checks them."""
        return self.settings.needs_tokens or self.settings.insecure or _is_on_this_machine(peer)


def is_wanted_to_end() -> bool:
    """Return whether Ray wants the replica of this process to end.

    To end a replica, Ray sets FLAG, waits for the replica's calls, and then calls `__del__`. After
    graceful_shutdown_timeout_s it kills the replica. A replica that began to drain only in `__del__` would
    be killed during a long call. So this function reads FLAG. If a version of Ray does not set FLAG, a
    replica drains after its calls have ended.
    """
    from ray._private import worker

    return any(_is_ending(each) for each in worker.global_worker.actors.values())


def _is_ending(actor: Any) -> bool:
    return bool(getattr(getattr(actor, "_replica_impl", None), FLAG, False))


def add_methods(kind: type[DaemonReplica]) -> None:
    """Add a coroutine for each unary method, and an async generator for each streaming method."""
    for method in methods():
        make = _streaming if method.gives_stream else _single
        setattr(kind, method.name, make(method))


def _single(method: Method) -> Any:
    async def call(self: DaemonReplica, request: Any, grpc_context: Any) -> Response:
        if not self.may_call(grpc_context.peer()):
            return self.grpc.refuse(grpc_context, grpc.StatusCode.PERMISSION_DENIED, NEEDS_TOKENS)
        return await self.grpc.unary(method, request, grpc_context)

    return call


def _streaming(method: Method) -> Any:
    async def call(self: DaemonReplica, request: Any, grpc_context: Any) -> AsyncIterator[Response]:
        if not self.may_call(grpc_context.peer()):
            yield self.grpc.refuse(grpc_context, grpc.StatusCode.PERMISSION_DENIED, NEEDS_TOKENS)
            return
        async for each in self.grpc.stream(method, request, grpc_context):
            yield each

    return call


async def forward_http(
    replica: DaemonReplica, scope: Mapping[str, Any], receive: Any, send: Any
) -> None:
    client = scope.get("client")
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1003})
    elif not replica.may_call(f"http:{client[0]}" if client else ""):
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send(
            {"type": "http.response.body", "body": NEEDS_TOKENS.encode(), "more_body": False}
        )
    else:
        await replica.http(scope, receive, send)


def _is_on_this_machine(peer: str) -> bool:
    """Return whether a peer in gRPC's notation is on this machine.

    Examples: ipv4:127.0.0.1:41234, ipv6:%5B::1%5D:41234.
    """
    kind, _, place = peer.partition(":")
    if kind == "unix":
        return True
    host = place.replace("%5B", "[").replace("%5D", "]")
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif kind == "ipv4":
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
