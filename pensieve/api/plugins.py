"""What the launcher plugs into the servers for a feature that has doors of its own."""

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

        `forwarder_of` makes a `Forwarder` of an `OwnerLookup` (api/grpc/forwarding.py). It is None where no
        other daemon shares the history.
        """
        ...

    def routes(self, requests: Any) -> Sequence[Any]:
        """Return the endpoints, as `api/http/routes.py` has them; `requests` is an `ApiRequests`."""
        ...

    @property
    def families(self) -> Sequence[MetricFamily]:
        """The metrics that `samples` may have."""
        ...

    async def samples(self) -> Samples:
        """Look the metrics up; called at most once in a few seconds, and it may take a while."""
        ...
