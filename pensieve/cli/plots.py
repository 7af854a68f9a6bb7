"""Drawing, for the benches: matplotlib, if it is there."""

from __future__ import annotations

from typing import Any

from pensieve.errors import ConfigError


def axes(width: float = 7.0, height: float = 4.5) -> tuple[Any, Any]:
    """A figure to save, and its axes."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--plot needs matplotlib: install the extra `bench`") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, drawn = pyplot.subplots(figsize=(width, height), layout="constrained")
    return figure, drawn
