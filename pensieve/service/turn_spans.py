"""A turn that has ended, as a span of OpenTelemetry: a plain value, which launch/traces.py exports.

    arrived_at ──tokenizing, store── begun_at ──queue── admitted ──prompt── first token ──reply── end

Times are those of the loop, put on the wall clock when the turn ends; those between are the engine's,
counted from `begun_at`.  A span has ids, options, counts and times, and nothing that anybody said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pensieve.core.turn import FinishReason
from pensieve.service import trace_names as names
from pensieve.service.live_turn import LiveTurn

Attribute = str | int | float | tuple[str, ...]
FINISH_WORDS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.FAILED: "error",
}
SECOND_NS = 1_000_000_000


class TurnSpan(NamedTuple):
    """Times are nanoseconds since 1970."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    events: tuple[tuple[str, int], ...] = ()  # what happened, and when
    traceparent: str = ""  # the caller's span, as it said it
    failure: str = ""  # the reason, where there is no reply


def span_of(live: LiveTurn, model: str, now: float, wall_now: float) -> TurnSpan:
    """Of a turn that ends `now` by the loop's clock, and `wall_now` by the wall's."""

    def wall_ns(at: float) -> int:
        return int((wall_now - now + at) * SECOND_NS)

    attributes: dict[str, Attribute] = {
        names.OPERATION_NAME: names.OPERATION,
        names.PROVIDER_NAME: names.SYSTEM,
        names.REQUEST_MODEL: model,
        names.CONVERSATION_ID: live.conversation_id,
        names.RESPONSE_ID: str(live.turn_id),
        names.OUTPUT_TOKENS: live.num_tokens,
    }
    if live.ask is not None:
        sampling = live.ask.options.sampling
        attributes |= {
            names.TEMPERATURE: sampling.temperature,
            names.TOP_P: sampling.top_p,
            names.TOP_K: sampling.top_k,
            names.MAX_TOKENS: sampling.max_tokens,
        }
    if live.tenant:
        attributes[names.TENANT] = live.tenant
    if live.finish is not None:
        attributes[names.FINISH_REASONS] = (FINISH_WORDS[live.finish],)
    failure = live.failure.reason if live.failure is not None else ""
    if failure:
        attributes[names.ERROR_TYPE] = failure
    events: list[tuple[str, int]] = []
    if figures := live.figures:
        attributes |= {
            names.INPUT_TOKENS: figures["prompt_tokens"],
            names.CACHED_TOKENS: figures["device_tokens"] + figures["host_tokens"],
            names.RECOMPUTED_TOKENS: figures["recomputed_tokens"],
        }
        events.append((names.ADMITTED, wall_ns(live.begun_at + figures["queue_seconds"])))
        if live.num_tokens:
            first = live.begun_at + figures["first_token_seconds"]
            events.append((names.FIRST_TOKEN, wall_ns(first)))
    return TurnSpan(
        f"{names.OPERATION} {model}",
        wall_ns(live.arrived_at),
        wall_ns(now),
        attributes,
        tuple(events),
        live.ask.traceparent if live.ask is not None else "",
        failure,
    )
