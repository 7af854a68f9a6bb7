"""The interface of features that add a gRPC service, HTTP endpoints and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from google.protobuf.descriptor import ServiceDescriptor

from pensieve.api.metrics.families import MetricFamily, Samples


class Plugin(Protocol):
    """A gRPC service, endpoints of the HTTP server, and metrics."""

    @property
    def service(self) -> ServiceDescriptor: ...

    def add_service(self, server: Any, forwarder_of: Callable[[Any], Any] | None) -> None:
        """Add the service to a gRPC server.

        `forwarder_of` makes a `Forwarder` from an `OwnerLookup` (api/grpc/forwarding.py). It is None if no
        other daemon shares the history.
        """
        ...

    def routes(self, requests: Any) -> Sequence[Any]:
        """Return the endpoints as `Route`s; `requests` is an `ApiRequests`."""
        ...

    @property
    def families(self) -> Sequence[MetricFamily]:
        """The metrics that `samples` may contain."""
        ...

    async def samples(self) -> Samples:
        """Return samples. This is called at most once in a few seconds, so it may be slow."""
        ...
