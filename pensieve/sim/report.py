"""The figures of a simulation, as a row of plain values and as a table of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pensieve.sim.simulator import Counts

COLUMNS = (
    ("policy", "policy", "{}"),
    ("rate", "rate", "{:g}"),
    ("device_size", "device size", "{:,}"),
    ("host_size", "host size", "{:,}"),
    ("turns", "turns", "{:,}"),
    ("history_tokens", "history tokens", "{:,}"),
    ("recomputed_tokens", "recomputed", "{:,}"),
    ("recompute_cost", "cost", "{:,.0f}"),
    ("saved", "against lru", "{:+.1%}"),
    ("hit_rate", "found", "{:.1%}"),
    ("first_token_p50", "first token P50 s", "{:.3f}"),
    ("normalized_p90", "P90 ms/token", "{:.1f}"),
    ("gap_p99", "P99 gap ms", "{:.1f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)
SWEPT = ("rate", "device_size", "host_size")  # shown where they differ


def figures(policy: str, counts: Counts) -> dict[str, Any]:
    """One row: plain numbers, None where there is no value."""
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


def compared(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to each row by how much its recompute cost differs from that of `lru` in the same setting."""
    bases = {_setting(row): row["recompute_cost"] for row in rows if row["policy"] == "lru"}
    for row in rows:
        base = bases.get(_setting(row))
        row["saved"] = (row["recompute_cost"] / base - 1) if base else None


def _setting(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in SWEPT)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Columns with a value in some row; of what may be swept, only what differs."""
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
