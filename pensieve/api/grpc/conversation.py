"""The methods of ConversationService: translate the request, call the daemon, translate the result."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pensieve.api.grpc import json_values, translate
from pensieve.api.grpc.server_info import server_info
from pensieve.conversations.binding.chain import pieces_of
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.heads import ConversationSettings, GivenHistory, PrefixSettings
from pensieve.conversations.live_turn import ReplyTokens
from pensieve.errors import InvalidArgument, NotFound
from pensieve.guard.callers import caller
from pensieve.store import records
from pensieve.store.bodies import canonical_json
from pensieve.text.reply_pieces import ReplyPieces, Text, Thinking
from pensieve.text.tool_calls import style_of
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc

T = TypeVar("T")


class ConversationService(conversation_pb2_grpc.ConversationServiceServicer):
    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon

    # -- conversations --

    async def CreateConversation(
        self, request: pb.CreateConversationRequest, context: Any
    ) -> pb.CreateConversationResponse:
        settings = _settings(request)
        created = await self.daemon.charged_to(settings.tenant).create(settings)
        return pb.CreateConversationResponse(conversation=self._conversation(created))

    async def ImportConversation(
        self, requests: AsyncIterator[pb.ImportConversationRequest], context: Any
    ) -> pb.ImportConversationResponse:
        conversations = self.daemon.charged_to(caller().tenant)
        first = await anext(requests, None)
        if first is None or not first.HasField("conversation"):
            raise InvalidArgument("conversation", "is missing: the first piece must have it")
        settings = _settings(first.conversation)
        history = GivenHistory(self.daemon.context_max)
        history.extend(settings.messages)
        piece: pb.ImportConversationRequest | None = first
        while piece is not None:
            if piece.messages:
                history.extend(translate.messages_of(piece.messages, len(history.messages)))
            if piece.complete:
                break
            piece = await anext(requests, None)
        else:
            raise InvalidArgument("complete", "is missing: the last piece must have it")
        created = await conversations.create(replace(settings, messages=history.messages))
        return pb.ImportConversationResponse(conversation=self._conversation(created))

    async def GetConversation(
        self, request: pb.GetConversationRequest, context: Any
    ) -> pb.GetConversationResponse:
        conversation_id = _id(request.conversation_id)
        found = await self._read(self.daemon.reader.conversation_with_title, conversation_id)
        return pb.GetConversationResponse(conversation=self._conversation(found))

    async def ListConversations(
        self, request: pb.ListConversationsRequest, context: Any
    ) -> pb.ListConversationsResponse:
        size, token = request.page_size or translate.PAGE_SIZE, request.page_token
        found = await self._read(self.daemon.reader.list_conversations, size, token)
        page = pb.ListConversationsResponse(next_page_token=found.next_page_token)
        count = await _fill(page.conversations, map(self._conversation, found.conversations))
        if count < len(found.conversations):
            page.next_page_token = found.tokens[count - 1]
        return page

    async def DeleteConversation(
        self, request: pb.DeleteConversationRequest, context: Any
    ) -> pb.DeleteConversationResponse:
        await self.daemon.writable.delete(_id(request.conversation_id), caller().tenant)
        return pb.DeleteConversationResponse()

    async def ForkConversation(
        self, request: pb.ForkConversationRequest, context: Any
    ) -> pb.ForkConversationResponse:
        tenant = caller().tenant
        fork = await self.daemon.charged_to(tenant).fork(
            _id(request.conversation_id),
            request.new_conversation_id or _random_id(),
            request.at_revision if request.HasField("at_revision") else None,
            metadata=json_values.one_object("metadata", request.metadata),
            tenant=tenant,
        )
        return pb.ForkConversationResponse(conversation=self._conversation(fork))

    async def RewindConversation(
        self, request: pb.RewindConversationRequest, context: Any
    ) -> pb.RewindConversationResponse:
        tenant = caller().tenant
        rewound = await self.daemon.charged_to(tenant).rewind(
            _id(request.conversation_id),
            request.to_revision,
            request.expected_revision if request.HasField("expected_revision") else None,
            tenant=tenant,
        )
        return pb.RewindConversationResponse(conversation=self._conversation(rewound))

    async def WarmConversation(
        self, request: pb.WarmConversationRequest, context: Any
    ) -> pb.WarmConversationResponse:
        await self.daemon.warm(_id(request.conversation_id), caller().tenant, request.cache_salt)
        return pb.WarmConversationResponse()

    async def ListMessages(
        self, request: pb.ListMessagesRequest, context: Any
    ) -> pb.ListMessagesResponse:
        size, start = translate.page_of(request)
        found = await self._read(
            self.daemon.reader.message_page,
            *(_id(request.conversation_id), start, size),
            include_token_ids=request.include_token_ids,
        )
        messages: Sequence[records.StoredMessage] = found.messages
        if request.cut_replies:
            messages = await self._split_replies(request.conversation_id, messages)
        page = pb.ListMessagesResponse()
        count = await _fill(page.messages, map(translate.message, messages))
        if found.has_more or count < len(found.messages):
            page.next_page_token = str(start + count)
        return page

    async def _split_replies(
        self, conversation_id: str, messages: Sequence[records.StoredMessage]
    ) -> Sequence[records.StoredMessage]:
        tenant, template = caller().tenant, self.daemon.texts.template
        tools = (await self._read(self.daemon.reader.get_conversation, conversation_id)).tools

        def split() -> list[records.StoredMessage]:
            style = style_of(template)
            return [split_reply(each, ReplyPieces(style, tools)) for each in messages]

        return await self.daemon.threads.in_text_pool(tenant, split)

    # -- declared prefixes --

    async def CreatePrefix(
        self, request: pb.CreatePrefixRequest, context: Any
    ) -> pb.CreatePrefixResponse:
        settings = PrefixSettings(
            _prefix_id(request.prefix_id),
            system_prompt=request.system_prompt,
            tools=json_values.objects("tools", request.tools),
            template_options=json_values.one_object("template_options", request.template_options),
            messages=translate.messages_of(request.messages) if request.messages else (),
            keep_warm=request.keep_warm,
            tenant=caller().tenant,
        )
        declared = await self.daemon.charged_to(settings.tenant).prefixes.create(settings)
        return pb.CreatePrefixResponse(prefix=translate.prefix(declared))

    async def GetPrefix(self, request: pb.GetPrefixRequest, context: Any) -> pb.GetPrefixResponse:
        prefix_id = _prefix_id(request.prefix_id)
        found, messages = await self._read(self.daemon.reader.prefix, prefix_id)
        return translate.whole_prefix(found, messages)

    async def ListPrefixes(
        self, request: pb.ListPrefixesRequest, context: Any
    ) -> pb.ListPrefixesResponse:
        size, token = request.page_size or translate.PAGE_SIZE, request.page_token
        found = await self._read(self.daemon.reader.prefixes, size, token)
        prefixes = [translate.prefix(each) for each in found.prefixes]
        return pb.ListPrefixesResponse(prefixes=prefixes, next_page_token=found.next_page_token)

    async def DeletePrefix(
        self, request: pb.DeletePrefixRequest, context: Any
    ) -> pb.DeletePrefixResponse:
        prefix_id = _prefix_id(request.prefix_id)
        await self.daemon.writable.delete_prefix(prefix_id, caller().tenant)
        return pb.DeletePrefixResponse()

    # -- turns --

    async def SendMessage(  # type: ignore[override]  # it writes to the context instead of yielding
        self, request: pb.SendMessageRequest, context: Any
    ) -> None:
        daemon = self.daemon
        _id(request.conversation_id)
        by, trace = caller(), _traceparent(context)
        turn = translate.turn_request(request, by.tenant, daemon.defaults, by.priority_max, trace)
        live = await daemon.begin(turn, context.time_remaining())
        sequence = 1
        await context.write(
            pb.SendMessageResponse(sequence=sequence, started=translate.started(live))
        )

        async def write(tokens: ReplyTokens) -> None:
            nonlocal sequence
            for delta in translate.deltas(tokens):
                sequence += 1
                await context.write(pb.SendMessageResponse(sequence=sequence, delta=delta))

        # If the client disconnects, gRPC cancels this task, and `follow` starts the turn's grace period.
        await daemon.conversations.followers.follow(live, write)
        await write(live.withheld)
        await context.write(
            pb.SendMessageResponse(sequence=sequence + 1, completed=translate.completed(live))
        )

    async def CancelTurn(
        self, request: pb.CancelTurnRequest, context: Any
    ) -> pb.CancelTurnResponse:
        _id(request.conversation_id)
        cancelled = await self.daemon.cancel_turn(translate.cancel(request, caller().tenant))
        return translate.cancelled(cancelled)

    # -- the daemon --

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(server=server_info(self.daemon))

    # -- inside --

    async def _read(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        tenant = caller().tenant
        return await self.daemon.threads.in_read_thread(
            tenant, function, *arguments, **named, tenant=tenant
        )

    def _conversation(self, found: records.StoredConversation) -> pb.Conversation:
        return translate.conversation(found, self.daemon.context_max)


async def _fill(page: Any, messages: Iterable[Any]) -> int:
    """Fill a page up to its maximum size, and return the number of messages."""
    num_bytes = 0
    for each in messages:
        num_bytes += each.ByteSize()
        if page and num_bytes > records.PAGE_BYTES_MAX:
            break
        page.append(each)
        await asyncio.sleep(0)  # let other streams continue
    return len(page)


def split_reply(stored: records.StoredMessage, cutter: ReplyPieces) -> records.StoredMessage:
    """Split a stored reply into text, thinking and tool calls, in the form in which clients send them.

    A reply with an incomplete call is returned unchanged, because an incomplete call has no such form.
    """
    if stored.finish_reason is None:
        return stored
    pieces = cutter.whole(pieces_of(stored.content, stored.extra))
    if cutter.num_calls != len(cutter.calls):
        return stored
    extra = {name: each for name, each in stored.extra.items() if name != "parts"}
    if thinking := "".join(each.text for each in pieces if isinstance(each, Thinking)):
        extra["thinking"] = thinking
    if cutter.calls:
        extra["tool_calls"] = [
            {
                "id": None,
                "name": each.name,
                "arguments": json.loads(canonical_json(dict(each.arguments))),
            }
            for each in cutter.calls
        ]
    text = "".join(each.text for each in pieces if isinstance(each, Text))
    return replace(stored, content=text, extra=extra)


def _settings(request: pb.CreateConversationRequest) -> ConversationSettings:
    return ConversationSettings(
        request.conversation_id or _random_id(),
        system_prompt=request.system_prompt,
        tools=json_values.objects("tools", request.tools),
        template_options=json_values.one_object("template_options", request.template_options),
        metadata=json_values.one_object("metadata", request.metadata),
        prefix_id=request.prefix_id,
        tenant=caller().tenant,
        messages=translate.messages_of(request.messages) if request.messages else (),
    )


def _id(conversation_id: str) -> str:
    """Return the id. Raises NotFound if the id is malformed, because no conversation can have such an id."""
    if not conversation_id:
        raise InvalidArgument("conversation_id", "is missing")
    if not records.ID_PATTERN.fullmatch(conversation_id):
        raise NotFound("no such conversation")
    return conversation_id


def _prefix_id(prefix_id: str) -> str:
    records.check_id("prefix_id", prefix_id)
    return prefix_id


def _traceparent(context: Any) -> str:
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == "traceparent"), "")


def _random_id() -> str:
    return secrets.token_urlsafe(12).replace("-", "~")
