"""Serve the metrics of several replicas at one address, for a Prometheus server without service discovery.

    GET /metrics    metrics of all replicas, each sample with the label `replica`, and pensieve_replica_up
    GET /health     200 before the first scrape, or if at least one replica answered the latest scrape

Each scrape asks all replicas. Nothing is cached. The listener (api/metrics/listener.py) allows five seconds
for a response, so each replica has at most SCRAPE_SECONDS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pensieve.api.metrics.listener import Answers, MetricsListener
from pensieve.client.fleet import Fleet
from pensieve.client.fleet.exposition import merged
from pensieve.errors import ConfigError, InvalidArgument
from pensieve.guard.exposure import is_loopback

SCRAPE_SECONDS = 3.5


class FleetMetrics:
    """A listener and the replicas whose metrics it serves. Belongs to one event loop."""

    def __init__(self, fleet: Fleet) -> None:
        if fleet.seconds > SCRAPE_SECONDS:
            raise InvalidArgument(
                "seconds", f"must be at most {SCRAPE_SECONDS:g} when metrics are served"
            )
        self._fleet = fleet
        self._is_serving = True
        self._listener = MetricsListener(
            Answers(self.text, lambda: self._is_serving, lambda authorization, peer: True)
        )

    async def listen(self, address: str, insecure: bool = False) -> str:
        """Listen, and return HOST:PORT.

        Raises ConfigError if other machines could connect and `insecure` is not set.
        """
        if not insecure and not is_loopback(address.rpartition(":")[0]):
            raise ConfigError(
                f"{address} can be reached by others, and has neither TLS nor tokens. Listen on 127.0.0.1, "
                "or pass --insecure"
            )
        return await self._listener.listen(address)

    async def text(self) -> str:
        """Return the metrics of all replicas that answer."""
        found = await self._fleet.metrics()
        self._is_serving = any(answer.value is not None for answer in found)
        return await asyncio.to_thread(merged, [(answer.replica, answer.value) for answer in found])

    async def close(self) -> None:
        await self._listener.close()


async def serve_until_cancelled(
    fleet: Fleet, address: str, insecure: bool, listening: Callable[[str], None]
) -> None:
    """Serve until the task is cancelled; `listening` receives the address."""
    serving = FleetMetrics(fleet)
    try:
        listening(await serving.listen(address, insecure))
        await asyncio.Event().wait()
    finally:
        await serving.close()
