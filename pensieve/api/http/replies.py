"""A live turn as pieces of a reply, for whichever API writes them, and its end when its client leaves.

A client of these APIs cannot attach to its turn again, unless it sends an `Idempotency-Key`.  So its turn
ends when it leaves: what was written to it stays in the history, which is what it has; where nothing was,
nothing stays.  With a key the turn lives on for the grace of gRPC's (readers.py).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pensieve.api.http.exchange import Exchange
from pensieve.api.openai.answer import PromptTokens, Reply
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.live_turn import LiveTurn
from pensieve.core.turn import FinishReason
from pensieve.text.reply_pieces import Piece, ReplyPieces

Write = Callable[[int, int], Awaitable[None]]  # takes tokens [start, stop) of a turn
WritePieces = Callable[[Sequence[Piece], int, int], Awaitable[None]]


async def follow(
    daemon: Daemon, exchange: Exchange, live: LiveTurn, write: Write | None, *, stays: bool
) -> None:
    """Until the turn has ended; without `write` its client gets the whole reply then.

    `stays`: the turn goes on when its client leaves.
    """
    num_sent = 0

    async def on_tokens(start: int, stop: int) -> None:
        nonlocal num_sent
        if write is not None:
            await write(start, stop)
            num_sent = stop

    try:
        await daemon.conversations.follow(live, on_tokens)
    except asyncio.CancelledError:
        is_over = live.finish is not None or daemon.conversations.readers.has_reader(live)
        if exchange.has_left and not (stays or is_over):
            if num_sent:
                daemon.conversations.cancel(live, num_sent)
            else:
                daemon.threads.spawn(daemon.conversations.drop(live))
        raise


async def follow_pieces(
    daemon: Daemon, exchange: Exchange, live: LiveTurn, pieces: ReplyPieces, write: WritePieces
) -> None:
    """The same, with the pieces that the tokens are cut to."""

    async def on_tokens(start: int, stop: int) -> None:
        found: list[Piece] = []
        for number in range(start, stop):
            found += pieces.push(live.texts[number], live.parts[number])
        await write(found, start, stop)

    await follow(daemon, exchange, live, on_tokens, stays=has_key(exchange))
    rest = pieces.push(live.tail, live.parts[live.num_tokens - 1]) if live.tail else []
    if rest := [*rest, *pieces.end()]:
        await write(rest, live.num_tokens, live.num_tokens)


def has_key(exchange: Exchange) -> bool:
    return bool(exchange.headers.get("idempotency-key"))


def request_id_of(exchange: Exchange) -> str:
    """By which a retry finds the turn that the first try began; any text may be a key."""
    key = exchange.headers.get("idempotency-key", "")
    return f"key-{digest(key)}" if key else ""


def digest(*words: object) -> str:
    return hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=12).hexdigest()


def reply_of(live: LiveTurn, finish: FinishReason | None = None, tail: str | None = None) -> Reply:
    """The whole of a turn that has ended, or is about to: then it is said how."""
    finish = live.finish if finish is None else finish
    tail = live.tail if tail is None else tail
    count = live.num_tokens
    texts = list(live.texts[:count])
    if tail and texts:
        texts[-1] += tail
    logprobs = [live.logprobs[each] for each in range(count)] if live.logprobs else ()
    finish = FinishReason.LENGTH if finish is FinishReason.LENGTH else FinishReason.STOP
    return Reply(live.token_ids[:count], texts, finish, live.parts[:count], logprobs)


def pieces_of(live: LiveTurn, pieces: ReplyPieces) -> list[Piece]:
    """All of a turn that has ended, cut by `pieces`, which has seen nothing of it."""
    reply = reply_of(live)
    return pieces.whole(zip(reply.parts, reply.texts, strict=True))


def tokens_of(live: LiveTurn, start: int, stop: int) -> Reply:
    logprobs = [live.logprobs[each] for each in range(start, stop)] if live.logprobs else ()
    return Reply(
        live.token_ids[start:stop],
        live.texts[start:stop],
        FinishReason.STOP,
        live.parts[start:stop],
        logprobs,
    )


def prompt_of(live: LiveTurn) -> PromptTokens:
    figures = live.figures
    cached = int(figures.get("device_tokens", 0)) + int(figures.get("host_tokens", 0))
    return PromptTokens(int(figures.get("prompt_tokens", 0)), cached)


def sources(figures: Mapping[str, Any]) -> dict[str, str]:
    """Where the tokens of a turn's context came from, as headers."""
    found = {
        f"x-pensieve-{name.replace('_', '-')}": str(int(figures[name]))
        for name in ("new_tokens", "device_tokens", "host_tokens", "recomputed_tokens")
        if name in figures
    }
    if figures.get("recompute_reason"):
        found["x-pensieve-recompute-reason"] = str(figures["recompute_reason"]).lower()
    return found
