"""Choose the conversation for a response, and begin its turn there.

    previous_response_id    the conversation as it was after that response: append to it if that is its end
                            and no turn runs, else fork it
    conversation            append to its end; it is an error if another turn runs there
    neither                 as for a chat completion: a conversation with these messages (binding/), or a new
                            one

Every request of this API has a system prompt, tools and template options; a conversation here keeps those it
began with. If a request follows a response and brings others, it gets a new conversation, and the messages
before it are computed again. In a conversation that the client names, the request may leave them out. If it
gives them, they must be the same, unless the conversation is empty. Pending messages of such a conversation
come before those of the request (store/conversation_changes).

If a conversation was made for a turn that does not begin or end, it is deleted.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pensieve.api.http.requests import ApiRequests
from pensieve.api.http.stored import (
    TAKEN_BACK,
    StartingPoint,
    StoredConversations,
    as_stored,
    first_number,
    no_previous,
)
from pensieve.api.json_fields import Refusal
from pensieve.api.openai.conversation_items import Place, tag_of
from pensieve.api.openai.request import Request
from pensieve.conversations.binding.binder import StatelessRequest
from pensieve.conversations.binding.chain import ChainEnd
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.draft import TurnRequest, check_settings
from pensieve.conversations.heads import ConversationSettings, message_of
from pensieve.conversations.live_turn import LiveTurn
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.errors import NotFound, PensieveError, StaleRevision, TurnRunning
from pensieve.store import records
from pensieve.store.records import ChainMatch
from pensieve.store.responses import StoredResponse
from pensieve.text import Message

ATTEMPTS_MAX = 3  # to append to a conversation that other requests change
PAGE_SIZE = 100


@dataclass(frozen=True, slots=True)
class TurnPlace:
    conversation_id: str
    began_at_revision: int
    place: Place  # of its reply
    tools: Sequence[Mapping[str, Any]]  # the conversation's; its reply may call them
    is_ours: bool  # the conversation was made for responses


Ended = Callable[[TurnPlace, LiveTurn, FinishReason, str], StoredResponse]  # of a turn


@dataclass(frozen=True, slots=True)
class ResponseTurn:
    """A request as a turn: its instructions apart from its messages."""

    request: Request
    instructions: str
    messages: tuple[Message, ...]  # without the instructions
    options: TurnOptions
    tenant: str
    given_sampling: Mapping[str, Any]
    session_key: str = ""  # the client's own name for the conversation
    chain: ChainEnd | None = None  # by which the binder finds its history again
    ended: Ended | None = None  # makes what is stored with its reply


@dataclass(frozen=True, slots=True)
class PlacedTurn:
    live: LiveTurn
    where: TurnPlace
    how: str = "appended"  # or "forked", or "new"
    is_made: bool = False  # the conversation, for this turn
    recompute_reason: str = ""


def new_conversation_id() -> str:
    return f"conv_{secrets.token_hex(16)}"


class ResponsePlaces:
    """Runs on the event loop."""

    def __init__(
        self,
        daemon: Daemon,
        requests: ApiRequests,
        stored: StoredConversations,
    ) -> None:
        self._daemon, self._requests = daemon, requests
        self._stored = stored

    async def begin(self, turn: ResponseTurn) -> PlacedTurn:
        if turn.request.previous_response_id:
            return await self._follow(turn)
        if turn.request.conversation:
            return await self._append(turn)
        _check_outputs(turn, frozenset())
        return await self._find(turn)

    async def whole(self, turn: ResponseTurn) -> Request:
        """Return the request with its whole prompt, for a turn that is in no conversation."""
        request, instructions = turn.request, turn.instructions
        if request.previous_response_id:
            start = await self._stored.after_response(request.previous_response_id, turn.tenant)
        elif request.conversation:
            start, turn, _ = await self._end_of_conversation(turn)
        else:
            _check_outputs(turn, frozenset())
            return request
        _check_outputs(turn, start.calls)
        conversation = start.conversation
        if request.conversation and not is_empty(conversation):
            _check_same(turn, start)
            instructions = start.system_prompt
            options = conversation.template_options
            request = replace(request, tools=conversation.tools, template_options=options)
        system = (Message("system", instructions),) if instructions else ()
        before = await self._stored.as_sent_back(start)
        return replace(request, messages=(*system, *before, *turn.messages))

    # -- after a history --

    async def _find(self, turn: ResponseTurn) -> PlacedTurn:
        request = turn.request
        chat = StatelessRequest(
            request.messages,
            turn.options,
            request.tools,
            request.template_options,
            turn.tenant,
            turn.session_key,
            reply_reader=self._requests.reply_reader(request),
        )
        for _ in range(ATTEMPTS_MAX):
            history, match = await self._requests.binder.look(chat)
            turn = replace(turn, chain=history.end)
            if match is None:
                break
            rest = replace(turn, messages=request.messages[history.lengths[match.digest] :])
            with contextlib.suppress(StaleRevision, TurnRunning, NotFound):  # it changed meanwhile
                return await self._after_match(rest, match)
        return await self._new(turn, ())

    async def _after_match(self, turn: ResponseTurn, match: ChainMatch) -> PlacedTurn:
        conversation_id, tenant = match.conversation_id, turn.tenant
        if not match.may_append:
            new_id = new_conversation_id()
            with self._requests.binder.reserved(tenant, new_id):
                fork = await self._daemon.writable_by(tenant).fork(
                    conversation_id, new_id, match.revision, tenant=tenant
                )
                first = await self._stored.first_number(fork)
                where = _where(turn, fork, first, is_ours=True)
                return PlacedTurn(
                    await self._begin_first(turn, where), where, "forked", is_made=True
                )
        conversation = await self._stored.conversation(conversation_id, tenant)
        if conversation.revision != match.present_revision:
            raise StaleRevision(match.present_revision, conversation.revision)
        is_ours = await self._stored.is_made_for(conversation_id, tenant)
        first = await self._stored.first_number(conversation)
        where = _where(turn, conversation, first, is_ours=is_ours)
        return PlacedTurn(await self._begin(turn, where), where)

    # -- after a response --

    async def _follow(self, turn: ResponseTurn) -> PlacedTurn:
        start = await self._stored.after_response(turn.request.previous_response_id, turn.tenant)
        _check_outputs(turn, start.calls)
        conversation, tenant = start.conversation, turn.tenant
        reason = _difference(turn, start)
        if reason:
            return await self._new(turn, await self._stored.as_sent_back(start), reason)
        if conversation.revision == start.revision and conversation.running_turn_id is None:
            with contextlib.suppress(StaleRevision, TurnRunning):
                where = _where(turn, conversation, start.first_number, is_ours=start.is_ours)
                return PlacedTurn(await self._begin(turn, where), where)
        new_id = new_conversation_id()
        with self._requests.binder.reserved(tenant, new_id):
            try:
                fork = await self._daemon.writable_by(tenant).fork(
                    conversation.conversation_id, new_id, start.revision, tenant=tenant
                )
            except NotFound:  # of its revision
                raise no_previous(TAKEN_BACK) from None
            where = _where(turn, fork, start.first_number, is_ours=True)
            return PlacedTurn(await self._begin_first(turn, where), where, "forked", is_made=True)

    # -- in a conversation that the client names --

    async def _append(self, turn: ResponseTurn) -> PlacedTurn:
        for attempt in range(ATTEMPTS_MAX):
            try:
                return await self._append_once(turn)
            except StaleRevision:
                if attempt + 1 == ATTEMPTS_MAX:
                    raise
        raise AssertionError("unreachable")

    async def _append_once(self, turn: ResponseTurn) -> PlacedTurn:
        start, turn, pending = await self._end_of_conversation(turn)
        conversation = start.conversation
        if conversation.running_turn_id is not None:
            conversation = await self._stored.claim(conversation)
            if conversation.running_turn_id is None:  # it was another daemon's, which is gone
                raise StaleRevision(start.revision, conversation.revision)
            turn_id = str(conversation.running_turn_id)
            raise TurnRunning(conversation.conversation_id, turn_id)
        _check_outputs(turn, start.calls)
        first = start.first_number
        if is_empty(conversation):
            conversation = await self._begun_with(turn, conversation)
            first = first_number(bool(turn.instructions))
        else:
            _check_same(turn, start)
        where = _where(turn, conversation, first, is_ours=False)
        return PlacedTurn(await self._begin(turn, where, pending), where)

    async def _end_of_conversation(
        self, turn: ResponseTurn
    ) -> tuple[StartingPoint, ResponseTurn, tuple[records.NewMessage, ...]]:
        """Return the conversation's end, the turn with the pending messages before its own, and those."""
        conversation, pending = await self._stored.with_pending(
            turn.request.conversation, turn.tenant
        )
        before = tuple(message_of(each) for each in as_stored(pending, conversation))
        turn = replace(turn, messages=before + turn.messages)
        start = await self._stored.of_conversation(conversation, turn.messages)
        return start, turn, pending

    async def _begun_with(
        self, turn: ResponseTurn, conversation: records.Conversation
    ) -> records.Conversation:
        """Give an empty conversation the system prompt, tools and options of the request."""
        request = turn.request
        if not (turn.instructions or request.tools or request.template_options):
            return conversation
        await self._check_settings(turn)
        return await self._stored.begin_with(
            conversation.conversation_id,
            turn.instructions,
            request.tools,
            request.template_options,
            turn.tenant,
        )

    # -- a conversation of its own --

    async def _new(
        self, turn: ResponseTurn, before: Sequence[Message], reason: str = ""
    ) -> PlacedTurn:
        created = await self._daemon.writable_by(turn.tenant).create(
            ConversationSettings(
                new_conversation_id(),
                system_prompt=turn.instructions,
                tools=turn.request.tools,
                template_options=turn.request.template_options,
                tenant=turn.tenant,
            )
        )
        turn = replace(turn, messages=(*before, *turn.messages))
        where = _where(turn, created, first_number(bool(turn.instructions)), is_ours=True)
        live = await self._begin_first(turn, where)
        return PlacedTurn(live, where, "new", is_made=True, recompute_reason=reason)

    async def _begin_first(self, turn: ResponseTurn, made: TurnPlace) -> LiveTurn:
        try:
            return await self._begin(turn, made)
        except BaseException:
            await self.discard(made.conversation_id, made.began_at_revision, turn.tenant)
            raise

    async def discard(self, conversation_id: str, revision: int, tenant: str) -> None:
        """Delete a conversation that was made for a turn that came to nothing, unless somebody uses it."""
        with contextlib.suppress(PensieveError):  # then it stays
            await self._daemon.writable.delete(conversation_id, tenant, revision)

    async def _begin(
        self,
        turn: ResponseTurn,
        where: TurnPlace,
        pending: tuple[records.NewMessage, ...] | None = None,
    ) -> LiveTurn:
        return await self._daemon.begin(
            TurnRequest(
                where.conversation_id,
                turn.messages,
                turn.options,
                turn.tenant,
                expected_revision=where.began_at_revision,
                given_sampling=turn.given_sampling,
                chain=turn.chain,
                pending=pending,
                response=None if turn.ended is None else partial(turn.ended, where),
            )
        )

    async def _check_settings(self, turn: ResponseTurn) -> None:
        settings = ConversationSettings(
            "",
            system_prompt=turn.instructions,
            tools=turn.request.tools,
            template_options=turn.request.template_options,
        )
        model = self._requests.template, self._daemon.context_max
        await self._daemon.conversations.tokenizing.run(
            turn.tenant, partial(check_settings, *model, settings)
        )


