"""Values of forwarded HTTP requests, shared by the HTTP server and the gRPC forwarder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pensieve.errors import OwnedElsewhere
from pensieve.guard.callers import Caller

FORWARDED = "pensieve.forwarded"  # key in the ASGI scope


@dataclass(slots=True)
class ForwardedRequest:
    """A request that another daemon forwarded to this daemon, and the caller that the other daemon named."""

    caller: Caller
    # drawn by the other daemon: identifies the request if both daemons execute it
    forwarding_key: str
    owner: OwnedElsewhere | None = None  # set if another daemon owns the conversation or job


class HttpRequest(Protocol):
    """A request that can be forwarded, and its answer."""

    scope: Mapping[str, Any]
    forwarding_key: str  # set when the request is first forwarded

    @property
    def received(self) -> bytes | None: ...
    def pass_on_head(self, status: int, headers: Sequence[tuple[str, str]]) -> None: ...
    async def write(self, piece: bytes, /) -> None: ...
    async def end_bytes(self) -> None: ...


class ForwardHttp(Protocol):
    async def __call__(self, request: HttpRequest, by: Caller, owner: OwnedElsewhere, /) -> bool:
        """Let the owner answer. Return False if this daemon has become the owner and must answer itself."""
