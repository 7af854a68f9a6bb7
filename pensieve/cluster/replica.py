"""A replica: an ordinary daemon as the child of a Ray Serve replica, and the way to it.

Ray starts, places, counts, checks and ends replicas. What a replica does is

    start      run the daemon under Ray's name for this replica, in a folder that another one may have had
               (slots.py), and wait until it serves
    calls      pass on each gRPC method and each HTTP request (grpc_forward.py, http_forward.py)
    health     the daemon's own: it runs, answers, and serves; to restart its engine it has RESTART_SECONDS;
               everything else makes Ray replace the replica
    end        Ray sends nothing more, and waits for what runs; the daemon drains, so that turns have its
               drain_timeout, and its end is the end of all calls

A replica that is killed takes its daemon with it (tied.py), and one whose daemon dies ends itself
(deployments.py). The calls in flight end as UNAVAILABLE.

This class knows Ray's conventions and imports nothing of it; deployments.py makes it a deployment.
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

START_SECONDS = 1800.0  # a large model from a slow disk
HEALTH_SECONDS = 5.0
RESTART_SECONDS = 600.0
ROUTERS_SECONDS = 2.0  # until none of them sends anything more to a replica that is to end
FLAG = "_shutting_down"  # that Ray sets on an actor; no part of its public interface
EXIT_SECONDS = 20.0  # of a daemon whose turns have ended
STRANGER = "without tokens (serve.token_file) only the cluster's own machine may call it"


class DaemonReplica:
    """Has a method for each RPC, under the name that Ray looks for; `add_methods` makes them."""

    settings: ClusterSettings
    daemon: ChildProcess
    slot: Slot
    grpc: GrpcForward
    http: HttpForward

    async def start_daemon(self, settings: ClusterSettings, name: str, host: str) -> None:
        self.settings = settings
        make_folders(settings)
        self.slot = take_slot(settings.data_folder / "replicas")  # this process's until it ends
        command = replica_command(settings, name, host, self.slot)
        environment = {"PENSIEVE_LOG_FORMAT": "text", **store_environment(settings)}
        self.daemon = ChildProcess(command, environment, pass_fds=(self.slot.lock,))
        found = await self.daemon.start(START_SECONDS)
        log.info("replica %s serves %s", name, found)
        self.grpc = GrpcForward(found["grpc"], name)
        self.http = HttpForward(found["http"], name)
        self._served = time.monotonic()
        self._health = grpc.aio.insecure_channel(found["grpc"])

    async def check_daemon(self) -> None:
        """Raises when the daemon does not serve."""
        self.daemon.check()
        answer = await health(self._health, HEALTH_SECONDS)
        if answer.status == status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING:
            self._served = time.monotonic()
        elif time.monotonic() - self._served > RESTART_SECONDS:
            raise Unavailable(f"its engine has not served for {RESTART_SECONDS:g} s")

    async def begin_end(self) -> None:
        """It is to end, and calls may still run."""
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
        """Whether a client at this address may call: with tokens the daemon decides."""
        return self.settings.needs_tokens or self.settings.insecure or _is_here(peer)


def is_wanted_to_end() -> bool:
    """Whether Ray wants the replica of this process to end.

    Ray sets FLAG at once, waits for the replica's calls, and tells it only then (`__del__`). When its
    patience (graceful_shutdown_timeout_s) is over it kills the replica, told or not. So without the flag a
    replica with one long call would never drain. Under a Ray that has no such flag, a replica drains when
    its calls have ended.
    """
    from ray._private import worker

    return any(_is_ending(each) for each in worker.global_worker.actors.values())


def _is_ending(actor: Any) -> bool:
    return bool(getattr(getattr(actor, "_replica_impl", None), FLAG, False))


def add_methods(kind: type[DaemonReplica]) -> None:
    """A coroutine for each method with one response, an async generator for each with a stream of them."""
    for method in methods():
        make = _streaming if method.gives_stream else _single
        setattr(kind, method.name, make(method))


def _single(method: Method) -> Any:
    async def call(self: DaemonReplica, request: Any, grpc_context: Any) -> Response:
        if not self.may_call(grpc_context.peer()):
            return self.grpc.refused(grpc_context, grpc.StatusCode.PERMISSION_DENIED, STRANGER)
        return await self.grpc.unary(method, request, grpc_context)

    return call


def _streaming(method: Method) -> Any:
    async def call(self: DaemonReplica, request: Any, grpc_context: Any) -> AsyncIterator[Response]:
        if not self.may_call(grpc_context.peer()):
            yield self.grpc.refused(grpc_context, grpc.StatusCode.PERMISSION_DENIED, STRANGER)
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
        await send({"type": "http.response.body", "body": STRANGER.encode(), "more_body": False})
    else:
        await replica.http(scope, receive, send)


def _is_here(peer: str) -> bool:
    """`peer` is as gRPC writes it: ipv4:127.0.0.1:41234, ipv6:%5B::1%5D:41234."""
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
