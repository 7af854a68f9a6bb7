"""What a daemon does about whose a conversation is, where several share a history.

A claim that finds the conversation in another epoch (store/remote/remote_store.py) means that others have
written to it since it was here.  What this daemon still has of it is then dropped, in this order and before
the claim's job has its result: a turn of it that runs here, which the history does not know any more; what
the history's thread remembers; and its KV in the engine.  The engine hears of it on the loop, which got it
from the store's thread before it gets the result of the job, so a Submit comes behind.

A call over gRPC that needs a conversation of another daemon's is passed on to it (grpc/forwarding.py).  One
over HTTP takes the conversation over instead, unless a turn of it runs there: its body is gone by the time
that it is known whose the conversation is, and routers know beforehand.  `takes_over` says which it is.

A daemon that has lost its session computes turns that nobody will have: they end as soon as it knows, with an
error after which a client says the same again.  Where one is about to be committed, the history refuses it.

All of it is of the loop but `_stale`, which the store's thread calls, and `_lost`, the connection's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from pensieve.conversations.conversations import Conversations
from pensieve.conversations.history import History
from pensieve.conversations.live_turn import LiveTurn, cache_key
from pensieve.conversations.threads import Threads
from pensieve.engine.messages import DeleteConversation, Message
from pensieve.errors import OwnedElsewhere, QueueFull, Unavailable
from pensieve.store.remote.remote_store import RemoteStore, Store

Pull = Callable[[str, str, str], Awaitable[object]]  # from an address, a tenant's conversation
takes_over: ContextVar[bool] = ContextVar("takes_over", default=False)  # of the call that runs
TAKEN = "the conversation was served elsewhere meanwhile; say it again"


class Owning:
    def __init__(
        self,
        store: Store,
        history: History,
        conversations: Conversations,
        threads: Threads,
        put: Callable[[Message], None],
    ) -> None:
        self._store, self._history, self._conversations = store, history, conversations
        self._threads, self._put = threads, put
        self.pull: Pull | None = None  # where daemons fetch KV of each other
        if isinstance(store, RemoteStore):
            store.on_stale = self._stale
            store.on_lost = self._lost
            threads.is_taken = self._is_taken
            conversations.bring_kv = self._bring_kv

    def _stale(self, tenant: str, conversation_id: str) -> None:
        """In the store's thread."""
        self._history.forget(tenant, conversation_id)
        self._threads.loop.call_soon_threadsafe(self._drop, tenant, conversation_id)

    def _drop(self, tenant: str, conversation_id: str) -> None:
        turns = self._conversations.turns
        for live in turns.all_live():
            if (live.tenant, live.conversation_id) == (tenant, conversation_id):
                self._give_up(live)
        self._tell(DeleteConversation(cache_key(tenant, conversation_id)))

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
            self._tell(cancel)
            self._threads.spawn(self._conversations.end_interrupted(live, Unavailable(TAKEN)))

    async def _is_taken(self, elsewhere: OwnedElsewhere, tenant: str) -> bool:
        """After a job that was refused: whether it may be done again, here."""
        if not takes_over.get():
            return False
        await self.take(elsewhere.conversation_id, tenant)
        return True

    async def _bring_kv(self, live: LiveTurn) -> None:
        """Of a conversation that another daemon had until now, if that is sooner than computing it."""
        if isinstance(self._store, RemoteStore):
            named = live.tenant, live.conversation_id
            address = self._store.came_from.pop(named, "")
            if address and self.pull is not None:
                await self.pull(address, *named)

    def _tell(self, message: Message) -> None:
        """A DeleteConversation is never refused (engine_client.py); without an engine there is no KV."""
        with contextlib.suppress(Unavailable, QueueFull):
            self._put(message)

    async def take(self, conversation_id: str, tenant: str) -> None:
        """Serve a conversation here that another daemon has; OwnedElsewhere if that one runs a turn of it."""
        if isinstance(self._store, RemoteStore):
            was_taking = takes_over.set(False)  # one try
            try:
                await self._threads.in_store(
                    tenant, self._store.take, conversation_id, tenant=tenant
                )
            finally:
                takes_over.reset(was_taking)
