"""Whether the KV of a conversation that moves is sent to its new home, and when it is there.

What is *fetched*, with the conversation's next turn, is fetched while its old owner answers, and only if that
is through sooner than the new one, alone, would have computed it.  What is *pushed* is sent before anybody
asks, and delays no turn: all of it is sent.
"""

from __future__ import annotations

from pensieve.sim.cluster.network import Links
from pensieve.sim.cluster.replica import Machine, Replica
from pensieve.sim.cluster.tally import Cause
from pensieve.sim.cost import CHUNK_TOKENS


class HandOver:
    def __init__(self, machine: Machine, link_bytes_per_second: float) -> None:
        self._machine = machine
        self.links = Links(link_bytes_per_second) if link_bytes_per_second else None

    def bytes_of(self, tokens: int) -> int:
        """Of whole chunks."""
        whole = -(-tokens // CHUNK_TOKENS) * CHUNK_TOKENS
        return whole * self._machine.cost.kv_bytes_per_token

    def fetched(self, source: Replica, target: str, tokens: int, now: float) -> float:
        """When it is there; 0 if it is not to be had, or sooner computed again."""
        links = self.links
        if links is None or source.gone or 0 < source.answers_until <= now:
            return 0.0
        num_bytes = self.bytes_of(tokens)
        ends = links.ends(source.name, target, num_bytes, now)
        if ends - now >= self._machine.recompute_seconds(tokens):
            return 0.0
        return links.reserve(source.name, target, num_bytes, now)

    def pushed(self, source: Replica, target: str, tokens: int, now: float, cause: Cause) -> float:
        """When it is there."""
        assert self.links is not None, "nothing is sent"
        num_bytes = self.bytes_of(tokens)
        cause.moved += 1
        cause.handed_over += 1
        cause.handed_over_bytes += num_bytes
        return self.links.reserve(source.name, target, num_bytes, now)
