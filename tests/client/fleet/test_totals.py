"""Combined figures: quantiles over all samples, ratios of sums, maxima."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pensieve.api.grpc.admin import _latency
from pensieve.client.fleet.totals import latency_of, once_per_history, tenants_of, total_of
from pensieve.engine.distributions import RecentTimes
from pensieve.v1 import admin_pb2 as pb


@pytest.mark.parametrize("seed", range(20))
def test_combined_quantiles_equal_those_of_all_times_together(seed: int) -> None:
    rng = random.Random(seed)
    several = [RecentTimes() for _ in range(rng.randint(1, 5))]
    together = RecentTimes()
    for _ in range(rng.choice((0, 1, 2, 50, 1000))):
        number = rng.randrange(len(several))
        # Each daemon is slower than the daemon before.
        seconds = rng.lognormvariate(number - 3, 1.5)
        for times in (several[number], together):
            times.add(seconds, 10.0)
    found = latency_of([_latency(times, 20.0) for times in several])
    alone = together.spread(20.0)
    expected = {
        "count": alone.count,
        "p50_seconds": alone.p50,
        "p95_seconds": alone.p95,
        "p99_seconds": alone.p99,
    }
    assert found == expected


def test_combined_quantiles_are_not_means_of_quantiles() -> None:
    quick, slow = RecentTimes(), RecentTimes()
    quick.add(0.01, 0.0, 990)
    slow.add(1.0, 0.0, 10)
    found = latency_of([_latency(each, 1.0) for each in (quick, slow)])
    assert found["p99_seconds"] == pytest.approx(0.01, rel=0.02)
    slow.add(1.0, 0.0, 1)
    found = latency_of([_latency(each, 1.0) for each in (quick, slow)])
    assert found["p99_seconds"] == pytest.approx(1.0, rel=0.02)


def test_the_buckets_of_an_answer_match_its_quantiles() -> None:
    times = RecentTimes()
    for seconds in (0.0, 0.5, 0.5, 2.0):
        times.add(seconds, 0.0)
    answer = _latency(times, 1.0)
    assert [each.count for each in answer.buckets] == [1, 2, 1]
    assert answer.buckets[1].seconds == answer.p50_seconds == pytest.approx(0.5, rel=0.02)
    assert answer.buckets[2].seconds == answer.p99_seconds


def stats(history: str = "", **more: float) -> pb.Stats:
    found = pb.Stats(history=history)
    found.more.update(more)
    return found


def test_combined_shares_are_ratios_of_sums() -> None:
    found = [
        stats(tbt_attained=1.0, tbt_count=90, tbt_objective_seconds=0.2, tbt_p99_seconds=0.1),
        stats(tbt_attained=0.5, tbt_count=10, tbt_objective_seconds=0.2, tbt_p99_seconds=0.9),
    ]
    more: dict[str, Any] = total_of(found)["more"]
    assert more == {"tbt_attained": 0.95, "tbt_count": 100, "tbt_objective_seconds": 0.2}
    found[0].more["tbt_objective_seconds"] = 0.3  # shares for different objectives are not combined
    assert total_of(found)["more"] == {"tbt_count": 100}
    found = [
        stats(tokens_computed=90, tokens_idle=9, rows_padded=10, idle_share=0.19),
        stats(tokens_computed=100, tokens_idle=1, rows_padded=0, idle_share=0.01),
    ]
    assert total_of(found)["more"]["idle_share"] == 0.1


def test_some_figures_are_combined_by_their_maximum() -> None:
    found = [
        stats(queue_wait_seconds=1.0, backup_age_seconds=60.0, erasure_pending=0.0),
        stats(queue_wait_seconds=3.0, erasure_pending=1.0),
    ]
    found[0].service.loop_lag_max_seconds = 0.5
    found[1].service.refusals["QUEUE_FULL"] = 2
    found[0].service.refusals["QUEUE_FULL"] = 1
    total = total_of(found)
    assert total["more"] == {
        "queue_wait_seconds": 3.0,
        "backup_age_seconds": 60.0,
        "erasure_pending": 1.0,
    }
    assert total["service"]["loop_lag_max_seconds"] == 0.5
    assert total["service"]["refusals"] == {"QUEUE_FULL": 3}


def test_tenant_figures_are_added_even_if_the_name_looks_like_a_unit() -> None:
    found = [
        stats("", **{"tenant_tokens.x_seconds": 1, "tenant_tokens.seconds": 2}),
        stats("", **{"tenant_tokens.x_seconds": 3, "tenant_tokens.a_objective_seconds": 4}),
    ]
    assert total_of(found)["more"] == {
        "tenant_tokens.x_seconds": 4,
        "tenant_tokens.seconds": 2,
        "tenant_tokens.a_objective_seconds": 4,
    }


def test_figures_of_a_history_count_once_per_history() -> None:
    assert once_per_history([("h", 5), ("h", 6), ("", 10), ("", 1), ("g", 100)]) == 117
    found = [stats("h", history_problems=2), stats("h", history_problems=2)]
    assert total_of(found)["more"] == {"history_problems": 2}
    answers = [pb.ListTenantsResponse(history="h"), pb.ListTenantsResponse(history="h")]
    answers[0].tenants.add(name="acme", turns=1, stored_bytes=70, prefixes=2, calls=1)
    answers[1].tenants.add(name="acme", turns=2, stored_bytes=71, prefixes=2, unread_bytes=9)
    answers[1].tenants.add(name="beta", turns=1)
    assert tenants_of(answers) == [
        {
            "name": "acme",
            "turns": 3,
            "calls": 1,
            "unread_bytes": 9,
            "stored_bytes": 71,
            "prefixes": 2,
        },
        {
            "name": "beta",
            "turns": 1,
            "calls": 0,
            "unread_bytes": 0,
            "stored_bytes": 0,
            "prefixes": 0,
        },
    ]


def test_totals_of_no_replicas_are_zero() -> None:
    total = total_of([])
    assert (total["num_serving"], total["more"], total["tokens_per_iteration"]) == (0, {}, 0.0)
    assert set(total["first_token"].values()) == {0}
