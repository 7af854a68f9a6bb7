"""The SDK's client for operators: the methods of AdminService. `pensieve admin` uses it.

It connects like `Client`, usually to the daemon's admin socket (unix:PATH). Most methods return messages of
admin.proto.
"""

from __future__ import annotations

from collections.abc import Iterator

from pensieve.client.client import Client
from pensieve.client.connection import Link
from pensieve.client.requests import check_id, check_text
from pensieve.client.retry import Deadline
from pensieve.v1 import admin_pb2 as pb
from pensieve.v1 import admin_pb2_grpc

LOOK_SECONDS = 30.0  # timeout of calls that scan the cache


class Admin(Client):
    """A connection to one daemon for its operator. Takes the arguments of `Client`, with one address.

    If several tenants have the same `conversation_id`, pass the `tenant`, too.
    """

    _is_for_one_daemon = True

    def stats(self) -> pb.Stats:
        """Return the daemon's current figures."""
        return self.call(lambda link: _stub(link).GetStats, pb.GetStatsRequest()).stats

    def watch(self, interval_seconds: float = 1.0) -> Iterator[pb.Stats]:
        """Iterate over the daemon's figures, one every `interval_seconds`, until the daemon ends."""
        request = pb.WatchStatsRequest(interval_seconds=interval_seconds)
        stream = self._connection.stream(
            lambda link: _stub(link).WatchStats, request, Deadline(None), self._connection.route("")
        )
        try:
            while (response := stream.read()) is not None:
                yield response.stats
        finally:
            stream.cancel()

    def metrics(self) -> str:
        """Return the daemon's current metrics in Prometheus' exposition format."""
        return self.call(lambda link: _stub(link).GetMetrics, pb.GetMetricsRequest()).text

    def cached(self, least_valuable: bool = False, limit: int = 20) -> list[pb.CachedConversation]:
        """Return at most `limit` conversations with KV in the cache.

        The list begins with the largest conversations. With `least_valuable`, it begins with those that would
        be evicted next.
        """
        kinds = pb.ListCachedConversationsRequest
        order = kinds.ORDER_LEAST_VALUABLE if least_valuable else kinds.ORDER_LARGEST
        request = kinds(order=order, limit=limit)
        answer = self.call(lambda link: _stub(link).ListCachedConversations, request, LOOK_SECONDS)
        return list(answer.conversations)

    def explain(self, conversation_id: str, tenant: str = "") -> pb.ExplainConversationResponse:
        """Return where the KV of a conversation is, and why."""
        request = pb.ExplainConversationRequest(
            conversation_id=check_text("conversation_id", conversation_id),
            tenant=check_text("tenant", tenant),
        )
        return self.call(lambda link: _stub(link).ExplainConversation, request, LOOK_SECONDS)

    def evict(self, conversation_id: str, tenant: str = "", to_host: bool = False) -> int:
        """Evict the KV of a conversation, and return the number of evicted chunks.

        With `to_host`, the chunks are swapped out to the host instead. The result is their number.
        """
        destination = pb.EvictConversationRequest.Destination
        request = pb.EvictConversationRequest(
            conversation_id=check_text("conversation_id", conversation_id),
            tenant=check_text("tenant", tenant),
            destination=destination.DESTINATION_HOST
            if to_host
            else destination.DESTINATION_NOWHERE,
        )
        answer = self.call(lambda link: _stub(link).EvictConversation, request)
        return answer.chunks_moved if to_host else answer.chunks_dropped

    def check(self) -> list[str]:
        """Check the daemon's cache, scheduler and history, and return the problems found."""
        return list(
            self.call(lambda link: _stub(link).CheckIntegrity, pb.CheckIntegrityRequest()).problems
        )

    def tenants(self) -> list[pb.Tenant]:
        """Return the usage and the limits of each tenant."""
        return list(
            self.call(lambda link: _stub(link).ListTenants, pb.ListTenantsRequest()).tenants
        )

    def tenant_prefixes(self) -> list[pb.TenantPrefix]:
        """Return the declared prefixes of all tenants, oldest first."""
        answer = self.call(
            lambda link: _stub(link).ListTenantPrefixes, pb.ListTenantPrefixesRequest()
        )
        return list(answer.prefixes)

    def delete_tenant_prefix(self, prefix_id: str, tenant: str = "") -> None:
        """Delete a tenant's prefix `prefix_id`. Conversations created from it keep their whole history."""
        request = pb.DeleteTenantPrefixRequest(
            prefix_id=check_id(prefix_id, "prefix_id"), tenant=check_text("tenant", tenant)
        )
        self.call(lambda link: _stub(link).DeleteTenantPrefix, request)

    def drain(self) -> int:
        """Refuse new turns and let the running turns finish. Return how many are running."""
        return self.call(lambda link: _stub(link).Drain, pb.DrainRequest()).turns_running


def _stub(link: Link) -> admin_pb2_grpc.AdminServiceStub:
    return admin_pb2_grpc.AdminServiceStub(link.channel)
