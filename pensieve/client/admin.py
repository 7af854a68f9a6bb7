"""What `pensieve admin` asks a daemon; the answers are the messages of admin.proto."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from pensieve.client import wire
from pensieve.client.client import Client
from pensieve.client.failures import Deadline, failed
from pensieve.client.turns import check_text
from pensieve.v1 import admin_pb2 as pb
from pensieve.v1 import admin_pb2_grpc


class Admin(Client):
    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def stats(self) -> pb.Stats:
        stats: pb.Stats = self.call(self._admin.GetStats, pb.GetStatsRequest()).stats
        return stats

    def watch(self, interval_seconds: float = 1.0) -> Iterator[pb.Stats]:
        """Until the daemon ends or the caller stops."""
        request = pb.WatchStatsRequest(interval_seconds=interval_seconds)
        self._check_open()
        call = self._admin.WatchStats(request, metadata=self._metadata)
        try:
            for response in call:
                yield response.stats
        except grpc.RpcError as failure:
            raise failed(failure, Deadline(None)) from None
        finally:
            call.cancel()

    def cached(self, least_valuable: bool = False, limit: int = 20) -> list[pb.CachedConversation]:
        kinds = pb.ListCachedConversationsRequest
        order = kinds.ORDER_LEAST_VALUABLE if least_valuable else kinds.ORDER_LARGEST
        answer = self.call(
            self._admin.ListCachedConversations, kinds(order=order, limit=limit), wire.LOOK_SECONDS
        )
        return list(answer.conversations)

    def explain(self, conversation_id: str, tenant: str = "") -> pb.ExplainConversationResponse:
        request = pb.ExplainConversationRequest(
            conversation_id=check_text("conversation_id", conversation_id),
            tenant=check_text("tenant", tenant),
        )
        answer: pb.ExplainConversationResponse = self.call(
            self._admin.ExplainConversation, request, wire.LOOK_SECONDS
        )
        return answer

    def evict(self, conversation_id: str, tenant: str = "", to_host: bool = False) -> int:
        """How many chunks lost their pages, or with `to_host`, are leaving the device for the host."""
        destination = pb.EvictConversationRequest.Destination
        request = pb.EvictConversationRequest(
            conversation_id=check_text("conversation_id", conversation_id),
            tenant=check_text("tenant", tenant),
            destination=destination.DESTINATION_HOST
            if to_host
            else destination.DESTINATION_NOWHERE,
        )
        answer = self.call(self._admin.EvictConversation, request)
        return int(answer.chunks_moved if to_host else answer.chunks_dropped)

    def check(self) -> list[str]:
        """What is wrong; nothing, as a rule."""
        return list(self.call(self._admin.CheckIntegrity, pb.CheckIntegrityRequest()).problems)

    def drain(self) -> int:
        """How many turns still run."""
        return int(self.call(self._admin.Drain, pb.DrainRequest()).turns_running)
