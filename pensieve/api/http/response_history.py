"""Read and change stored conversations and responses for the endpoints of OpenAI's API.

A request continues from a starting point: the end of a conversation, or a response in it. If a new
conversation must continue from there, it gets the earlier messages as text, like the history of a stateless
client. Changes run in a store thread, and are on disk when the method returns. Deleted text is erased from
the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pensieve.api.http.requests import ApiRequests
from pensieve.api.json_fields import Refusal
from pensieve.api.openai.conversation_items import (
    Place,
    calls_of,
    items_of,
    reply_as_sent_back,
    tag_of,
)
from pensieve.api.openai.response_stream import ENDED
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.draft import stored_messages
from pensieve.conversations.heads import ConversationSettings, message_of
from pensieve.conversations.housekeeping import wait_until_erased
from pensieve.errors import ErasurePending, NotFound, StaleRevision, StorageFull
from pensieve.store import records
from pensieve.store.conversation_changes import Pending, PendingChange
from pensieve.store.responses import Removed, StoredResponse
from pensieve.text import Message

T = TypeVar("T")
PAGE_SIZE = 100
REWOUND = "no longer exists: its conversation was rewound"


@dataclass(frozen=True, slots=True)
class StartingPoint:
    conversation: records.StoredConversation
    revision: int
    system_prompt: str
    is_ours: bool  # the conversation was created for responses
    calls: frozenset[str]  # function calls whose outputs the request may contain
    first_number: int  # the first message's number in item ids (`Place`)
    is_of_response: bool = False  # `revision` is the revision of a response


class ResponseHistory:
    """Runs on the event loop."""

    def __init__(self, daemon: Daemon, requests: ApiRequests) -> None:
        self._daemon, self._requests = daemon, requests
        self._store, self._threads = daemon.store, daemon.threads

    async def after_response(self, response_id: str, tenant: str) -> StartingPoint:
        found = await self.response(response_id, tenant)
        if found is None:
            raise no_previous("is not the id of a stored response")
        if found.revision is None:
            raise Refusal(
                "previous_response_id",
                "is a response without a reply: it is running, was cancelled, or failed",
            )
        conversation = await self.conversation(found.conversation_id, tenant)
        head = await self._head(conversation)
        return StartingPoint(
            conversation,
            found.revision,
            head.content if head else "",
            found.is_ours,
            frozenset(calls_of(found.body["output"])),
            first_number(head is not None),
            is_of_response=True,
        )

    async def end_of_conversation(
        self, conversation: records.StoredConversation, messages: Sequence[Message]
    ) -> StartingPoint:
        """Return the end of a conversation as the starting point for these messages."""
        head = await self._head(conversation)
        first, calls = first_number(head is not None), set[str]()
        if any(each.role == "tool" for each in messages):
            calls = await self._last_calls(conversation, first)
        return StartingPoint(
            conversation,
            conversation.revision,
            head.content if head else "",
            False,
            frozenset(calls),
            first,
        )

    async def conversation(self, conversation_id: str, tenant: str) -> records.StoredConversation:
        _check_id(conversation_id)
        return await self._read(self._daemon.reader.get_conversation, conversation_id, tenant)

    async def with_pending(
        self, conversation_id: str, tenant: str
    ) -> tuple[records.StoredConversation, tuple[records.NewMessage, ...]]:
        """Return a conversation with its pending messages."""
        _check_id(conversation_id)
        reader = self._daemon.reader
        found, pending = await self._read(reader.with_pending, conversation_id, tenant)
        return found, pending.messages

    async def first_number(self, conversation: records.StoredConversation) -> int:
        return first_number(await self._head(conversation) is not None)

    async def messages(
        self, conversation: records.StoredConversation, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[records.StoredMessage]:
        stop = conversation.num_messages if stop is None else stop
        while start < stop:
            page = await self._threads.in_read_thread(
                conversation.tenant,
                self._daemon.reader.message_page,
                *(conversation.conversation_id, start, min(PAGE_SIZE, stop - start)),
                tenant=conversation.tenant,
            )
            for each in page.messages:
                yield each
            start += len(page.messages)
            if not page.messages:
                return

    async def as_sent_back(self, start: StartingPoint) -> tuple[Message, ...]:
        """Return the messages up to the starting point, without the system prompt."""
        conversation, found = start.conversation, list[Message]()
        last_revision = 0
        tag = tag_of(conversation.tenant, conversation.conversation_id)
        async for stored in self.messages(conversation):
            if stored.revision > start.revision:
                break
            last_revision = stored.revision
            if stored.role == "system" and not stored.revision and not stored.index:
                continue
            if stored.finish_reason is None:
                found.append(message_of(stored))
            else:
                cutter = self._requests.cutter(conversation.tools)
                place = Place(tag, start.first_number + stored.index)
                found.append(reply_as_sent_back(stored, place, cutter))
        if start.is_of_response and last_revision != start.revision:
            raise no_previous(REWOUND)
        return tuple(found)

    # -- responses --

    async def response(self, response_id: str, tenant: str) -> StoredResponse | None:
        if not records.ID_PATTERN.fullmatch(response_id):
            return None  # the id is malformed
        return await self._read(self._daemon.reader.response, response_id, tenant)

    async def runs(self, response: StoredResponse) -> bool:
        """Return whether the response's turn runs, here or at another daemon."""
        if response.body.get("status") in ENDED:
            return False
        with contextlib.suppress(NotFound):
            found = await self.conversation(response.conversation_id, response.tenant)
            return found.running_turn_id is not None
        return False

    async def require_here(self, response_id: str, tenant: str) -> None:
        """Raise OwnedElsewhere if the turn runs at another daemon. Only that daemon can end the turn."""
        found = await self.response(response_id, tenant)
        if found is not None and await self.runs(found):
            with contextlib.suppress(NotFound):
                await self.claim(await self.conversation(found.conversation_id, tenant))

    async def claim(self, conversation: records.StoredConversation) -> records.StoredConversation:
        """Claim a conversation with a running turn, and return the conversation's new state.

        Raises OwnedElsewhere if another daemon runs the turn.
        """
        tenant, name = conversation.tenant, conversation.conversation_id
        await self._threads.in_store(tenant, self._store.claim, name, tenant=tenant, lane=name)
        return await self.conversation(name, tenant)

    async def save(self, response: StoredResponse) -> None:
        await self._threads.run_to_end(
            self._threads.in_store(
                *(response.tenant, self._store.responses.save, response),
                lane=response.conversation_id,
            )
        )

    async def is_only_for_responses(self, conversation_id: str, tenant: str) -> bool:
        return await self._threads.in_store(
            *(tenant, self._store.responses.is_only_for_responses, conversation_id),
            tenant=tenant,
            lane=conversation_id,
        )

    async def delete(self, response_id: str, tenant: str) -> str:
        """Delete a response. Also delete its conversation if nothing else needs it (store/responses.py).

        Returns the id of the deleted conversation, or an empty string.
        """
        return await self._threads.run_to_end(self._delete(response_id, tenant))

    async def _delete(self, response_id: str, tenant: str) -> str:
        """Delete an unneeded conversation first, because this also deletes its responses."""
        conversations = self._daemon.writable
        # These errors mean that the conversation was deleted or continued meanwhile.
        with contextlib.suppress(NotFound, StaleRevision):
            unneeded = await self._threads.in_store(
                tenant,
                self._store.responses.conversation_unneeded_without,
                response_id,
                tenant=tenant,
            )
            if unneeded.conversation_id:
                await conversations.delete(unneeded.conversation_id, tenant, unneeded.revision)
                return unneeded.conversation_id
        try:
            removed: Removed = await self._threads.in_store(
                tenant, self._store.responses.delete, response_id, tenant=tenant
            )
        except ErasurePending:
            await wait_until_erased(self._store.erasure.finish, self._threads)
            return ""
        if removed.conversation_id:
            try:
                await conversations.delete(removed.conversation_id, tenant, removed.revision)
            except (NotFound, StaleRevision):
                removed = Removed()
                await wait_until_erased(self._store.erasure.finish, self._threads)
        return removed.conversation_id

    # -- changes of conversations --

    async def set_metadata(
        self, conversation_id: str, metadata: Mapping[str, Any], tenant: str
    ) -> records.StoredConversation:
        await self._check(tenant)
        return await self._threads.in_store(
            *(tenant, self._store.changes.set_metadata, conversation_id, metadata),
            tenant=tenant,
            lane=conversation_id,
        )

    async def set_beginning(
        self,
        conversation_id: str,
        settings: ConversationSettings,
        tenant: str,
    ) -> records.StoredConversation:
        await self._check(tenant)
        return await self._threads.in_store(
            tenant,
            self._store.changes.set_beginning,
            *(conversation_id, settings.system_prompt, settings.tools, settings.template_options),
            tenant=tenant,
            lane=conversation_id,
        )

    async def change_pending(
        self, conversation_id: str, change: Callable[[Pending], Pending], tenant: str
    ) -> Pending:
        """Apply `change` to the pending messages. Removed messages are erased from the files."""
        await self._check(tenant)
        return await self._threads.run_to_end(self._change_pending(conversation_id, change, tenant))

    async def _change_pending(
        self, conversation_id: str, change: Callable[[Pending], Pending], tenant: str
    ) -> Pending:
        changed: PendingChange = await self._threads.in_store(
            *(tenant, self._store.changes.change_pending, conversation_id, change),
            tenant=tenant,
            lane=conversation_id,
        )
        if changed.is_erasure_due:
            await wait_until_erased(self._store.erasure.finish, self._threads)
        return changed.after

    async def _check(self, tenant: str) -> None:
        self._daemon.charged_to(tenant)
        bytes_max = self._daemon.admission.allowances.storage.get(tenant)
        if bytes_max is None:
            return
        taken = await self._threads.in_store(tenant, self._store.stored_bytes, tenant)
        if taken >= bytes_max:
            raise StorageFull(
                f"the conversations of your tenant take {taken:,} of {bytes_max:,} bytes; delete some"
            )

    # -- inside --

    async def _read(self, function: Callable[..., T], conversation_id: str, tenant: str) -> T:
        return await self._threads.in_read_thread(tenant, function, conversation_id, tenant=tenant)

    async def _last_calls(self, conversation: records.StoredConversation, first: int) -> set[str]:
        last = max(0, conversation.num_messages - 1)
        found = set[str]()
        tag = tag_of(conversation.tenant, conversation.conversation_id)
        async for stored in self.messages(conversation, last):
            place = Place(tag, first + stored.index)
            cutter = self._requests.cutter(conversation.tools)
            found |= calls_of(items_of(stored, place, cutter))
        return found

    async def _head(self, conversation: records.StoredConversation) -> records.StoredMessage | None:
        async for first in self.messages(conversation, 0, min(1, conversation.num_messages)):
            if first.role == "system" and not first.revision:
                return first
        return None


