"""`Fleet`: call AdminService on all replicas at once.

Each method returns one row per replica, in the order of discovery. A replica that does not answer has a row
with an error. Only connections are kept between calls, so a recovered replica answers the next call.

`watch` runs a task for each replica, which reads the replica's stream and keeps the latest figures. A stream
is started again if it ends, or is silent for longer than the interval plus the deadline. Each interval yields
the latest figures of all replicas. So a hanging replica delays only its own row. The list of replicas is
refreshed at most every LIST_SECONDS. Everything runs on the event loop of the first call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import grpc

from pensieve.client.channel import Tls
from pensieve.client.fleet import exposition
from pensieve.client.fleet.asking import Connections, ReplicaAnswer, ask_each, call_error
from pensieve.client.fleet.discovery import Discovery
from pensieve.client.fleet.replicas import Replica
from pensieve.client.requests import check_text
from pensieve.errors import PensieveError, ServerFault, Unavailable
from pensieve.v1 import admin_pb2 as pb

if TYPE_CHECKING:  # the generated stubs define this name only for type checkers
    from pensieve.v1.admin_pb2_grpc import AdminServiceAsyncStub

T = TypeVar("T")
ReplicaKey = tuple[str, str]  # name and address identify a replica
ANSWER_SECONDS = 5.0
LIST_SECONDS = 5.0  # between two refreshes of the list during `watch`
RESTART_SECONDS = 1.0  # pause before a stream of figures is started again
CACHED_MAX = 1000  # limit of conversations per replica


class Fleet:
    """Connections to several daemons for their operator.

    Args:
        discovery: lists the replicas.
        token: an admin token that all replicas accept; sockets need none.
        tls: as for `Client`; ignored for sockets.
        seconds: how long each replica may take to answer.
    """

    def __init__(
        self,
        discovery: Discovery,
        *,
        token: str | None = None,
        tls: Tls = False,
        seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._discovery = discovery
        self._connections = Connections(token, tls)
        self.seconds = seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def replicas(self) -> Sequence[Replica]:
        """Return the current replicas."""
        found = await self._discovery.list_replicas()
        await self._connections.keep_only(found)
        return found

    # -- one call to each replica --

    async def stats(self) -> list[ReplicaAnswer[pb.Stats]]:
        """Return the figures of each replica."""

        async def call(stub: AdminServiceAsyncStub, seconds: float) -> pb.Stats:
            request = pb.GetStatsRequest()
            return (await stub.GetStats(request, timeout=seconds, metadata=self._metadata)).stats

        return await self._each(call)

    async def cached(
        self, least_valuable: bool = False
    ) -> list[ReplicaAnswer[pb.ListCachedConversationsResponse]]:
        """Return the conversations with KV in the cache, at most CACHED_MAX per replica.

        `holdings.held_of` merges them.
        """
        kinds = pb.ListCachedConversationsRequest
        order = kinds.ORDER_LEAST_VALUABLE if least_valuable else kinds.ORDER_LARGEST
        request = kinds(order=order, limit=CACHED_MAX)

        async def call(
            stub: AdminServiceAsyncStub, seconds: float
        ) -> pb.ListCachedConversationsResponse:
            return await stub.ListCachedConversations(
                request, timeout=seconds, metadata=self._metadata
            )

        return await self._each(call)

    async def explain(
        self, conversation_id: str, tenant: str = ""
    ) -> list[ReplicaAnswer[pb.ExplainConversationResponse]]:
        """Return where each replica has the KV of a conversation. The error of a row may be NotFound."""
        request = pb.ExplainConversationRequest(
            conversation_id=check_text("conversation_id", conversation_id),
            tenant=check_text("tenant", tenant),
        )

        async def call(
            stub: AdminServiceAsyncStub, seconds: float
        ) -> pb.ExplainConversationResponse:
            return await stub.ExplainConversation(request, timeout=seconds, metadata=self._metadata)

        return await self._each(call)

    async def tenants(self) -> list[ReplicaAnswer[pb.ListTenantsResponse]]:
        """Return the usage of each tenant on each replica. `totals.tenants_of` adds it up."""

        async def call(stub: AdminServiceAsyncStub, seconds: float) -> pb.ListTenantsResponse:
            request = pb.ListTenantsRequest()
            return await stub.ListTenants(request, timeout=seconds, metadata=self._metadata)

        return await self._each(call)

    async def check(self) -> list[ReplicaAnswer[list[str]]]:
        """Check the consistency of each replica's tables, and return the problems found."""

        async def call(stub: AdminServiceAsyncStub, seconds: float) -> list[str]:
            request = pb.CheckIntegrityRequest()
            answer = await stub.CheckIntegrity(request, timeout=seconds, metadata=self._metadata)
            return list(answer.problems)

        return await self._each(call)

    async def metrics(self) -> list[ReplicaAnswer[exposition.Families]]:
        """Return the parsed metrics of each replica. `exposition.merged` makes one text of them.

        A thread parses the metrics after all replicas have answered. Parsing may take seconds, which must not
        count towards the deadlines.
        """

        async def call(stub: AdminServiceAsyncStub, seconds: float) -> str:
            request = pb.GetMetricsRequest()
            answer = await stub.GetMetrics(request, timeout=seconds, metadata=self._metadata)
            return answer.text

        found = await self._each(call)
        return await asyncio.to_thread(lambda: [_parse(answer) for answer in found])

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return self._connections.metadata

    async def _each(
        self, call: Callable[[AdminServiceAsyncStub, float], Awaitable[T]]
    ) -> list[ReplicaAnswer[T]]:
        return await ask_each(
            await self.replicas(),
            lambda replica, seconds: call(self._connections.stub(replica), seconds),
            self.seconds,
        )

    # -- watching --

    async def watch(
        self, interval_seconds: float = 1.0
    ) -> AsyncGenerator[list[ReplicaAnswer[pb.Stats]], None]:
        """Iterate over the figures of all replicas, every `interval_seconds`.

        The first result is yielded when every replica has answered or failed.
        """
        loop = asyncio.get_running_loop()
        latest: dict[ReplicaKey, ReplicaAnswer[pb.Stats]] = {}
        tasks: dict[ReplicaKey, asyncio.Task[None]] = {}
        updated = asyncio.Event()
        replicas = await self.replicas()
        listed_at = loop.time()

        def keep(answer: ReplicaAnswer[pb.Stats]) -> None:
            latest[_key(answer.replica)] = answer
            updated.set()

        try:
            while True:
                replica_by_key = {_key(each): each for each in replicas}
                for key in tasks.keys() - replica_by_key.keys():
                    (task := tasks.pop(key)).cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    latest.pop(key, None)
                for key in replica_by_key.keys() - tasks.keys():
                    follow = self._follow(replica_by_key[key], interval_seconds, keep)
                    tasks[key] = loop.create_task(follow)
                while not latest.keys() >= replica_by_key.keys():
                    updated.clear()
                    await updated.wait()
                yield [replace(latest[key], replica=each) for key, each in replica_by_key.items()]
                await asyncio.sleep(interval_seconds)
                if loop.time() >= listed_at + LIST_SECONDS:
                    replicas, listed_at = await self._refreshed_list(replicas), loop.time()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _refreshed_list(self, before: Sequence[Replica]) -> Sequence[Replica]:
        """Return the current replicas. If they cannot be listed, return the previous list."""
        try:
            return await self.replicas()
        except PensieveError:
            return before

    async def _follow(
        self,
        replica: Replica,
        interval_seconds: float,
        keep: Callable[[ReplicaAnswer[pb.Stats]], None],
    ) -> None:
        """Pass each update of one replica's figures to `keep`, or an error if the replica sends none."""
        request = pb.WatchStatsRequest(interval_seconds=interval_seconds)
        patience = interval_seconds + self.seconds
        while True:
            stream = self._connections.stub(replica).WatchStats(request, metadata=self._metadata)
            try:
                seconds = self.seconds
                while True:
                    async with asyncio.timeout(seconds):
                        response = await stream.read()
                    if not isinstance(response, pb.WatchStatsResponse):  # end of the stream
                        raise Unavailable("the replica ended its stream of figures")
                    keep(ReplicaAnswer(replica, response.stats))
                    seconds = patience
            except TimeoutError:
                keep(ReplicaAnswer(replica, error=Unavailable(f"no answer in {seconds:g} s")))
            except grpc.aio.AioRpcError as failure:
                keep(ReplicaAnswer(replica, error=call_error(failure, seconds)))
            except PensieveError as error:
                keep(ReplicaAnswer(replica, error=error))
            finally:
                stream.cancel()
            await asyncio.sleep(RESTART_SECONDS)


def _key(replica: Replica) -> ReplicaKey:
    return replica.name, replica.address


def _parse(answer: ReplicaAnswer[str]) -> ReplicaAnswer[exposition.Families]:
    if answer.value is None:
        return ReplicaAnswer(answer.replica, error=answer.error)
    try:
        return ReplicaAnswer(answer.replica, exposition.read(answer.value))
    except exposition.InvalidExposition as error:
        why = ServerFault(f"the replica's metrics cannot be read: {error}")
        return ReplicaAnswer(answer.replica, error=why)
