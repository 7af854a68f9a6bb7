"""What is read of the history for clients and the operator, also while the model is loading.

It waits for no turn and no writer: the read thread has a connection of its own (store/history_reader.py).
"""

from __future__ import annotations

from pensieve.service.threads import Threads
from pensieve.store import records
from pensieve.store.conversation_changes import Pending
from pensieve.store.remote.remote_store import Reader
from pensieve.store.responses import StoredResponse


class Reads:
    """Belongs to the loop; the reader belongs to the read thread."""

    def __init__(self, reader: Reader, threads: Threads) -> None:
        self._reader = reader
        self._threads = threads

    async def conversation(self, conversation_id: str, tenant: str = "") -> records.Conversation:
        return await self._threads.in_reader(
            tenant, self._reader.get_conversation, conversation_id, tenant=tenant
        )

    async def turn(
        self, conversation_id: str, turn_id: str, request_id: str, tenant: str = ""
    ) -> records.StoredTurn | None:
        """A turn of this conversation, by its request_id or else by its own id."""
        return await self._threads.in_reader(
            tenant, self._reader.find_turn, conversation_id, turn_id, request_id, tenant=tenant
        )

    async def conversations(
        self, page_size: int, page_token: str, tenant: str = ""
    ) -> records.Page:
        return await self._threads.in_reader(
            tenant, self._reader.list_conversations, page_size, page_token, tenant=tenant
        )

    async def num_conversations(self) -> int:
        return await self._threads.in_reader("", self._reader.num_conversations)

    async def stored_bytes(self) -> dict[str, int]:
        """By tenant."""
        return await self._threads.in_reader("", self._reader.stored_bytes)

    async def tenants_of(self, conversation_id: str) -> list[str]:
        """Those that have a conversation with this id; for the operator."""
        return await self._threads.in_reader("", self._reader.tenants_of, conversation_id)

    async def prefix(
        self, prefix_id: str, tenant: str = ""
    ) -> tuple[records.Prefix, list[records.Message]]:
        """A declared prefix and its messages."""
        return await self._threads.in_reader(tenant, self._reader.prefix, prefix_id, tenant=tenant)

    async def prefixes(
        self, page_size: int, page_token: str, tenant: str = ""
    ) -> records.PrefixPage:
        return await self._threads.in_reader(
            tenant, self._reader.prefixes, page_size, page_token, tenant=tenant
        )

    async def all_prefixes(self) -> list[records.Prefix]:
        """Those of all tenants; for the operator."""
        return await self._threads.in_reader("", self._reader.all_prefixes)

    async def num_prefixes(self) -> dict[str, int]:
        """By tenant."""
        return await self._threads.in_reader("", self._reader.num_prefixes)

    async def response(self, response_id: str, tenant: str = "") -> StoredResponse | None:
        return await self._threads.in_reader(
            tenant, self._reader.response, response_id, tenant=tenant
        )

    async def with_pending(
        self, conversation_id: str, tenant: str = ""
    ) -> tuple[records.Conversation, Pending]:
        """One conversation, and the messages that come before those of its next turn."""
        return await self._threads.in_reader(
            tenant, self._reader.with_pending, conversation_id, tenant=tenant
        )

    async def messages(
        self,
        conversation_id: str,
        start: int,
        page_size: int,
        *,
        include_token_ids: bool = False,
        tenant: str = "",
    ) -> records.MessagePage:
        return await self._threads.in_reader(
            tenant,
            self._reader.message_page,
            conversation_id,
            start,
            page_size,
            include_token_ids=include_token_ids,
            tenant=tenant,
        )

    def close(self) -> None:
        """The threads have ended."""
        self._reader.close()
