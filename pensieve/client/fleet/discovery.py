"""Which replicas there are: from a list, or from a daemon, which knows those that share its history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

from pensieve.client.channel import Tls
from pensieve.client.fleet.asking import Connections, failed
from pensieve.client.fleet.replicas import Replica
from pensieve.v1 import admin_pb2 as pb

ANSWER_SECONDS = 5.0


class Discovery(Protocol):
    """Whoever knows the replicas."""

    async def list_replicas(self) -> Sequence[Replica]:
        """Those that there are now, in the order in which they are shown."""
        ...


class FixedReplicas:
    """Those of a list."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)

    async def list_replicas(self) -> Sequence[Replica]:
        return self._replicas


class SharedReplicas:
    """Those that share a history, as the daemon at an address says. Belongs to no event loop."""

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
