"""Draws figures of benches and of the simulator with matplotlib, if it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError
from pensieve.extras import need

SECONDS_PER_HOUR = 3600


def matplotlib() -> None:
    """Make sure of it."""
    need("bench", "matplotlib", "--plot").use("Agg")


def axes(width: float = 7.0, height: float = 4.5) -> tuple[Any, Any]:
    """A figure to save, and its axes."""
    matplotlib()
    from matplotlib import pyplot

    figure, drawn = pyplot.subplots(figsize=(width, height), layout="constrained")
    return figure, drawn


def save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot draw {path}: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)
    return path


# -- what `pensieve simulate` draws --


def simulated(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Two plots over time of each row that has a series, and one of each thing that was swept."""
    paths = []
    for number, row in enumerate(rows, 1):
        if "series" in row:
            name = f"{number:02d}-{row['policy']}" if len(rows) > 1 else row["policy"]
            paths.append(_tiers(row, folder / f"tiers-{name}.png"))
            paths.append(_iterations(row, folder / f"iterations-{name}.png"))
    if len({row["rate"] for row in rows}) > 1:
        paths.append(_latency(rows, folder / "latency.png"))
    for key, title in (("device_size", "device"), ("host_size", "host")):
        if len({row[key] for row in rows}) > 1:
            paths.append(_hits(rows, key, title, folder / f"hits-{title}.png"))
    return paths


def _times(series: dict[str, Any]) -> tuple[list[float], str]:
    seconds = series["seconds"]
    if seconds and seconds[-1] > 2 * SECONDS_PER_HOUR:
        return [each / SECONDS_PER_HOUR for each in seconds], "hours"
    return seconds, "seconds"


def _numbers(values: Sequence[float | None]) -> list[float]:
    """A gap is drawn where nothing happened."""
    return [float("nan") if each is None else each for each in values]


def _tiers(row: dict[str, Any], path: Path) -> Path:
    series = row["series"]
    times, unit = _times(series)
    figure, drawn = axes()
    device, clean = _numbers(series["device"]), _numbers(series["clean"])
    both = [a + b for a, b in zip(device, clean, strict=True)]
    drawn.fill_between(times, 0, device, label="device: in use, or nowhere else")
    drawn.fill_between(
        times, device, both, alpha=0.5, label="device: may be taken, the host has it"
    )
    drawn.plot(times, _numbers(series["host"]), color="black", label="host")
    drawn.set(xlabel=unit, ylabel="share of the tier", ylim=(0, 1.02), title=_title(row))
    drawn.legend(loc="lower right")
    return save(figure, path)


def _iterations(row: dict[str, Any], path: Path) -> Path:
    series = row["series"]
    times, unit = _times(series)
    figure, drawn = axes()
    drawn.plot(times, _numbers(series["tokens"]), label="tokens per iteration")
    drawn.plot(times, _numbers(series["running"]), label="turns running")
    drawn.plot(times, _numbers(series["queued"]), label="turns waiting")
    drawn.set(xlabel=unit, ylabel="mean", title=_title(row))
    drawn.set_ylim(bottom=0)
    drawn.legend()
    return save(figure, path)


def _latency(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    figure, drawn = axes()
    for label, line in _lines(rows, ("policy", "device_size", "host_size")).items():
        line = [row for row in line if row["normalized_p90"] is not None]
        drawn.plot(
            [row["tokens_per_second"] for row in line],
            [row["normalized_p90"] for row in line],
            marker="o",
            label=label,
        )
    drawn.set(
        xlabel="throughput (output tokens per second)",
        ylabel="P90 normalized latency (ms per token)",
        yscale="log",
    )
    drawn.legend()
    return save(figure, path)


def _hits(rows: Sequence[dict[str, Any]], key: str, title: str, path: Path) -> Path:
    figure, drawn = axes()
    others = [each for each in ("policy", "rate", "device_size", "host_size") if each != key]
    for label, line in _lines(rows, others).items():
        line = sorted(line, key=lambda row: row[key])
        drawn.plot(
            [row[key] for row in line],
            [100 * (row["hit_rate"] or 0.0) for row in line],
            marker="o",
            label=label,
        )
    drawn.set(xlabel=f"{title} tier (tokens)", ylabel="history found (%)")
    drawn.set_ylim(bottom=0)
    drawn.legend()
    return save(figure, path)


def _lines(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Rows that differ in one thing only, by what they have in common."""
    varying = [key for key in keys if key == "policy" or len({row[key] for row in rows}) > 1]
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        label = ", ".join(_named(key, row[key]) for key in varying)
        lines.setdefault(label, []).append(row)
    return lines


def _named(key: str, value: Any) -> str:
    if key == "policy":
        return str(value)
    return f"{key.removesuffix('_size')} {value:,}"


def _title(row: dict[str, Any]) -> str:
    parts = [row["policy"]]
    if row.get("rate") is not None:
        parts.append(f"{row['rate']:g} conversations a second")
    return ", ".join(parts)
