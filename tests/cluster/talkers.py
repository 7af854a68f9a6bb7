"""Simulated users of the SDK, each in one conversation, who remember their messages and replies.

A talker behaves like a client with several addresses. It sends its request to the address that the id of the
conversation selects. If that address does not answer, the talker sends the request, with its id, to the next
address. An error is *visible* if the SDK would raise it, because its retries are used up or it does not retry
this error. After a visible error the talker sends the message again, as a user would.
"""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from pensieve.client import AsyncClient, Delta, Retry
from pensieve.client.retry import Deadline, Tries
from pensieve.errors import Loading, PensieveError

HOME_SHARE = 0.7  # part of the turns that begin at the conversation's address
CANCEL_SHARE = 0.05  # part of the turns that are cancelled
LENGTHS = (3, 12, 40, 120)  # tokens of a reply


@dataclass
class Spoken:
    """A message and its outcome."""

    request_id: str
    text: str
    begun_at: float  # monotonic
    ended_at: float = 0.0
    failures: list[str] = field(default_factory=list)  # seconds and names of errors the SDK retries
    visible: list[str] = field(default_factory=list)  # names of errors that the SDK raises
    reply: str | None = None  # None: it was not acknowledged
    revision: int = 0


class Talker:
    def __init__(
        self, number: int, clients: Sequence[AsyncClient], seed: int, pause_seconds: float
    ) -> None:
        """`clients` has one client for each address. They do not retry."""
        self.conversation_id = f"talk-{number}"
        self.spoken: list[Spoken] = []
        self._clients = clients
        self._random = random.Random(f"{seed}/{number}")
        self._home = zlib.crc32(self.conversation_id.encode()) % len(clients)
        self._at = self._home
        self._pause_seconds = pause_seconds

    async def talk(self, enough: asyncio.Event) -> None:
        """Send messages until `enough` is set, then finish the last turn."""
        while not enough.is_set():
            await asyncio.sleep(self._random.uniform(0, 2 * self._pause_seconds))
            await self.say()

    async def say(self) -> Spoken:
        number = len(self.spoken)
        spoken = Spoken(
            f"{self.conversation_id}-{number}",
            f"word {number} {self._random.randrange(10**6)}",
            time.monotonic(),
        )
        self.spoken.append(spoken)
        length = self._random.choice(LENGTHS)
        cancels = self._random.random() < CANCEL_SHARE
        if self._random.random() < HOME_SHARE:
            self._at = self._home
        while spoken.reply is None:
            try:
                await self._persist(spoken, length, cancels)
            except PensieveError as error:
                spoken.visible.append(f"{type(error).__name__}: {error}")
        return spoken

    async def _persist(self, spoken: Spoken, length: int, cancels: bool) -> None:
        """Retry like a client with several addresses."""
        tries = Tries(Retry(drawn=self._random.random), Deadline(None))
        while True:
            try:
                return await self._try(spoken, length, cancels)
            except Loading as error:  # another address may be ready
                failure: PensieveError = error
            except PensieveError as error:
                failure = error
            after = time.monotonic() - spoken.begun_at
            spoken.failures.append(
                f"{after:.1f} s, {self._at}: {type(failure).__name__}: {failure}"
            )
            pause = tries.pause(failure)
            self._at = (self._at + 1) % len(self._clients)
            await asyncio.sleep(pause)

    async def _try(self, spoken: Spoken, length: int, cancels: bool) -> None:
        conversation = self._clients[self._at].conversation(self.conversation_id)
        turn = conversation.send(
            spoken.text, request_id=spoken.request_id, max_tokens=length, ignore_eos=True
        )
        async for event in turn:
            if cancels and isinstance(event, Delta):
                cancels = False
                await turn.cancel()
        reply = await turn.reply()
        spoken.ended_at = time.monotonic()
        spoken.reply, spoken.revision = reply.text, reply.revision
