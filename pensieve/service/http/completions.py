"""`POST /v1/completions`: text that goes on from a prompt, in no conversation; nothing of it is kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pensieve.service.daemon import Daemon
from pensieve.service.grpc.auth import Caller
from pensieve.service.http.bodies import Bodies, named
from pensieve.service.http.chat import DONE, all_of
from pensieve.service.http.exchange import Exchange, event
from pensieve.service.http.replies import digest, follow, prompt_of, reply_of, sources, tokens_of
from pensieve.service.live_turn import LiveTurn
from pensieve.service.openai import Heading, Request, RequestKind, answer
from pensieve.service.openai.completion_stream import CompletionStream
from pensieve.text.reply_pieces import Piece as ReplyPiece
from pensieve.text.reply_pieces import ReplyPieces


class Completions:
    def __init__(self, daemon: Daemon, bodies: Bodies) -> None:
        self._daemon, self._bodies = daemon, bodies

    async def __call__(self, exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
        request = await self._bodies.request(exchange, by, RequestKind.COMPLETION)
        with named(request):
            options = self._bodies.options(request, by)
            lives = await self._bodies.begin_unstored(request, options, by)
        heading = Heading(
            digest(by.tenant, lives[0].number, time.time()), int(time.time()), request.model
        )
        if request.stream:
            await self._stream(exchange, request, heading, lives)
            return None
        await all_of(follow(self._daemon, exchange, live, _no_pieces(), None) for live in lives)
        exchange.out |= sources(lives[0].figures)
        replies = [reply_of(live) for live in lives]
        tokenizer, prompt = self._bodies.template.tokenizer, prompt_of(lives[0])
        made = partial(answer, request, replies, prompt, heading, tokenizer)
        return await self._bodies.made(by, sum(live.num_tokens for live in lives), made)

    async def _stream(
        self, exchange: Exchange, request: Request, heading: Heading, lives: Sequence[LiveTurn]
    ) -> None:
        stream = CompletionStream(request, heading, self._bodies.template.tokenizer)
        exchange.begin_events()

        async def one(number: int, live: LiveTurn) -> None:
            async def on_pieces(found: Sequence[ReplyPiece], start: int, stop: int) -> None:
                await exchange.write(event(stream.chunk(number, tokens_of(live, start, stop))))

            await follow(self._daemon, exchange, live, _no_pieces(), on_pieces)
            await exchange.write(event(stream.end(number, reply_of(live).finish)))

        await all_of(one(number, live) for number, live in enumerate(lives))
        if request.include_usage:
            replies = [reply_of(live) for live in lives]
            await exchange.write(event(stream.usage(replies, prompt_of(lives[0]))))
        await exchange.write(DONE)
        await exchange.end_events()


def _no_pieces() -> ReplyPieces:
    """The prompt was no chat, so nothing is a part."""
    return ReplyPieces(None, ())
