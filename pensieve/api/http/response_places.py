"""Choose the conversation for a response, and begin its turn there.

    previous_response_id    append to the conversation of that response if nothing follows the response and
                            no turn runs; otherwise, fork the conversation after the response
    conversation            append to this conversation; an error if another turn runs there
    neither                 as for a chat completion: match the history (binding/), or create a conversation

Each request has settings: system prompt, tools and template options. But the settings of a conversation never
change. If a request with previous_response_id has other settings, a new conversation is created, and the
earlier messages are computed again. A request with `conversation` may omit the settings, but not change them.
Only the first request of an empty conversation sets them. Pending messages of the conversation come before
the messages of the request (store/conversation_changes).

A conversation that was created for a turn is deleted if the turn does not begin, or fails.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pensieve.api.http.requests import ApiRequests
from pensieve.api.http.response_history import (
    REWOUND,
    ResponseHistory,
    StartingPoint,
    as_stored,
    first_number,
    no_previous,
)
from pensieve.api.json_fields import Refusal
from pensieve.api.openai.conversation_items import Place, tag_of
from pensieve.api.openai.request import ParsedRequest
from pensieve.conversations.binding.chain import ChainEnd
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.draft import TurnRequest, check_settings
from pensieve.conversations.heads import ConversationSettings, all_messages, message_of
from pensieve.conversations.live_turn import LiveTurn
from pensieve.core.turn import FinishReason
from pensieve.errors import NotFound, PensieveError, StaleRevision, TurnRunning
from pensieve.store import records
from pensieve.store.records import ChainMatch
from pensieve.store.responses import StoredResponse
from pensieve.text import Message

ATTEMPTS_MAX = 3  # attempts to append, if other requests change the conversation meanwhile
PAGE_SIZE = 100


@dataclass(frozen=True, slots=True)
class TurnPlace:
    conversation_id: str
    began_at_revision: int
    place: Place  # message number and item ids of the reply
    tools: Sequence[Mapping[str, Any]]  # the conversation's tools
    is_ours: bool  # the conversation was created for responses


MakeStored = Callable[[TurnPlace, LiveTurn, FinishReason, str], StoredResponse]


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A request, and the turn to run in its conversation.

    `request.turn` has all messages of the request, with the instructions as the first message. `turn` has the
    instructions in its settings, and only messages that are new in the conversation. `turn` has no
    request_id: retries are found by the id of the response (idempotency.py).
    """

    request: ParsedRequest
    turn: TurnRequest
    chain: ChainEnd  # used only if the request names no conversation; `_find` adds the history's digest
    make_stored: MakeStored | None = None  # called at the end of the turn

    @classmethod
    def of(cls, request: ParsedRequest, chain: ChainEnd) -> NewResponse:
        instructions, turn = request.echoed.get("instructions"), request.turn
        messages, settings = turn.messages, turn.settings
        if instructions is not None:
            messages, settings = messages[1:], replace(settings, system_prompt=instructions)
        turn = replace(turn, messages=messages, settings=settings, request_id="")
        return cls(request, turn, chain)

    @property
    def settings(self) -> ConversationSettings:
        return self.turn.settings

    def with_messages_before(self, before: Sequence[Message]) -> NewResponse:
        """Return a copy with these messages before the messages of `turn`."""
        return replace(self, turn=replace(self.turn, messages=(*before, *self.turn.messages)))


@dataclass(frozen=True, slots=True)
class PlacedTurn:
    live: LiveTurn
    turn_place: TurnPlace
    binding: str = "appended"  # or "forked", or "new"
    is_new_conversation: bool = False  # the conversation was created for this turn
    recompute_reason: str = ""


def new_conversation_id() -> str:
    return f"conv_{secrets.token_hex(16)}"


