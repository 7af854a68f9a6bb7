"""Turns that are about to begin: drafted, tokenized, or waiting for the store thread.

They count like live ones, for the daemon's limit and for their tenant's, since nobody knows yet that they
will be refused.  And a live turn without a reader is not given up while a request for it is on the way.
All of it belongs to the loop.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from pensieve.service.draft import Ask
from pensieve.service.live_turn import LiveTurn


class Arriving:
    def __init__(self) -> None:
        self.num_turns = 0
        self._of_tenant: Counter[str] = Counter()
        self._of_request: Counter[tuple[str, str, str]] = Counter()

    def add(self, ask: Ask) -> None:
        self.num_turns += 1
        self._of_tenant[ask.tenant] += 1
        self._of_request[ask.tenant, ask.conversation_id, ask.request_id] += 1

    def remove(self, ask: Ask) -> None:
        self.num_turns -= 1
        _subtract(self._of_tenant, ask.tenant)
        _subtract(self._of_request, (ask.tenant, ask.conversation_id, ask.request_id))

    def num_of_tenant(self, tenant: str) -> int:
        return self._of_tenant[tenant]

    def expects(self, live: LiveTurn) -> bool:
        """Whether a request for this turn is on the way."""
        return self.has_request(live.tenant, live.conversation_id, live.request_id)

    def has_request(self, tenant: str, conversation_id: str, request_id: str) -> bool:
        return self._of_request[tenant, conversation_id, request_id] > 0


def _subtract(counts: Counter[Any], key: Any) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
