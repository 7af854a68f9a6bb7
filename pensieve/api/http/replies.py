"""Write a reply over HTTP as it arrives, and end its turn when the client disconnects.

Without an `Idempotency-Key`, a client cannot attach to its turn again. So a disconnect ends the turn. The
history keeps the text that was already sent. If no text was sent, the history keeps nothing. With a key, the
turn continues for the same grace period as over gRPC (followers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from pensieve.api.http.exchange import Exchange
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.live_turn import LiveTurn, ReplyTokens


class EventStream(Protocol):
    """Renders the tokens of one reply as events."""

    def tokens(self, tokens: ReplyTokens) -> list[dict[str, Any]]: ...
    def withheld_events(self, tail: ReplyTokens) -> list[dict[str, Any]]: ...


async def follow(
    daemon: Daemon,
    exchange: Exchange,
    live: LiveTurn,
    stream: EventStream | None,
    *,
    survives_disconnect: bool,
) -> None:
    """Write the reply as events until the turn has ended. Without `stream`, only wait for its end.

    `survives_disconnect`: a stored turn continues after a disconnect.
    """
    followers, num_sent = daemon.conversations.followers, 0

    async def write(tokens: ReplyTokens) -> None:
        nonlocal num_sent
        assert stream is not None
        await exchange.write_events(stream.tokens(tokens))
        num_sent += len(tokens.token_ids)

    try:
        if stream is None:
            await followers.follow(live)
        else:
            await followers.follow(live, write)
    except asyncio.CancelledError:
        is_over = live.finish is not None or followers.has_follower(live)
        if exchange.has_disconnected and not ((survives_disconnect and live.is_stored) or is_over):
            daemon.conversations.ends.stop(live, num_sent)
        raise
    if stream is not None:
        await exchange.write_events(stream.withheld_events(live.withheld))


def cache_headers(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return headers with the cache figures of a turn."""
    found = {
        f"x-pensieve-{name.replace('_', '-')}": str(int(figures[name]))
        for name in ("new_tokens", "device_tokens", "host_tokens", "recomputed_tokens")
        if name in figures
    }
    if figures.get("recompute_reason"):
        found["x-pensieve-recompute-reason"] = str(figures["recompute_reason"]).lower()
    return found
