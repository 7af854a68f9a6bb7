"""The Ray Serve application: `pensieve.cluster.deployments:build` is the import path in the YAML file.

    Replica   the ingress: Ray's proxies send every call straight to one, chosen by router.py
    History   one: the process that owns the history and the table of owners

How many, where and with which resources is Ray's: `args` gives the usual ones, and `deployments` in the YAML
file outranks them, autoscaling included.  The history service runs on Ray's head: its folder is there, and
replicas know its address from when they started, so Ray has to restart it on the same node.

An actor ends when its child has ended by itself.  Ray notices at its next health check, at most
HEALTH_PERIOD later, and routers with their next call; a check that reported the dead child would have to fail
three times first, and calls would go there meanwhile.

Where all of it ends, the history service ends last, or turns that drain could not be written: Ray ends the
deployments of an application together.

A replica that Ray wants to end drains by itself (ending.py): Ray waits for its calls, and would kill it while
one runs.  What Ray is told to wait is longer than that takes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Any

import grpc
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from pensieve.cluster.child_process import ChildProcess
from pensieve.cluster.ending import is_wanted_to_end
from pensieve.cluster.locate import channel_to, trusting
from pensieve.cluster.replica import (
    EXIT_SECONDS,
    ROUTERS_SECONDS,
    START_SECONDS,
    Replica,
    add_methods,
    forward_http,
)
from pensieve.cluster.settings import (
    HISTORY,
    LOOPBACK,
    REPLICA,
    ClusterSettings,
    data_folder,
    history_command,
    history_environment,
    settings_of,
)
from pensieve.cluster.watchdog import Watchdog

log = logging.getLogger("ray.serve")
ROUTER = "pensieve.cluster.router:HomeRouter"
ONGOING_MAX = (
    100_000  # requests per replica: the daemon has its own limits, and says so in its errors
)
HISTORY_SECONDS = 60.0  # for the history service to end
LOOK_SECONDS = 0.25
HEALTH_PERIOD = 2.0
STATS_SECONDS = 2.0
ON_HEAD = {"node:__internal_head__": 0.001}  # a resource that Ray gives its head


async def http_application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    await forward_http(serve.get_replica_context().servable_object, scope, receive, send)


def _host(settings: ClusterSettings) -> str:
    return LOOPBACK if settings.local else str(ray.util.get_node_ip_address())


async def _end_with(child: ChildProcess) -> None:
    """Ends this process, an actor of Ray's, when its child has ended by itself."""
    if not await child.lost():
        return
    log.error("%s; Ray replaces this actor", child.end)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def _replicas_end_too() -> bool:
    """Whether the application is deleted, and replicas of it have not ended yet."""
    try:
        name = serve.get_replica_context().app_name
        application = serve.status().applications.get(name)
        if application is None or application.status != "DELETING":
            return False
        # Ray's status names no deployments any more; actors have names that begin with their replica's.
        return any(f"{name}#{REPLICA}#" in each for each in ray.util.list_named_actors())
    except Exception:
        log.exception("Ray does not say which replicas run")
        return False


def _trusting(ca: str) -> grpc.ChannelCredentials:
    """As far as it can be read: the watchdog judges nobody by a certificate."""
    try:
        return trusting(ca)
    except OSError as error:
        log.warning("the history service is not watched: %s: %s", ca, error.strerror)
        return trusting("")


class HistoryOnRay:
    """The history service, as the child of the one replica of its deployment."""

    async def __init__(self, settings: ClusterSettings) -> None:  # type: ignore[misc]
        command = history_command(settings, _host(settings), str(data_folder(settings)))
        environment = {"PENSIEVE_LOG_FORMAT": "text", **history_environment(settings)}
        self._service = ChildProcess(command, environment)
        found = await self._service.start(START_SECONDS)
        ((scheme, place),) = found.items()
        self._address = f"{scheme}://{place}"
        channel = channel_to(self._address, lambda: _trusting(settings.history_ca))
        self._watchdog = Watchdog(self._service, channel)
        self._ending = asyncio.create_task(_end_with(self._service))

    async def address(self) -> str:
        """As --store takes it."""
        return self._address

    async def check_health(self) -> None:
        self._service.check()
        await self._watchdog.look()

    async def __del__(self) -> None:
        if hasattr(self, "_service"):
            while await asyncio.to_thread(_replicas_end_too):
                await asyncio.sleep(LOOK_SECONDS)
            await self._service.stop(HISTORY_SECONDS)


class ReplicaOnRay(Replica):
    async def __init__(self, settings: ClusterSettings, history: Any) -> None:  # type: ignore[misc]
        """`history` is the handle of the history service, or the address of one that is not ours."""
        context = serve.get_replica_context()
        address = history if isinstance(history, str) else await history.address.remote()
        await self.start_daemon(settings, context.replica_id.unique_id, _host(settings), address)
        self._ending = asyncio.create_task(_end_with(self.daemon))
        self._until_wanted = asyncio.create_task(self._end_when_wanted())

    async def _end_when_wanted(self) -> None:
        while not is_wanted_to_end():
            await asyncio.sleep(LOOK_SECONDS)
        await self.begin_end()

    def record_routing_stats(self) -> dict[str, Any]:
        return self.routing_stats()

    async def check_health(self) -> None:
        await self.check_daemon()

    async def __del__(self) -> None:
        await self.end_daemon()


add_methods(ReplicaOnRay)


def shutdown_seconds(settings: ClusterSettings) -> float:
    """After which Ray kills a replica that has not ended."""
    return ROUTERS_SECONDS + settings.drain_seconds + 2 * EXIT_SECONDS


def build(args: dict[str, Any]) -> serve.Application:
    """For `import_path`."""
    settings = settings_of(args)
    ingress = serve.ingress(lambda: http_application)(ReplicaOnRay)
    replica = serve.deployment(
        ingress,
        name=REPLICA,
        num_replicas=settings.replicas,
        max_ongoing_requests=ONGOING_MAX,
        graceful_shutdown_timeout_s=shutdown_seconds(settings),
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=30.0,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        # One after the other, and without room for one more: a replica has its GPU for itself.
        rolling_update_percentage=0.01,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_routing_stats_period_s=STATS_SECONDS
        ),
    )
    if settings.is_elsewhere:
        return replica.bind(settings, settings.history)
    history = serve.deployment(
        HistoryOnRay,
        name=HISTORY,
        num_replicas=1,
        graceful_shutdown_timeout_s=shutdown_seconds(settings) + HISTORY_SECONDS,
        health_check_period_s=HEALTH_PERIOD,
        ray_actor_options={"num_cpus": 0, "resources": ON_HEAD},
    )
    return replica.bind(settings, history.bind(settings))
