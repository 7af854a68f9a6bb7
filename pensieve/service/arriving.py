"""Turns that are about to begin: drafted, tokenized, or waiting for the store thread.

They count like live ones, for the daemon's limit and for their tenant's, since nobody knows yet that they
will be refused; so do the characters that they hold, for a tenant's own.  A client that says the same again
waits for its first call (`gone`).  All of it belongs to the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from pensieve.service.counts import Counts
from pensieve.service.draft import Ask


class Arriving:
    def __init__(self) -> None:
        self.num_turns = 0
        self._of_tenant = Counts[str]()
        self._characters_of_tenant = Counts[str]()
        self._of_request = Counts[tuple[str, str, str]]()
        self._asks: dict[int, Ask] = {}  # as they came, by their identity
        self._waiting: dict[tuple[str, str, str], list[asyncio.Future[None]]] = {}

    def add(self, ask: Ask) -> None:
        self.num_turns += 1
        self._asks[id(ask)] = ask
        self._of_tenant[ask.tenant] += 1
        self._characters_of_tenant[ask.tenant] += ask.num_characters
        self._of_request[_request(ask)] += 1

    def remove(self, ask: Ask) -> None:
        self.num_turns -= 1
        self._asks.pop(id(ask), None)
        self._of_tenant[ask.tenant] -= 1
        self._characters_of_tenant[ask.tenant] -= ask.num_characters
        self._of_request[_request(ask)] -= 1
        if not self._of_request[_request(ask)]:
            for waiting in self._waiting.pop(_request(ask), ()):
                if not waiting.done():
                    waiting.set_result(None)

    async def gone(self, tenant: str, conversation_id: str, request_id: str) -> None:
        """Until no call of this request is about to begin its turn."""
        while request_id and self.has_request(tenant, conversation_id, request_id):
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.setdefault((tenant, conversation_id, request_id), []).append(waiting)
            await waiting

    def asks(self) -> Collection[Ask]:
        """In the order in which they came."""
        return self._asks.values()

    def num_characters_of(self, tenant: str) -> int:
        """That wait to be tokenized or stored."""
        return self._characters_of_tenant[tenant]

    def num_of_tenant(self, tenant: str) -> int:
        return self._of_tenant[tenant]

    def has_request(self, tenant: str, conversation_id: str, request_id: str) -> bool:
        return self._of_request[tenant, conversation_id, request_id] > 0


def _request(ask: Ask) -> tuple[str, str, str]:
    return ask.tenant, ask.conversation_id, ask.request_id
