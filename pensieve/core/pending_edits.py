"""Rewinds and evictions of conversations, some of which wait for the end of a turn.

The pages of a turn that has ended or was suspended stay its own until its last slice is committed
(scheduler.py).  Until then its conversation is neither cut nor evicted: what is to be done is noted, the
deepest cut and the latest eviction, and `carry_out` does it.  The log is cut at once: nobody may build on
the rest.
"""

from __future__ import annotations

from pensieve.core.cache import KVCache


class PendingEdits:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._cuts: dict[str, int] = {}  # how much is to stay
        self._evictions: dict[str, bool] = {}  # whether to the host

    def rewind(self, conversation_id: str, num_tokens: int, now: float) -> None:
        conversation = self._cache.conversations.get(conversation_id)
        if conversation is not None and conversation.turn_id is not None:
            cut = self._cuts.get(conversation_id, num_tokens)
            self._cuts[conversation_id] = min(cut, num_tokens)
            conversation.log = conversation.log[:num_tokens]
        else:
            self._cache.rewind(conversation_id, num_tokens, now)

    def evict(self, conversation_id: str, to_host: bool, now: float, waits: bool) -> int:
        """How many chunks go, as far as it is known now."""
        if waits:
            self._evictions[conversation_id] = to_host
            chunks = self._cache.conversations[conversation_id].chunks()
            return sum(chunk.resident for chunk in chunks)
        evict = self._cache.move_to_host if to_host else self._cache.evict
        return evict(conversation_id, now)

    def carry_out(self, conversation_id: str, now: float) -> None:
        """A turn has given up its pages; if no other holds the conversation, what has waited is done."""
        conversation = self._cache.conversations.get(conversation_id)
        if conversation is not None and conversation.turn_id is not None:
            return
        if (cut := self._cuts.pop(conversation_id, None)) is not None:
            self._cache.rewind(conversation_id, cut, now)
        if (to_host := self._evictions.pop(conversation_id, None)) is not None:
            self.evict(conversation_id, to_host, now, waits=False)