def first_number(has_head: bool) -> int:
    """Return the first message's number in item ids. Number 0 is reserved for the system prompt."""
    return 0 if has_head else 1


def as_stored(
    messages: Sequence[records.NewMessage], conversation: records.StoredConversation
) -> list[records.StoredMessage]:
    """Return pending messages as the next messages of the conversation."""
    return [
        records.StoredMessage(
            index=conversation.num_messages + number,
            role=each.role,
            content=each.content,
            tool_call_id=each.tool_call_id,
            extra=dict(each.extra),
            revision=conversation.revision + 1,
            first_token_index=conversation.num_tokens,
            num_tokens=0,
            finish_reason=None,
            token_ids=None,
        )
        for number, each in enumerate(messages)
    ]


def as_pending(messages: Sequence[Message]) -> tuple[records.NewMessage, ...]:
    """Return messages as store records, without tokens yet."""
    return tuple(stored_messages(messages, [[] for _ in messages]))


def change_appending(messages: Sequence[Message]) -> Callable[[Pending], Pending]:
    """Return a change that appends these messages to the pending messages."""
    more = as_pending(messages)
    return lambda found: replace(found, messages=(*found.messages, *more))


def no_previous(problem: str) -> Refusal:
    return Refusal("previous_response_id", problem, "previous_response_not_found")


def _check_id(conversation_id: str) -> None:
    """Raise NotFound for a malformed id, without looking it up or quoting it."""
    if not records.ID_PATTERN.fullmatch(conversation_id):
        raise NotFound("no such conversation")
