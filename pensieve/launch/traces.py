"""Export the spans of turns with OpenTelemetry (`--traces`). The usual OTEL_* variables configure it:

    OTEL_TRACES_EXPORTER           otlp (default), console, or another that is installed
    OTEL_EXPORTER_OTLP_PROTOCOL    http/protobuf (default) or grpc; each needs its own package
    OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_*

Exporters are found by their entry points. The span of a turn is created when the turn has ended. A thread of
OpenTelemetry sends spans in batches, and drops spans if its queue is full. So no turn waits for a collector.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points
from typing import Any

from pensieve.conversations.turn_spans import TurnSpan
from pensieve.errors import ConfigError
from pensieve.extras import need

log = logging.getLogger("pensieve")
PURPOSE = "--traces"
ENTRY_POINT_GROUP = "opentelemetry_traces_exporter"
PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
PACKAGES = {
    "otlp_proto_http": "opentelemetry-exporter-otlp-proto-http",
    "otlp_proto_grpc": "opentelemetry-exporter-otlp-proto-grpc",
}
TRACEPARENT_CHARACTERS_MAX = 128
CLOSE_MILLISECONDS = 3_000
INSTANCE_ATTRIBUTE = "service.instance.id"


class Traces:
    """Exports spans. Any thread may call `export`; the daemon calls it in the event loop."""

    def __init__(self, processor: Any, replica: str = "") -> None:
        """`processor` is a span processor of OpenTelemetry. `replica` is the name of this daemon."""
        api = need("otel", "opentelemetry.trace", PURPOSE)
        sdk = need("otel", "opentelemetry.sdk.trace", PURPOSE)
        resources = need("otel", "opentelemetry.sdk.resources", PURPOSE)
        context = need("otel", "opentelemetry.trace.propagation.tracecontext", PURPOSE)
        attributes = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "pensieve"}
        if replica and INSTANCE_ATTRIBUTE not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            attributes[INSTANCE_ATTRIBUTE] = replica
        self._provider = sdk.TracerProvider(resource=resources.Resource.create(attributes))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pensieve")
        self._propagator = context.TraceContextTextMapPropagator()
        self._server, self._error = api.SpanKind.SERVER, api.StatusCode.ERROR

    def export(self, turn: TurnSpan) -> None:
        """Export a span. Errors are logged, because the turn itself has succeeded."""
        try:
            self._export(turn)
        except Exception:
            log.exception("cannot export the span of a turn")

    def close(self) -> None:
        """Send the queued spans, for at most CLOSE_MILLISECONDS."""
        self._provider.force_flush(CLOSE_MILLISECONDS)
        self._provider.shutdown()

    def _export(self, turn: TurnSpan) -> None:
        carrier = {"traceparent": turn.traceparent[:TRACEPARENT_CHARACTERS_MAX]}
        span = self._tracer.start_span(
            turn.name,
            context=self._propagator.extract(carrier),
            kind=self._server,
            attributes=dict(turn.attributes),
            start_time=turn.start_ns,
        )
        for name, at_ns in turn.events:
            span.add_event(name, timestamp=at_ns)
        if turn.failure:
            span.set_status(self._error, turn.failure)
        span.end(end_time=turn.end_ns)


def open_traces(replica: str = "") -> Traces:
    """Open the exporter that the OTEL_* variables configure."""
    export = need("otel", "opentelemetry.sdk.trace.export", PURPOSE)
    return Traces(export.BatchSpanProcessor(_exporter()), replica)


def _exporter() -> Any:
    name = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if name == "otlp":
        given = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "")
        given = given or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "") or "http/protobuf"
        if given not in PROTOCOLS:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL is {given!r}, but must be one of {', '.join(PROTOCOLS)}"
            )
        name = PROTOCOLS[given]
    found = next(iter(entry_points(group=ENTRY_POINT_GROUP, name=name)), None)
    if found is None:
        how = (
            f"pip install {PACKAGES[name]}" if name in PACKAGES else "OTEL_TRACES_EXPORTER names it"
        )
        raise ConfigError(f"{PURPOSE}: no exporter {name!r} is installed ({how})")
    return found.load()()
