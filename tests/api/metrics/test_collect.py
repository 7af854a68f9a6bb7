"""Samples made from counters: sources add up, and reasons match their turns."""

from __future__ import annotations

import pytest

from pensieve.api.metrics.scrape import Collected, turn_metrics
from pensieve.conversations.live_turn import LiveTurn
from pensieve.conversations.meter import Meter
from pensieve.core.iteration import SampledToken
from pensieve.core.turn import FinishReason, Usage
from pensieve.engine.messages import EngineEvent, TurnEnded


def ended(turn_id: int, **tokens: int) -> TurnEnded:
    return TurnEnded(turn_id, "c", FinishReason.STOP, Usage(**tokens))  # type: ignore[arg-type]  # only counts are given


def by(found: Collected, name: str) -> dict[str, float]:
    return {labels[0]: value for labels, value in found[name]}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("tokens", "sources"),
    [
        ((30, 0, 0), (30, 0, 0)),
        ((30, 20, 0), (30, 20, 0)),
        ((30, 20, 10), (20, 20, 10)),
        ((10, 20, 15), (0, 15, 15)),  # the shared tokens were in both tiers
        ((0, 20, 20), (0, 0, 20)),
    ],
)
def test_each_cached_token_has_one_source(
    tokens: tuple[int, int, int], sources: tuple[int, int, int]
) -> None:
    device, host, shared = tokens
    meter = Meter()
    one = ended(1, new_tokens=5, device_tokens=device, host_tokens=host, shared_tokens=shared)
    meter.engine_events([one], lambda number: None)
    found = turn_metrics(meter)
    assert by(found, "prompt_tokens_cached_by_source_total") == dict(
        zip(("device", "host", "shared"), sources, strict=True)
    )
    assert found["prompt_tokens_cached_total"] == [((), device + host)]
    assert found["prompt_tokens_total"] == [((), 5 + device + host)]
    assert found["external_prefix_cache_queries_total"] == [((), 5 + host)]


def test_source_counters_never_decrease() -> None:
    meter = Meter()
    meter.engine_events([ended(1, device_tokens=50)], lambda number: None)
    before = by(turn_metrics(meter), "prompt_tokens_cached_by_source_total")
    meter.engine_events([ended(2, host_tokens=100, shared_tokens=100)], lambda number: None)
    after = by(turn_metrics(meter), "prompt_tokens_cached_by_source_total")
    assert (before["device"], after) == (50, {"device": 50, "host": 0, "shared": 100})


def test_recomputed_tokens_are_counted_by_the_reason_of_their_turn() -> None:
    live = {
        number: LiveTurn(number, "c", 0, 1, attempt_id=number, recompute_reason=reason)
        for number, reason in ((1, "dropped"), (2, "engine_restarted"), (3, "dropped"))
    }
    meter = Meter()
    events: list[EngineEvent] = [
        SampledToken(1, 7),
        ended(1, recomputed_tokens=100),
        ended(2, recomputed_tokens=20),
        ended(3, recomputed_tokens=3),
        SampledToken(9, 7),
        ended(9, recomputed_tokens=4000),  # the end of a warm
    ]
    meter.engine_events(events, live.get)
    found = turn_metrics(meter)
    assert by(found, "kv_recomputed_tokens_total") == {
        "dropped": 103,
        "engine_restarted": 20,
        "fingerprint_changed": 0,
        "other": 4000,
    }
    assert found["generation_tokens_total"] == [((), 2)]
    assert found["prompt_tokens_total"] == [((), 4123)]
