"""The Ray Serve application: `pensieve.cluster.deployments:build` is the import path in the YAML file.

It has one deployment, `Replica`. Ray's proxies send all calls with the same session id to the same replica,
by Ray's consistent hashing. Other calls go to any replica. If another daemon owns the conversation of a call,
the replica's daemon forwards the call to the owner. Ray decides how many replicas run, on which nodes and
with which resources. `args` sets the number and the resources. `deployments` in the YAML file overrides
these values, and can enable autoscaling.

A replica is a Ray actor, which exits when its daemon ends. Ray notices the exit at its next health check,
after at most HEALTH_PERIOD. Routers notice it at their next call. Reporting a failed health check instead
would be slower: Ray waits for three failures, and meanwhile sends calls to the dead daemon.

A replica detects that Ray wants to end it (`is_wanted_to_end`), and drains its daemon itself. Otherwise, Ray
would wait for running calls, and kill the replica with its calls after `shutdown_seconds`. This time is
longer than the drain of the daemon, so the drain ends first.
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
ONGOING_MAX = 100_000  # requests per replica; more than the daemon's own limits allow
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


async def _exit_after(child: ChildProcess) -> None:
    """End this process, a Ray actor, when its child has ended unexpectedly."""
    if not await child.ended_unexpectedly():
        return
    log.error("%s; Ray will replace this replica", child.end)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


class ReplicaOnRay(DaemonReplica):
    async def __init__(self, settings: ClusterSettings) -> None:  # type: ignore[misc]
        name = serve.get_replica_context().replica_id.unique_id
        await self.start_daemon(settings, name, _host(settings))
        self._exit_task = asyncio.create_task(_exit_after(self.daemon))
        self._drain_task = asyncio.create_task(self._drain_when_wanted_to_end())

    async def _drain_when_wanted_to_end(self) -> None:
        while not is_wanted_to_end():
            await asyncio.sleep(LOOK_SECONDS)
        await self.drain()

    async def check_health(self) -> None:
        await self.check_daemon()

    async def __del__(self) -> None:
        await self.end_daemon()


add_methods(ReplicaOnRay)


def shutdown_seconds(settings: ClusterSettings) -> float:
    """Return the time after which Ray kills a replica that has not ended."""
    return ROUTERS_SECONDS + settings.drain_seconds + 2 * EXIT_SECONDS


def build(args: dict[str, Any]) -> serve.Application:
    """Build the application. Used as `import_path`."""
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
        # Update replicas one at a time, and start no extra replica: there may be no GPU for it.
        rolling_update_percentage=0.01,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    return replica.bind(settings)
