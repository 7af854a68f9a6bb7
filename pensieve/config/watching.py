"""The settings of what others watch a daemon by: its name among several, metrics and traces."""

from __future__ import annotations

from pensieve.config.parsing import replica_name, switch
from pensieve.config.setting import Setting, Table

REPLICA = Setting(
    "replica",
    replica_name,
    "",
    "the name of this daemon among several that share a history; a label of its metrics",
    "NAME",
    "watching",
)
WATCHING: Table = (
    REPLICA,
    Setting(
        "metrics",
        str,
        "",
        "serve GET /metrics for Prometheus, and GET /health, there (port 0: any free one); other machines "
        "can reach only what --insecure allows",
        "HOST:PORT",
        "watching",
    ),
    Setting(
        "traces",
        switch,
        "",
        "a span of OpenTelemetry for each turn, exported as the OTEL_* variables say; never text",
        group="watching",
    ),
)
