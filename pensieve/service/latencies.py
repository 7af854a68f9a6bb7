"""How long clients wait for tokens: quantiles of the latest five minutes, and histograms since the start.

All of it belongs to the loop.  Times are those of its clock, when the service has tokens in hand: what the
engine, the pipe and a busy loop take is in them, the network to the client is not.
"""

from __future__ import annotations

from pensieve.engine.histogram import Histogram
from pensieve.engine.recent_times import RecentTimes
from pensieve.service.live_turn import LiveTurn
from pensieve.service.metrics.buckets import FIRST_TOKEN_SECONDS, TOKEN_GAP_SECONDS


class Latencies:
    """Of the turns of all clients."""

    def __init__(self) -> None:
        self.first_token = RecentTimes()  # since a request was admitted
        self.token_gap = RecentTimes()
        self.first_tokens = Histogram(FIRST_TOKEN_SECONDS)
        self.token_gaps = Histogram(TOKEN_GAP_SECONDS)

    def came(self, live: LiveTurn, now: float) -> None:
        """Tokens of a turn, or its end."""
        num_new = live.num_tokens - live.num_timed
        if num_new <= 0:
            return
        if live.num_timed:
            self.token_gap.add(now - live.token_at, now)
            self.token_gaps.add(now - live.token_at)
        else:
            self.first_token.add(now - live.arrived_at, now)
            self.first_tokens.add(now - live.arrived_at)
        if num_new > 1:  # they came together
            self.token_gap.add(0.0, now, num_new - 1)
            self.token_gaps.add(0.0, num_new - 1)
        live.num_timed, live.token_at = live.num_tokens, now