class ResponsePlaces:
    """Runs on the event loop."""

    def __init__(
        self,
        daemon: Daemon,
        requests: ApiRequests,
        history: ResponseHistory,
    ) -> None:
        self._daemon, self._requests = daemon, requests
        self._history = history

    async def begin(self, new: NewResponse) -> PlacedTurn:
        if new.request.previous_response_id:
            return await self._follow(new)
        if new.request.conversation:
            return await self._append(new)
        _check_outputs(new, frozenset())
        return await self._find(new)

    async def with_whole_prompt(self, new: NewResponse) -> ParsedRequest:
        """Return the request with its whole prompt, for an unstored turn."""
        request, settings = new.request, new.settings
        if request.previous_response_id:
            start = await self._history.after_response(
                request.previous_response_id, new.turn.tenant
            )
        elif request.conversation:
            start, new, _ = await self._end_of_conversation(new)
        else:
            _check_outputs(new, frozenset())
            return request
        _check_outputs(new, start.calls)
        conversation = start.conversation
        if request.conversation and not is_empty(conversation):
            _check_same(new, start)
            settings = ConversationSettings(
                "", start.system_prompt, conversation.tools, conversation.template_options
            )
        before = await self._history.as_sent_back(start)
        messages = (*all_messages(settings), *before, *new.turn.messages)
        return replace(request, turn=replace(new.turn, messages=messages, settings=settings))

    # -- after a history --

    async def _find(self, new: NewResponse) -> PlacedTurn:
        turn = new.request.turn
        for _ in range(ATTEMPTS_MAX):
            history, match = await self._requests.binder.look_up(turn, new.chain)
            new = replace(new, turn=replace(new.turn, chain=history.end))
            if match is None:
                break
            messages = turn.messages[history.lengths[match.digest] :]
            unmatched = replace(new, turn=replace(new.turn, messages=messages))
            # These errors mean that the conversation has changed meanwhile.
            with contextlib.suppress(StaleRevision, TurnRunning, NotFound):
                return await self._after_match(unmatched, match)
        return await self._new(new, ())

    async def _after_match(self, new: NewResponse, match: ChainMatch) -> PlacedTurn:
        conversation_id, tenant = match.conversation_id, new.turn.tenant
        if not match.may_append:
            new_id = new_conversation_id()
            with self._requests.binder.reserved(tenant, new_id):
                fork = await self._daemon.charged_to(tenant).fork(
                    conversation_id, new_id, match.revision, tenant=tenant
                )
                first = await self._history.first_number(fork)
                turn_place = _turn_place(new, fork, first, is_ours=True)
                return PlacedTurn(
                    await self._begin_first(new, turn_place),
                    turn_place,
                    "forked",
                    is_new_conversation=True,
                )
        conversation = await self._history.conversation(conversation_id, tenant)
        if conversation.revision != match.present_revision:
            raise StaleRevision(match.present_revision, conversation.revision)
        is_ours = await self._history.is_only_for_responses(conversation_id, tenant)
        first = await self._history.first_number(conversation)
        turn_place = _turn_place(new, conversation, first, is_ours=is_ours)
        return PlacedTurn(await self._begin(new, turn_place), turn_place)

    # -- after a response --

    async def _follow(self, new: NewResponse) -> PlacedTurn:
        start = await self._history.after_response(
            new.request.previous_response_id, new.turn.tenant
        )
        _check_outputs(new, start.calls)
        conversation, tenant = start.conversation, new.turn.tenant
        reason = _difference(new, start)
        if reason:
            return await self._new(new, await self._history.as_sent_back(start), reason)
        if conversation.revision == start.revision and conversation.running_turn_id is None:
            with contextlib.suppress(StaleRevision, TurnRunning):
                turn_place = _turn_place(
                    new, conversation, start.first_number, is_ours=start.is_ours
                )
                return PlacedTurn(await self._begin(new, turn_place), turn_place)
        new_id = new_conversation_id()
        with self._requests.binder.reserved(tenant, new_id):
            try:
                fork = await self._daemon.charged_to(tenant).fork(
                    conversation.conversation_id, new_id, start.revision, tenant=tenant
                )
            except NotFound:  # the conversation has no such revision any more
                raise no_previous(REWOUND) from None
            turn_place = _turn_place(new, fork, start.first_number, is_ours=True)
            return PlacedTurn(
                await self._begin_first(new, turn_place),
                turn_place,
                "forked",
                is_new_conversation=True,
            )

    # -- in a conversation that the client names --

    async def _append(self, new: NewResponse) -> PlacedTurn:
        for attempt in range(ATTEMPTS_MAX):
            try:
                return await self._append_once(new)
            except StaleRevision:
                if attempt + 1 == ATTEMPTS_MAX:
                    raise
        raise AssertionError("unreachable")

    async def _append_once(self, new: NewResponse) -> PlacedTurn:
        start, new, pending = await self._end_of_conversation(new)
        conversation = start.conversation
        if conversation.running_turn_id is not None:
            conversation = await self._history.claim(conversation)
            if conversation.running_turn_id is None:  # the turn's daemon no longer runs
                raise StaleRevision(start.revision, conversation.revision)
            turn_id = str(conversation.running_turn_id)
            raise TurnRunning(conversation.conversation_id, turn_id)
        _check_outputs(new, start.calls)
        first = start.first_number
        if is_empty(conversation):
            conversation = await self._give_settings(new, conversation)
            first = first_number(bool(new.settings.system_prompt))
        else:
            _check_same(new, start)
        turn_place = _turn_place(new, conversation, first, is_ours=False)
        return PlacedTurn(await self._begin(new, turn_place, pending), turn_place)

    async def _end_of_conversation(
        self, new: NewResponse
    ) -> tuple[StartingPoint, NewResponse, tuple[records.NewMessage, ...]]:
        """Return the conversation's end, `new` with pending messages in front, and the pending messages."""
        conversation, pending = await self._history.with_pending(
            new.request.conversation, new.turn.tenant
        )
        new = new.with_messages_before(
            [message_of(each) for each in as_stored(pending, conversation)]
        )
        start = await self._history.end_of_conversation(conversation, new.turn.messages)
        return start, new, pending

    async def _give_settings(
        self, new: NewResponse, conversation: records.StoredConversation
    ) -> records.StoredConversation:
        """Give an empty conversation the system prompt, tools and options of the request."""
        settings, tenant = new.settings, new.turn.tenant
        if not (settings.system_prompt or settings.tools or settings.template_options):
            return conversation
        model = self._requests.template, self._daemon.context_max
        await self._daemon.conversations.text_pool.run(
            tenant, partial(check_settings, *model, settings)
        )
        return await self._history.set_beginning(conversation.conversation_id, settings, tenant)

    # -- in a new conversation --

    async def _new(
        self, new: NewResponse, before: Sequence[Message], reason: str = ""
    ) -> PlacedTurn:
        tenant, conversation_id = new.turn.tenant, new_conversation_id()
        created = await self._daemon.charged_to(tenant).create(
            replace(new.settings, conversation_id=conversation_id, tenant=tenant)
        )
        new = new.with_messages_before(before)
        first = first_number(bool(new.settings.system_prompt))
        turn_place = _turn_place(new, created, first, is_ours=True)
        live = await self._begin_first(new, turn_place)
        return PlacedTurn(
            live, turn_place, "new", is_new_conversation=True, recompute_reason=reason
        )

    async def _begin_first(self, new: NewResponse, turn_place: TurnPlace) -> LiveTurn:
        try:
            return await self._begin(new, turn_place)
        except BaseException:
            await self.discard(
                turn_place.conversation_id, turn_place.began_at_revision, new.turn.tenant
            )
            raise

    async def discard(self, conversation_id: str, revision: int, tenant: str) -> None:
        """Delete a conversation that was created for a failed turn, unless it is in use."""
        with contextlib.suppress(PensieveError):  # then the conversation stays
            await self._daemon.writable.delete(conversation_id, tenant, revision)

    async def _begin(
        self,
        new: NewResponse,
        turn_place: TurnPlace,
        pending: tuple[records.NewMessage, ...] | None = None,
    ) -> LiveTurn:
        return await self._daemon.begin(
            replace(
                new.turn,
                conversation_id=turn_place.conversation_id,
                expected_revision=turn_place.began_at_revision,
                pending=pending,
                response=None if new.make_stored is None else partial(new.make_stored, turn_place),
            )
        )


