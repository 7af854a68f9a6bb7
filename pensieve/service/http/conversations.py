"""`/v1/conversations`: conversations as they are everywhere, with their messages as items.

POST                    one without messages; items that it begins with are pending
GET, POST …/{id}        what it is; its metadata is replaced
DELETE                  nothing of it stays

items: GET, GET one     messages, a reply in its parts (openai/conversation_items), then what is pending
items: POST             pending, until the next turn brings them (store/conversation_changes)
items: DELETE           of the last one alone: what is pending goes, and a reply is taken back by a rewind;
what it
                        answered is pending then
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pensieve.errors import NotFound, TurnRunning
from pensieve.service.daemon import Daemon
from pensieve.service.draft import ConversationSettings
from pensieve.service.grpc.auth import Caller
from pensieve.service.heads import check_length
from pensieve.service.http.bodies import Bodies
from pensieve.service.http.exchange import Exchange
from pensieve.service.http.pasts import Pasts, as_stored
from pensieve.service.http.queries import is_descending, limit_of, query_of
from pensieve.service.http.response_places import drawn_id
from pensieve.service.openai import Refusal
from pensieve.service.openai.conversation_items import items_of
from pensieve.service.openai.fields import Fields, check_json
from pensieve.service.openai.item_ids import Place, place_of, tag_of
from pensieve.service.openai.response_items import add_items
from pensieve.service.stored_responses import StoredResponses, appended
from pensieve.store import records
from pensieve.store.conversation_changes import Pending
from pensieve.text import Message

ITEMS_MAX = 20  # of a request
PENDING_MAX = 100  # of a conversation: a turn has few messages
WINDOW = 16  # messages that are read at once, from the end on
ONLY_LAST = "only the last item of a conversation can be deleted, where it is a whole message"


class Conversations:
    def __init__(
        self, daemon: Daemon, bodies: Bodies, stored: StoredResponses, pasts: Pasts
    ) -> None:
        self._daemon, self._bodies = daemon, bodies
        self._stored, self._pasts = stored, pasts

    async def create(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        given = await self._bodies.json(exchange, by)
        fields = Fields({} if given is None else given)
        metadata, messages = _metadata(fields) or {}, _items(fields)
        fields.end()
        change = self._appended(messages)
        change(Pending())  # what cannot be pending makes no conversation
        settings = ConversationSettings(drawn_id(), metadata=metadata, tenant=by.tenant)
        created = await self._daemon.writable_by(by.tenant).create(settings)
        if messages:
            await self._stored.change_pending(created.conversation_id, change, by.tenant)
        return _described(created)

    async def get(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return _described(await self._conversation(exchange, by))

    async def update(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        conversation = await self._conversation(exchange, by)
        fields = Fields(await self._bodies.json(exchange, by))
        metadata = _metadata(fields)
        fields.end()
        if metadata is None:
            raise Refusal("metadata", "is required", "missing_required_parameter")
        changed = await self._stored.set_metadata(conversation.conversation_id, metadata, by.tenant)
        return _described(changed)

    async def delete(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        conversation_id = exchange.values["conversation_id"]
        if not records.ID_PATTERN.fullmatch(conversation_id):
            raise NotFound("there is no such conversation")
        await self._daemon.writable.delete(conversation_id, by.tenant)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    # -- items --

    async def list_items(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        conversation = await self._conversation(exchange, by)
        query = query_of(exchange)
        limit, descending = limit_of(query), is_descending(query)
        first = await self._pasts.first_number(conversation)
        after = _parsed(query["after"], conversation, first) if query.get("after") else None
        found: list[Mapping[str, Any]] = []
        async for item in self._items(conversation, first, after, descending):
            found.append(item)
            if len(found) > limit:
                break
        return _listed(found[:limit], has_more=len(found) > limit)

    async def add_items(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        conversation = await self._conversation(exchange, by)
        fields = Fields(await self._bodies.json(exchange, by))
        if "items" not in fields:
            raise Refusal("items", "is required", "missing_required_parameter")
        messages = _items(fields)
        fields.end()
        after = await self._stored.change_pending(
            conversation.conversation_id, self._appended(messages), by.tenant
        )
        added = as_stored(after.messages, conversation)[-len(messages) :] if messages else []
        first = await self._pasts.first_number(conversation)
        return _listed([item for each in added for item in self._of(each, conversation, first)])

    async def get_item(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        conversation = await self._conversation(exchange, by)
        first = await self._pasts.first_number(conversation)
        return (await self._item(exchange.values["item_id"], conversation, first))[1]

    async def delete_item(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        conversation = await self._conversation(exchange, by)
        if conversation.running_turn_id is not None:
            turn_id = str(conversation.running_turn_id)
            raise TurnRunning(conversation.conversation_id, turn_id)
        first = await self._pasts.first_number(conversation)
        message, item = await self._item(exchange.values["item_id"], conversation, first)
        last = [each async for each in self._items(conversation, first, None, True, messages_max=1)]
        if len(last) != 1 or last[0]["id"] != item["id"]:
            raise Refusal("item_id", ONLY_LAST)
        if message.index >= conversation.num_messages:
            await self._stored.change_pending(
                conversation.conversation_id,
                lambda found: replace(found, messages=found.messages[:-1]),
                by.tenant,
            )
        elif message.finish_reason is not None:
            await self._take_back(conversation, message)
        else:
            raise Refusal("item_id", ONLY_LAST)  # what the conversation began with
        return _described(
            await self._daemon.reads.conversation(conversation.conversation_id, by.tenant)
        )

    async def _take_back(self, conversation: records.Conversation, reply: records.Message) -> None:
        """The last reply; what it answers is pending again."""
        question: list[records.NewMessage] = []
        revision, start = 0, max(0, reply.index - records.PAGE_SIZE_MAX)
        async for each in self._pasts.messages(conversation, start, reply.index):
            if each.revision == reply.revision:
                question.append(
                    records.NewMessage(each.role, each.content, (), each.tool_call_id, each.extra)
                )
            else:
                revision = each.revision
        conversation_id, tenant = conversation.conversation_id, conversation.tenant
        await self._daemon.writable_by(tenant).rewind(conversation_id, revision, tenant)
        await self._stored.change_pending(
            conversation_id,
            lambda found: replace(found, messages=(*question, *found.messages)),
            tenant,
        )

    # -- inside --

    def _appended(self, messages: Sequence[Message]) -> Callable[[Pending], Pending]:
        """More of what is pending; all of it has to fit a turn, or no turn could bring it."""
        add, context_max = appended(messages), self._daemon.context_max

        def change(found: Pending) -> Pending:
            after = add(found)
            if len(after.messages) > PENDING_MAX:
                problem = f"a conversation has at most {PENDING_MAX} that no turn has seen"
                raise Refusal("items", problem)
            check_length("items", sum(map(_length, after.messages)), context_max)
            return after

        return change

    async def _conversation(self, exchange: Exchange, by: Caller) -> records.Conversation:
        return await self._pasts.conversation(exchange.values["conversation_id"], by.tenant)

    async def _pending(self, conversation: records.Conversation) -> list[records.Message]:
        found = await self._daemon.reads.pending(conversation.conversation_id, conversation.tenant)
        return as_stored(found.messages, conversation)

    def _of(
        self, message: records.Message, conversation: records.Conversation, first: int
    ) -> list[dict[str, Any]]:
        tag = tag_of(conversation.tenant, conversation.conversation_id)
        place = Place(tag, first + message.index)
        return items_of(message, place, self._bodies.pieces_of(conversation.tools))

    async def _items(
        self,
        conversation: records.Conversation,
        first_number: int,
        after: tuple[int, int] | None,
        descending: bool,
        messages_max: int = records.PAGE_SIZE_MAX,
    ) -> AsyncIterator[dict[str, Any]]:
        """Behind this one (a message's index, and a part of it), in either order."""
        walk = self._backward if descending else self._forward
        first = None if after is None else after[0]
        num_messages = 0
        async for message in walk(conversation, first):
            items = list(enumerate(self._of(message, conversation, first_number)))
            for part, item in reversed(items) if descending else items:
                at = (message.index, part)
                if after is None or (at < after if descending else at > after):
                    yield item
            num_messages += 1
            if num_messages == messages_max:
                return

    async def _forward(
        self, conversation: records.Conversation, first: int | None
    ) -> AsyncIterator[records.Message]:
        async for each in self._pasts.messages(conversation, first or 0):
            yield each
        for each in await self._pending(conversation):
            if first is None or each.index >= first:
                yield each

    async def _backward(
        self, conversation: records.Conversation, first: int | None
    ) -> AsyncIterator[records.Message]:
        for each in reversed(await self._pending(conversation)):
            if first is None or each.index <= first:
                yield each
        stop = conversation.num_messages if first is None else first + 1
        stop = min(stop, conversation.num_messages)
        while stop > 0:
            start = max(0, stop - WINDOW)
            window = [each async for each in self._pasts.messages(conversation, start, stop)]
            for each in reversed(window):
                yield each
            stop = start

    async def _item(
        self, item_id: str, conversation: records.Conversation, first: int
    ) -> tuple[records.Message, dict[str, Any]]:
        index, _ = _parsed(item_id, conversation, first)
        if index < conversation.num_messages:
            found = [each async for each in self._pasts.messages(conversation, index, index + 1)]
        else:
            found = [each for each in await self._pending(conversation) if each.index == index]
        for message in found:
            for item in self._of(message, conversation, first):
                if item["id"] == item_id:
                    return message, item
        raise NotFound("there is no such item in this conversation")


def _parsed(item_id: str, conversation: records.Conversation, first: int) -> tuple[int, int]:
    """The index of the item's message, and which part of it the item is."""
    found = place_of(item_id)
    tag = tag_of(conversation.tenant, conversation.conversation_id)
    if found is None or found[0].tag != tag or found[0].number < first:
        raise NotFound("there is no such item in this conversation")
    return found[0].number - first, found[1]


def _length(message: records.NewMessage) -> int:
    """In characters, with its thoughts and its calls."""
    return len(message.content) + (len(str(message.extra)) if message.extra else 0)


def _described(conversation: records.Conversation) -> dict[str, Any]:
    return {
        "id": conversation.conversation_id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": conversation.metadata,
    }


def _listed(items: Sequence[Mapping[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else "",
        "last_id": items[-1]["id"] if items else "",
        "has_more": has_more,
    }


def _metadata(fields: Fields) -> Mapping[str, Any] | None:
    where, found = fields.where("metadata"), fields.object("metadata")
    if found is not None:
        check_json(found, where)
        if not all(isinstance(each, str) for each in found.values()):
            raise Refusal(where, "must hold strings", "invalid_type")
    return found


def _items(fields: Fields) -> list[Message]:
    where, given = fields.where("items"), fields.items("items")
    messages: list[Message] = []
    if given:
        check_json(given, where)
        if len(given) > ITEMS_MAX:
            raise Refusal(where, f"a request has at most {ITEMS_MAX} items")
        add_items(messages, given, where)
    return messages
