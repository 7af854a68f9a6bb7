"""Create declared prefixes, and warm prefixes and conversations. Belongs to the event loop.

To warm a conversation is to bring its KV to the device before its next message. A prefix is tokenized in the
text pool and stored. Then conversations may begin with the prefix. The first of these conversations computes
the prefix's KV, unless the prefix was warmed before. If a prefix has `keep_warm`, the daemon warms it when
the prefix is declared, when an engine has started, and at intervals. Such a warm queues behind turns. The
prefix's tenant pays for the computed tokens. A tenant in debt is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

from pensieve.conversations.admission import Admission
from pensieve.conversations.draft import OutdatedTokens
from pensieve.conversations.engine_client import EngineClient
from pensieve.conversations.heads import BeginningSettings, ConversationSettings, PrefixSettings
from pensieve.conversations.history import History
from pensieve.conversations.text_pool import ChargedTextPool
from pensieve.conversations.threads import Threads
from pensieve.conversations.turns import Turns
from pensieve.errors import InvalidArgument, NotFound, PensieveError
from pensieve.guard.limits import Allowance
from pensieve.store import records
from pensieve.store.declared_prefixes import stored_id

log = logging.getLogger("pensieve")
PAUSE_SECONDS = 0.01  # between two warms
WARMS_MAX = 8  # in the engine at once; the engine's queue is for turns with a waiting client
WAIT_SECONDS = 0.05
PREFIX_WARMING = "/prefixes"  # passed as the tenant of this work; no real tenant has this name


class Warmer:
    """Bring conversations' KV to the device before their next message.

    A warm is a turn without a follower. A client's warm counts as a turn of its tenant until the warm has
    ended. The daemon's own warms do not count.
    """

    def __init__(
        self,
        history: History,
        turns: Turns,
        threads: Threads,
        engine: EngineClient,
        admission: Admission,
        text_pool: ChargedTextPool,
    ) -> None:
        self._history, self.turns, self._threads = history, turns, threads
        self._engine, self._admission, self._text_pool = engine, admission, text_pool

    async def warm(
        self, conversation_id: str, tenant: str = "", cache_salt: str = "", *, counts: bool = True
    ) -> None:
        """Have the engine bring the conversation's KV to the device."""

        async def sequence() -> None:
            attempt_id = self.turns.begin_warm(conversation_id, tenant, counts=counts)
            is_put = False
            try:
                while True:
                    found = await self._threads.in_store(
                        *(tenant, self._history.warm, conversation_id, attempt_id, cache_salt),
                        tenant=tenant,
                        lane=conversation_id,
                    )
                    if not isinstance(found, OutdatedTokens):
                        break
                    await self._text_pool.renew(found)
                if found is not None:
                    weight = self._admission.weight_of(tenant, self._threads.loop.time())
                    is_put = self._engine.try_put(replace(found, share=tenant, weight=weight))
            finally:
                if not is_put:
                    self.turns.end_warm(attempt_id)

        await self._threads.run_to_end(sequence())


class DeclaredPrefixes:
    def __init__(
        self,
        history: History,
        threads: Threads,
        warmer: Warmer,
        text_pool: ChargedTextPool,
        admission: Admission,
        now: Callable[[], float],
    ) -> None:
        """`now`: the wall clock, for times that are stored."""
        self._history, self._threads, self._warmer = history, threads, warmer
        self._text_pool, self._admission, self._now = text_pool, admission, now
        self._due = asyncio.Event()

    async def create(self, settings: PrefixSettings) -> records.StoredPrefix:
        tenant, template_time = settings.tenant, self._now()
        tokens = await self._tokens(settings, template_time)
        prefixes_max = self._allowance(tenant).limits.prefixes_max
        declared = await self._threads.in_store(
            *(
                tenant,
                self._history.declared.declare,
                settings,
                tokens,
                template_time,
                prefixes_max,
            ),
            lane=stored_id(settings.prefix_id),
        )
        if settings.keep_warm:
            await self._warm(tenant, settings.prefix_id)
        return declared

    async def begin_with_history(
        self, settings: ConversationSettings
    ) -> records.StoredConversation:
        """Create a conversation with the client's messages, which are tokenized like a prefix."""
        if settings.prefix_id:
            raise InvalidArgument("prefix_id", "cannot be combined with messages")
        tenant, template_time = settings.tenant, self._now()
        tokens = await self._tokens(settings, template_time)
        return await self._threads.in_store(
            *(tenant, self._history.declared.begin_with_history, settings, tokens, template_time),
            lane=settings.conversation_id,
        )

    async def _tokens(self, settings: BeginningSettings, template_time: float) -> list[list[int]]:
        tokens: list[list[int]] = await self._text_pool.run(
            settings.tenant, lambda: self._history.heads.declared(settings, template_time)
        )
        self._text_pool.charge(settings.tenant, sum(map(len, tokens)))
        return tokens

    def _allowance(self, tenant: str) -> Allowance:
        return self._admission.allowances.of(tenant, self._threads.loop.time())

    # -- kept warm --

    def keep_warm(self, seconds: float, is_paused: Callable[[], bool]) -> None:
        """Warm the prefixes with `keep_warm` now and every `seconds`.

        While `is_paused` returns True, no prefix is warmed, because a warm may write to the history.
        """
        self._threads.spawn(self._keep_warm(seconds, is_paused))

    def warm_soon(self) -> None:
        """Warm all prefixes with `keep_warm`. Call this when an engine has started: its cache is empty."""
        self._due.set()

    async def _keep_warm(self, seconds: float, is_paused: Callable[[], bool]) -> None:
        while True:
            self._due.clear()
            try:
                prefixes = await self._threads.in_store(
                    PREFIX_WARMING, self._history.declared.to_keep_warm
                )
            except PensieveError as error:  # the next pass tries again
                log.warning("prefixes could not be kept warm: %s", error)
                prefixes = []
            for tenant, prefix_id in prefixes:
                while is_paused() or self._warmer.turns.num_own_warms >= WARMS_MAX:
                    await asyncio.sleep(WAIT_SECONDS)
                if self._allowance(tenant).in_debt(self._threads.loop.time()) is None:
                    await self._warm(tenant, prefix_id)
                await asyncio.sleep(PAUSE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._due.wait()

    async def _warm(self, tenant: str, prefix_id: str) -> None:
        try:
            await self._warmer.warm(stored_id(prefix_id), tenant, counts=False)
        except NotFound:  # the prefix was deleted in the meantime
            return
        except PensieveError as error:
            log.warning("prefix %s could not be warmed: %s", prefix_id, error)
