"""Declared prefixes, those that are kept warm, and warms of any conversation; on the loop.

A prefix is tokenized in the text pool and then stored; from then on conversations may begin under it.  Its KV
is computed by the first of them, and stays as long as the engine keeps it.  A prefix to be *kept warm* is
warmed by the daemon: when it is declared, when an engine has started, and every `keep_warm_seconds`.  Such a
warm waits behind turns like any other, its tenant pays for what it computes, and a tenant in debt is passed
over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, NamedTuple

from pensieve.conversations.draft import Outdated
from pensieve.conversations.heads import Begins, ConversationSettings, PrefixSettings
from pensieve.conversations.history import History
from pensieve.conversations.threads import Threads
from pensieve.conversations.turns import Turns
from pensieve.engine.messages import Message
from pensieve.errors import InvalidArgument, NotFound, PensieveError
from pensieve.guard.limits import Allowance
from pensieve.store import records
from pensieve.store.declared_prefixes import stored_id

log = logging.getLogger("pensieve")
PAUSE_SECONDS = 0.01  # between two of them
WARMS_MAX = 8  # in the engine at once: its queue is for turns that somebody waits for
WAIT_SECONDS = 0.05
NOBODY = "/prefixes"  # no tenant has this name


class Warming:
    """Brings conversations' KV to the device before their next message, by turns that nobody reads.

    A warm counts as a turn of its tenant until it has ended, unless the daemon wants it by itself.
    """

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
        self._history, self.turns, self._threads = history, turns, threads
        self._tell, self._renew, self._weight_of = tell, renew, weight_of

    async def warm(self, conversation_id: str, tenant: str = "", *, counts: bool = True) -> None:
        """Have the engine bring the conversation's KV to the device."""

        async def sequence() -> None:
            number, is_put = self.turns.begin_warm(conversation_id, tenant, counts=counts), False
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
                    self.turns.end_warm(number)

        await self._threads.whole(sequence())


class Acts(NamedTuple):
    """What is done with conversations of any kind."""

    tokenized: Callable[[str, Callable[[], Any]], Awaitable[Any]]  # for a tenant, in the text pool
    delete: Callable[[str, str], Awaitable[None]]  # a conversation of a tenant
    charge: Callable[[str, int], None]  # a tenant, for tokens


class DeclaredPrefixes:
    def __init__(
        self,
        history: History,
        threads: Threads,
        warming: Warming,
        acts: Acts,
        now: Callable[[], float],
        allowance_of: Callable[[str], Allowance],
        keep_warm_seconds: float,
    ) -> None:
        """`now`: the clock of the records."""
        self._history, self._threads, self._warming, self._acts = history, threads, warming, acts
        self._now, self._allowance_of = now, allowance_of
        self._keep_warm_seconds = keep_warm_seconds
        self._due = asyncio.Event()
        self.is_paused: Callable[[], bool] = lambda: False  # a warm may write to the history

    async def create(self, settings: PrefixSettings) -> records.Prefix:
        tenant, template_time = settings.tenant, self._now()
        tokens = await self._tokens(settings, template_time)
        prefixes_max = self._allowance_of(tenant).limits.prefixes_max
        declared = await self._threads.in_store(
            tenant, self._history.declared.declare, settings, tokens, template_time, prefixes_max
        )
        if settings.keep_warm:
            await self._warm(tenant, settings.prefix_id)
        return declared

    async def begin_with_history(self, settings: ConversationSettings) -> records.Conversation:
        """A conversation whose first messages its client gives: tokenized like a prefix, and then its own."""
        if settings.prefix_id:
            raise InvalidArgument("prefix_id", "is not given beside messages")
        tenant, template_time = settings.tenant, self._now()
        tokens = await self._tokens(settings, template_time)
        return await self._threads.in_store(
            tenant, self._history.declared.begin_with_history, settings, tokens, template_time
        )

    async def _tokens(self, settings: Begins, template_time: float) -> list[list[int]]:
        tokens: list[list[int]] = await self._acts.tokenized(
            settings.tenant, lambda: self._history.heads.declared(settings, template_time)
        )
        self._acts.charge(settings.tenant, sum(map(len, tokens)))
        return tokens

    async def delete(self, prefix_id: str, tenant: str = "") -> None:
        """Conversations under it stay whole, and keep the KV that they share."""
        try:
            await self._acts.delete(stored_id(prefix_id), tenant)
        except NotFound:
            raise NotFound(f"there is no prefix {prefix_id!r}") from None

    # -- kept warm --

    def start(self) -> None:
        if self._keep_warm_seconds:
            self._threads.spawn(self._keep_warm())

    def warm_soon(self) -> None:
        """An engine has started, which has nothing."""
        self._due.set()

    async def _keep_warm(self) -> None:
        while True:
            self._due.clear()
            try:
                kept = await self._threads.in_store(NOBODY, self._history.declared.to_keep_warm)
            except PensieveError as error:  # the next pass tries again
                log.warning("prefixes could not be kept warm: %s", error)
                kept = []
            for tenant, prefix_id in kept:
                while self.is_paused() or self._warming.turns.num_own_warms >= WARMS_MAX:
                    await asyncio.sleep(WAIT_SECONDS)
                if self._allowance_of(tenant).in_debt(self._threads.loop.time()) is None:
                    await self._warm(tenant, prefix_id)
                await asyncio.sleep(PAUSE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._keep_warm_seconds):
                    await self._due.wait()

    async def _warm(self, tenant: str, prefix_id: str) -> None:
        try:
            await self._warming.warm(stored_id(prefix_id), tenant, counts=False)
        except NotFound:  # it was deleted meanwhile
            return
        except PensieveError as error:
            log.warning("prefix %s could not be warmed: %s", prefix_id, error)
