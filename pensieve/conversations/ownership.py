"""Claim conversations, and drop stale state of conversations that another daemon has owned.

A claim may take a conversation from another daemon's session (store/owners.py). The other daemon may have
written to the conversation since this daemon last owned it. So this daemon drops its state of the
conversation before the claim returns: the memory of `History`, a turn that still runs here, and the
KV in the engine. The engine drops the KV before the SubmitTurn of the next turn.

A call for a conversation that another daemon owns fails with OwnedElsewhere and writes nothing. The gRPC and
HTTP servers forward such calls to the owner (api/grpc/forwarding.py). If another daemon takes a conversation
while a turn of it runs here, the store refuses the end of that turn.

Everything runs on the event loop, except `_on_stale`, which the store thread calls.
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve.conversations.conversations import Conversations
from pensieve.conversations.engine_client import EngineClient
from pensieve.conversations.history import History
from pensieve.conversations.live_turn import cache_key
from pensieve.conversations.threads import Threads
from pensieve.engine.messages import DeleteConversation
from pensieve.errors import OwnedElsewhere, Unavailable
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.transactions import TAKEN


class Claims:
    """Claim conversations for this daemon. Raises NotFound if there is no such conversation (any more)."""

    def __init__(self, store: ConversationStore, threads: Threads) -> None:
        self.replica = store.replica
        self._store, self._threads = store, threads

    @property
    def address(self) -> str:
        """This daemon's address for other daemons; empty until it is announced."""
        return self._store.owners.address

    @property
    def lease_seconds(self) -> float:
        return self._store.owners.lease_seconds

    async def claim(self, conversation_id: str, tenant: str) -> OwnedElsewhere | None:
        """Claim a conversation; return the owner if another daemon has a valid lease."""
        return await self._claim_in_store_thread(self._store.claim, conversation_id, tenant)

    async def take(self, conversation_id: str, tenant: str) -> OwnedElsewhere | None:
        """Claim a conversation whose owner does not answer, even if the owner's lease is valid.

        Return the owner if it still runs a turn of the conversation.
        """
        return await self._claim_in_store_thread(self._store.take, conversation_id, tenant)

    async def _claim_in_store_thread(
        self, claim: Callable[..., None], conversation_id: str, tenant: str
    ) -> OwnedElsewhere | None:
        def call() -> None:
            claim(conversation_id, tenant=tenant)
            self._store.get_conversation(conversation_id, tenant=tenant)

        try:
            await self._threads.in_store(tenant, call, lane=conversation_id)
        except OwnedElsewhere as owner:
            return owner
        return None


class StaleConversations:
    """Drop the state of conversations that other daemons may have changed."""

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
        store.watch(self._on_stale)

    def _on_stale(self, tenant: str, conversation_id: str) -> None:
        """Called in a store thread when a claim took a conversation from another session."""
        self._history.forget(tenant, conversation_id)
        self._threads.loop.call_soon_threadsafe(self._drop, tenant, conversation_id)

    def _drop(self, tenant: str, conversation_id: str) -> None:
        for live in self._conversations.turns.all_live():
            if (live.tenant, live.conversation_id) == (tenant, conversation_id):
                self._conversations.ends.give_up(live, Unavailable(TAKEN))
        self._engine.try_put(DeleteConversation(cache_key(tenant, conversation_id)))
