"""Tokenize long texts in the text pool, and charge their tenant."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pensieve.conversations.admission import Admission
from pensieve.conversations.draft import OutdatedTokens
from pensieve.conversations.history import History
from pensieve.conversations.threads import Threads
from pensieve.errors import ContextFull

T = TypeVar("T")


class ChargedTextPool:
    """Belongs to the event loop."""

    def __init__(self, history: History, threads: Threads, admission: Admission) -> None:
        self._history, self._threads, self._admission = history, threads, admission

    async def run(self, tenant: str, function: Callable[[], T]) -> T:
        """Call a function in the text pool.

        If the text does not fit the context, charge the tenant nevertheless: tokenizing it took time. The
        caller charges text that fits.
        """
        try:
            return await self._threads.in_text_pool(tenant, function)
        except ContextFull as full:
            self.charge(tenant, full.tokens)
            raise

    async def renew(self, outdated: OutdatedTokens) -> None:
        """Retokenize a conversation that was stored under another tokenizer or template."""
        tenant, lane = outdated.conversation.tenant, outdated.conversation.conversation_id
        tokens = await self._threads.in_text_pool(tenant, outdated.tokens)
        await self._threads.in_store(tenant, self._history.renew, outdated, tokens, lane=lane)

    def charge(self, tenant: str, num_tokens: int) -> None:
        self._admission.charge(tenant, num_tokens, self._threads.loop.time())
