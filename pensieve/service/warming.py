"""Brings conversations' KV to the device before their next message; best effort.

A warm is a turn of the engine that nobody reads.  It counts as a turn of its tenant until it has ended,
unless the daemon wants it by itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from pensieve.engine.messages import Message
from pensieve.service.draft import Outdated
from pensieve.service.history import History
from pensieve.service.threads import Threads
from pensieve.service.turns import Turns


class Warming:
    def __init__(
        self,
        history: History,
        turns: Turns,
        threads: Threads,
        tell: Callable[[Message], bool],
        renew: Callable[[Outdated], Awaitable[None]],
        weight_of: Callable[[str], float],
    ) -> None:
        """`tell` says whether the engine hears of it; `renew` tokenizes a conversation again."""
        self._history, self._turns, self._threads = history, turns, threads
        self._tell, self._renew, self._weight_of = tell, renew, weight_of

    @property
    def num_own(self) -> int:
        """Of those that the daemon wants by itself, that have not ended."""
        return self._turns.num_own_warms

    async def warm(self, conversation_id: str, tenant: str = "", *, counts: bool = True) -> None:
        """Have the engine bring the conversation's KV to the device."""

        async def sequence() -> None:
            number, is_put = self._turns.begin_warm(conversation_id, tenant, counts=counts), False
            try:
                while True:
                    found = await self._threads.in_store(
                        tenant, self._history.warm, conversation_id, number, tenant=tenant
                    )
                    if not isinstance(found, Outdated):
                        break
                    await self._renew(found)
                if found is not None:
                    weight = self._weight_of(tenant)
                    is_put = self._tell(replace(found, share=tenant, weight=weight))
            finally:
                if not is_put:
                    self._turns.end_warm(number)

        await self._threads.whole(sequence())
