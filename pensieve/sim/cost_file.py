"""Reads and writes a cost model as a JSON file.

Costs are fitted to one journal, and serve many simulations.

One JSON object: the numbers of `CostModel` by name under `cost`, and beside it facts about the fit for people
(errors, what was found, what was only assumed), which are not read back.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError
from pensieve.sim.cost import CostModel
from pensieve.sim.fit import Fit

VERSION = 1
SECONDS = (
    "dense_seconds_per_token",
    "dense_seconds_min",
    "attention_seconds_per_pair",
    "attention_seconds_per_key",
    "overhead_seconds",
)
COUNTS = ("layers", "kv_bytes_per_token")


def written(fit: Fit) -> str:
    """The text of the file."""
    cost = {name: getattr(fit.cost, name) for name in (*SECONDS, *COUNTS)}
    link = fit.cost.link_bytes_per_second
    return json.dumps(
        {
            "version": VERSION,
            "source": fit.cost.source,
            "cost": {**cost, "link_bytes_per_second": link if math.isfinite(link) else None},
            "errors": [each._asdict() for each in fit.errors],
            "found": fit.found,
            "assumed": fit.assumed,
        },
        indent=2,
    )


def read(text: str) -> CostModel:
    """Raises ValueError that names what is wrong."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(given, dict) or not isinstance(given.get("cost"), dict):
        raise ValueError("is not a file that `pensieve simulate --fit` wrote")
    if given.get("version") != VERSION:
        raise ValueError(f"is of version {given.get('version')}; this reads {VERSION}")
    cost = given["cost"]
    unknown = sorted(set(cost) - {*SECONDS, *COUNTS, "link_bytes_per_second"})
    if unknown:
        raise ValueError(f"cost.{unknown[0]} is unknown")
    seconds = {name: _number(cost, name) for name in SECONDS}
    if not seconds["dense_seconds_per_token"]:
        raise ValueError("cost.dense_seconds_per_token is above 0: every token takes something")
    counts = {name: _number(cost, name) for name in COUNTS}
    for name, value in counts.items():
        if value < 1 or value != int(value):
            raise ValueError(f"cost.{name} is a whole number of at least 1, not {value:g}")
    link = math.inf
    if cost.get("link_bytes_per_second") is not None:
        link = _number(cost, "link_bytes_per_second")
        if not link:
            raise ValueError("cost.link_bytes_per_second is above 0 (null: copies take no time)")
    source = given.get("source")
    if not isinstance(source, str):
        raise ValueError("source is a text")
    return CostModel(
        **seconds,
        layers=int(counts["layers"]),
        kv_bytes_per_token=int(counts["kv_bytes_per_token"]),
        link_bytes_per_second=link,
        source=source,
    )


def _number(cost: dict[str, Any], name: str) -> float:
    if name not in cost:
        raise ValueError(f"cost.{name} is missing")
    value = cost[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"cost.{name} is a number of at least 0, not {value!r}")
    return float(value)


def load(path: Path) -> CostModel:
    """The costs of a file that `save` wrote."""
    try:
        return read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} {error}") from error


def save(fit: Fit, path: Path) -> None:
    """The file that `load` reads."""
    try:
        path.write_text(written(fit) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
