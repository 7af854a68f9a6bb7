"""What requests go on from: conversations that are stored, as they were after a response or as they are.

Messages are read page by page; a past that another conversation takes over is text, as a client sends it
that keeps the history itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pensieve.errors import NotFound
from pensieve.service.daemon import Daemon
from pensieve.service.heads import message_of
from pensieve.service.http.bodies import Bodies
from pensieve.service.openai.conversation_items import (
    Place,
    calls_of,
    items_of,
    reply_as_sent_back,
    tag_of,
)
from pensieve.service.openai.fields import Refusal
from pensieve.service.stored_responses import StoredResponses
from pensieve.store import records
from pensieve.text import Message

T = TypeVar("T")
PAGE_SIZE = 100
TAKEN_BACK = "was taken back: its conversation was rewound"


@dataclass(frozen=True, slots=True)
class Past:
    """What a request goes on from."""

    conversation: records.Conversation
    revision: int
    system_prompt: str
    is_ours: bool
    calls: frozenset[str]  # that may be answered
    first_number: int  # of its messages, as items
    is_of_response: bool = False  # its revision is that of a reply


class Pasts:
    """Belongs to the loop."""

    def __init__(self, daemon: Daemon, bodies: Bodies, stored: StoredResponses) -> None:
        self._daemon, self._bodies, self._stored = daemon, bodies, stored

    async def after_response(self, response_id: str, tenant: str) -> Past:
        found = await self._stored.find(response_id, tenant)
        if found is None:
            raise no_previous("is not the id of a response")
        if found.revision is None:
            raise Refusal(
                "previous_response_id",
                "is the id of a response that has no reply: it runs, was cancelled, or failed",
            )
        conversation = await self.conversation(found.conversation_id, tenant)
        head = await self._head(conversation)
        return Past(
            conversation,
            found.revision,
            head.content if head else "",
            found.is_ours,
            frozenset(calls_of(found.body["output"])),
            first_number(head is not None),
            is_of_response=True,
        )

    async def of_conversation(
        self, conversation: records.Conversation, messages: Sequence[Message]
    ) -> Past:
        """Its end, as the ground of these messages."""
        head = await self._head(conversation)
        first, calls = first_number(head is not None), set[str]()
        if any(each.role == "tool" for each in messages):
            calls = await self._last_calls(conversation, first)
        return Past(
            conversation,
            conversation.revision,
            head.content if head else "",
            False,
            frozenset(calls),
            first,
        )

    async def conversation(self, conversation_id: str, tenant: str) -> records.Conversation:
        _check_id(conversation_id)
        return await self._read(self._daemon.reader.get_conversation, conversation_id, tenant)

    async def with_pending(
        self, conversation_id: str, tenant: str
    ) -> tuple[records.Conversation, tuple[records.NewMessage, ...]]:
        """The same, with the messages that come before those of its next turn."""
        _check_id(conversation_id)
        reader = self._daemon.reader
        found, pending = await self._read(reader.with_pending, conversation_id, tenant)
        return found, pending.messages

    async def first_number(self, conversation: records.Conversation) -> int:
        """Of its messages, as items."""
        return first_number(await self._head(conversation) is not None)

    async def messages(
        self, conversation: records.Conversation, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[records.Message]:
        """Its messages from a position on, page by page."""
        stop = conversation.num_messages if stop is None else stop
        while start < stop:
            page = await self._daemon.threads.in_reader(
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

    async def as_sent_back(self, past: Past) -> tuple[Message, ...]:
        """The past as text, without its system prompt."""
        conversation, found = past.conversation, list[Message]()
        last_revision = 0
        tag = tag_of(conversation.tenant, conversation.conversation_id)
        async for stored in self.messages(conversation):
            if stored.revision > past.revision:
                break
            last_revision = stored.revision
            if stored.role == "system" and not stored.revision and not stored.index:
                continue
            if stored.finish_reason is None:
                found.append(message_of(stored))
            else:
                cutter = self._bodies.pieces_of(conversation.tools)
                place = Place(tag, past.first_number + stored.index)
                found.append(reply_as_sent_back(stored, place, cutter))
        if past.is_of_response and last_revision != past.revision:
            raise no_previous(TAKEN_BACK)
        return tuple(found)

    # -- inside --

    async def _read(self, function: Callable[..., T], conversation_id: str, tenant: str) -> T:
        return await self._daemon.threads.in_reader(
            tenant, function, conversation_id, tenant=tenant
        )

    async def _last_calls(self, conversation: records.Conversation, first: int) -> set[str]:
        """Of its last reply."""
        last = max(0, conversation.num_messages - 1)
        found = set[str]()
        tag = tag_of(conversation.tenant, conversation.conversation_id)
        async for stored in self.messages(conversation, last):
            place = Place(tag, first + stored.index)
            cutter = self._bodies.pieces_of(conversation.tools)
            found |= calls_of(items_of(stored, place, cutter))
        return found

    async def _head(self, conversation: records.Conversation) -> records.Message | None:
        """The system prompt that it began with."""
        async for first in self.messages(conversation, 0, min(1, conversation.num_messages)):
            if first.role == "system" and not first.revision:
                return first
        return None


def first_number(has_head: bool) -> int:
    """Of the messages of a conversation, as items: 0 is its system prompt's."""
    return 0 if has_head else 1


def as_stored(
    messages: Sequence[records.NewMessage], conversation: records.Conversation
) -> list[records.Message]:
    """Pending messages, as if they were the next of the conversation."""
    return [
        records.Message(
            index=conversation.num_messages + number,
            role=each.role,
            content=each.content,
            tool_call_id=each.tool_call_id,
            extra=dict(each.extra),
            revision=conversation.revision + 1,
            first_token=conversation.num_tokens,
            num_tokens=0,
            finish_reason=None,
            token_ids=None,
        )
        for number, each in enumerate(messages)
    ]


def no_previous(problem: str) -> Refusal:
    return Refusal("previous_response_id", problem, "previous_response_not_found")


def _check_id(conversation_id: str) -> None:
    """What cannot be an id is neither looked for nor repeated."""
    if not records.ID_PATTERN.fullmatch(conversation_id):
        raise NotFound("there is no such conversation")
