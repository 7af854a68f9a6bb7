"""Describe a turn that has ended as an OpenTelemetry span. launch/traces.py exports the spans.

    accepted_at ──tokenizing, store── begun_at ──queue── admitted ──prompt── first token ──reply── end

The event loop's times are mapped to the wall clock when the turn ends. Times between `begun_at` and the end
are the engine's, counted from `begun_at`. A span has ids, options, counts and times, but no text. Its names
follow OpenTelemetry's conventions for generative AI, which are still changing. Our own names begin with
`pensieve.`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pensieve.conversations.daemon_config import Sources
from pensieve.conversations.live_turn import LiveTurn
from pensieve.core.turn import FinishReason

Attribute = str | int | float | tuple[str, ...]
SECOND_NS = 1_000_000_000


class TurnSpan(NamedTuple):
    """A span. Times are nanoseconds since 1970."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    events: tuple[tuple[str, int], ...] = ()  # name and time of each
    traceparent: str = ""  # the caller's span, as the caller sent it
    failure: str = ""  # why there is no reply


class TurnSpans:
    """Make a span of each turn that ends; subscribed to `TurnEvents.ended` while spans are exported."""

    def __init__(
        self,
        model: str,
        export: Callable[[TurnSpan], None],
        sources: Sources | None = None,
    ) -> None:
        self._model, self._export = model, export
        self._wall_clock = (sources or Sources()).wall_clock

    def turn_ended(self, live: LiveTurn, now: float) -> None:
        self._export(span_of(live, self._model, now, self._wall_clock()))


def span_of(live: LiveTurn, model: str, now: float, wall_now: float) -> TurnSpan:
    """Make the span of a turn that ends `now` by the loop's clock and at `wall_now` by the wall clock."""

    def wall_ns(at: float) -> int:
        return int((wall_now - now + at) * SECOND_NS)

    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pensieve",
        "gen_ai.request.model": model,
        "gen_ai.conversation.id": live.conversation_id,
        "gen_ai.response.id": str(live.turn_id),
        "gen_ai.usage.output_tokens": live.num_tokens,
    }
    if live.request is not None:
        sampling = live.request.options.sampling
        attributes |= {
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.max_tokens": sampling.max_tokens,
        }
    if live.tenant:
        attributes["pensieve.tenant"] = live.tenant
    if live.finish is not None:
        word = "error" if live.finish is FinishReason.FAILED else live.finish.value
        attributes["gen_ai.response.finish_reasons"] = (word,)
    failure = live.failure.reason if live.failure is not None else ""
    if failure:
        attributes["error.type"] = failure
    events: list[tuple[str, int]] = []
    if figures := live.figures:
        attributes |= {
            "gen_ai.usage.input_tokens": figures["prompt_tokens"],
            "gen_ai.usage.cache_read.input_tokens": figures["device_tokens"]
            + figures["host_tokens"],
            "pensieve.usage.recomputed_tokens": figures["recomputed_tokens"],
        }
        events.append(("pensieve.admitted", wall_ns(live.begun_at + figures["queue_seconds"])))
        if live.num_tokens:
            first = live.begun_at + figures["first_token_seconds"]
            events.append(("pensieve.first_token", wall_ns(first)))
    return TurnSpan(
        f"chat {model}",
        wall_ns(live.accepted_at),
        wall_ns(now),
        attributes,
        tuple(events),
        live.request.traceparent if live.request is not None else "",
        failure,
    )
