"""The daemons that share a history, as one of them says."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from pensieve.client.channel import Tls
from pensieve.client.fleet.asking import Connections, failed
from pensieve.client.fleet.replicas import Replica
from pensieve.v1 import admin_pb2 as pb

ANSWER_SECONDS = 5.0


class SharedReplicas:
    """A `Discovery`: asks the daemon at an address. Belongs to no event loop."""

    def __init__(self, address: str, *, token: str | None = None, tls: Tls = False) -> None:
        self._address, self._token, self._tls = address, token, tls

    async def list_replicas(self) -> Sequence[Replica]:
        """Those that have the history open now, by name."""
        connections = Connections(self._token, self._tls)
        stub = connections.stub(Replica(self._address, self._address))
        try:
            found = await stub.ListReplicas(
                pb.ListReplicasRequest(), timeout=ANSWER_SECONDS, metadata=connections.metadata
            )
        except grpc.aio.AioRpcError as failure:
            raise failed(failure, ANSWER_SECONDS) from None
        finally:
            await connections.close()
        replicas = [self._replica(each) for each in found.replicas]
        return sorted(replicas, key=lambda each: each.name)

    def _replica(self, told: pb.Replica) -> Replica:
        """One without an address is the daemon that was asked: it is alone."""
        address = told.address or self._address
        state = "draining" if told.draining else "alive" if told.alive else "silent"
        return Replica(told.name or address, address, told.metrics_address, state)
