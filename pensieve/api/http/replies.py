"""Write a reply over HTTP as it comes, and end its turn when the client leaves.

A client of these APIs cannot attach to its turn again, unless it sends an `Idempotency-Key`. So its turn ends
when it leaves: the text that was written to it stays in the history; if there was none, nothing stays. With a
key the turn lives on for as long as one of gRPC's (followers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from pensieve.api.http.exchange import Exchange
from pensieve.api.reply import ReplyStream, ReplyTokens
from pensieve.conversations.daemon import Daemon


class EventStream(Protocol):
    """Renders the tokens of one reply as events."""

    def tokens(self, tokens: ReplyTokens) -> list[dict[str, Any]]: ...
    def rest(self, tail: ReplyTokens) -> list[dict[str, Any]]: ...


async def follow(
    daemon: Daemon,
    exchange: Exchange,
    reply: ReplyStream,
    stream: EventStream | None,
    *,
    stays: bool,
) -> None:
    """Write the reply as events until the turn has ended; without `stream`, only wait.

    `stays`: the turn goes on when its client leaves.
    """
    live, followers, num_sent = reply.live, daemon.conversations.followers, 0

    async def write(tokens: ReplyTokens) -> None:
        nonlocal num_sent
        assert stream is not None
        await exchange.write_events(stream.tokens(tokens))
        num_sent += len(tokens.token_ids)

    try:
        if stream is None:
            await followers.follow(live)
        else:
            await reply.follow(followers, write)
    except asyncio.CancelledError:
        is_over = live.finish is not None or followers.has_follower(live)
        if exchange.has_left and not (stays or is_over):
            daemon.conversations.ends.stop(live, num_sent)
        raise
    if stream is not None:
        await exchange.write_events(stream.rest(reply.tail))


def sources(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return headers that say where the tokens of a turn's context came from."""
    found = {
        f"x-pensieve-{name.replace('_', '-')}": str(int(figures[name]))
        for name in ("new_tokens", "device_tokens", "host_tokens", "recomputed_tokens")
        if name in figures
    }
    if figures.get("recompute_reason"):
        found["x-pensieve-recompute-reason"] = str(figures["recompute_reason"]).lower()
    return found
