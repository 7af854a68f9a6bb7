"""Draw the results of `pensieve simulate`: one sheet for a whole sweep.

The first plots show the compared figures over the parameter with the most values (a rate, or the size of a
tier), with a line per policy. Each combination of the other parameters has its own row. The other plots show
each simulation of the first seed over time: how full the tiers were, and how many turns ran and waited.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pensieve.bench.plot_scale import plain
from pensieve.bench.plots import Sheet
from pensieve.sim.report import repeats_by_point

Row = dict[str, Any]
SECONDS_PER_HOUR = 3600
SWEPT = {
    "rate": "conversations per second",
    "device_size": "device tier (tokens)",
    "host_size": "host tier (tokens)",
}
SETTING_TEXTS = {"rate": "{}/s", "device_size": "device {}", "host_size": "host {}"}
FILE = "simulate.png"
SETTINGS_OVER_TIME_MAX = 4  # settings that are drawn over time
WIDTH = 3.0  # inches, of each panel
SHARE_MOST = 100.0  # percent


class _Measure:
    """One figure of a row; None if the row has no such figure."""

    def __init__(
        self, title: str, value_of: Callable[[Row], float | None], most: float | None = None
    ) -> None:
        self.title, self.value_of, self.most = title, value_of, most

    def spread(self, repeats: Sequence[Row]) -> tuple[float, float, float]:
        """Return the median, minimum and maximum over the seeds."""
        values = [value for row in repeats if (value := self.value_of(row)) is not None]
        if not values:
            return (float("nan"),) * 3
        return statistics.median(values), min(values), max(values)


def draw(rows: Sequence[Row], facts: Iterable[str], folder: Path) -> Path:
    return sheet(rows, facts).save(folder / FILE)


def sheet(rows: Sequence[Row], facts: Iterable[str]) -> Sheet:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    tried = {key: sorted({row[key] for row in rows if row[key] is not None}) for key in SWEPT}
    swept = max(tried, key=lambda key: len(tried[key]))
    varied = [key for key in SWEPT if len(tried[key]) > 1]
    fixed = [_setting_text(key, values[0]) for key, values in tried.items() if len(values) == 1]
    compared = (
        f"Eviction policies {', '.join(policies)}" if len(policies) > 1 else f"Policy {policies[0]}"
    )
    parameters = (
        f" by {' and '.join(SWEPT[key].split(' (')[0] for key in varied)}" if varied else ""
    )
    result = Sheet(f"{compared}{parameters}", [*facts, *fixed, *_repeat_facts(rows)], WIDTH)
    measures = _measures(rows)
    if varied:
        _draw_sweep(
            result, rows, policies, swept, [key for key in varied if key != swept], measures
        )
    elif len(policies) > 1 or len(rows) > 1:
        _draw_bars(result, rows, measures)
    _draw_over_time(result, rows, policies, varied)
    return result


def _repeat_facts(rows: Sequence[Row]) -> list[str]:
    if len({row["seed"] for row in rows}) == 1:
        return []
    return ["medians; bands and whiskers: minimum to maximum over the seeds"]


def _measures(rows: Sequence[Row]) -> list[_Measure]:
    def recomputed_percent(row: Row) -> float | None:
        return None if row["hit_rate"] is None else 100 * (1 - row["hit_rate"])

    found = [_Measure("Recomputed history (%)", recomputed_percent, SHARE_MOST)]
    if any(row.get("saved") is not None for row in rows) and len({r["policy"] for r in rows}) > 1:
        found.append(
            _Measure(
                "Recompute cost / cost with lru",
                lambda row: None if row.get("saved") is None else 1 + row["saved"],
            )
        )
    timed = any(row["normalized_p90"] for row in rows)
    if timed:
        found += [
            _Measure("Output tokens per second", lambda row: row["tokens_per_second"]),
            _Measure("P90 of a turn's time per token (ms)", lambda row: row["normalized_p90"]),
        ]
    return found


def _draw_sweep(
    result: Sheet,
    rows: Sequence[Row],
    policies: Sequence[str],
    swept: str,
    others: Sequence[str],
    measures: Sequence[_Measure],
) -> None:
    tried = sorted({row[swept] for row in rows})
    for values in product(*(sorted({row[key] for row in rows}) for key in others)):
        setting_rows = [
            row for row in rows if all(row[k] == v for k, v in zip(others, values, strict=True))
        ]
        result.row(", ".join(map(_setting_text, others, values)))
        for measure in measures:
            panel = result.panel(
                measure.title, SWEPT[swept], swept=tried, most=measure.most, y_group=measure.title
            )
            for policy in policies:
                groups = [
                    each for each in repeats_by_point(setting_rows) if each[0]["policy"] == policy
                ]
                groups.sort(key=lambda repeats: float(repeats[0][swept]))
                middle, least, most = zip(*map(measure.spread, groups), strict=True)
                panel.line(policy, [each[0][swept] for each in groups], middle, least, most)


def _draw_bars(result: Sheet, rows: Sequence[Row], measures: Sequence[_Measure]) -> None:
    groups = repeats_by_point(rows)
    for number, measure in enumerate(measures):
        if number % 2 == 0:
            result.row()
        middle, least, most = zip(*map(measure.spread, groups), strict=True)
        panel = result.panel(measure.title, "")
        panel.bars([each[0]["policy"] for each in groups], middle, least, most)


def _draw_over_time(
    result: Sheet, rows: Sequence[Row], policies: Sequence[str], varied: Sequence[str]
) -> None:
    """Draw the figures over time: a column per policy, and two rows per setting."""
    drawn = [repeats[0] for repeats in repeats_by_point(rows) if "series" in repeats[0]]
    settings = list(dict.fromkeys(tuple(row[key] for key in varied) for row in drawn))
    shown = (
        settings
        if len(settings) <= SETTINGS_OVER_TIME_MAX
        else _evenly_spaced(settings, SETTINGS_OVER_TIME_MAX)
    )
    for number, setting in enumerate(shown):
        setting_rows = [row for row in drawn if tuple(row[key] for key in varied) == setting]
        subset_text = f" ({len(shown)} of {len(settings)} settings)" * (len(settings) > len(shown))
        heading = ", ".join(map(_setting_text, varied, setting)) or "Over time"
        if varied and not number:
            heading = f"Over time{subset_text}: {heading}"
        if setting_rows[0]["seed"] is not None:
            heading += f" (seed {setting_rows[0]['seed']})"
        result.row(heading)
        for row in setting_rows:
            _draw_tiers(result, row, policies)
        result.row()
        for row in setting_rows:
            _draw_turns(result, row, policies)


def _evenly_spaced(values: Sequence[Any], count: int) -> list[Any]:
    """Return the first, the last, and evenly spaced values between them."""
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _times(series: dict[str, Any]) -> tuple[list[float], str]:
    seconds = series["seconds"]
    if seconds and seconds[-1] > 2 * SECONDS_PER_HOUR:
        return [each / SECONDS_PER_HOUR for each in seconds], "hours"
    return seconds, "seconds"


def _numbers(values: Sequence[float | None], scale: float = 1.0) -> list[float]:
    """Replace missing values by NaN, which are drawn as gaps."""
    return [float("nan") if each is None else each * scale for each in values]


def _draw_tiers(result: Sheet, row: Row, policies: Sequence[str]) -> None:
    series = row["series"]
    times, unit = _times(series)
    title = f"{row['policy']}: fill of the tiers" if len(policies) > 1 else "Fill of the tiers"
    panel = result.panel(title, unit, "% of the tier", most=SHARE_MOST, height=1.2)
    device_only, clean = _numbers(series["device"], 100), _numbers(series["clean"], 100)
    both = [a + b for a, b in zip(device_only, clean, strict=True)]
    panel.area("device: without a host copy", times, [0.0] * len(times), device_only)
    panel.area("device: can be freed at once", times, device_only, both)
    if row["host_size"]:
        panel.line("host", times, _numbers(series["host"], 100), marked=False)


def _draw_turns(result: Sheet, row: Row, policies: Sequence[str]) -> None:
    series = row["series"]
    times, unit = _times(series)
    title = f"{row['policy']}: turns" if len(policies) > 1 else "Turns"
    panel = result.panel(title, unit, "turns, mean", height=1.2, y_group="turns")
    panel.line("running", times, _numbers(series["running"]), marked=False)
    panel.line("waiting", times, _numbers(series["queued"]), marked=False)


def _setting_text(key: str, value: float) -> str:
    return SETTING_TEXTS[key].format(plain(value))
