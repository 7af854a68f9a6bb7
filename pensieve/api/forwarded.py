"""A forwarded HTTP request, as the door that receives it and the one that carries it know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pensieve.errors import OwnedElsewhere
from pensieve.guard.callers import Caller

FORWARDED = "pensieve.forwarded"  # in the scope of an ASGI application


@dataclass(slots=True)
class ForwardedRequest:
    """The caller that another daemon names, and why this daemon did not answer, if it did not."""

    caller: Caller
    retry_key: str
    elsewhere: OwnedElsewhere | None = None  # why this daemon does not answer either


class HttpRequest(Protocol):
    """A request that can be sent to another daemon, and its answer."""

    scope: Mapping[str, Any]
    retry_key: str

    @property
    def received(self) -> bytes | None: ...
    def pass_on_head(self, status: int, headers: Sequence[tuple[str, str]]) -> None: ...
    async def write(self, piece: bytes, /) -> None: ...
    async def end_bytes(self) -> None: ...


class ForwardHttp(Protocol):
    async def __call__(self, request: HttpRequest, by: Caller, owner: OwnedElsewhere, /) -> bool:
        """Have the owner answer; return False if this daemon is the owner now and answers by itself."""
