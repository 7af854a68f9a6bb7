"""Follow live turns, and keep a turn without readers alive for a grace period. Belongs to the event loop.

Any number of readers follow a turn from its first token on. When the last reader leaves before the end, the
turn lives for another `grace_seconds`, in which a client may attach again with the same request_id. Then the
turn is abandoned: the engine stops it, its row becomes `interrupted`, and nothing of it is in the history. A
retry with the same request_id runs it again. The grace period passes in steps, so a stalled event loop does
not use it up. A client that leaves on purpose cancels the turn instead (cancelling.py). If a cancel keeps
less of the reply than other readers were sent, those readers get an error in place of the end.

A reader takes all new tokens whenever its stream can be written to. A reader is cancelled if its stream
cannot be written to for `stall_seconds`, or if it is `undelivered_tokens_max` behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pensieve.conversations.live_turn import LiveTurn
from pensieve.errors import TurnInterrupted

log = logging.getLogger("pensieve")
GRACE_STEPS = 10  # of a stalled event loop, up to twice as many
Write = Callable[[int, int], Awaitable[None]]  # delivers tokens [start, stop) of a turn
CUT = "another client ended the turn, and the history has less of its reply than was sent here"


@dataclass(frozen=True)
class ReaderLimits:
    grace_seconds: float  # that a turn without a reader lives
    stall_seconds: float  # that a reader may take nothing
    undelivered_tokens_max: int


@dataclass(eq=False)
class Reader:
    live: LiveTurn
    wake: asyncio.Event
    task: asyncio.Task[Any] | None
    num_sent: int = 0
    writing_since: float | None = None


class Readers:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: ReaderLimits,
        on_abandoned: Callable[[LiveTurn], None],
    ) -> None:
        """`on_abandoned` gets each turn whose grace has passed and that nobody reads."""
        self._loop = loop
        self._limits = limits
        self._on_abandoned = on_abandoned
        self._readers: dict[int, list[Reader]] = {}  # by turn number
        self._graces: dict[int, asyncio.TimerHandle] = {}

    async def follow(self, live: LiveTurn, write: Write) -> None:
        """Have `write` deliver a turn's tokens, from the first on, until it has ended."""
        reader = Reader(live, asyncio.Event(), asyncio.current_task())
        self._readers.setdefault(live.number, []).append(reader)
        self._end_grace(live.number)
        try:
            while True:
                reader.wake.clear()
                finish, num_tokens = live.finish, live.num_tokens
                if reader.num_sent < num_tokens:
                    reader.writing_since = self._loop.time()
                    await write(reader.num_sent, num_tokens)
                    reader.writing_since = None
                    reader.num_sent = num_tokens
                elif finish is not None:
                    break
                else:
                    await reader.wake.wait()
        finally:
            readers = self._readers[live.number]
            readers.remove(reader)
            if not readers:
                del self._readers[live.number]
                self.start_grace(live)
        if live.failure is not None:
            raise live.failure
        if reader.num_sent > live.num_tokens:
            raise TurnInterrupted(CUT)

    def start_grace(self, live: LiveTurn) -> None:
        """A turn that nobody reads has its time from now on."""
        if live.finish is None and live.number not in self._readers:
            self._end_grace(live.number)
            self._step_of_grace(live, GRACE_STEPS, self._loop.time())

    def has_reader(self, live: LiveTurn) -> bool:
        return live.number in self._readers

    @property
    def num_undelivered_tokens(self) -> int:
        """That the readers have not taken, of all turns together."""
        readers = [each for readers in self._readers.values() for each in readers]
        return sum(max(each.live.num_tokens - each.num_sent, 0) for each in readers)

    def wake(self, number: int) -> None:
        for reader in self._readers.get(number, ()):
            reader.wake.set()

    def cancel_stalled(self) -> None:
        now = self._loop.time()
        for reader in [each for readers in self._readers.values() for each in readers]:
            if reader.writing_since is None:
                continue
            num_behind = reader.live.num_tokens - reader.num_sent
            stalled = now - reader.writing_since
            limits = self._limits
            if stalled > limits.stall_seconds or num_behind > limits.undelivered_tokens_max:
                log.warning(
                    "a reader is %d tokens behind and took nothing for %.0f s",
                    num_behind,
                    stalled,
                    extra=ids_of(reader.live),
                )
                if reader.task is not None:
                    reader.task.cancel()

    def close(self) -> None:
        for grace in self._graces.values():
            grace.cancel()

    def _end_grace(self, number: int) -> None:
        if (grace := self._graces.pop(number, None)) is not None:
            grace.cancel()

    def _step_of_grace(self, live: LiveTurn, num_left: int, due: float) -> None:
        now, step = self._loop.time(), self._limits.grace_seconds / GRACE_STEPS
        is_late = now - due > step
        if num_left > 0 or (is_late and num_left > -GRACE_STEPS):
            self._graces[live.number] = self._loop.call_at(
                now + step, self._step_of_grace, live, num_left - 1, now + step
            )
            return
        self._graces.pop(live.number, None)
        if live.finish is None and live.number not in self._readers:
            log.info("a turn lost its reader", extra=ids_of(live))
            self._on_abandoned(live)


def ids_of(live: LiveTurn) -> dict[str, str]:
    """What a log line is about; never what was said."""
    ids = {"turn_id": str(live.turn_id), "conversation_id": live.conversation_id}
    return ids | ({"tenant": live.tenant} if live.tenant else {})
