"""Responses and changes of conversations, in the store, for who is on the loop.

Each is one job of the store thread, and returns when it is on the disk.  A deletion returns when what is
deleted is erased from the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pensieve.errors import ErasurePending, NotFound, StaleRevision, StorageFull
from pensieve.service.daemon import Daemon
from pensieve.service.draft import stored_messages
from pensieve.service.housekeeping import erased
from pensieve.service.openai.response_stream import ENDED
from pensieve.store import records
from pensieve.store.conversation_changes import Pending, PendingChange
from pensieve.store.responses import Removed, StoredResponse
from pensieve.text import Message


class StoredResponses:
    """Belongs to the loop."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._store, self._threads = daemon.store, daemon.threads

    async def find(self, response_id: str, tenant: str) -> StoredResponse | None:
        if not records.ID_PATTERN.fullmatch(response_id):
            return None  # none has such an id
        reader = self._daemon.reader
        return await self._threads.in_reader(tenant, reader.response, response_id, tenant=tenant)

    async def runs(self, response: StoredResponse) -> bool:
        """Whether its turn runs, here or at another daemon; what is stored of one that has ended says so."""
        if response.body.get("status") in ENDED:
            return False
        tenant, reader = response.tenant, self._daemon.reader
        try:
            found = await self._threads.in_reader(
                tenant, reader.get_conversation, response.conversation_id, tenant=tenant
            )
        except NotFound:
            return False
        return found.running_turn_id is not None

    async def require_here(self, response_id: str, tenant: str) -> None:
        """OwnedElsewhere where its turn runs at another daemon, which alone can end it."""
        found = await self.find(response_id, tenant)
        if found is not None and await self.runs(found):
            named = found.conversation_id
            await self._threads.in_store(tenant, self._store.claim, named, tenant=tenant)

    async def save(self, response: StoredResponse) -> None:
        await self._threads.whole(
            self._threads.in_store(response.tenant, self._store.responses.save, response)
        )

    async def is_made_for(self, conversation_id: str, tenant: str) -> bool:
        return await self._threads.in_store(
            tenant, self._store.responses.is_made_for, conversation_id, tenant=tenant
        )

    async def delete(self, response_id: str, tenant: str) -> str:
        """And its conversation, if that was made for responses and this was the last one.

        Returns the id of that, empty if it stays.
        """
        return await self._threads.whole(self._delete(response_id, tenant))

    async def _delete(self, response_id: str, tenant: str) -> str:
        """A conversation that nothing needs any more goes first: its responses go with it, in one commit."""
        conversations = self._daemon.writable
        with contextlib.suppress(NotFound, StaleRevision):  # deleted meanwhile, or somebody goes on
            unneeded = await self._threads.in_store(
                tenant, self._store.responses.goes_with, response_id, tenant=tenant
            )
            if unneeded.conversation_id:
                await conversations.delete(unneeded.conversation_id, tenant, unneeded.revision)
                return unneeded.conversation_id
        try:
            removed: Removed = await self._threads.in_store(
                tenant, self._store.responses.delete, response_id, tenant=tenant
            )
        except ErasurePending:
            await erased(self._store.erasure.finish, self._threads)
            return ""
        if removed.conversation_id:
            try:
                await conversations.delete(removed.conversation_id, tenant, removed.revision)
            except (NotFound, StaleRevision):
                removed = Removed()
                await erased(self._store.erasure.finish, self._threads)
        return removed.conversation_id

    # -- conversations --

    async def set_metadata(
        self, conversation_id: str, metadata: Mapping[str, Any], tenant: str
    ) -> records.Conversation:
        await self._check(tenant)
        return await self._threads.in_store(
            tenant, self._store.changes.set_metadata, conversation_id, metadata, tenant=tenant
        )

    async def begin_with(
        self,
        conversation_id: str,
        system_prompt: str,
        tools: Sequence[Mapping[str, Any]],
        template_options: Mapping[str, Any],
        tenant: str,
    ) -> records.Conversation:
        await self._check(tenant)
        return await self._threads.in_store(
            tenant,
            self._store.changes.begin_with,
            *(conversation_id, system_prompt, tools, template_options),
            tenant=tenant,
        )

    async def change_pending(
        self, conversation_id: str, change: Callable[[Pending], Pending], tenant: str
    ) -> Pending:
        """What `change` makes of them; messages that go are erased from the files."""
        await self._check(tenant)
        return await self._threads.whole(self._change_pending(conversation_id, change, tenant))

    async def _change_pending(
        self, conversation_id: str, change: Callable[[Pending], Pending], tenant: str
    ) -> Pending:
        changed: PendingChange = await self._threads.in_store(
            tenant, self._store.changes.change_pending, conversation_id, change, tenant=tenant
        )
        if changed.is_erasure_due:
            await erased(self._store.erasure.finish, self._threads)
        return changed.after

    async def _check(self, tenant: str) -> None:
        """Refuse what its tenant may not store."""
        self._daemon.writable_by(tenant)
        most = self._daemon.admission.allowances.storage.get(tenant)
        if most is None:
            return
        taken = await self._threads.in_store(tenant, self._store.stored_bytes, tenant)
        if taken >= most:
            raise StorageFull(f"this token's conversations take {taken:,} bytes of {most:,}")


def as_pending(messages: Sequence[Message]) -> tuple[records.NewMessage, ...]:
    """As the store takes them; they have no tokens yet."""
    return tuple(stored_messages(messages, [[] for _ in messages]))


def appended(messages: Sequence[Message]) -> Callable[[Pending], Pending]:
    """More of them, behind what is pending."""
    more = as_pending(messages)
    return lambda found: replace(found, messages=(*found.messages, *more))
