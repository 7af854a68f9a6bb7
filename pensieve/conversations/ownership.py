"""Whose a conversation is, where several daemons share a history.

A claim that finds the conversation in another epoch (store/remote/remote_store.py) means that other daemons
have written to the conversation since it was here. Before the job that claims has its result, this daemon
drops what it still has of the conversation, in this order: a turn that runs here and that the history no
longer knows, what the history's thread remembers, and the KV in the engine. The engine hears of it before the
Submit of the next turn.

A gRPC call that needs a conversation of another daemon is passed on to that daemon (grpc/forwarding.py). An
HTTP call takes the conversation over instead, unless a turn of it runs there: by the time the owner is known,
the body of the request is gone. `takes_over` says which of both the present call does.

A daemon that has lost its session computes turns that nobody will have. They end as soon as the daemon knows,
with an error after which a client retries. The history refuses a turn that is about to be committed.

All of it belongs to the loop but `_stale`, which the store thread calls, and `_lost`, which the connection
calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from pensieve.conversations.conversations import Conversations
from pensieve.conversations.engine_client import EngineClient
from pensieve.conversations.history import History
from pensieve.conversations.live_turn import LiveTurn, cache_key
from pensieve.conversations.threads import Threads
from pensieve.engine.messages import DeleteConversation
from pensieve.errors import OwnedElsewhere, Unavailable
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.transactions import TAKEN

T = TypeVar("T")
takes_over: ContextVar[bool] = ContextVar("takes_over", default=False)  # of the call that runs


class SharedThreads(Threads):
    """Threads whose store is shared: a job of another daemon's conversation may take it over."""

    def __init__(
        self,
        store: ConversationStore,
        loop: asyncio.AbstractEventLoop,
        text_threads: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__(loop, text_threads, on_failure, store.num_lanes)
        self._store = store

    async def in_store(
        self,
        tenant: str,
        function: Callable[..., T],
        /,
        *arguments: Any,
        lane: str = "",
        **named: Any,
    ) -> T:
        try:
            return await super().in_store(tenant, function, *arguments, lane=lane, **named)
        except OwnedElsewhere as elsewhere:  # and it has written nothing
            if not takes_over.get():
                raise
            await self.take(elsewhere.conversation_id, tenant)
        return await super().in_store(tenant, function, *arguments, lane=lane, **named)

    async def take(self, conversation_id: str, tenant: str) -> None:
        """Serve a conversation of another daemon here; OwnedElsewhere if a turn of it runs there."""
        await super().in_store(
            tenant, self._store.take, conversation_id, tenant=tenant, lane=conversation_id
        )


class StaleConversations:
    """Drops what other daemons have changed."""

    def __init__(
        self,
        store: ConversationStore,
        history: History,
        conversations: Conversations,
        threads: Threads,
        engine: EngineClient,
    ) -> None:
        self._history, self._conversations = history, conversations
        self._threads, self._engine = threads, engine
        store.watch(self._stale, self._lost)

    def _stale(self, tenant: str, conversation_id: str) -> None:
        """In the store's thread."""
        self._history.forget(tenant, conversation_id)
        self._threads.loop.call_soon_threadsafe(self._drop, tenant, conversation_id)

    def _drop(self, tenant: str, conversation_id: str) -> None:
        turns = self._conversations.turns
        for live in turns.all_live():
            if (live.tenant, live.conversation_id) == (tenant, conversation_id):
                self._give_up(live)
        self._engine.tell(DeleteConversation(cache_key(tenant, conversation_id)))

    def _lost(self) -> None:
        """In the connection's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._threads.loop.call_soon_threadsafe(self._drop_all)

    def _drop_all(self) -> None:
        for live in self._conversations.turns.all_live():
            self._give_up(live)

    def _give_up(self, live: LiveTurn) -> None:
        """Of a turn that the history does not know any more."""
        cancel = self._conversations.turns.interrupt(live) if live.is_stored else None
        if cancel is not None:
            self._engine.tell(cancel)
            self._threads.spawn(self._conversations.end_interrupted(live, Unavailable(TAKEN)))
