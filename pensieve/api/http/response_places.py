"""In which conversation a response is, and the turn that it becomes there.

    previous_response_id    the conversation as it was after that response: appended if that is its end and no
                            turn runs, else a fork
    conversation            appended at its end; another turn that runs there is an error
    neither                 as of a chat completion: found by its messages (binding/), or a new one

Each request of this API says what a conversation begins with (system prompt, tools, template options), and a
conversation keeps that for its life here.  A request that follows another one and differs in it gets a new
conversation, and its past is computed again.  In a conversation that the client names, what the request
leaves out is the conversation's; what it gives has to be the same, or becomes the conversation's own while
that is empty.  Pending messages of such a conversation come before the request's
(store/conversation_changes).

A conversation that was made for a turn which then did not begin or end is deleted.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pensieve.api.http.bodies import Bodies
from pensieve.api.http.stored import (
    TAKEN_BACK,
    Past,
    Stored,
    as_stored,
    first_number,
    no_previous,
)
from pensieve.api.json_fields import Refusal
from pensieve.api.openai.conversation_items import Place, tag_of
from pensieve.api.openai.request import Request
from pensieve.conversations.binding.binder import Binder, StatelessRequest
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

ATTEMPTS_MAX = 3  # at the end of a conversation that others go on with, too
PAGE_SIZE = 100


@dataclass(frozen=True, slots=True)
class Where:
    conversation_id: str
    began_at_revision: int
    place: Place  # of its reply
    tools: Sequence[Mapping[str, Any]]  # the conversation's, by which its reply is cut
    is_ours: bool  # the conversation was made for responses


Ended = Callable[[Where, LiveTurn, FinishReason, str], StoredResponse]  # of a turn


@dataclass(frozen=True, slots=True)
class Wish:
    """A request, with what its conversation begins with apart from its messages."""

    request: Request
    instructions: str
    messages: tuple[Message, ...]  # without the instructions
    options: TurnOptions
    tenant: str
    given_sampling: Mapping[str, Any]
    session_key: str = ""  # the client's own name for the conversation
    chain: ChainEnd | None = None  # by which its history is found again, where all of it is known
    ended: Ended | None = None  # what is stored with its reply


@dataclass(frozen=True, slots=True)
class Placed:
    live: LiveTurn
    where: Where
    how: str = "appended"  # or forked, or new
    is_made: bool = False  # for this one
    recompute_reason: str = ""


def drawn_id() -> str:
    return f"conv_{secrets.token_hex(16)}"


class ResponsePlaces:
    """Belongs to the loop."""

    def __init__(
        self,
        daemon: Daemon,
        bodies: Bodies,
        stored: Stored,
        binder: Binder,
    ) -> None:
        self._daemon, self._bodies, self._binder = daemon, bodies, binder
        self._stored = stored

    async def begin(self, wish: Wish) -> Placed:
        if wish.request.previous_response_id:
            return await self._follow(wish)
        if wish.request.conversation:
            return await self._append(wish)
        _check_outputs(wish, frozenset())
        return await self._find(wish)

    async def whole(self, wish: Wish) -> Request:
        """The same with its whole prompt, for a turn that is in no conversation."""
        request, instructions = wish.request, wish.instructions
        if request.previous_response_id:
            past = await self._stored.after_response(request.previous_response_id, wish.tenant)
        elif request.conversation:
            past, wish, _ = await self._end_of_conversation(wish)
        else:
            _check_outputs(wish, frozenset())
            return request
        _check_outputs(wish, past.calls)
        conversation = past.conversation
        if request.conversation and not is_empty(conversation):
            _check_same(wish, past)
            instructions = past.system_prompt
            options = conversation.template_options
            request = replace(request, tools=conversation.tools, template_options=options)
        system = (Message("system", instructions),) if instructions else ()
        before = await self._stored.as_sent_back(past)
        return replace(request, messages=(*system, *before, *wish.messages))

    # -- behind a history --

    async def _find(self, wish: Wish) -> Placed:
        request = wish.request
        chat = StatelessRequest(
            request.messages,
            wish.options,
            request.tools,
            request.template_options,
            wish.tenant,
            wish.session_key,
            reply_reader=self._bodies.reply_reader(request),
        )
        for _ in range(ATTEMPTS_MAX):
            history, match = await self._binder.look(chat)
            wish = replace(wish, chain=history.end)
            if match is None:
                break
            rest = replace(wish, messages=request.messages[history.lengths[match.digest] :])
            with contextlib.suppress(StaleRevision, TurnRunning, NotFound):  # it changed meanwhile
                return await self._behind(rest, match)
        return await self._new(wish, ())

    async def _behind(self, wish: Wish, match: ChainMatch) -> Placed:
        conversation_id, tenant = match.conversation_id, wish.tenant
        if not match.may_append:
            new_id = drawn_id()
            with self._binder.reserved(tenant, new_id):
                fork = await self._daemon.writable_by(tenant).fork(
                    conversation_id, new_id, match.revision, tenant=tenant
                )
                first = await self._stored.first_number(fork)
                where = _where(wish, fork, first, is_ours=True)
                return Placed(await self._first_turn(wish, where), where, "forked", is_made=True)
        conversation = await self._stored.conversation(conversation_id, tenant)
        if conversation.revision != match.present_revision:
            raise StaleRevision(match.present_revision, conversation.revision)
        is_ours = await self._stored.is_made_for(conversation_id, tenant)
        first = await self._stored.first_number(conversation)
        where = _where(wish, conversation, first, is_ours=is_ours)
        return Placed(await self._turn(wish, where), where)

    # -- behind a response --

    async def _follow(self, wish: Wish) -> Placed:
        past = await self._stored.after_response(wish.request.previous_response_id, wish.tenant)
        _check_outputs(wish, past.calls)
        conversation, tenant = past.conversation, wish.tenant
        reason = _difference(wish, past)
        if reason:
            return await self._new(wish, await self._stored.as_sent_back(past), reason)
        if conversation.revision == past.revision and conversation.running_turn_id is None:
            with contextlib.suppress(StaleRevision, TurnRunning):
                where = _where(wish, conversation, past.first_number, is_ours=past.is_ours)
                return Placed(await self._turn(wish, where), where)
        new_id = drawn_id()
        with self._binder.reserved(tenant, new_id):
            try:
                fork = await self._daemon.writable_by(tenant).fork(
                    conversation.conversation_id, new_id, past.revision, tenant=tenant
                )
            except NotFound:  # of its revision
                raise no_previous(TAKEN_BACK) from None
            where = _where(wish, fork, past.first_number, is_ours=True)
            return Placed(await self._first_turn(wish, where), where, "forked", is_made=True)

    # -- in a conversation that the client names --

    async def _append(self, wish: Wish) -> Placed:
        for attempt in range(ATTEMPTS_MAX):
            try:
                return await self._append_once(wish)
            except StaleRevision:
                if attempt + 1 == ATTEMPTS_MAX:
                    raise
        raise AssertionError("unreachable")

    async def _append_once(self, wish: Wish) -> Placed:
        past, wish, pending = await self._end_of_conversation(wish)
        conversation = past.conversation
        if conversation.running_turn_id is not None:
            turn_id = str(conversation.running_turn_id)
            raise TurnRunning(conversation.conversation_id, turn_id)
        _check_outputs(wish, past.calls)
        first = past.first_number
        if is_empty(conversation):
            conversation = await self._begun_with(wish, conversation)
            first = first_number(bool(wish.instructions))
        else:
            _check_same(wish, past)
        where = _where(wish, conversation, first, is_ours=False)
        return Placed(await self._turn(wish, where, pending), where)

    async def _end_of_conversation(
        self, wish: Wish
    ) -> tuple[Past, Wish, tuple[records.NewMessage, ...]]:
        """What the conversation is now, the wish with what is pending there before it, and that."""
        conversation, pending = await self._stored.with_pending(
            wish.request.conversation, wish.tenant
        )
        before = tuple(message_of(each) for each in as_stored(pending, conversation))
        wish = replace(wish, messages=before + wish.messages)
        past = await self._stored.of_conversation(conversation, wish.messages)
        return past, wish, pending

    async def _begun_with(
        self, wish: Wish, conversation: records.Conversation
    ) -> records.Conversation:
        """An empty conversation, with what the request says that it begins with."""
        request = wish.request
        if not (wish.instructions or request.tools or request.template_options):
            return conversation
        await self._check_settings(wish)
        return await self._stored.begin_with(
            conversation.conversation_id,
            wish.instructions,
            request.tools,
            request.template_options,
            wish.tenant,
        )

    # -- a conversation of its own --

    async def _new(self, wish: Wish, before: Sequence[Message], reason: str = "") -> Placed:
        created = await self._daemon.writable_by(wish.tenant).create(
            ConversationSettings(
                drawn_id(),
                system_prompt=wish.instructions,
                tools=wish.request.tools,
                template_options=wish.request.template_options,
                tenant=wish.tenant,
            )
        )
        wish = replace(wish, messages=(*before, *wish.messages))
        where = _where(wish, created, first_number(bool(wish.instructions)), is_ours=True)
        live = await self._first_turn(wish, where)
        return Placed(live, where, "new", is_made=True, recompute_reason=reason)

    async def _first_turn(self, wish: Wish, made: Where) -> LiveTurn:
        try:
            return await self._turn(wish, made)
        except BaseException:
            await self.discard(made.conversation_id, made.began_at_revision, wish.tenant)
            raise

    async def discard(self, conversation_id: str, revision: int, tenant: str) -> None:
        """Delete a conversation that was made for a turn that came to nothing, if nobody uses it."""
        with contextlib.suppress(PensieveError):  # then it stays
            await self._daemon.writable.delete(conversation_id, tenant, revision)

    async def _turn(
        self,
        wish: Wish,
        where: Where,
        pending: tuple[records.NewMessage, ...] | None = None,
    ) -> LiveTurn:
        return await self._daemon.begin(
            TurnRequest(
                where.conversation_id,
                wish.messages,
                wish.options,
                wish.tenant,
                expected_revision=where.began_at_revision,
                given_sampling=wish.given_sampling,
                chain=wish.chain,
                pending=pending,
                response=None if wish.ended is None else partial(wish.ended, where),
            )
        )

    async def _check_settings(self, wish: Wish) -> None:
        settings = ConversationSettings(
            "",
            system_prompt=wish.instructions,
            tools=wish.request.tools,
            template_options=wish.request.template_options,
        )
        model = self._bodies.template, self._daemon.context_max
        await self._daemon.conversations.tokenizing.run(
            wish.tenant, partial(check_settings, *model, settings)
        )


def is_empty(conversation: records.Conversation) -> bool:
    """Whether what it begins with is still to be said."""
    return not (
        conversation.num_messages
        or conversation.revision
        or conversation.prefix_id
        or conversation.tools
        or conversation.template_options
    )


def _where(wish: Wish, conversation: records.Conversation, first: int, *, is_ours: bool) -> Where:
    """At the end of a conversation whose messages, as items, have numbers from `first` on."""
    number = first + conversation.num_messages + len(wish.messages)
    place = Place(tag_of(wish.tenant, conversation.conversation_id), number)
    conversation_id, revision = conversation.conversation_id, conversation.revision
    return Where(conversation_id, revision, place, conversation.tools, is_ours)


def _difference(wish: Wish, past: Past) -> str:
    """In what the conversation begins otherwise than the request wants; empty if in nothing."""
    request, conversation = wish.request, past.conversation
    if wish.instructions != past.system_prompt:
        return "instructions"
    if list(request.tools) != list(conversation.tools):
        return "tools"
    if dict(request.template_options) != dict(conversation.template_options):
        return "template_options"
    return ""


def _check_same(wish: Wish, past: Past) -> None:
    """Of a conversation that the client names: what is left out is the conversation's own."""
    request, conversation = wish.request, past.conversation
    for param, given, kept in (
        ("instructions", wish.instructions, past.system_prompt),
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


def _check_outputs(wish: Wish, calls: frozenset[str]) -> None:
    """The output of a function answers a call that was made."""
    known = set(calls)
    for message in wish.messages:
        known |= {call.id for call in message.tool_calls if call.id}
        if message.role == "tool" and message.tool_call_id not in known:
            raise Refusal("input", "has the output of a call that was not made before it")


def stored_response(
    where: Where,
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
