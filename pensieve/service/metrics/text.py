"""Metrics as text, in Prometheus' exposition format (version 0.0.4).

# HELP name text
# TYPE name counter|gauge|histogram
name{label="value",…} number
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from pensieve.engine.histogram import Histogram
from pensieve.service.metrics.families import Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Value = float | Histogram
Samples = Mapping[str, Sequence[tuple[tuple[str, ...], Value]]]  # by name: label values, value
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def exposition(
    families: Sequence[Family], samples: Samples, prefix: str, common: Mapping[str, str]
) -> Iterator[str]:
    """Lines; a family without samples has its name, type and help all the same."""
    for family in families:
        name = prefix + family.name
        yield f"# HELP {name} {family.help}"
        yield f"# TYPE {name} {family.kind.value}"
        for values, value in samples.get(family.name, ()):
            labels = {**common, **dict(zip(family.labels, values, strict=True))}
            if isinstance(value, Histogram):
                yield from _histogram(name, labels, value)
            else:
                yield f"{name}{_written(labels)} {_number(value)}"


def _histogram(name: str, labels: Mapping[str, str], value: Histogram) -> Iterator[str]:
    counts = list(accumulate(value.counts))
    for bound, count in zip((*value.bounds, math.inf), counts, strict=True):
        yield f"{name}_bucket{_written({**labels, 'le': _number(float(bound))})} {count}"
    yield f"{name}_count{_written(labels)} {counts[-1]}"
    yield f"{name}_sum{_written(labels)} {_number(value.sum)}"


def _written(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(value + 0)  # a bool is a number, too
