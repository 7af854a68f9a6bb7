"""The gRPC methods that a cluster serves, and the metadata keys that its processes use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from pensieve.v1 import admin_pb2, conversation_pb2, jobs_pb2, status_pb2

KEY = "session_id"  # Ray's metadata key for the routing key
TIMEOUT = "pensieve-timeout"
REPLICA = "pensieve-replica"
HEALTH = "grpc.health.v1.Health"
SERVICES = (
    conversation_pb2.DESCRIPTOR.services_by_name["ConversationService"],
    jobs_pb2.DESCRIPTOR.services_by_name["JobService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
)


class Method(NamedTuple):
    path: str
    takes_stream: bool
    gives_stream: bool

    @property
    def name(self) -> str:
        """Ray's name of the method: the last part of the path."""
        return self.path.rsplit("/", 1)[1]

    @property
    def kind(self) -> str:
        """gRPC's name for the kind of method: unary_unary, unary_stream, …"""
        sides = (self.takes_stream, self.gives_stream)
        return "_".join("stream" if each else "unary" for each in sides)


def methods() -> Iterator[Method]:
    for service in SERVICES:
        yield from _methods_of(service)
    yield Method(f"/{HEALTH}/Check", False, False)
    yield Method(f"/{HEALTH}/Watch", False, True)


async def health(channel: grpc.aio.Channel, seconds: float) -> status_pb2.HealthCheckResponse:
    """Return the daemon's health. Raises AioRpcError if the daemon does not answer."""
    check: Any = channel.unary_unary(
        f"/{HEALTH}/Check",
        request_serializer=status_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=status_pb2.HealthCheckResponse.FromString,
    )
    answer: status_pb2.HealthCheckResponse = await check(
        status_pb2.HealthCheckRequest(), timeout=seconds
    )
    return answer


def _methods_of(service: ServiceDescriptor) -> Iterator[Method]:
    for each in service.methods:
        path = f"/{service.full_name}/{each.name}"
        yield Method(path, each.client_streaming, each.server_streaming)
