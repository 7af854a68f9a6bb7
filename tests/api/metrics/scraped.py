"""A scrape of a real daemon, read by Prometheus' own client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.conversations.rig_daemon import DaemonRig


class Scraped:
    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {each.name: each for each in text_string_to_metric_families(text)}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def get(self, name: str, **labels: str) -> float:
        """Return the only sample with this name and these labels."""
        (value,) = [
            value
            for (other, of_sample), value in self.samples.items()
            if other == name and labels.items() <= dict(of_sample).items()
        ]
        return value

    def by(self, name: str, label: str) -> Mapping[str, float]:
        """Return the samples of a metric by a label."""
        return {
            dict(labels)[label]: value
            for (other, labels), value in self.samples.items()
            if other == name
        }

    @property
    def counters(self) -> dict[Any, float]:
        """Return all values that must never fall."""
        rising = {
            sample.name
            for family in self.families.values()
            if family.type in ("counter", "histogram")
            for sample in family.samples
        }
        return {key: value for key, value in self.samples.items() if key[0] in rising}


def scrape(rig: DaemonRig) -> Scraped:
    return Scraped(rig.call(rig.server._scrape.text()))
