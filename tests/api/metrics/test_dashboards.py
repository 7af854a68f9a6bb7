"""The dashboard and alerts use metrics and labels that a real scrape has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pensieve.api.metrics.families import FAMILIES as OF_DAEMON
from pensieve.conversations.daemon_config import BackupConfig, DaemonConfig
from pensieve.jobs.plugin import FAMILIES as OF_JOBS
from pensieve.jobs.worker import JobsConfig
from tests.api.metrics.promql import Named, names_in
from tests.api.metrics.scraped import Scraped, scrape
from tests.conversations.rig_daemon import DaemonRig

FAMILIES = (*OF_DAEMON, *OF_JOBS)
DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = json.loads((DOCS / "grafana" / "pensieve.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((DOCS / "alerts" / "pensieve.rules.yaml").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
OF_PROMETHEUS = {"instance", "job", "le"}
OF_ALL = {"model_name", "engine", "replica"}


def expressions() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for each in DASHBOARD["annotations"]["list"]:
        yield each["name"], each["expr"]
    for each in DASHBOARD["templating"]["list"]:
        if each["type"] == "query":
            yield each["name"], each["query"]["query"]
    for rule in ALERTS:
        yield rule["alert"], rule["expr"]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Scraped:
    folder = tmp_path_factory.mktemp("dashboards")
    config = DaemonConfig(grace_seconds=0.2, backup=BackupConfig(folder / "backup"), replica="a")
    with DaemonRig(folder / "data", config=config, batch_jobs=JobsConfig()) as rig:
        rig.ask("a", "one")
        return scrape(rig)


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expressions_use_only_metrics_and_labels_of_a_scrape(
    scraped: Scraped, where: str, expression: str
) -> None:
    found = names_in(expression)
    assert found.metrics, expression
    assert expression.count("(") == expression.count(")")
    labels: set[str] = set()
    for metric in found.metrics:
        base = re.sub(r"_(bucket|sum|count)$", "", metric)
        assert re.search(rf"^# TYPE {base} ", scraped.text, re.MULTILINE) or re.search(
            rf"^# TYPE {metric} ", scraped.text, re.MULTILINE
        ), f"{where}: there is no {metric}"
        (family,) = (f for f in FAMILIES if f"pensieve_{f.name}" in (metric, base))
        labels |= {*OF_ALL, *family.labels}
    assert found.labels <= labels | OF_PROMETHEUS, f"{where}: {found.labels - labels}"


def test_expressions_rate_counters_and_histograms_but_no_gauges() -> None:
    """A rate of a gauge, or a counter without a rate, is a mistake that still shows a curve."""
    kinds = {f"pensieve_{each.name}": each.kind.value for each in FAMILIES}
    for where, expression in expressions():
        for metric, kind in kinds.items():
            for match in re.finditer(rf"(\w+\()?{metric}(_bucket|_sum|_count)?\b", expression):
                rated = match[1] in ("rate(", "increase(")
                is_counted = kind == "counter" or bool(match[2])
                assert rated == is_counted, f"{where}: {match[0]}"


def test_promql_metrics_and_labels_are_found() -> None:
    assert names_in(
        'sum by (le, a) (rate(x_total{b="y{", c!~"z"}[5m])) / w > 0.5 and on (d) deriv(v[1h])'
    ) == (Named(frozenset({"x_total", "w", "v"}), frozenset({"le", "a", "b", "c", "d"})))
    assert names_in("label_values(x, model)") == Named(frozenset({"x"}), frozenset({"model"}))
    with pytest.raises(AssertionError, match="rat in"):
        names_in("rat(x)")


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) > 40
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert [row["title"] for row in DASHBOARD["panels"] if row["type"] == "row"] == [
        *("Overview", "Latency", "Cache", "Recompute", "Copies", "Queue"),
        *("History and service process", "Batch jobs and tenants", "Replicas"),
    ]
    for panel in PANELS:
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references))
        assert panel["datasource"]["uid"] == "${datasource}"


def test_legends_name_labels_that_their_expressions_keep() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), panel["title"]


def test_each_alert_has_a_name_a_severity_and_a_summary() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(names) == len(set(names))
    for rule in ALERTS:
        assert re.fullmatch(r"Pensieve[A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        text = json.dumps(rule["annotations"])
        used: set[Any] = set(re.findall(r"\$labels\.(\w+)", text))
        kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
        assert used <= kept, rule["alert"]


def test_the_dashboard_filters_by_replica_and_includes_unnamed_daemons(
    scraped: Scraped,
) -> None:
    of_all = {frozenset(dict(labels)) & OF_ALL for _, labels in scraped.samples}
    assert of_all == {frozenset(OF_ALL)}
    (variable,) = (each for each in DASHBOARD["templating"]["list"] if each["name"] == "replica")
    assert re.fullmatch(variable["allValue"], "")  # a missing label counts as ""
    for panel in PANELS:
        for target in panel["targets"]:
            selectors = re.findall(r"pensieve_\w+(\{[^}]*\})?", target["expr"])
            assert selectors, panel["title"]
            assert all('replica=~"$replica"' in each for each in selectors), panel["title"]
