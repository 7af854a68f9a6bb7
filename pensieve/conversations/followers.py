"""Follow live turns, and keep a turn without followers alive for a grace period. Belongs to the event loop.

Any number of followers read a turn, each from the first token on. When the last follower leaves before the
end, the turn lives for another `grace_seconds`. In this time a client may attach again with the same
request_id. After this time the turn is given up (`TurnEnds.give_up`): the engine stops it, its row becomes
`interrupted`, and the history is unchanged. A retry with the same request_id then runs the turn again.

The grace period also begins when a turn begins, and again when a retry finds the turn. It passes in steps, so
that a stalled event loop does not use it up.

A client that leaves on purpose stops the turn instead (cancelling.py). If a stop keeps fewer tokens than
another follower was sent, this follower gets an error.

A follower is sent all new tokens whenever its stream can be written to. A follower is cancelled if its stream
cannot be written to for `stall_seconds`, or if more than `undelivered_tokens_max` tokens wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pensieve.conversations.live_turn import LiveTurn, ReplyTokens, TurnPhase
from pensieve.errors import PensieveError, TurnInterrupted

log = logging.getLogger("pensieve")
GRACE_SECONDS = 5.0
STALL_SECONDS = 40.0
UNDELIVERED_TOKENS_MAX = 16_384
GRACE_STEPS = 10  # steps of the grace period; up to twice as many if the event loop stalls
Write = Callable[[ReplyTokens], Awaitable[None]]  # delivers the next tokens of a turn
CUT = "another client ended the turn, and the history has less of the reply than was sent here"


async def _take_nothing(tokens: ReplyTokens) -> None:
    """The `write` of a follower that waits only for the end."""


@dataclass(frozen=True)
class FollowerLimits:
    grace_seconds: float = GRACE_SECONDS  # how long a turn lives without a follower
    stall_seconds: float = STALL_SECONDS  # how long a follower may take nothing
    undelivered_tokens_max: int = UNDELIVERED_TOKENS_MAX


@dataclass(eq=False)
class Follower:
    live: LiveTurn
    wake: asyncio.Event
    task: asyncio.Task[Any] | None
    num_sent: int = 0
    writing_since: float | None = None


class TurnFollowers:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: FollowerLimits,
        give_up: Callable[[LiveTurn], None],
    ) -> None:
        """`give_up` (`TurnEnds.give_up`) gets each turn without a follower when its grace period ends."""
        self._loop = loop
        self._limits = limits
        self._give_up = give_up
        self._followers: dict[int, list[Follower]] = {}  # by attempt_id
        self._graces: dict[int, asyncio.TimerHandle] = {}  # by attempt_id

    async def until_ended(self, live: LiveTurn) -> None:
        """Wait until a turn has ended, with or without an error."""
        with contextlib.suppress(PensieveError):
            await self.follow(live)

    async def follow(self, live: LiveTurn, write: Write = _take_nothing) -> None:
        """Deliver a turn's tokens with `write`, from the first on, until it has ended.

        Then `live.withheld` may have more text. Raises the error of a failed turn.
        """
        follower = Follower(live, asyncio.Event(), asyncio.current_task())
        self._followers.setdefault(live.attempt_id, []).append(follower)
        self._cancel_grace(live.attempt_id)
        try:
            while True:
                follower.wake.clear()
                finish, num_tokens = live.finish, live.num_tokens
                if follower.num_sent < num_tokens:
                    follower.writing_since = self._loop.time()
                    await write(live.reply.span(follower.num_sent, num_tokens))
                    follower.writing_since = None
                    follower.num_sent = num_tokens
                elif finish is not None:
                    break
                else:
                    await follower.wake.wait()
        finally:
            followers = self._followers[live.attempt_id]
            followers.remove(follower)
            if not followers:
                del self._followers[live.attempt_id]
                self.start_grace(live)
        if live.failure is not None:
            raise live.failure
        if follower.num_sent > live.num_tokens:
            raise TurnInterrupted(CUT)

    def start_grace(self, live: LiveTurn) -> None:
        """Start the grace period of a turn, unless it has a follower or has ended."""
        if live.phase is TurnPhase.RUNNING and live.attempt_id not in self._followers:
            self._cancel_grace(live.attempt_id)
            self._grace_step(live, GRACE_STEPS, self._loop.time())

    def has_follower(self, live: LiveTurn) -> bool:
        return live.attempt_id in self._followers

    @property
    def num_undelivered_tokens(self) -> int:
        """The number of tokens, over all turns, that followers have not taken yet."""
        followers = [each for followers in self._followers.values() for each in followers]
        return sum(max(each.live.num_tokens - each.num_sent, 0) for each in followers)

    def wake(self, attempt_id: int) -> None:
        for follower in self._followers.get(attempt_id, ()):
            follower.wake.set()

    def cancel_stalled(self) -> None:
        now = self._loop.time()
        for follower in [each for followers in self._followers.values() for each in followers]:
            if follower.writing_since is None:
                continue
            num_behind = follower.live.num_tokens - follower.num_sent
            stalled_seconds = now - follower.writing_since
            limits = self._limits
            if stalled_seconds > limits.stall_seconds or num_behind > limits.undelivered_tokens_max:
                log.warning(
                    "a client was cut off: it was %d tokens behind and took nothing for %.0f s",
                    num_behind,
                    stalled_seconds,
                    extra=ids_of(follower.live),
                )
                if follower.task is not None:
                    follower.task.cancel()

    def close(self) -> None:
        for grace in self._graces.values():
            grace.cancel()

    def _cancel_grace(self, attempt_id: int) -> None:
        if (grace := self._graces.pop(attempt_id, None)) is not None:
            grace.cancel()

    def _grace_step(self, live: LiveTurn, num_left: int, due: float) -> None:
        now, step = self._loop.time(), self._limits.grace_seconds / GRACE_STEPS
        is_late = now - due > step
        if num_left > 0 or (is_late and num_left > -GRACE_STEPS):
            self._graces[live.attempt_id] = self._loop.call_at(
                now + step, self._grace_step, live, num_left - 1, now + step
            )
            return
        self._graces.pop(live.attempt_id, None)
        if live.phase is TurnPhase.RUNNING and live.attempt_id not in self._followers:
            log.info("a turn is given up: its client did not come back", extra=ids_of(live))
            self._give_up(live)


def ids_of(live: LiveTurn) -> dict[str, str]:
    """Return the ids for a log line about a turn; never text."""
    ids = {"turn_id": str(live.turn_id), "conversation_id": live.conversation_id}
    return ids | ({"tenant": live.tenant} if live.tenant else {})
