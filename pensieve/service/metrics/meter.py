"""What is counted as turns go, since the daemon's start: it outlives the engine process.

    took         what the engine says: a token, the end of a turn (also of a job's, and of a warm)
    turn_ended   the end of a client's turn, when it is in the history
    refused      a turn that was not admitted

A token costs an addition here and a bisection in latencies.py.  All of it belongs to the loop, but for
`commits`, which the writer of the history adds to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pensieve.core.iteration import SampledToken
from pensieve.core.turn import FinishReason, Usage
from pensieve.engine.histogram import Histogram
from pensieve.engine.messages import Event, TurnEnded
from pensieve.errors import PensieveError
from pensieve.service.live_turn import LiveTurn, RecomputeReason
from pensieve.service.metrics.buckets import COMMIT_SECONDS, TURN_SECONDS, TURN_TOKENS

OTHER = "other"  # recomputed for a warm, a job or a turn that was given up
RECOMPUTE_REASONS = (*(each.value for each in RecomputeReason), OTHER)
OUTCOMES = tuple(each.value for each in FinishReason if each is not FinishReason.WARMED)


class Meter:
    def __init__(self) -> None:
        self.usage = Usage()  # of all that the engine has ended, added up
        self.generation_tokens = 0
        self.recomputed = dict.fromkeys(RECOMPUTE_REASONS, 0)  # tokens
        self.sources = {"device": 0, "host": 0, "shared": 0}  # tokens that were cached
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.rejections = Counter[str]()
        self.turn_seconds = Histogram(TURN_SECONDS)
        self.queue_seconds = Histogram(TURN_SECONDS)
        self.prefill_seconds = Histogram(TURN_SECONDS)
        self.decode_seconds = Histogram(TURN_SECONDS)
        self.prompt_tokens = Histogram(TURN_TOKENS)
        self.output_tokens = Histogram(TURN_TOKENS)
        self.commits = Histogram(COMMIT_SECONDS)

    def took(self, events: Sequence[Event], turn_of: Callable[[int], LiveTurn | None]) -> None:
        """`turn_of` knows the live turns by their numbers, also those that these events end."""
        num_tokens = 0
        for event in events:
            if isinstance(event, SampledToken):
                num_tokens += 1
            elif isinstance(event, TurnEnded):
                self._add(event.usage, turn_of(event.turn_id))
        self.generation_tokens += num_tokens

    def turn_ended(self, live: LiveTurn, now: float) -> None:
        if live.finish is not None:
            self.outcomes[live.finish.value] += 1
        figures = live.figures
        if not figures or live.failure is not None:
            return
        queue, first = figures["queue_seconds"], figures["first_token_seconds"]
        self.turn_seconds.add(now - live.arrived_at)
        self.queue_seconds.add(queue)
        self.prefill_seconds.add(first - queue)
        self.decode_seconds.add(figures["total_seconds"] - first)
        self.prompt_tokens.add(figures["prompt_tokens"])
        self.output_tokens.add(figures["output_tokens"])

    def refused(self, error: PensieveError) -> None:
        self.rejections[error.reason] += 1

    def _add(self, usage: Usage, live: LiveTurn | None) -> None:
        total = self.usage
        total.new_tokens += usage.new_tokens
        total.device_tokens += usage.device_tokens
        total.host_tokens += usage.host_tokens
        total.recomputed_tokens += usage.recomputed_tokens
        total.shared_tokens += usage.shared_tokens
        # What another conversation had computed counts as shared, wherever it lay.
        device = usage.device_tokens - usage.shared_tokens
        self.sources["device"] += max(device, 0)
        self.sources["host"] += usage.host_tokens + min(device, 0)
        self.sources["shared"] += usage.shared_tokens
        if usage.recomputed_tokens:
            reason = live.recompute_reason if live is not None else OTHER
            self.recomputed[reason or OTHER] += usage.recomputed_tokens
