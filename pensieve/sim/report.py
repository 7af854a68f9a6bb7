"""What came of a simulation, as figures and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pensieve.sim.simulator import Counts

COLUMNS = (
    ("policy", "policy", "{}"),
    ("turns", "turns", "{:,}"),
    ("history_tokens", "history tokens", "{:,}"),
    ("recomputed_tokens", "recomputed", "{:,}"),
    ("recompute_cost", "cost", "{:,.0f}"),
    ("saved", "against lru", "{:+.1%}"),
    ("first_token_p50", "first token P50 s", "{:.3f}"),
    ("normalized_p90", "P90 ms/token", "{:.1f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)


def figures(policy: str, counts: Counts) -> dict[str, Any]:
    """One row: plain numbers, None where there is nothing to say."""
    seconds = counts.seconds
    p90 = quantile(counts.latencies, 0.9)
    return {
        "policy": policy,
        "turns": counts.turns,
        "refused": counts.refused,
        "history_tokens": counts.history_tokens,
        "device_tokens": counts.device_tokens,
        "host_tokens": counts.host_tokens,
        "recomputed_tokens": counts.recomputed_tokens,
        "recompute_cost": counts.recompute_cost,
        "input_tokens": counts.input_tokens,
        "output_tokens": counts.output_tokens,
        "iterations": counts.iterations,
        "seconds": seconds,
        "tokens_per_second": counts.output_tokens / seconds if seconds else None,
        "first_token_p50": quantile(counts.first_tokens, 0.5),
        "first_token_p99": quantile(counts.first_tokens, 0.99),
        "normalized_p50": _milliseconds(quantile(counts.latencies, 0.5)),
        "normalized_p90": _milliseconds(p90),
        "gap_p99": _milliseconds(quantile(counts.gaps, 0.99)),
    }


def compared(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to each row how much less recompute cost it has than `lru`, where that is there."""
    base = next((row["recompute_cost"] for row in rows if row["policy"] == "lru"), None)
    for row in rows:
        row["saved"] = (row["recompute_cost"] / base - 1) if base else None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Columns that say something in some row."""
    shown = [each for each in COLUMNS if any(row.get(each[0]) is not None for row in rows)]
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


def quantile(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
