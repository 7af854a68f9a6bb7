"""List the replicas: from an argument, or from a daemon, which knows all daemons that share its history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

from pensieve.client.channel import Tls
from pensieve.client.fleet.asking import Connections, call_error
from pensieve.client.fleet.replicas import Replica
from pensieve.v1 import admin_pb2 as pb

ANSWER_SECONDS = 5.0


class Discovery(Protocol):
    """A source of replicas."""

    async def list_replicas(self) -> Sequence[Replica]:
        """Return the current replicas, in the order in which they are shown."""
        ...


class FixedReplicas:
    """A fixed list of replicas."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)

    async def list_replicas(self) -> Sequence[Replica]:
        return self._replicas


class SharedReplicas:
    """The daemons that share a history, listed by one of them. May be used on several event loops."""

    def __init__(self, address: str, *, token: str | None = None, tls: Tls = False) -> None:
        self._address, self._token, self._tls = address, token, tls

    async def list_replicas(self) -> Sequence[Replica]:
        """Return the daemons that have the history open, sorted by name."""
        connections = Connections(self._token, self._tls)
        stub = connections.stub(Replica(self._address, self._address))
        try:
            found = await stub.ListReplicas(
                pb.ListReplicasRequest(), timeout=ANSWER_SECONDS, metadata=connections.metadata
            )
        except grpc.aio.AioRpcError as failure:
            raise call_error(failure, ANSWER_SECONDS) from None
        finally:
            await connections.close()
        replicas = [self._replica(each) for each in found.replicas]
        return sorted(replicas, key=lambda each: each.name)

    def _replica(self, given: pb.Replica) -> Replica:
        """Convert a protobuf Replica.

        A daemon that shares its history with no other daemon lists only itself, without an address.
        """
        address = given.address or self._address
        state = "draining" if given.draining else "alive" if given.alive else "silent"
        return Replica(given.name or address, address, given.metrics_address, state)
