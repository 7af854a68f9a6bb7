"""Trace spans of turns, with OpenTelemetry's exporters: names, times, parents, and no text of messages."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pensieve.client import Client
from pensieve.conversations import turn_spans
from pensieve.conversations.turn_spans import TurnSpan, TurnSpans
from pensieve.errors import ConfigError
from pensieve.launch import traces
from pensieve.launch.traces import Traces
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import ECHO, DaemonRig, ServeProcess, wait_for

SECRET = "xylophone"
SAMPLING = pb.Sampling(temperature=0.75, top_p=0.5, top_k=7, max_tokens=5, ignore_eos=True)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Watched:
    """A daemon whose spans are recorded."""

    def __init__(self, data: Path) -> None:
        self._exporter = InMemorySpanExporter()
        self.traces = Traces(SimpleSpanProcessor(self._exporter))
        self.rig = DaemonRig(data, program=(*ECHO, "--seconds=0.01"))

    @property
    def spans(self) -> list[Any]:
        return list(self._exporter.get_finished_spans())

    def only(self) -> Any:
        wait_for(lambda: self.spans)
        (span,) = self.spans
        return span


def export_turns(rig: DaemonRig, traces: Traces) -> None:
    spans = TurnSpans(rig.daemon.engine.model_name, traces.export)
    rig.daemon.events.ended.subscribe(spans.turn_ended)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path / "data")
    with found.rig as rig:
        export_turns(rig, found.traces)
        yield found
    found.traces.close()


def test_a_turn_is_a_span_with_opentelemetrys_names_for_generative_ai(watched: Watched) -> None:
    said = watched.rig.ask("trip", "hello", sampling=SAMPLING)
    span = watched.only()
    assert (span.name, span.kind) == ("chat builtin", SpanKind.SERVER)
    assert span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pensieve",
        "gen_ai.request.model": "builtin",
        "gen_ai.request.temperature": 0.75,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.input_tokens": said.completed.usage.new_tokens,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.id": said.started.turn_id,
        "gen_ai.conversation.id": "trip",
        "pensieve.usage.recomputed_tokens": 0,
    }
    assert span.resource.attributes["service.name"] == "pensieve"
    admitted, token = span.events
    assert [admitted.name, token.name] == ["pensieve.admitted", "pensieve.first_token"]
    assert span.start_time <= admitted.timestamp <= token.timestamp <= span.end_time


def test_the_span_of_a_later_turn_has_its_cached_tokens(watched: Watched) -> None:
    watched.rig.ask("trip", "hello", sampling=SAMPLING)
    usage = watched.rig.ask("trip", "again", sampling=SAMPLING).completed.usage
    wait_for(lambda: len(watched.spans) == 2)
    found = watched.spans[1].attributes
    assert found["gen_ai.usage.cache_read.input_tokens"] == usage.device_tokens > 0
    assert found["gen_ai.usage.input_tokens"] == usage.device_tokens + usage.new_tokens


def test_a_span_belongs_to_its_callers_trace(watched: Watched) -> None:
    request = pb.SendMessageRequest(
        conversation_id="trip",
        messages=[pb.NewMessage(content="hello")],
        sampling=SAMPLING,
        create_if_missing=True,
    )
    parent = f"00-{TRACE}-{PARENT}-01"
    list(watched.rig.stub.SendMessage(request, metadata=(("traceparent", parent),)))
    span = watched.only()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT


@pytest.mark.parametrize(
    "given", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01" * 40]
)
def test_an_invalid_traceparent_begins_a_new_trace(watched: Watched, given: str) -> None:
    request = pb.SendMessageRequest(
        conversation_id="trip", messages=[pb.NewMessage(content="hi")], create_if_missing=True
    )
    list(watched.rig.stub.SendMessage(request, metadata=(("traceparent", given),)))
    assert watched.only().parent is None


def test_a_turn_with_an_unsampled_parent_has_no_span(watched: Watched) -> None:
    request = pb.SendMessageRequest(
        conversation_id="trip", messages=[pb.NewMessage(content="hi")], create_if_missing=True
    )
    not_sampled = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
    list(watched.rig.stub.SendMessage(request, metadata=not_sampled))
    watched.rig.ask("trip", "again", sampling=SAMPLING)
    assert watched.only().attributes["gen_ai.request.max_tokens"] == 5


def test_a_failed_turns_span_has_the_reason_and_a_replay_has_no_span(watched: Watched) -> None:
    endless = pb.Sampling(max_tokens=50_000, ignore_eos=True)
    stream = watched.rig.send("trip", "hello", sampling=endless)
    next(stream)
    watched.rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id="trip"))
    with pytest.raises(grpc.RpcError):
        list(stream)
    span = watched.only()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "TURN_INTERRUPTED" == span.status.description
    assert span.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    for _ in range(2):
        watched.rig.ask("other", "hello", sampling=SAMPLING, request_id="same")
    wait_for(lambda: len(watched.spans) == 2)


def test_a_failing_exporter_fails_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = Watched(tmp_path / "data")
    monkeypatch.setattr(found.traces, "_tracer", None)
    with found.rig as rig:
        export_turns(rig, found.traces)
        for _ in range(2):
            assert rig.ask("trip", "hello", sampling=SAMPLING).completed.finish_reason
    assert caplog.text.count("cannot export the span of a turn") == 2


def test_traces_contain_no_text_of_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    process = ServeProcess(tmp_path / "data", "--traces")
    with Client(process.start()) as client:
        talk = client.conversation("trip")
        talk.create(system_prompt=f"{SECRET} one")
        reply = talk.ask(
            f"{SECRET} two",
            max_tokens=9,
            stop=[f"{SECRET} three"],
            metadata={"a": f"{SECRET} four"},
        )
    assert process.stop() == 0
    log = process.log.read_text()
    assert '"chat echo (arithmetic instead of a model)"' in log
    (usage,) = re.findall(r'"gen_ai.usage.output_tokens": (\d+)', log)
    assert int(usage) == reply.usage.output_tokens
    assert '"service.name": "ours"' in log
    assert SECRET not in log
    assert not reply.text or reply.text not in log


def test_no_span_attribute_is_named_for_text() -> None:
    source = inspect.getsource(turn_spans.span_of)
    values = re.findall(r'"((?:gen_ai|pensieve|error)\.[a-z_.]+)"', source)
    assert len(values) == len(set(values)) > 15
    banned = r"message|prompt\b|content|instruction|text|completion"
    assert not [value for value in values if re.search(banned, value)]


def test_without_the_flag_opentelemetry_is_not_even_imported(tmp_path: Path) -> None:
    code = (
        "import sys, pensieve.launch.daemon; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "'otlp_proto_http' is installed .pip install opentelemetry-exporter-otlp-proto-http"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "pip install opentelemetry-exporter-otlp-proto-grpc",
        ),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "smoke"},
            "'smoke', but must be one of http/protobuf, grpc",
        ),
        ({"OTEL_TRACES_EXPORTER": "nobodys"}, "'nobodys' is installed"),
    ],
)
def test_the_error_names_a_missing_exporter(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(traces, "entry_points", lambda **_: ())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        traces.open_traces()


# -- a collector --


class Collector:
    """An OTLP collector over gRPC and HTTP, made with OpenTelemetry's own protocol package."""

    def __init__(self) -> None:
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        grpc_service = pytest.importorskip(
            "opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc"
        )
        self._service, self.raw = service, list[bytes]()
        take, answer = self._take, service.ExportTraceServiceResponse

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.headers["content-type"] == "application/x-protobuf"
                assert self.path == "/v1/traces"
                take(body)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer().SerializeToString())

            def log_message(self, *arguments: Any) -> None:
                """Discard the log."""

        class Servicer(grpc_service.TraceServiceServicer):  # type: ignore[misc, name-defined]
            def Export(self, request: Any, context: Any) -> Any:
                take(request.SerializeToString())
                return answer()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.grpc = grpc.server(ThreadPoolExecutor(2))
        grpc_service.add_TraceServiceServicer_to_server(Servicer(), self.grpc)
        self.grpc_port = self.grpc.add_insecure_port("127.0.0.1:0")
        self.grpc.start()

    def _take(self, raw: bytes) -> None:
        self.raw.append(raw)

    def endpoint(self, protocol: str) -> str:
        port = self.grpc_port if protocol == "grpc" else self.http.server_port
        return f"http://127.0.0.1:{port}"

    @property
    def resources(self) -> list[Any]:
        found = [self._service.ExportTraceServiceRequest.FromString(each) for each in self.raw]
        return [each for request in found for each in request.resource_spans]

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.grpc.stop(None)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_gets_the_spans_by_otlp_and_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    package = "http" if protocol == "http/protobuf" else "grpc"
    pytest.importorskip(f"opentelemetry.exporter.otlp.proto.{package}.trace_exporter")
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint(protocol))
    process = ServeProcess(tmp_path / "data", "--traces")
    with Client(process.start()) as client:
        talk = client.conversation("trip")
        talk.create(system_prompt=f"{SECRET} one")
        replies = [talk.ask(f"{SECRET} {each}", max_tokens=9) for each in ("two", "three")]
    assert process.stop() == 0
    collector.close()
    spans = [
        span
        for each in collector.resources
        for scope in each.scope_spans
        for span in scope.spans
        if span.kind == 2  # SERVER
    ]
    assert len(spans) == 2
    for span, reply in zip(spans, replies, strict=True):
        given = {each.key: each.value for each in span.attributes}
        assert span.name.startswith("chat ")
        assert given["gen_ai.operation.name"].string_value == "chat"
        assert given["gen_ai.conversation.id"].string_value == "trip"
        assert given["gen_ai.usage.output_tokens"].int_value == reply.usage.output_tokens
        assert [each.name for each in span.events] == ["pensieve.admitted", "pensieve.first_token"]
        assert span.start_time_unix_nano < span.end_time_unix_nano
    named = {
        each.key: each.value.string_value for each in collector.resources[0].resource.attributes
    }
    assert named["service.name"] == "pensieve"
    sent = b"".join(collector.raw)
    assert SECRET.encode() not in sent
    for reply in replies:
        assert not reply.text or reply.text.encode() not in sent


def test_spans_name_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    def instance(replica: str) -> Any:
        exporter = InMemorySpanExporter()
        found = Traces(SimpleSpanProcessor(exporter), replica)
        found.export(TurnSpan("chat echo", 1, 2, {}))
        found.close()
        (span,) = exporter.get_finished_spans()
        return span.resource.attributes.get("service.instance.id")

    unnamed = instance("")
    assert unnamed != "replica-1"  # OpenTelemetry sets no name or a random one
    assert instance("replica-1") == "replica-1"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=of-the-operator")
    assert instance("replica-1") == "of-the-operator"
