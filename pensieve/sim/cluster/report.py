"""The figures of a simulated cluster, as plain values and as tables of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pensieve.sim.cluster.cluster import Cluster
from pensieve.sim.cluster.limits import (
    CALLS_END,
    CALLS_FIRST,
    TOKEN_BYTES,
    history_rows,
    region_row,
)

Row = dict[str, Any]


def result(
    cluster: Cluster, store_rates: Sequence[float], round_trips: Sequence[float]
) -> dict[str, Any]:
    """For JSON."""
    setting, tally, links = cluster.setting, cluster.tally, cluster.links
    rows = [phase.row() for phase in tally.phases]
    seconds = sum(row["to"] - row["from"] for row in rows)
    rate = sum(row["turns"] for row in rows) / seconds
    peak = max(row["turns_per_second_peak"] for row in rows)
    moved = sum(cause.moved for cause in tally.causes.values())
    recomputed = sum(cause.recomputed_tokens for cause in tally.causes.values())
    return {
        "replicas": setting.replicas,
        "simulated": min(setting.simulated, setting.replicas),
        "bound": setting.bound,
        "phases": rows,
        "causes": [cause.row() for cause in tally.causes.values()],
        "refused": tally.refused,
        "moved": moved,
        "log_bytes_moved": TOKEN_BYTES * recomputed,
        "network": {
            "gigabits_per_second": 8e-9 * setting.link_bytes_per_second,
            "handed_over": links.count if links else 0,
            "gigabytes": links.num_bytes / 1e9 if links else 0.0,
            "peak_gigabits_per_second": links.peak_bits_per_second() / 1e9 if links else 0.0,
            "kv_bytes_per_token": setting.machine.cost.kv_bytes_per_token,
        },
        "history": {
            "turns_per_second": rate,
            "turns_per_second_peak": peak,
            "calls_per_second": rate * (CALLS_FIRST + CALLS_END),
            "stores": history_rows(rate, peak, setting.replicas, list(store_rates)),
            "regions": [region_row(each) for each in round_trips],
        },
    }


def text(found: dict[str, Any]) -> Iterator[str]:
    yield from _spreads(found["phases"])
    yield ""
    yield from _latencies(found["phases"])
    yield ""
    yield from _causes(found)
    yield ""
    yield from _history(found)


def _spreads(rows: Sequence[Row]) -> Iterator[str]:
    yield "the fullest replica over the mean: with the bound | by hash alone"
    yield (
        f"{'phase':<26}{'replicas':>9}{'conversations':>15}{'turns/s':>9}{'conversations':>17}"
        f"{'turns':>15}{'tokens':>15}"
    )
    for row in rows:
        pairs = [
            f"{_ratio(row[f'{name}_spread'])} | {_ratio(row[f'{name}_spread_plain'])}"
            for name in ("conversations", "turns", "tokens")
        ]
        yield (
            f"{row['phase'][:25]:<26}{row['replicas']:>9,}{row['conversations']:>15,.0f}"
            f"{row['turns_per_second']:>9,.0f}{pairs[0]:>17}{pairs[1]:>15}{pairs[2]:>15}"
        )


def _latencies(rows: Sequence[Row]) -> Iterator[str]:
    yield "first tokens, of the replicas that are simulated, and what moves made all replicas compute again"
    yield (
        f"{'phase':<26}{'turns':>8}{'P50 ms':>9}{'P99 ms':>9}{'moved':>8}{'P50 ms':>9}{'P99 ms':>9}"
        f"{'tokens again':>14}"
    )
    for row in rows:
        yield (
            f"{row['phase'][:25]:<26}{row['measured_turns']:>8,}{_ms(row['ttft_p50']):>9}"
            f"{_ms(row['ttft_p99']):>9}{row['moved_measured']:>8,}{_ms(row['moved_ttft_p50']):>9}"
            f"{_ms(row['moved_ttft_p99']):>9}{row['recomputed_tokens']:>14,}"
        )


def _causes(found: dict[str, Any]) -> Iterator[str]:
    yield "moved conversations, and why"
    yield (
        f"{'cause':<30}{'replicas':>9}{'had':>9}{'lost':>7}{'moved':>9}{'tokens again':>14}"
        f"{'KV sent':>9}{'GB':>9}"
    )
    for row in found["causes"]:
        yield (
            f"{row['cause'][:29]:<30}{row['replicas']:>9,}{row['owned']:>9,}{row['running']:>7,}"
            f"{row['moved']:>9,}{row['recomputed_tokens']:>14,}{row['handed_over']:>9,}"
            f"{row['handed_over_gigabytes']:>9,.1f}"
        )
    network = found["network"]
    if network["gigabits_per_second"]:
        yield (
            f"(had: conversations active of late; lost: turns that ran, and are run again; KV is sent over "
            f"{network['gigabits_per_second']:g} Gb/s a host where that is sooner than computing it: at most "
            f"{network['peak_gigabits_per_second']:.1f} Gb/s of a host in one second)"
        )


def _history(found: dict[str, Any]) -> Iterator[str]:
    history, replicas = found["history"], found["replicas"]
    yield (
        f"the history: {history['turns_per_second']:,.0f} turns/s of {replicas:,} replicas, "
        f"{history['turns_per_second_peak']:,} in the busiest second; "
        f"{history['calls_per_second']:,.0f} calls/s of the store"
    )
    for row in history["stores"]:
        carries = "any number" if row["replicas"] is None else f"{row['replicas']:,} such replicas"
        yield (
            f"  a store of {row['store_turns_per_second']:,.0f} turns/s carries {carries}; "
            f"{replicas:,} need {row['shards']:,} of it, {row['shards_at_peak']:,} in that second"
        )
    for row in history["regions"]:
        yield (
            f"  {1000 * row['round_trip_seconds']:g} ms away: first tokens "
            f"{1000 * row['first_token_seconds']:g} ms later, of moved conversations "
            f"{1000 * row['first_token_moved_seconds']:g}; ends {1000 * row['completed_seconds']:g}"
        )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.0f}"
