"""The replicas that a history service knows, and which of them serves a conversation.

    HistoryReplicas("history://10.0.0.9:50060", secret=…)

Each question is a call on a channel of its own, which costs some milliseconds, seldom: whoever watches asks
every few seconds, and `explain` once.  So it belongs to no event loop, and there is nothing to close.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc

from pensieve.client.channel import OPTIONS, Tls, credentials_of, metadata_of
from pensieve.client.fleet.asking import failed
from pensieve.client.fleet.replicas import Replica
from pensieve.errors import InvalidArgument
from pensieve.v1 import history_pb2 as pb
from pensieve.v1 import history_pb2_grpc

if TYPE_CHECKING:  # a name that the stubs have for type checkers alone
    from pensieve.v1.history_pb2_grpc import HistoryServiceAsyncStub

T = TypeVar("T")
SCHEMES = ("history://", "historys://")  # without TLS, and with it
ANSWER_SECONDS = 5.0


class HistoryReplicas:
    """A `Discovery`: the replicas whose sessions have not ended, by name."""

    def __init__(self, address: str, *, secret: str = "", ca: Tls = True) -> None:
        """`address` begins with one of SCHEMES; `ca` is of TLS, as of `Client`."""
        scheme, _, self._target = address.partition("://")
        if f"{scheme}://" not in SCHEMES or not self._target:
            raise InvalidArgument("replicas", f"{address!r} is no history://HOST:PORT")
        self._credentials = credentials_of(ca) if scheme == "historys" else None
        self._metadata = metadata_of(secret)

    async def list_replicas(self) -> Sequence[Replica]:
        """Those that there are now; one that is silent has the rest of its lease to come back."""

        async def call(stub: HistoryServiceAsyncStub) -> pb.ListReplicasResponse:
            request = pb.ListReplicasRequest()
            return await stub.ListReplicas(request, timeout=ANSWER_SECONDS, metadata=self._metadata)

        return [
            Replica(
                *(each.name, each.address, each.metrics_address),
                state="alive" if each.connected else "silent",
            )
            for each in (await self._answered(call)).replicas
        ]

    async def locate(self, conversation_id: str, tenant: str = "") -> str:
        """The name of the replica that serves it; "" where none does."""

        async def call(stub: HistoryServiceAsyncStub) -> pb.LocateResponse:
            request = pb.LocateRequest(tenant=tenant, conversation_id=conversation_id)
            return await stub.Locate(request, timeout=ANSWER_SECONDS, metadata=self._metadata)

        return (await self._answered(call)).replica

    async def _answered(self, call: Callable[[HistoryServiceAsyncStub], Awaitable[T]]) -> T:
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(self._target, options=OPTIONS)
        else:
            channel = grpc.aio.secure_channel(self._target, self._credentials, options=OPTIONS)
        async with channel:
            try:
                return await call(history_pb2_grpc.HistoryServiceStub(channel))
            except grpc.aio.AioRpcError as failure:
                raise failed(failure, ANSWER_SECONDS) from None
