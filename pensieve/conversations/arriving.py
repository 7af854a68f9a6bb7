"""Count the turns that are about to begin, and let requests with the same request_id begin one by one.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection

from pensieve.conversations.draft import TurnRequest
from pensieve.guard.limits import Counts


class ArrivingTurns:
    """Turns that are about to begin: being drafted or tokenized, or waiting for the store thread.

    These turns and their characters count towards the limits of the daemon and of the tenant. Requests with
    the same request_id begin one after the other.
    """

    def __init__(self) -> None:
        self.num_turns = 0
        self._of_tenant = Counts[str]()
        self.num_characters = Counts[str]()  # waiting to be tokenized or stored, by tenant
        self._requests: dict[int, TurnRequest] = {}  # by identity, in order of arrival
        # Set when the request has begun its turn; by tenant, conversation (empty: any) and request_id.
        self._beginning: dict[tuple[str, str, str], asyncio.Event] = {}

    def add(self, request: TurnRequest) -> None:
        self.num_turns += 1
        self._requests[id(request)] = request
        self._of_tenant[request.tenant] += 1
        self.num_characters[request.tenant] += request.num_characters
        self._enter(request.tenant, request.conversation_id, request.request_id)

    def remove(self, request: TurnRequest) -> None:
        self.num_turns -= 1
        self._requests.pop(id(request), None)
        self._of_tenant[request.tenant] -= 1
        self.num_characters[request.tenant] -= request.num_characters
        self._leave(request.tenant, request.conversation_id, request.request_id)

    async def until_begun(self, tenant: str, conversation_id: str, request_id: str) -> None:
        """Wait until no other call with this request_id is about to begin its turn."""
        while (other := self._beginning.get((tenant, conversation_id, request_id))) is not None:
            await other.wait()

    @contextlib.asynccontextmanager
    async def one_at_a_time(self, tenant: str, request_id: str) -> AsyncIterator[None]:
        """Make other calls with this request_id wait, whatever their conversation."""
        await self.until_begun(tenant, "", request_id)
        self._enter(tenant, "", request_id)
        try:
            yield
        finally:
            self._leave(tenant, "", request_id)

    def requests(self) -> Collection[TurnRequest]:
        """Return the requests in order of arrival."""
        return self._requests.values()

    def num_of_tenant(self, tenant: str) -> int:
        return self._of_tenant[tenant]

    def has_request(self, tenant: str, conversation_id: str, request_id: str) -> bool:
        return (tenant, conversation_id, request_id) in self._beginning

    def _enter(self, tenant: str, conversation_id: str, request_id: str) -> None:
        if request_id:
            self._beginning[tenant, conversation_id, request_id] = asyncio.Event()

    def _leave(self, tenant: str, conversation_id: str, request_id: str) -> None:
        event = self._beginning.pop((tenant, conversation_id, request_id), None)
        if event is not None:
            event.set()