def is_empty(conversation: records.Conversation) -> bool:
    """Whether it has neither messages nor a system prompt, tools or options."""
    return not (
        conversation.num_messages
        or conversation.revision
        or conversation.prefix_id
        or conversation.tools
        or conversation.template_options
    )


def _where(
    turn: ResponseTurn, conversation: records.Conversation, first: int, *, is_ours: bool
) -> TurnPlace:
    """Return the place at the end of a conversation whose messages, as items, are numbered from `first`."""
    number = first + conversation.num_messages + len(turn.messages)
    place = Place(tag_of(turn.tenant, conversation.conversation_id), number)
    conversation_id, revision = conversation.conversation_id, conversation.revision
    return TurnPlace(conversation_id, revision, place, conversation.tools, is_ours)


def _difference(turn: ResponseTurn, start: StartingPoint) -> str:
    """Return what the conversation began with that the request wants differently; empty if nothing."""
    request, conversation = turn.request, start.conversation
    if turn.instructions != start.system_prompt:
        return "instructions"
    if list(request.tools) != list(conversation.tools):
        return "tools"
    if dict(request.template_options) != dict(conversation.template_options):
        return "template_options"
    return ""


def _check_same(turn: ResponseTurn, start: StartingPoint) -> None:
    """Refuse a request that differs from what the conversation it names began with."""
    request, conversation = turn.request, start.conversation
    for param, given, kept in (
        ("instructions", turn.instructions, start.system_prompt),
        ("tools", list(request.tools), list(conversation.tools)),
        (
            request.param("template_options"),
            dict(request.template_options),
            dict(conversation.template_options),
        ),
    ):
        if given and given != kept:
            problem = (
                "differs from what this conversation began with, which it keeps;"
                " leave it out, or go on from a previous_response_id instead"
            )
            raise Refusal(param, problem)


def _check_outputs(turn: ResponseTurn, calls: frozenset[str]) -> None:
    """Refuse the output of a function that was not called before it."""
    known = set(calls)
    for message in turn.messages:
        known |= {call.id for call in message.tool_calls if call.id}
        if message.role == "tool" and message.tool_call_id not in known:
            raise Refusal("input", "has the output of a call that was not made before it")


def stored_response(
    where: TurnPlace,
    response_id: str,
    body: Mapping[str, Any],
    request: str,
    tenant: str,
    revision: int | None,
) -> StoredResponse:
    return StoredResponse(
        response_id,
        where.conversation_id,
        body,
        request,
        revision,
        where.is_ours,
        where.began_at_revision,
        tenant,
    )
