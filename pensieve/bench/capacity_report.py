"""Report the results of `pensieve bench capacity` as rows, lines, tables and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pensieve.bench.capacity_load import Figures
from pensieve.bench.plot_scale import plain
from pensieve.bench.plots import Sheet
from pensieve.bench.report import Report


@dataclass(frozen=True)
class CapacityRow:
    """The figures of one load on one daemon."""

    scheduling: str
    objective: float
    rate: float
    seed: int
    figures: Figures

    def values(self) -> dict[str, Any]:
        load = {name: getattr(self, name) for name in ("scheduling", "objective", "rate", "seed")}
        return {**load, **asdict(self.figures)}


@dataclass(frozen=True)
class CapacityResult:
    """The highest load of one scheduler that passes with one objective for the P99 gap."""

    scheduling: str
    objective: float
    rate: float  # 0: every tried rate exceeded a limit
    figures: Figures | None
    why: str = ""  # why the rate is 0


def duration_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.3g} s"


def line_of(figures: Figures) -> str:
    unfinished = f", {figures.unfinished} unfinished" if figures.unfinished else ""
    return (
        f"gap P50 {duration_text(figures.gap_p50)}, P99 {duration_text(figures.gap_p99)}; first token P50 "
        f"{duration_text(figures.first_token_p50)}, P99 {duration_text(figures.first_token_p99)}; queue P50 "
        f"{duration_text(figures.queue_p50)}; {figures.tokens_per_second:,.1f} tokens/s "
        f"({figures.turns} turns{unfinished})"
    )


def result_text(found: CapacityResult) -> str:
    subject = f"{found.scheduling} within {duration_text(found.objective)}"
    if found.figures is None:
        return f"{subject}: none ({found.why})"
    return f"{subject}: {found.rate:.3g} conversations/s; {line_of(found.figures)}"


def show_found(found: Sequence[CapacityResult], report: Report) -> None:
    rows = []
    for each in found:
        figures = each.figures
        tokens = f"{figures.tokens_per_second:,.1f}" if figures else "-"
        gap = duration_text(figures.gap_p99 or 0.0) if figures else "-"
        rate = f"{each.rate:.3g}" if figures else "none"
        rows.append((each.scheduling, duration_text(each.objective), rate, tokens, gap))
    columns = ("scheduling", "objective for the P99 gap", "conversations/s", "tokens/s", "P99 gap")
    report.table("The highest load that meets the objectives", columns, rows)


def show_rows(
    rows: Sequence[CapacityRow], compared: Iterable[tuple[str, str]], report: Report
) -> None:
    """Print a row for each scheduler and objective, over all seeds.

    Then print ratios for each pair of schedulers in `compared`. Each ratio compares two runs with the same
    objective and seed.
    """
    table = []
    for name, objective in dict.fromkeys((row.scheduling, row.objective) for row in rows):
        selected = [
            row.figures for row in rows if (row.scheduling, row.objective) == (name, objective)
        ]
        table.append(
            (
                name,
                duration_text(objective),
                median_and_range([each.gap_p50 for each in selected]),
                median_and_range([each.gap_p99 for each in selected]),
                median_and_range([each.attained for each in selected], "{:.1%}".format),
                median_and_range([each.first_token_p50 for each in selected]),
                median_and_range([each.first_token_p99 for each in selected]),
                median_and_range([each.tokens_per_second for each in selected], "{:,.1f}".format),
            )
        )
    columns = ("scheduling", "objective", "gap P50", "gap P99", "attained")
    report.table("One load", (*columns, "first token P50", "first token P99", "tokens/s"), table)
    for name, other in compared:
        ours = [row for row in rows if row.scheduling == name]
        pairs = [
            (mine, theirs.figures)
            for mine in ours
            for theirs in rows
            if (theirs.scheduling, theirs.objective, theirs.seed)
            == (other, mine.objective, mine.seed)
        ]
        if pairs:
            gaps = [(a.figures.gap_p99 or 0.0) / (b.gap_p99 or math.nan) for a, b in pairs]
            speeds = [a.figures.tokens_per_second / b.tokens_per_second for a, b in pairs]
            objective_ratios = [(a.figures.gap_p99 or 0.0) / a.objective for a, _ in pairs]
            report.line(
                f"{name} over {other}: P99 gap {median_and_range(gaps, _ratio)}, tokens/s "
                f"{median_and_range(speeds, _ratio)}; P99 gap relative to the objective "
                f"{median_and_range(objective_ratios, _ratio)}"
            )


def median_and_range(
    values: Sequence[float | None], format_value: Callable[[float], str] = duration_text
) -> str:
    """Return the median, and the minimum and maximum if they differ."""
    known = [each for each in values if each is not None]
    if not known:
        return "-"
    least, most, middle = (
        format_value(each) for each in (min(known), max(known), statistics.median(known))
    )
    return middle if least == most else f"{middle} ({least} to {most})"


def _ratio(value: float) -> str:
    return f"{value:.2f} x"


def plot(rows: Sequence[CapacityRow], path: Path, facts: Sequence[str]) -> None:
    """Draw the P99 gap over the load: a line per scheduler, and a horizontal line per objective."""
    sheet = Sheet("Time between tokens over the load", facts, width=5.0)
    rates = sorted({row.rate for row in rows})
    panel = sheet.panel(
        "P99 of the gaps between tokens", "conversations per second", "seconds", swept=rates
    )
    for name in dict.fromkeys(row.scheduling for row in rows):
        by_rate: dict[float, list[float]] = {}
        for row in rows:
            if row.scheduling == name and row.figures.gap_p99 is not None:
                by_rate.setdefault(row.rate, []).append(row.figures.gap_p99)
        if by_rate:
            points = sorted(by_rate.items())
            panel.line(
                name,
                [rate for rate, _ in points],
                [statistics.median(gaps) for _, gaps in points],
                [min(gaps) for _, gaps in points],
                [max(gaps) for _, gaps in points],
            )
    for objective in sorted({row.objective for row in rows}):
        panel.horizontal_line(f"objective {plain(objective)} s", objective)
    sheet.save(path)
