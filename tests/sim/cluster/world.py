"""A small cluster of a slow made-up machine, with short conversations."""

from __future__ import annotations

from typing import Any

from pensieve.sim.cluster.cluster import Cluster, Setting
from pensieve.sim.cluster.conversations import Talk
from pensieve.sim.cluster.replica import Machine
from pensieve.sim.cluster.script import parse
from tests.scripts.made_up import CHAT, COST

MACHINE = Machine(COST, 64_000, 64_000, "return", 256, 64)
TALK = Talk(CHAT, 4.0, seed=3)


def cluster(events: str = "", talk: Talk = TALK, **more: Any) -> Cluster:
    values: dict[str, Any] = {
        "replicas": 8,
        "simulated": 0,
        "seconds": 60.0,
        "lease_seconds": 2.0,
        "drain_seconds": 15.0,
        "restart_seconds": 5.0,
        "active_seconds": 60.0,
    }
    return Cluster(Setting(MACHINE, talk, parse(events), **{**values, **more}))