def is_empty(conversation: records.StoredConversation) -> bool:
    """Return whether a conversation has no messages, system prompt, tools or options."""
    return not (
        conversation.num_messages
        or conversation.revision
        or conversation.prefix_id
        or conversation.tools
        or conversation.template_options
    )


def _turn_place(
    new: NewResponse, conversation: records.StoredConversation, first: int, *, is_ours: bool
) -> TurnPlace:
    """Return the place at a conversation's end. `first`: the first message's number in item ids."""
    number = first + conversation.num_messages + len(new.turn.messages)
    place = Place(tag_of(new.turn.tenant, conversation.conversation_id), number)
    conversation_id, revision = conversation.conversation_id, conversation.revision
    return TurnPlace(conversation_id, revision, place, conversation.tools, is_ours)


def _difference(new: NewResponse, start: StartingPoint) -> str:
    """Return the name of a setting that differs between request and conversation; empty if none does."""
    settings, conversation = new.settings, start.conversation
    if settings.system_prompt != start.system_prompt:
        return "instructions"
    if list(settings.tools) != list(conversation.tools):
        return "tools"
    if dict(settings.template_options) != dict(conversation.template_options):
        return "template_options"
    return ""


def _check_same(new: NewResponse, start: StartingPoint) -> None:
    """Refuse settings that differ from the settings of the conversation. Omitted settings are allowed."""
    settings, conversation = new.settings, start.conversation
    for param, given, kept in (
        ("instructions", settings.system_prompt, start.system_prompt),
        ("tools", list(settings.tools), list(conversation.tools)),
        (
            new.request.param("template_options"),
            dict(settings.template_options),
            dict(conversation.template_options),
        ),
    ):
        if given and given != kept:
            problem = (
                "differs from the conversation's value, which cannot change: omit the parameter,"
                " or use previous_response_id instead of conversation"
            )
            raise Refusal(param, problem)


def _check_outputs(new: NewResponse, calls: frozenset[str]) -> None:
    """Refuse the output of a function call if the call does not precede the output."""
    known = set(calls)
    for message in new.turn.messages:
        known |= {call.id for call in message.tool_calls if call.id}
        if message.role == "tool" and message.tool_call_id not in known:
            raise Refusal(
                "input", "has a function_call_output whose function_call does not come before it"
            )


def stored_response(
    turn_place: TurnPlace,
    response_id: str,
    body: Mapping[str, Any],
    request: str,
    tenant: str,
    revision: int | None,
) -> StoredResponse:
    return StoredResponse(
        response_id,
        turn_place.conversation_id,
        body,
        request,
        revision,
        turn_place.is_ours,
        turn_place.began_at_revision,
        tenant,
    )
