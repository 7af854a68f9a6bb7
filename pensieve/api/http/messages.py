"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API.

A request has the whole history. The binder finds the stored conversation with these messages, and only the
new messages are computed (conversations/binding). Counting tokens renders and tokenizes the whole history,
and stores nothing.

Each answer has the header `request-id`, because clients expect it. Logs have the conversation's id instead,
which is in the header `x-pensieve-conversation-id`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from pensieve.api.anthropic.parse import UNSUPPORTED_THREAD, parse, parse_count
from pensieve.api.anthropic.render import (
    MessageEnding,
    MessageStream,
    ending_of,
    error_body,
    message,
    stop_string_of,
)
from pensieve.api.http.errors import shape_of
from pensieve.api.http.exchange import Exchange
from pensieve.api.http.idempotency import client_key_of, digest
from pensieve.api.http.replies import cache_headers, follow
from pensieve.api.http.requests import ApiRequests, client_field_names
from pensieve.api.json_fields import Refusal
from pensieve.api.openai.answer import Heading
from pensieve.api.openai.request import ParsedRequest
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.live_turn import LiveTurn, PromptTokens, ReplyTokens
from pensieve.errors import ContextFull, PensieveError
from pensieve.guard.callers import Caller
from pensieve.guard.client_errors import client_text
from pensieve.text.reply_pieces import ReplyPieces


class MessageEndpoints:
    def __init__(self, daemon: Daemon, requests: ApiRequests) -> None:
        self._daemon, self._requests = daemon, requests

    async def create(self, exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
        _set_request_id(exchange)
        request = await self._requests.read(exchange, by, parse)
        with client_field_names(request):
            if self._requests.is_stored(request):
                (live,) = await self._requests.begin_bound(exchange, request)
            else:
                (live,) = await self._requests.begin_unstored(request)
        answer_id = digest(by.tenant, live.conversation_id, live.turn_id)
        heading = Heading(answer_id, int(time.time()), request.model)
        cutter = self._requests.cutter(request.tools)
        if request.stream:
            await self._stream(exchange, request, heading, live, cutter)
            return None
        await follow(
            self._daemon, exchange, live, None, survives_disconnect=bool(client_key_of(exchange))
        )
        exchange.out |= cache_headers(live.figures)
        reply = live.whole_reply()
        pieces = cutter.whole(zip(reply.parts, reply.texts, strict=True))
        return message(heading, pieces, reply, live.prompt, self._ending(request, reply, cutter))

    async def count_tokens(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        _set_request_id(exchange)
        request = await self._requests.read(exchange, by, parse_count)
        with client_field_names(request):
            return {"input_tokens": await self._requests.num_tokens(request)}

    async def _stream(
        self,
        exchange: Exchange,
        request: ParsedRequest,
        heading: Heading,
        live: LiveTurn,
        cutter: ReplyPieces,
    ) -> None:
        prompt = PromptTokens(live.history_tokens + live.prompt_tokens)
        stream = MessageStream(heading, prompt, cutter)
        exchange.begin_events()
        await follow(
            self._daemon, exchange, live, stream, survives_disconnect=bool(client_key_of(exchange))
        )
        reply = live.whole_reply()
        ending = self._ending(request, reply, cutter)
        await exchange.write_events(stream.end(reply, live.prompt, ending))
        await exchange.end_events()

    def _ending(
        self, request: ParsedRequest, reply: ReplyTokens, cutter: ReplyPieces
    ) -> MessageEnding:
        stop = stop_string_of(
            *(reply, self._requests.template.tokenizer, request.sampling.stop),
            continues_text=request.continues_text,
        )
        return ending_of(reply.finish, cutter.ends_with_call, stop)


def body_of(error: PensieveError) -> Mapping[str, Any]:
    """Return the body of an error. The text 'prompt is too long' makes clients shorten their history."""
    text, details = client_text(error), None
    if isinstance(error, Refusal) and error.code == "context_length_exceeded":
        text = f"prompt is too long: {error.problem}"
    elif isinstance(error, ContextFull):
        text = f"prompt is too long: {error.tokens} tokens > {error.tokens_max} maximum"
    elif isinstance(error, Refusal) and error.code == UNSUPPORTED_THREAD:
        details = {"error_code": error.code, "unsupported": ["thread"]}
    return error_body(shape_of(error).status, text, details)


def _set_request_id(exchange: Exchange) -> None:
    exchange.out["request-id"] = f"req_{secrets.token_hex(12)}"
