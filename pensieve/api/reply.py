"""The reply of a turn for rendering, streamed or whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from pensieve.conversations.followers import TurnFollowers
from pensieve.conversations.live_turn import LiveTurn, ReplyTokens
from pensieve.core.turn import HAS_REPLY, FinishReason

NO_TOKENS = ReplyTokens()


class PromptTokens(NamedTuple):
    """The number of tokens of a prompt, and how many of them were cached."""

    num_tokens: int
    num_cached: int = 0


class ReplyStream:
    """A reader's view of a turn."""

    def __init__(self, live: LiveTurn) -> None:
        self.live = live

    async def follow(
        self,
        followers: TurnFollowers,
        write: Callable[[ReplyTokens], Awaitable[None]],
    ) -> None:
        """Call `write` with tokens as they arrive, until the turn ends. Then use `tail`."""

        async def write_tokens(start: int, stop: int) -> None:
            await write(self.tokens(start, stop))

        await followers.follow(self.live, write_tokens)

    def tokens(self, start: int, stop: int) -> ReplyTokens:
        return self.live.reply.span(start, stop)

    @property
    def tail(self) -> ReplyTokens:
        """Text that a cancelled turn had withheld."""
        live = self.live
        if not live.tail:
            return NO_TOKENS
        return ReplyTokens(texts=[live.tail], parts=[live.reply.parts[live.num_tokens - 1]])

    def whole(self, finish: FinishReason | None = None, tail: str | None = None) -> ReplyTokens:
        """Return the whole reply. If the turn is about to end, pass its `finish` and `tail`."""
        live = self.live
        tail = live.tail if tail is None else tail
        found = self.tokens(0, live.num_tokens)
        if tail and found.texts:
            found.texts[-1] += tail
        finish = finish or live.finish
        if finish in HAS_REPLY:  # else the turn was cancelled
            found.finish = finish
        return found

    @property
    def prompt(self) -> PromptTokens:
        """The numbers of prompt tokens. The turn must have ended."""
        figures = self.live.figures
        num_cached = int(figures.get("device_tokens", 0)) + int(figures.get("host_tokens", 0))
        return PromptTokens(int(figures.get("prompt_tokens", 0)), num_cached)
