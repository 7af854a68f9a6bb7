"""The reply of a turn for rendering: its tokens in columns, streamed or whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from pensieve.conversations.followers import TurnFollowers
from pensieve.conversations.live_turn import LiveTurn
from pensieve.core.iteration import Logprob
from pensieve.core.turn import HAS_REPLY, FinishReason
from pensieve.text import Part
from pensieve.text.reply_pieces import Piece, ReplyPieces


class ReplyTokens(NamedTuple):
    """Some or all tokens of a reply.

    The text of `ReplyStream.tail` belongs to no token, so it has entries in `texts` and `parts` only.
    """

    token_ids: Sequence[int]
    texts: Sequence[str]  # of each token: the text that became complete with it
    finish: FinishReason = FinishReason.STOP  # one of HAS_REPLY; only used for a whole reply
    parts: Sequence[Part] = ()  # of each token; empty: all text
    logprobs: Sequence[tuple[float, Sequence[Logprob]]] = ()  # of each token, if requested

    def is_of(self, *parts: Part) -> list[bool]:
        """For each token, return whether it belongs to one of these parts."""
        if not self.parts:
            return [Part.TEXT in parts] * len(self.texts)
        return [each in parts for each in self.parts]

    @property
    def num_thinking(self) -> int:
        return sum(self.is_of(Part.THINKING))

    def pieces(self, cutter: ReplyPieces) -> list[Piece]:
        """Return the pieces of these tokens. `cutter` must have seen all earlier tokens of the reply."""
        found: list[Piece] = []
        for text, part in zip(self.texts, self.parts, strict=True):
            found += cutter.push(text, part)
        return found


NO_TOKENS = ReplyTokens((), ())


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
        live = self.live
        token_ids, texts = live.token_ids[start:stop], live.texts[start:stop]
        logprobs = [live.logprobs[each] for each in range(start, stop)] if live.logprobs else ()
        return ReplyTokens(token_ids, texts, FinishReason.STOP, live.parts[start:stop], logprobs)

    @property
    def tail(self) -> ReplyTokens:
        """Text that a cancelled turn had withheld."""
        live = self.live
        if not live.tail:
            return NO_TOKENS
        return ReplyTokens((), (live.tail,), parts=(live.parts[live.num_tokens - 1],))

    def whole(self, finish: FinishReason | None = None, tail: str | None = None) -> ReplyTokens:
        """Return the whole reply. If the turn is about to end, pass its `finish` and `tail`."""
        live = self.live
        tail = live.tail if tail is None else tail
        found = self.tokens(0, live.num_tokens)
        texts = list(found.texts)
        if tail and texts:
            texts[-1] += tail
        finish = finish or live.finish
        if finish not in HAS_REPLY:  # the turn was cancelled
            finish = FinishReason.STOP
        return ReplyTokens(found.token_ids, texts, finish, found.parts, found.logprobs)

    @property
    def prompt(self) -> PromptTokens:
        """The numbers of prompt tokens. The turn must have ended."""
        figures = self.live.figures
        num_cached = int(figures.get("device_tokens", 0)) + int(figures.get("host_tokens", 0))
        return PromptTokens(int(figures.get("prompt_tokens", 0)), num_cached)
