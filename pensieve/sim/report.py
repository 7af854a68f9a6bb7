"""Format the figures of a simulation as a row of plain values and as a text table.

Rows that differ only in their seed are repeats. The table shows their medians in one line. It also shows the
range of the differences between a policy's cost and the cost of lru (negative: the policy costs less).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from pensieve.sim.simulator import SimulationFigures

COLUMNS = (
    ("policy", "policy", "{}"),
    ("rate", "rate", "{:g}"),
    ("device_size", "device size", "{:,.0f}"),
    ("host_size", "host size", "{:,.0f}"),
    ("turns", "turns", "{:,.0f}"),
    ("history_tokens", "history tokens", "{:,.0f}"),
    ("recomputed_tokens", "recomputed", "{:,.0f}"),
    ("recompute_cost", "cost", "{:,.0f}"),
    ("saved_shown", "cost against lru", "{}"),
    ("hit_rate", "hit rate", "{:.1%}"),
    ("first_token_p50", "first token P50 s", "{:.3f}"),
    ("normalized_p90", "P90 ms/token", "{:.1f}"),
    ("gap_p99", "P99 gap ms", "{:.1f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)
SWEPT = ("rate", "device_size", "host_size")  # shown only if they differ
SAVED = "{:+.1%}"


def figures(policy: str, counts: SimulationFigures) -> dict[str, Any]:
    """Return one row of plain numbers; None where there is no value."""
    seconds = counts.seconds
    found = counts.device_tokens + counts.host_tokens
    known = found + counts.recomputed_tokens
    return {
        "policy": policy,
        "turns": counts.turns,
        "refused": counts.refused,
        "history_tokens": counts.history_tokens,
        "device_tokens": counts.device_tokens,
        "host_tokens": counts.host_tokens,
        "recomputed_tokens": counts.recomputed_tokens,
        "recompute_cost": counts.recompute_cost,
        "hit_rate": found / known if known else None,
        "input_tokens": counts.input_tokens,
        "output_tokens": counts.output_tokens,
        "iterations": counts.iterations,
        "seconds": seconds,
        "tokens_per_second": counts.delivered_tokens / seconds if seconds else None,
        "first_token_p50": counts.first_tokens.quantile(0.5),
        "first_token_p99": counts.first_tokens.quantile(0.99),
        "normalized_p50": _milliseconds(counts.latencies.quantile(0.5)),
        "normalized_p90": _milliseconds(counts.latencies.quantile(0.9)),
        "gap_p99": _milliseconds(counts.gaps.quantile(0.99)),
    }


def add_savings(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row how its recompute cost differs from the cost of `lru` in the same setting."""
    bases = {_setting(row): row["recompute_cost"] for row in rows if row["policy"] == "lru"}
    for row in rows:
        base = bases.get(_setting(row))
        row["saved"] = (row["recompute_cost"] / base - 1) if base else None


def why_equal(rows: Sequence[dict[str, Any]]) -> str:
    """Return why all policies have equal figures, if nothing was evicted; else an empty string."""
    if len({row["policy"] for row in rows}) == 1 or any(row["recomputed_tokens"] for row in rows):
        return ""
    return (
        "the policies are equal because nothing was evicted: all of this load fits into the tiers. "
        "Smaller tiers (like --device-tokens 100k --host-tokens 0) or a higher --rate show a difference"
    )


def _setting(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in (*SWEPT, "seed"))


def repeats_by_point(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group the repeats of each point, in the order of the points."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        point = tuple(row.get(key) for key in ("policy", *SWEPT, "stateless", "phases"))
        groups.setdefault(point, []).append(row)
    return list(groups.values())


def _median(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the repeats as one row, with the range of savings in words."""
    row = dict(repeats[0])
    for key in row:
        values = [each[key] for each in repeats]
        if all(isinstance(each, int | float) for each in values):
            row[key] = statistics.median(values)
    saved = [each["saved"] for each in repeats if each.get("saved") is not None]
    if saved:
        row["saved_shown"] = SAVED.format(statistics.median(saved))
        if len(saved) > 1:
            row["saved_shown"] += f" ({SAVED.format(min(saved))} to {SAVED.format(max(saved))})"
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the columns that have values; swept columns only if they differ."""
    rows = [_median(repeats) for repeats in repeats_by_point(rows)]
    shown = [
        each
        for each in COLUMNS
        if any(row.get(each[0]) is not None for row in rows)
        and (each[0] not in SWEPT or len({row.get(each[0]) for row in rows}) > 1)
    ]
    lines = [[title for _, title, _ in shown]]
    for row in rows:
        lines.append(
            [form.format(row[key]) if row.get(key) is not None else "-" for key, _, form in shown]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(shown))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
