"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API.

As a chat completion does, a request brings the whole history, and the conversation that this is, is found by
its messages (conversations/binding): only what is new of it is computed.  A count renders and tokenizes all
of it, and leaves nothing.

Each answer has a `request-id`, as its clients expect.  No log has it: what happened to a turn is found by its
conversation's id, which is in a header too.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pensieve.api.anthropic.parse import UNSUPPORTED_THREAD, parse, parse_count
from pensieve.api.anthropic.render import (
    Ending,
    MessageStream,
    ending_of,
    error_body,
    message,
    stopped_by,
)
from pensieve.api.http.bodies import Bodies, named
from pensieve.api.http.completions import begin_bound
from pensieve.api.http.errors import shape_of
from pensieve.api.http.exchange import Exchange
from pensieve.api.http.replies import (
    digest,
    follow,
    follow_pieces,
    has_key,
    pieces_of,
    prompt_of,
    reply_of,
    sources,
)
from pensieve.api.json_fields import Refusal
from pensieve.api.openai.answer import Heading, PromptTokens
from pensieve.api.openai.request import Request
from pensieve.conversations.binding.binder import Binder
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.live_turn import LiveTurn
from pensieve.errors import ContextFull, PensieveError
from pensieve.guard.callers import Caller
from pensieve.guard.client_errors import client_text
from pensieve.text.reply_pieces import Piece, ReplyPieces


class Messages:
    def __init__(self, daemon: Daemon, bodies: Bodies, binder: Binder) -> None:
        self._daemon, self._bodies, self._binder = daemon, bodies, binder

    async def create(self, exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
        _identify(exchange)
        request = await self._bodies.read(exchange, by, parse)
        with named(request):
            (live,) = await begin_bound(self._binder, self._bodies, exchange, by, request)
        answer_id = digest(by.tenant, live.conversation_id, live.turn_id)
        heading = Heading(answer_id, int(time.time()), request.model)
        pieces = self._bodies.pieces(request)
        if request.stream:
            await self._stream(exchange, request, heading, live, pieces)
            return None
        await follow(self._daemon, exchange, live, None, stays=has_key(exchange))
        exchange.out |= sources(live.figures)
        found = pieces_of(live, pieces)
        ending = self._ending(request, live, pieces)
        return message(heading, found, reply_of(live), prompt_of(live), ending)

    async def count_tokens(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        _identify(exchange)
        request = await self._bodies.read(exchange, by, parse_count)
        with named(request):
            return {"input_tokens": await self._bodies.num_tokens(request, by)}

    async def _stream(
        self,
        exchange: Exchange,
        request: Request,
        heading: Heading,
        live: LiveTurn,
        pieces: ReplyPieces,
    ) -> None:
        prompt = PromptTokens(live.history_tokens + live.prompt_tokens)
        stream = MessageStream(heading, prompt)
        exchange.begin_events()

        async def on_pieces(found: Sequence[Piece], start: int, stop: int) -> None:
            await exchange.write_events(stream.events(found))

        await follow_pieces(self._daemon, exchange, live, pieces, on_pieces)
        ending = self._ending(request, live, pieces)
        await exchange.write_events(stream.end(reply_of(live), prompt_of(live), ending))
        await exchange.end_events()

    def _ending(self, request: Request, live: LiveTurn, pieces: ReplyPieces) -> Ending:
        reply, tokenizer = reply_of(live), self._bodies.template.tokenizer
        stop = stopped_by(reply, tokenizer, request.sampling.stop)
        return ending_of(reply.finish, pieces.ends_with_call, stop)


def body_of(error: PensieveError) -> Mapping[str, Any]:
    """An error as Anthropic's clients know it; by this text they see that a history has to be shortened."""
    text, details = client_text(error), None
    if isinstance(error, Refusal) and error.code == "context_length_exceeded":
        text = f"prompt is too long: {error.problem}"
    elif isinstance(error, ContextFull):
        text = f"prompt is too long: {error.tokens} tokens > {error.tokens_max} maximum"
    elif isinstance(error, Refusal) and error.code == UNSUPPORTED_THREAD:
        details = {"error_code": error.code, "unsupported": ["thread"]}
    return error_body(shape_of(error).status, text, details)


def _identify(exchange: Exchange) -> None:
    exchange.out["request-id"] = f"req_{secrets.token_hex(12)}"
