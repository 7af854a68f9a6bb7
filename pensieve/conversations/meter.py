"""Count turns since the daemon's start, and measure how long clients wait.

The counts continue when the engine process is restarted:

    engine_events  the engine published events: tokens, and ends of turns (also of jobs' turns and warms)
    turn_ended     a client's turn has ended, and its end is in the history
    refused        a request for a turn was refused

If vLLM has a histogram with the same meaning, the histogram here has the same bounds. Everything belongs to
the event loop, except `commits`, which the writer of the history increments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pensieve.conversations.live_turn import LiveTurn, RecomputeReason
from pensieve.core.iteration import SampledToken
from pensieve.core.turn import FinishReason, Usage
from pensieve.engine.distributions import Histogram, RecentTimes
from pensieve.engine.messages import EngineEvent, TurnEnded
from pensieve.errors import PensieveError

OTHER = "other"  # recomputed for a warm, a job or a turn that was given up
RECOMPUTE_REASONS = (*(each.value for each in RecomputeReason), OTHER)
OUTCOMES = tuple(each.value for each in FinishReason if each is not FinishReason.WARMED)

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
TURN_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TURN_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
COMMIT_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)


class Meter:
    def __init__(self) -> None:
        self.usage = Usage()  # the sum over everything that the engine has ended
        self.generation_tokens = 0
        self.recomputed = dict.fromkeys(RECOMPUTE_REASONS, 0)  # tokens
        self.sources = {"device": 0, "host": 0, "shared": 0}  # cached tokens
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.rejections = Counter[str]()
        self.turn_seconds = Histogram(TURN_SECONDS)
        self.queue_seconds = Histogram(TURN_SECONDS)
        self.prefill_seconds = Histogram(TURN_SECONDS)
        self.decode_seconds = Histogram(TURN_SECONDS)
        self.prompt_tokens = Histogram(TURN_TOKENS)
        self.output_tokens = Histogram(TURN_TOKENS)
        self.commits = Histogram(COMMIT_SECONDS)

    def engine_events(
        self, events: Sequence[EngineEvent], turn_of: Callable[[int], LiveTurn | None]
    ) -> None:
        """Count events. `turn_of` must find live turns by attempt_id, also turns that these events end."""
        num_tokens = 0
        for event in events:
            if isinstance(event, SampledToken):
                num_tokens += 1
            elif isinstance(event, TurnEnded):
                self._add(event.usage, turn_of(event.attempt_id))
        self.generation_tokens += num_tokens

    def turn_ended(self, live: LiveTurn, now: float) -> None:
        if live.finish is not None:
            self.outcomes[live.finish.value] += 1
        figures = live.figures
        if not figures or live.failure is not None:
            return
        queue, first = figures["queue_seconds"], figures["first_token_seconds"]
        self.turn_seconds.add(now - live.accepted_at)
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
        # Tokens that another conversation had computed count as shared, whatever their tier.
        device = usage.device_tokens - usage.shared_tokens
        self.sources["device"] += max(device, 0)
        self.sources["host"] += usage.host_tokens + min(device, 0)
        self.sources["shared"] += usage.shared_tokens
        if usage.recomputed_tokens:
            reason = live.recompute_reason if live is not None else OTHER
            self.recomputed[reason or OTHER] += usage.recomputed_tokens


class Latencies:
    """Measure the seconds until tokens come: quantiles of the latest five minutes, and histograms.

    The time is taken when the service has the tokens, so the network to the client does not count.
    """

    def __init__(self) -> None:
        self.first_token = RecentTimes()  # since the daemon accepted the request
        self.token_gap = RecentTimes()
        self.first_tokens = Histogram(FIRST_TOKEN_SECONDS)
        self.token_gaps = Histogram(TOKEN_GAP_SECONDS)

    def tokens_arrived(self, live: LiveTurn, now: float) -> None:
        """Record that new tokens of a turn have come."""
        num_new = live.num_tokens - live.num_timed
        if num_new <= 0:
            return
        if live.num_timed:
            self.token_gap.add(now - live.token_at, now)
            self.token_gaps.add(now - live.token_at)
        else:
            self.first_token.add(now - live.accepted_at, now)
            self.first_tokens.add(now - live.accepted_at)
        if num_new > 1:  # they came together
            self.token_gap.add(0.0, now, num_new - 1)
            self.token_gaps.add(0.0, num_new - 1)
        live.num_timed, live.token_at = live.num_tokens, now
