"""Read and write a cost model as a JSON file.

The costs come from a fit to a journal or from a profile. Simulations and starting daemons read them.

The file is one JSON object. `cost` has the numbers of `CostModel` by name. `chunks` has the measured cost of
recomputing a chunk, if any. `measured_with` says what a profile measured, and when. `errors` has the errors
of the predictions. Other fields (found and assumed numbers) are for people and are not read back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.core.cost import CostProfile, Points
from pensieve.errors import ConfigError
from pensieve.sim.cost import CostModel
from pensieve.sim.fit import Fit

VERSION = 2
READABLE_VERSIONS = (1, 2)  # version 1 has no points and no chunks
SECONDS = (
    "dense_seconds_per_token",
    "dense_seconds_min",
    "attention_seconds_per_pair",
    "attention_seconds_per_key",
    "overhead_seconds",
)
POINTS = ("dense_points", "decode_points")
COUNTS = ("layers", "kv_bytes_per_token")


class CostFile(NamedTuple):
    """The contents of a file of costs."""

    cost: CostModel
    measured_with: dict[str, Any]  # model, machine and versions of a profile; empty for a fit
    errors: dict[str, Any]  # on held-out iterations, by kind


def fit_text(fit: Fit) -> str:
    """Return the text of a file with the results of a fit."""
    return text_of(
        fit.cost,
        {
            "errors": [each._asdict() for each in fit.errors],
            "found": fit.found,
            "assumed": fit.assumed,
        },
    )


def text_of(cost: CostModel, facts: Mapping[str, Any]) -> str:
    link = cost.link_bytes_per_second
    given: dict[str, Any] = {
        "version": VERSION,
        "source": cost.source,
        "cost": {
            **{name: getattr(cost, name) for name in (*SECONDS, *COUNTS)},
            "link_bytes_per_second": link if math.isfinite(link) else None,
            **{name: points for name in POINTS if (points := getattr(cost, name))},
        },
    }
    if cost.chunk_costs is not None:
        tokens, profile = cost.chunk_costs
        given["chunks"] = {
            "tokens": tokens,
            "attention_seconds": profile.attention_seconds,
            "other_seconds": profile.other_seconds,
            "copy_seconds": profile.copy_seconds,
        }
    return json.dumps({**given, **facts}, indent=2)


def read(text: str) -> CostModel:
    """Return the costs. Raises ValueError with the problem."""
    return parsed(text).cost


def parsed(text: str) -> CostFile:
    """Return the contents of the file. Raises ValueError with the problem."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(given, dict) or not isinstance(given.get("cost"), dict):
        raise ValueError("is not a file that `pensieve profile` or `pensieve simulate --fit` wrote")
    if given.get("version") not in READABLE_VERSIONS:
        known = " and ".join(map(str, READABLE_VERSIONS))
        raise ValueError(f"version {given.get('version')} is unknown; this release reads {known}")
    cost = given["cost"]
    unknown = sorted(set(cost) - {*SECONDS, *COUNTS, *POINTS, "link_bytes_per_second"})
    if unknown:
        raise ValueError(f"cost.{unknown[0]} is unknown")
    seconds = {name: _number(cost, name) for name in SECONDS}
    if not seconds["dense_seconds_per_token"]:
        raise ValueError(
            "cost.dense_seconds_per_token must be above 0: every token takes some time"
        )
    counts = {name: _number(cost, name) for name in COUNTS}
    for name, value in counts.items():
        if value < 1 or value != int(value):
            raise ValueError(f"cost.{name} must be a whole number of at least 1, not {value:g}")
    link = math.inf
    if cost.get("link_bytes_per_second") is not None:
        link = _number(cost, "link_bytes_per_second")
        if not link:
            raise ValueError(
                "cost.link_bytes_per_second must be above 0 (null: copies take no time)"
            )
    source, measured_with = given.get("source"), given.get("measured_with", {})
    if not isinstance(source, str):
        raise ValueError("source must be a string")
    if not isinstance(measured_with, dict):
        raise ValueError("measured_with must be an object")
    points = {name: _points("cost", cost, name) if name in cost else () for name in POINTS}
    model = CostModel(
        **seconds,
        tile_tokens=1,
        dense_points=points["dense_points"],
        decode_points=points["decode_points"],
        layers=int(counts["layers"]),
        kv_bytes_per_token=int(counts["kv_bytes_per_token"]),
        link_bytes_per_second=link,
        source=source,
        chunk_costs=_chunks(given["chunks"]) if "chunks" in given else None,
    )
    errors = given.get("errors")
    by_kind = {
        str(each.get("kind")): each
        for each in (errors if isinstance(errors, list) else [])
        if isinstance(each, dict)
    }
    return CostFile(model, measured_with, by_kind)


def _chunks(given: Any) -> tuple[int, CostProfile]:
    if not isinstance(given, dict):
        raise ValueError("chunks must be an object")
    tokens = _number(given, "tokens", "chunks")
    if tokens < 1 or tokens != int(tokens):
        raise ValueError(f"chunks.tokens must be a whole number of at least 1, not {tokens:g}")
    return int(tokens), CostProfile(
        _points("chunks", given, "attention_seconds"),
        _number(given, "other_seconds", "chunks"),
        measured=True,
        copy_seconds=_number(given, "copy_seconds", "chunks"),
    )


def _points(section: str, given: dict[str, Any], name: str) -> Points:
    value = given.get(name)
    if not isinstance(value, list) or not all(
        isinstance(each, list) and len(each) == 2 and isinstance(each[0], int) for each in value
    ):
        raise ValueError(f"{section}.{name} must be a list of pairs of a count and seconds")
    return tuple((count, _number({name: seconds}, name, section)) for count, seconds in value)


def _number(given: dict[str, Any], name: str, section: str = "cost") -> float:
    if name not in given:
        raise ValueError(f"{section}.{name} is missing")
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{section}.{name} must be a number of at least 0, not {value!r}")
    return float(value)


def load(path: Path) -> CostModel:
    """Return the costs of a file that `save` or a profile wrote."""
    return load_all(path).cost


def load_all(path: Path) -> CostFile:
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def save(fit: Fit, path: Path) -> None:
    """Write a fit to a file that `load` reads."""
    try:
        path.write_text(fit_text(fit) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
