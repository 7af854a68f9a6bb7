"""`POST /v1/chat/completions` and `/v1/completions`.

A chat brings its whole history, and only what is new of it is computed: the conversation is found by its
messages (conversations/binding).  Of `n` choices the first goes on with that conversation, the others with
forks of it.  `store: false`, or a header that names a task of Open WebUI's, makes a turn of all messages that
leaves nothing.  A text completion goes on from a prompt, in no conversation, and nothing of it is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pensieve.api.http.bodies import Bodies, named
from pensieve.api.http.exchange import Exchange
from pensieve.api.http.replies import digest, follow, has_key, request_id_of, sources
from pensieve.api.openai.answer import Heading, answer
from pensieve.api.openai.chunks import ChatStream, CompletionStream, usage_chunk
from pensieve.api.openai.request import Request, RequestKind, parse
from pensieve.api.reply import ReplyStream
from pensieve.conversations.binding.binder import Binder, StatelessRequest
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.live_turn import LiveTurn
from pensieve.errors import InvalidArgument
from pensieve.guard.callers import Caller

DONE = b"data: [DONE]\n\n"
TASK_HEADER = "x-openwebui-task"
SESSION_HEADERS = ("x-session-id", "x-openwebui-chat-id")


class Completions:
    def __init__(self, daemon: Daemon, bodies: Bodies, binder: Binder, kind: RequestKind) -> None:
        self._daemon, self._bodies, self._binder = daemon, bodies, binder
        self._kind = kind

    async def __call__(self, exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
        request = await self._bodies.read(exchange, by, partial(parse, self._kind))
        with named(request):
            lives = await self._begin(exchange, by, request)
        first, is_chat = lives[0], self._kind is RequestKind.CHAT
        names = (first.conversation_id, first.turn_id) if is_chat else (first.number, time.time())
        heading = Heading(digest(by.tenant, *names), int(time.time()), request.model)
        if request.stream:
            await self._stream(exchange, request, heading, lives)
            return None
        stays, replies = has_key(exchange), [ReplyStream(live) for live in lives]
        await all_of(follow(self._daemon, exchange, each, None, stays=stays) for each in replies)
        exchange.out |= sources(first.figures)
        bodies, wholes = self._bodies, [each.whole() for each in replies]
        tokenizer, prompt = bodies.template.tokenizer, replies[0].prompt
        made = partial(answer, request, wholes, prompt, heading, tokenizer, bodies.style)
        return await bodies.made(by, sum(live.num_tokens for live in lives), made)

    async def _begin(self, exchange: Exchange, by: Caller, request: Request) -> list[LiveTurn]:
        # Open WebUI can name what it wants of a model beside its chats: titles, tags, queries.
        is_errand = request.store is None and bool(exchange.headers.get(TASK_HEADER))
        if self._kind is RequestKind.COMPLETION or request.store is False or is_errand:
            return await self._bodies.begin_unstored(request, by)
        return await begin_bound(self._binder, self._bodies, exchange, by, request)

    async def _stream(
        self,
        exchange: Exchange,
        request: Request,
        heading: Heading,
        lives: Sequence[LiveTurn],
    ) -> None:
        kind = ChatStream if self._kind is RequestKind.CHAT else CompletionStream
        tokenizer, stays = self._bodies.template.tokenizer, has_key(exchange)
        replies = [ReplyStream(live) for live in lives]
        exchange.begin_events()

        async def one(number: int, reply: ReplyStream) -> None:
            stream = kind(request, heading, tokenizer, self._bodies.pieces(request), number)
            await follow(self._daemon, exchange, reply, stream, stays=stays)
            await exchange.write_events([stream.end(reply.whole().finish)])

        await all_of(one(number, reply) for number, reply in enumerate(replies))
        if request.include_usage:
            wholes, prompt = [each.whole() for each in replies], replies[0].prompt
            await exchange.write_events([usage_chunk(request, heading, wholes, prompt)])
        await exchange.write(DONE)
        await exchange.end_events()


async def begin_bound(
    binder: Binder, bodies: Bodies, exchange: Exchange, by: Caller, request: Request
) -> list[LiveTurn]:
    """A turn for each choice, in the conversation that the request's messages go on with."""
    chat = StatelessRequest(
        messages=request.messages,
        tools=request.tools,
        template_options=request.template_options,
        options=bodies.options(request, by),
        tenant=by.tenant,
        session_key=session_key(exchange, request),
        request_id=request_id_of(exchange),
        given_sampling=bodies.given_sampling(request),
        num_choices=request.num_choices,
        reply_reader=bodies.reply_reader(request),
    )
    try:
        bound = await binder.begin(chat)
    except InvalidArgument as error:
        if error.field != "request_id":
            raise
        problem = "was used before with another request"
        raise InvalidArgument("idempotency-key", problem) from None
    exchange.out["x-pensieve-conversation-id"] = bound[0].conversation_id
    exchange.out["x-pensieve-bound"] = bound[0].how.value
    exchange.out["x-pensieve-known-messages"] = str(bound[0].num_known_messages)
    return [each.live for each in bound]


def session_key(exchange: Exchange, request: Request) -> str:
    named = (exchange.headers.get(name, "") for name in SESSION_HEADERS)
    return next(filter(None, named), request.prompt_cache_key)


async def all_of(works: Any) -> None:
    """All of them; the first error ends the others."""
    tasks = [asyncio.ensure_future(each) for each in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
