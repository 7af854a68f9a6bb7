"""`/v1/conversations`: the same conversations as over gRPC, with their messages as items.

POST                    create a conversation without messages; items in the request become pending items
GET, POST …/{id}        describe the conversation; replace its metadata
DELETE …/{id}           delete the conversation

GET …/{id}/items        list the messages, then pending items; a reply has several items
                        (openai/conversation_items)
GET …/items/{item}      return an item
POST …/{id}/items       add pending items, which the next turn includes (store/conversation_changes)
DELETE …/items/{item}   delete the last item. A pending item is erased. For a reply, the conversation is
                        rewound, and the messages that the reply answers become pending items again
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pensieve.api.http.exchange import Exchange, is_descending, limit_of, query_of
from pensieve.api.http.requests import ApiRequests
from pensieve.api.http.response_history import ResponseHistory, as_stored, change_appending
from pensieve.api.http.response_places import new_conversation_id
from pensieve.api.json_fields import Fields, Refusal, check_json
from pensieve.api.openai.conversation_items import Place, items_of, place_of, tag_of
from pensieve.api.openai.messages import add_items
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.heads import ConversationSettings, check_length
from pensieve.errors import NotFound, StaleRevision
from pensieve.guard.callers import Caller
from pensieve.store import records
from pensieve.store.conversation_changes import Pending
from pensieve.store.conversation_rows import refuse_running
from pensieve.text import Message

ITEMS_MAX = 20  # per request
ITEMS_LISTED, ITEMS_LISTED_MAX = 20, 100  # default and maximum of `limit`
ATTEMPTS_MAX = 3  # attempts to delete an item, if the conversation changes meanwhile
PENDING_MAX = 100  # per conversation, because the number of messages of a turn is limited
WINDOW = 16  # number of messages that are read at once in descending order
ONLY_LAST = (
    "only the last item of a conversation can be deleted, and only if it is pending or a reply, "
    "and is the only item of its message"
)


class ConversationItems(NamedTuple):
    conversation: records.StoredConversation
    pending: tuple[records.NewMessage, ...]
    first_number: int  # the first message's number in item ids (`Place`)

    @property
    def pending_messages(self) -> list[records.StoredMessage]:
        """Return the pending messages as the next messages of the conversation."""
        return as_stored(self.pending, self.conversation)

    @property
    def tag(self) -> str:
        return tag_of(self.conversation.tenant, self.conversation.conversation_id)


class ConversationEndpoints:
    def __init__(self, daemon: Daemon, requests: ApiRequests, history: ResponseHistory) -> None:
        self._daemon, self._requests = daemon, requests
        self._history = history

    async def create(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        given = await self._requests.json(exchange, by)
        fields = Fields({} if given is None else given)
        metadata, messages = _metadata(fields) or {}, _items(fields)
        fields.end()
        pending = self._change_appending(messages)(Pending()).messages
        settings = ConversationSettings(
            new_conversation_id(), metadata=metadata, tenant=by.tenant, pending=pending
        )
        return _conversation_body(await self._daemon.charged_to(by.tenant).create(settings))

    async def get(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return _conversation_body(await self._conversation(exchange, by))

    async def update(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        conversation = await self._conversation(exchange, by)
        fields = Fields(await self._requests.json(exchange, by))
        metadata = _metadata(fields)
        fields.end()
        if metadata is None:
            raise Refusal("metadata", "is required", "missing_required_parameter")
        changed = await self._history.set_metadata(
            conversation.conversation_id, metadata, by.tenant
        )
        return _conversation_body(changed)

    async def delete(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        conversation_id = exchange.values["conversation_id"]
        if not records.ID_PATTERN.fullmatch(conversation_id):
            raise NotFound("no such conversation")
        await self._daemon.writable.delete(conversation_id, by.tenant)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    # -- items --

    async def list_items(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        state = await self._read_state(exchange, by)
        query = query_of(exchange)
        limit = limit_of(query.get("limit"), ITEMS_LISTED, ITEMS_LISTED_MAX)
        descending = is_descending(query.get("order"))
        after = _parse_item_id(query["after"], state) if query.get("after") else None
        found: list[Mapping[str, Any]] = []
        async for item in self._items(state, after, descending):
            found.append(item)
            if len(found) > limit:
                break
        return _list_body(found[:limit], has_more=len(found) > limit)

    async def add_items(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        state = await self._read_state(exchange, by)
        fields = Fields(await self._requests.json(exchange, by))
        if "items" not in fields:
            raise Refusal("items", "is required", "missing_required_parameter")
        messages = _items(fields)
        fields.end()
        after = await self._history.change_pending(
            state.conversation.conversation_id, self._change_appending(messages), by.tenant
        )
        pending_messages = as_stored(after.messages, state.conversation)
        added = pending_messages[len(pending_messages) - len(messages) :]
        return _list_body([item for each in added for item in self._items_of_message(each, state)])

    async def get_item(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        state = await self._read_state(exchange, by)
        return (await self._item(exchange.values["item_id"], state))[1]

    async def delete_item(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        """Delete the item with this id, if it is the last item.

        Retries if the conversation changes between the reading and the deletion. If another item gets the
        same id in between, that item is not deleted.
        """
        conversations = self._daemon.writable
        requested: records.StoredMessage | None = None
        for attempt in range(ATTEMPTS_MAX):
            state = await self._read_state(exchange, by)
            if state.conversation.running_turn_id is not None:
                await self._history.claim(state.conversation)
                state = await self._read_state(exchange, by)
            refuse_running(state.conversation)
            message, item = await self._item(exchange.values["item_id"], state)
            if requested is not None and not _is_same(message, requested):
                raise no_item()
            requested = message
            is_last = message.index == state.conversation.num_messages + len(state.pending) - 1
            is_beginning = not (state.pending or message.finish_reason)
            if not is_last or is_beginning or self._items_of_message(message, state) != [item]:
                raise Refusal("item_id", ONLY_LAST)
            try:
                return _conversation_body(
                    await conversations.delete_last(state.conversation, state.pending)
                )
            except StaleRevision:
                if attempt + 1 == ATTEMPTS_MAX:
                    raise
        raise AssertionError("unreachable")

    # -- inside --

    def _change_appending(self, messages: Sequence[Message]) -> Callable[[Pending], Pending]:
        """Return a change that adds pending messages. All pending messages must fit into one turn."""
        add, context_max = change_appending(messages), self._daemon.context_max

        def change(found: Pending) -> Pending:
            after = add(found)
            if len(after.messages) > PENDING_MAX:
                problem = f"a conversation has at most {PENDING_MAX} pending items"
                raise Refusal("items", problem)
            check_length("items", sum(map(_length, after.messages)), context_max)
            return after

        return change

    async def _conversation(self, exchange: Exchange, by: Caller) -> records.StoredConversation:
        return await self._history.conversation(exchange.values["conversation_id"], by.tenant)

    async def _read_state(self, exchange: Exchange, by: Caller) -> ConversationItems:
        conversation, pending = await self._history.with_pending(
            exchange.values["conversation_id"], by.tenant
        )
        return ConversationItems(
            conversation, pending, await self._history.first_number(conversation)
        )

    def _items_of_message(
        self, message: records.StoredMessage, state: ConversationItems
    ) -> list[dict[str, Any]]:
        place = Place(state.tag, state.first_number + message.index)
        return items_of(message, place, self._requests.cutter(state.conversation.tools))

    async def _items(
        self,
        state: ConversationItems,
        after: tuple[int, int] | None,
        descending: bool,
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the items after the item `after`, in either order.

        `after`: index of a message, and number of the item within the message.
        """
        walk = self._backward if descending else self._forward
        first = None if after is None else after[0]
        num_messages = 0
        async for message in walk(state, first):
            items = list(enumerate(self._items_of_message(message, state)))
            for part, item in reversed(items) if descending else items:
                position = (message.index, part)
                if after is None or (position < after if descending else position > after):
                    yield item
            num_messages += 1
            if num_messages == records.PAGE_SIZE_MAX:
                return

    async def _forward(
        self, state: ConversationItems, first: int | None
    ) -> AsyncIterator[records.StoredMessage]:
        async for each in self._history.messages(state.conversation, first or 0):
            yield each
        for each in state.pending_messages:
            if first is None or each.index >= first:
                yield each

    async def _backward(
        self, state: ConversationItems, first: int | None
    ) -> AsyncIterator[records.StoredMessage]:
        for each in reversed(state.pending_messages):
            if first is None or each.index <= first:
                yield each
        conversation = state.conversation
        stop = conversation.num_messages if first is None else first + 1
        stop = min(stop, conversation.num_messages)
        while stop > 0:
            start = max(0, stop - WINDOW)
            window = [each async for each in self._history.messages(conversation, start, stop)]
            for each in reversed(window):
                yield each
            stop = start

    async def _item(
        self, item_id: str, state: ConversationItems
    ) -> tuple[records.StoredMessage, dict[str, Any]]:
        index, _ = _parse_item_id(item_id, state)
        conversation = state.conversation
        if index < conversation.num_messages:
            found = [
                each
                async for each in self._history.messages(conversation, index, index + 1)
                if each.revision <= conversation.revision  # not newer than the state that was read
            ]
        else:
            found = [each for each in state.pending_messages if each.index == index]
        for message in found:
            for item in self._items_of_message(message, state):
                if item["id"] == item_id:
                    return message, item
        raise no_item()


def no_item() -> NotFound:
    return NotFound("there is no such item in this conversation")


def _parse_item_id(item_id: str, state: ConversationItems) -> tuple[int, int]:
    """Return the index of the item's message, and the number of the item within the message."""
    found = place_of(item_id)
    if found is None or found[0].tag != state.tag or found[0].number < state.first_number:
        raise no_item()
    return found[0].number - state.first_number, found[1]


def _is_same(message: records.StoredMessage, other: records.StoredMessage) -> bool:
    """Return whether both are the same message. Revisions are compared only for replies."""
    is_reply = message.finish_reason is not None
    return (
        message.role,
        message.content,
        message.tool_call_id,
        message.extra,
        is_reply and message.revision,
    ) == (
        *(other.role, other.content, other.tool_call_id, other.extra),
        other.finish_reason is not None and other.revision,
    )


def _length(message: records.NewMessage) -> int:
    """Return the number of characters of a message, including thinking and tool calls."""
    return len(message.content) + (len(str(message.extra)) if message.extra else 0)


def _conversation_body(conversation: records.StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation.conversation_id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": conversation.metadata,
    }


def _list_body(items: Sequence[Mapping[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
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
