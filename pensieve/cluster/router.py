"""Ray Serve's request router for Pensieve: a conversation's requests go to its home.

It runs wherever Ray routes from: in each proxy.  The name of a replica is the unique id that Ray gave it,
so nothing has to be told which is which.  What a request's key is, the edges have found (grpc_edge.py,
http_edge.py) and Ray carries as the session id.

A request without a key goes to the replica with the fewest requests.  One with a key waits for its home
while that is slow to answer, up to HOME_ATTEMPTS probes, then goes to any: that replica passes it on or
takes the conversation over, as the ownership table says.  A replica that died is taken out by Ray and its
keys are placed anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pensieve.cluster.homes import Homes
from pensieve.cluster.locate import locate_from

HOME_ATTEMPTS = 3


class HomeRouter(RequestRouter):  # type: ignore[misc]
    def initialize_state(self, **_: Any) -> None:
        self._homes = Homes(time.monotonic)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = {each.unique_id for each in self._replica_id_set}
        super().update_replicas(replicas)
        for name in before - {each.unique_id for each in self._replica_id_set}:
            self._homes.forget(name)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._homes.forget(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Sequence[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        key = pending_request.metadata.session_id
        if not key:
            return [candidate_replicas]
        candidates = {each.replica_id.unique_id: each for each in candidate_replicas}

        def running_now() -> set[str]:
            return candidates.keys() & {each.unique_id for each in self._replica_id_set}

        name = await self._homes.of(key, running_now, locate_from(candidate_replicas))
        if name is None:
            return [candidate_replicas]
        return [[candidates[name]]] * HOME_ATTEMPTS + [candidate_replicas]
