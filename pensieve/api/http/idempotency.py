"""The same request again over HTTP, by its `Idempotency-Key`.

A request with a key that came before is not run a second time. The key becomes a name by which the first
request is found:

    chat completions, messages    the request_id of its turn; the binder looks for it (binding/binder.py)
    responses                     the response's id; a response that runs or is stored has it

A key with another body is refused. While the first request is about to begin, the same request waits. A turn
whose client sent a key goes on when the client leaves, because that is when clients retry.

Over gRPC, SendMessage has a request_id of its own (conversations/history.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

from pensieve.api.http.exchange import Exchange
from pensieve.errors import InvalidArgument


def key_of(exchange: Exchange) -> str:
    """Return the key, which may be any text; empty if there is none."""
    return exchange.headers.get("idempotency-key", "")


def request_id_of(exchange: Exchange) -> str:
    """Return the request_id for the turn of a request with a key; empty if it has none."""
    key = key_of(exchange)
    return f"key-{digest(key)}" if key else ""


def key_reused() -> InvalidArgument:
    return InvalidArgument("idempotency-key", "was used before with another request")


def digest(*words: object) -> str:
    return hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=12).hexdigest()


class OneAtATime:
    """Makes requests with the same name begin one after the other."""

    def __init__(self) -> None:
        self._beginning: dict[str, asyncio.Event] = {}

    @contextlib.asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[None]:
        """Wait until no other request with this name is within; an empty name never waits."""
        if not name:
            yield
            return
        while (other := self._beginning.get(name)) is not None:
            await other.wait()
        begun = self._beginning[name] = asyncio.Event()
        try:
            yield
        finally:
            del self._beginning[name]
            begun.set()
