"""`POST /v1/chat/completions` and `/v1/completions`.

A chat request has the whole history. The binder finds the stored conversation with these messages, and only
the new messages are computed (conversations/binding). With `n` choices, only the first choice may continue
this conversation, and the other choices continue forks. Three kinds of request are not stored: requests with
`store: false`, text completions, and Open WebUI's own tasks, which TASK_HEADER marks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pensieve.api.http.exchange import Exchange
from pensieve.api.http.idempotency import client_key_of, digest
from pensieve.api.http.replies import cache_headers, follow
from pensieve.api.http.requests import ApiRequests, client_field_names
from pensieve.api.openai.answer import Heading, answer
from pensieve.api.openai.chunks import ChatStream, CompletionStream, usage_chunk
from pensieve.api.openai.request import ParsedRequest, RequestKind, parse
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.live_turn import LiveTurn
from pensieve.guard.callers import Caller

DONE = b"data: [DONE]\n\n"
TASK_HEADER = "x-openwebui-task"


class CompletionsEndpoint:
    def __init__(self, daemon: Daemon, requests: ApiRequests, kind: RequestKind) -> None:
        self._daemon, self._requests, self._kind = daemon, requests, kind

    async def __call__(self, exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
        request = await self._requests.read(exchange, by, partial(parse, self._kind))
        with client_field_names(request):
            lives = await self._begin(exchange, request)
        first, is_chat = lives[0], self._kind is RequestKind.CHAT
        names = (
            (first.conversation_id, first.turn_id) if is_chat else (first.attempt_id, time.time())
        )
        heading = Heading(digest(by.tenant, *names), int(time.time()), request.model)
        if request.stream:
            await self._stream(exchange, request, heading, lives)
            return None
        survives_disconnect = bool(client_key_of(exchange))
        await run_together(
            follow(self._daemon, exchange, each, None, survives_disconnect=survives_disconnect)
            for each in lives
        )
        exchange.out |= cache_headers(first.figures)
        requests, replies = self._requests, [each.whole_reply() for each in lives]
        tokenizer, prompt = requests.template.tokenizer, lives[0].prompt
        render = partial(answer, request, replies, prompt, heading, tokenizer, requests.style)
        return await requests.render(by, sum(live.num_tokens for live in lives), render)

    async def _begin(self, exchange: Exchange, request: ParsedRequest) -> list[LiveTurn]:
        # Open WebUI sets this header for its own requests (titles, tags, queries), which belong to no chat.
        is_ui_task = request.store is None and bool(exchange.headers.get(TASK_HEADER))
        is_stored = self._kind is RequestKind.CHAT and self._requests.is_stored(request)
        if is_ui_task or not is_stored:
            return await self._requests.begin_unstored(request)
        return await self._requests.begin_bound(exchange, request)

    async def _stream(
        self,
        exchange: Exchange,
        request: ParsedRequest,
        heading: Heading,
        lives: Sequence[LiveTurn],
    ) -> None:
        kind = ChatStream if self._kind is RequestKind.CHAT else CompletionStream
        tokenizer, survives_disconnect = (
            self._requests.template.tokenizer,
            bool(client_key_of(exchange)),
        )
        exchange.begin_events()

        async def stream_choice(number: int, live: LiveTurn) -> None:
            stream = kind(request, heading, tokenizer, self._requests.cutter(request.tools), number)
            await follow(
                self._daemon, exchange, live, stream, survives_disconnect=survives_disconnect
            )
            await exchange.write_events([stream.end(live.whole_reply().finish)])

        await run_together(stream_choice(number, live) for number, live in enumerate(lives))
        if request.include_usage:
            replies, prompt = [each.whole_reply() for each in lives], lives[0].prompt
            await exchange.write_events([usage_chunk(request, heading, replies, prompt)])
        await exchange.write(DONE)
        await exchange.end_events()


async def run_together(coroutines: Any) -> None:
    """Run these coroutines at the same time. The first error cancels the other coroutines."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
