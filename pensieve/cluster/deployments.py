"""The Ray Serve application: `pensieve.cluster.deployments:build` is the import path in the YAML file.

    Replica   the ingress: Ray's proxies send every call straight to one, chosen by router.py
    History   one: the process that owns the history and the table of owners

How many, where and with which resources is Ray's: `args` gives the usual ones, and `deployments` in the YAML
file outranks them, autoscaling included.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from pensieve.cluster.replica import Replica, add_methods, forward_http
from pensieve.cluster.settings import REPLICA, ClusterSettings, settings_of

ROUTER = "pensieve.cluster.router:HomeRouter"
ONGOING_MAX = (
    100_000  # requests per replica: the daemon has its own limits, and says so in its errors
)
DRAIN_SECONDS = 60.0
HEALTH_PERIOD = 2.0
STATS_SECONDS = 2.0


async def http_application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    await forward_http(serve.get_replica_context().servable_object, scope, receive, send)


class ReplicaOnRay(Replica):
    async def __init__(self, settings: ClusterSettings) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        host = "127.0.0.1" if settings.local else ray.util.get_node_ip_address()
        await self.start_daemon(settings, context.replica_id.unique_id, host)

    async def check_health(self) -> None:
        await self.check_daemon()

    async def __del__(self) -> None:
        await self.end_daemon(DRAIN_SECONDS)


add_methods(ReplicaOnRay)


def build(args: dict[str, Any]) -> serve.Application:
    """For `import_path`."""
    settings = settings_of(args)
    ingress = serve.ingress(lambda: http_application)(ReplicaOnRay)
    replica = serve.deployment(
        ingress,
        name=REPLICA,
        num_replicas=settings.replicas,
        max_ongoing_requests=ONGOING_MAX,
        graceful_shutdown_timeout_s=DRAIN_SECONDS + 10.0,
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
    return replica.bind(settings)
