"""The Ray Serve application: `pensieve.cluster.deployments:build` is the import path in the YAML file.

It is one deployment, `Replica`. Ray's proxies send calls with the same session id to the same replica, by
Ray's consistent hashing, and other calls to any. The daemon there forwards the call to the conversation's
owner, if that is another daemon. How many replicas, where and with which resources is Ray's: `args` gives the
usual ones, and `deployments` in the YAML file outranks them, autoscaling included.

An actor ends when its daemon has ended by itself. Ray notices at its next health check, at most HEALTH_PERIOD
later, and routers with their next call. A check that reported the dead daemon would have to fail three times
first, and calls would go there meanwhile.

A replica that Ray wants to end drains by itself (`is_wanted_to_end`): Ray waits for its calls, and would kill
it while one runs. What Ray is told to wait is longer than that takes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from pensieve.cluster.child_process import ChildProcess
from pensieve.cluster.replica import (
    EXIT_SECONDS,
    ROUTERS_SECONDS,
    DaemonReplica,
    add_methods,
    forward_http,
    is_wanted_to_end,
)
from pensieve.cluster.settings import LOOPBACK, REPLICA, ClusterSettings, settings_of

log = logging.getLogger("ray.serve")
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
ONGOING_MAX = (
    100_000  # requests per replica: the daemon has its own limits, and says so in its errors
)
LOOK_SECONDS = 0.25
HEALTH_PERIOD = 2.0


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


class ReplicaOnRay(DaemonReplica):
    async def __init__(self, settings: ClusterSettings) -> None:  # type: ignore[misc]
        name = serve.get_replica_context().replica_id.unique_id
        await self.start_daemon(settings, name, _host(settings))
        self._ending = asyncio.create_task(_end_with(self.daemon))
        self._until_wanted = asyncio.create_task(self._end_when_wanted())

    async def _end_when_wanted(self) -> None:
        while not is_wanted_to_end():
            await asyncio.sleep(LOOK_SECONDS)
        await self.begin_end()

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
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    return replica.bind(settings)
