"""The metrics listener: answers, permissions, and limits."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pensieve.api.grpc.server import Server
from pensieve.api.metrics import listener
from pensieve.errors import AddressInUse, ConfigError
from pensieve.guard.callers import Token, new_token, tokens_of
from pensieve.guard.exposure import Listening
from pensieve.v1 import admin_pb2
from tests.api.metrics.scraped import Scraped
from tests.conversations.rig_daemon import DaemonRig, wait_for

GET = "GET {} HTTP/1.1\r\nHost: here\r\n{}\r\n"


@contextmanager
def daemon(data: Path, address: str = "127.0.0.1:0", **more: object) -> Iterator[DaemonRig]:
    listening = Listening("127.0.0.1:0", data / "admin.sock", metrics=address, **more)  # type: ignore[arg-type]
    with DaemonRig(data, listening=listening) as rig:
        yield rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DaemonRig]:
    with daemon(tmp_path / "data") as rig:
        yield rig


def connect(rig: DaemonRig) -> socket.socket:
    port = int(rig.server.metrics_address.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=30.0)


def read_all(connection: socket.socket) -> bytes:
    got = b""
    while piece := connection.recv(1 << 16):
        got += piece
    return got


def ask(rig: DaemonRig, request: str | bytes) -> tuple[int, dict[str, str], str]:
    """Send a request. Return status, headers and body."""
    with connect(rig) as connection:
        connection.sendall(request.encode() if isinstance(request, str) else request)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert int(headers["Content-Length"]) == len(body)
    assert headers["Connection"] == "close"
    return int(first.split()[1]), headers, body.decode()


def get(rig: DaemonRig, path: str, more: str = "") -> tuple[int, dict[str, str], str]:
    return ask(rig, GET.format(path, more))


def test_prometheus_can_read_the_metrics(rig: DaemonRig) -> None:
    rig.ask("a", "one")
    status, headers, text = get(rig, "/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert sum(Scraped(text).by("pensieve_turns_total", "outcome").values()) == 1
    assert get(rig, "/metrics?from=here")[0] == 200


def test_health_reports_whether_the_daemon_serves(rig: DaemonRig) -> None:
    assert get(rig, "/health")[::2] == (200, "serving\n")
    rig.daemon.draining = True
    assert get(rig, "/health")[::2] == (503, "not serving\n")


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (GET.format("/", ""), 404),
        (GET.format("/metrics/x", ""), 404),
        (GET.format("http://here/metrics", ""), 404),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi", 405),
        ("HEAD /health HTTP/1.1\r\n\r\n", 405),
        ("GET /metrics\r\n\r\n", 400),
        ("GET /metrics HTTP/2\r\n\r\n", 400),
        ("GET  /metrics HTTP/1.1\r\n\r\n", 400),
        ("GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", 400),
        ("GET /metrics HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"\xff\xfe\x00 \r\n\r\n", 400),
        ("GET /metrics HTTP/1.1\r\nA: " + "x" * listener.HEADER_BYTES_MAX + "\r\n\r\n", 431),
    ],
)
def test_unsupported_requests_are_refused(
    rig: DaemonRig, request_text: str | bytes, status: int
) -> None:
    assert ask(rig, request_text)[0] == status
    assert get(rig, "/health")[0] == 200


def test_silent_clients_are_disconnected_and_too_many_clients_are_refused(
    rig: DaemonRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "SECONDS_MAX", 3.0)
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 3)
    silent = [connect(rig) for _ in range(3)]
    wait_for(lambda: len(rig.server._metrics._tasks) == 3)
    with connect(rig) as crowded:
        assert b" 503 " in read_all(crowded)
    for each in silent:
        with each:
            assert each.recv(1) == b""
    wait_for(lambda: not rig.server._metrics._tasks)
    assert get(rig, "/metrics")[0] == 200


def test_a_disconnect_during_a_request_breaks_nothing(rig: DaemonRig) -> None:
    for text in (b"", b"GET /met", GET.format("/metrics", "").encode()):
        with connect(rig) as connection:
            connection.sendall(text)
    wait_for(lambda: not rig.server._metrics._tasks)
    assert get(rig, "/metrics")[0] == 200


def make_token(tenant: str, *, admin: bool) -> tuple[str, Token]:
    token, entry = new_token(tenant, admin)
    (parsed,) = tokens_of(Path("tokens.toml"), entry.encode())
    return token, parsed


def test_other_machines_need_an_operators_token(tmp_path: Path) -> None:
    operator, first = make_token("", admin=True)
    client, second = make_token("acme", admin=False)
    audit_log = tmp_path / "audit.jsonl"
    more = {"tokens": (first, second), "insecure": True, "audit_log": audit_log}
    with daemon(tmp_path / "data", "0.0.0.0:0", **more) as rig:
        status, headers, _ = get(rig, "/metrics")
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        bearer = "Authorization: Bearer {}\r\n"
        assert get(rig, "/metrics", bearer.format(client))[0] == 401
        assert get(rig, "/metrics", bearer.format(operator[:-1]))[0] == 401
        assert get(rig, "/metrics", bearer.format(operator))[0] == 200
        assert get(rig, "/health")[0] == 200
    lines = [json.loads(line) for line in audit_log.read_text().splitlines()]
    refused = [line for line in lines if line.get("method") == "metrics"]
    assert [line["reason"] for line in refused] == ["UNAUTHENTICATED"] * 3
    assert refused[0]["peer"].startswith("ipv4:127.0.0.1:")


def test_local_scrapes_need_no_token(tmp_path: Path) -> None:
    _, token = make_token("", admin=True)
    with daemon(tmp_path / "data", tokens=(token,)) as rig:
        assert get(rig, "/metrics")[0] == 200


@pytest.mark.parametrize("address", ["0.0.0.0:9100", "example.com:9100", "[::]:9100"])
def test_other_machines_can_connect_only_with_insecure(address: str) -> None:
    with pytest.raises(ConfigError, match="is reachable from other machines"):
        Server(None, Listening(metrics=address))  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["9100", "127.0.0.1:", "127.0.0.1:99999", "unix:x", ":9100"])
def test_an_invalid_metrics_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--metrics .* is not HOST:PORT"):
        Server(None, Listening(metrics=address))  # type: ignore[arg-type]


def test_the_daemon_does_not_start_if_the_metrics_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        rig = DaemonRig(tmp_path / "data", listening=Listening("", metrics=address))
        with pytest.raises(AddressInUse, match="for metrics"):
            rig.__enter__()
        rig.call(rig.server.close(0.0))
        rig._loop.call_soon_threadsafe(rig._loop.stop)
        rig._thread.join()
        rig._loop.close()


def test_admin_metrics_prints_the_same_metrics(
    rig: DaemonRig, capsys: pytest.CaptureFixture[str]
) -> None:
    from pensieve.cli.main import main

    data = rig._arguments[0]
    assert main(["admin", "metrics", "--data", str(data)]) == 0
    printed = Scraped(capsys.readouterr().out)
    assert printed.families.keys() == Scraped(get(rig, "/metrics")[2]).families.keys()
    assert main(["admin", "metrics", "--json", "--data", str(data)]) == 0
    assert "pensieve_engine_up" in json.loads(capsys.readouterr().out)["text"]
    text = rig.admin.GetMetrics(admin_pb2.GetMetricsRequest()).text
    assert text.endswith("\n")
