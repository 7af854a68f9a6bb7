"""Prometheus' own client can read the exposition format."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pensieve.api.metrics.families import (
    COUNTER,
    FAMILIES,
    GAUGE,
    HISTOGRAM,
    MetricFamily,
    exposition,
)
from pensieve.engine.distributions import Histogram

ODD = 'a "b" \\ c\nd'


def test_prometheus_parses_the_exposition_format() -> None:
    histogram = Histogram((0.5, 1, 2.5))
    histogram.add(1.0, 2)
    histogram.add(7)
    families = (
        MetricFamily("x_total", COUNTER, "Some."),
        MetricFamily("y", GAUGE, "One.", ("state",)),
        MetricFamily("z_seconds", HISTOGRAM, "Time."),
        MetricFamily("nothing", GAUGE, "None."),
    )
    samples: dict[str, Any] = {
        "x_total": [((), 3)],
        "y": [((ODD,), 0.25), (("up",), True)],
        "z_seconds": [((), histogram)],
    }
    lines = list(exposition(families, samples, "p_", {"model_name": ODD}))
    found = {each.name: each for each in text_string_to_metric_families("\n".join([*lines, ""]))}
    assert [(each.name, each.type) for each in found.values()] == [
        *(("p_x", "counter"), ("p_y", "gauge")),
        *(("p_z_seconds", "histogram"), ("p_nothing", "gauge")),
    ]
    assert [s.labels for s in found["p_y"].samples] == [
        {"model_name": ODD, "state": ODD},
        {"model_name": ODD, "state": "up"},
    ]
    assert [s.value for s in found["p_y"].samples] == [0.25, 1.0]
    buckets = [(s.labels.get("le"), s.value) for s in found["p_z_seconds"].samples]
    assert buckets == [("0.5", 0), ("1.0", 2), ("2.5", 2), ("+Inf", 3), (None, 3), (None, 9)]
    assert found["p_nothing"].samples == []


def test_the_table_of_metrics_is_well_formed() -> None:
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names))
    for family in FAMILIES:
        assert family.help.endswith(".")
        is_total = family.name.endswith("_total")
        # This name comes from vLLM, whose histogram of iterations is named like a counter.
        assert is_total == (family.kind is COUNTER) or family.name == "iteration_tokens_total"
        assert not {"le", "model_name", "engine"} & set(family.labels)
