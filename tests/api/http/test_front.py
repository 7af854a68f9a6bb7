"""The checks of every HTTP request: Host and Origin, tokens, limits, bodies, silent connections."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pensieve.api.http import connections as connections_module
from pensieve.api.http import exchange as exchange_module
from pensieve.api.http.listener import bound_socket
from pensieve.conversations.engine_client import EngineClient
from pensieve.guard import callers
from pensieve.guard.limits import Limits
from tests.api.http.rig_http import MODEL, HttpRig, http_rig
from tests.conversations.rig_daemon import ECHO, wait_for

CHAT = "/v1/chat/completions"
LONG = 50_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpRig]:
    with http_rig(tmp_path / "data") as found:
        yield found


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[HttpRig]:
    """A daemon that needs minutes for LONG tokens."""
    with http_rig(tmp_path / "data", program=(*ECHO, "--seconds=0.005")) as found:
        yield found


def raw(server: HttpRig, data: bytes) -> bytes:
    """Send bytes, and return everything received until the connection is closed."""
    with connect(server) as sock:
        sock.sendall(data)
        return receive_all(sock)


def connect(server: HttpRig) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def receive_all(sock: socket.socket) -> bytes:
    found = b""
    while chunk := sock.recv(65536):
        found += chunk
    return found


def test_without_tokens_only_local_host_names_are_served(server: HttpRig) -> None:
    assert server.ask("GET", "/v1/models").status == 200
    assert server.ask("GET", "/v1/models", headers={"host": "LOCALHOST:80"}).status == 200
    rebound = server.ask("GET", "/v1/models", headers={"host": "evil.example"})
    assert (rebound.status, rebound.error["type"]) == (403, "permission_error")
    assert raw(server, b"GET /v1/models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("192-168-1-5.evil.example:8000", 403),
        ("", 403),
        ("192.168.1.5:8000", 200),
        ("[fd00::1]:8000", 200),
        ("localhost", 200),
        ("MyBox", 200),
        ("mybox.lan:8000", 200),
        ("mybox.local", 200),
        ("otherbox.local", 403),
        ("chat.example", 200),
    ],
)
def test_without_tokens_foreign_host_names_are_refused_on_all_interfaces(
    insecure: HttpRig, host: str, status: int
) -> None:
    """Otherwise a web page could rebind its host name to the daemon's address, and read answers."""
    answer = insecure.ask("GET", "/v1/models", headers={"host": host})
    assert answer.status == status
    if status == 403:
        assert "IP address" in answer.error["message"]
        assert "--http-hosts" in answer.error["message"]


@pytest.fixture(scope="module")
def insecure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    """A daemon that listens on all interfaces of a machine called mybox.lan."""
    listening = {"http": "0.0.0.0:0", "insecure": True, "http_hosts": frozenset({"Chat.example"})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "MyBox.lan")
        with http_rig(Path(tmp_path_factory.mktemp("http")) / "data", http=listening) as found:
            yield found


def test_requests_from_other_origins_are_refused_without_cors_headers(server: HttpRig) -> None:
    answer = server.ask("GET", "/v1/models", headers={"origin": "https://evil.example"})
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers
    assert server.ask("GET", "/v1/models", headers={"origin": "null"}).status == 403
    same = server.ask("GET", "/v1/models", headers={"origin": f"http://{server.address}"})
    assert same.status == 200
    assert "access-control-allow-origin" not in same.headers


def test_allowed_origins_and_hosts_are_served(tmp_path: Path) -> None:
    site = "https://chat.example"
    allowed = {"http_origins": frozenset({site}), "http_hosts": frozenset({"box.example"})}
    with http_rig(tmp_path / "data", http=allowed) as server:
        headers = {"origin": site, "host": "box.example:8000"}
        answer = server.ask("GET", "/v1/models", headers=headers)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, site)
        asked = {**headers, "access-control-request-headers": "authorization, x-session-id"}
        preflight = server.ask("OPTIONS", CHAT, headers=asked)
        assert preflight.status == 204
        assert "x-session-id" in preflight.headers["access-control-allow-headers"]
        wrong = server.ask("POST", CHAT, {}, headers)
        assert (wrong.status, wrong.headers["access-control-allow-origin"]) == (400, site)


def test_with_tokens_all_paths_but_health_and_version_require_a_token(tmp_path: Path) -> None:
    given, entry = callers.new_token("red", admin=False)
    other, _ = callers.new_token("red", admin=False)
    tokens = callers.tokens_of(tmp_path / "tokens", entry.encode())
    with http_rig(tmp_path / "data", http={"tokens": tokens}) as server:
        assert server.ask("GET", "/health", headers={"host": "any.example"}).status == 200
        assert server.ask("GET", "/version").status == 200
        for path in ("/v1/models", CHAT, "/nowhere"):
            answer = server.ask("GET", path)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        wrong = {"authorization": f"Bearer {other}"}
        assert server.ask("GET", "/v1/models", headers=wrong).status == 401
        for headers in ({"authorization": f"bearer {given}"}, {"x-api-key": given}):
            assert server.ask("GET", "/v1/models", headers=headers).status == 200
        answer = server.chat("Hello", headers={"x-api-key": given})
        named = answer.headers["x-pensieve-conversation-id"]
        threads, reader = server.rig.daemon.threads, server.rig.daemon.reader
        look = threads.in_read_thread("red", reader.get_conversation, named, tenant="red")
        found = server.rig.call(look)
        assert found.num_messages == 2


def test_a_rate_limited_request_gets_a_retry_after_header(tmp_path: Path) -> None:
    given, entry = callers.new_token("red", admin=False)
    (token,) = callers.tokens_of(tmp_path / "tokens", entry.encode())
    slow = callers.Token(token.sha256, "red", limits=Limits(requests_per_second=0.01))
    with http_rig(
        tmp_path / "data", http={"tokens": (slow,)}, limits={"red": slow.limits}
    ) as server:
        headers = {"x-api-key": given}
        assert server.ask("GET", "/v1/models", headers=headers).status == 200
        answer = server.ask("GET", "/v1/models", headers=headers)
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 100
        assert int(answer.headers["retry-after-ms"]) > 1000


def test_bodies_have_a_limit_and_must_be_json(server: HttpRig) -> None:
    large = server.ask("POST", CHAT, b" " * (exchange_module.BODY_BYTES_MAX + 1))
    assert (large.status, large.error["code"]) == (413, "request_too_large")
    for body, code in (
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model": 1, "model": 2}', "invalid_json"),
        (b'{"n": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"[]", "invalid_type"),
        (b'"\xff"', "invalid_json"),
    ):
        answer = server.ask("POST", CHAT, body)
        assert (answer.status, answer.error["code"]) == (400, code), body[:20]
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert server.ask("POST", CHAT, b"{}", form).status == 400


def test_a_chunked_body_has_the_same_limit(server: HttpRig) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {server.address}\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with connect(server) as sock:
        sock.sendall(head.encode())
        answer = b""

        def send() -> None:
            try:
                for _ in range(20):
                    sock.sendall(chunk)
            except OSError:
                return  # the daemon closed the connection

        sending = threading.Thread(target=send)
        sending.start()
        while b"request_too_large" not in answer:
            answer += sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413")
    sending.join()


def test_a_refused_body_is_discarded_up_to_a_limit(server: HttpRig) -> None:
    connection = server.connection()
    most = b" " * connections_module.UNWANTED_BYTES_MAX
    connection.request("POST", CHAT, most[: -(1 << 20)], {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 413
    answer.read()
    connection.request("GET", "/version")  # on the same connection
    assert connection.getresponse().status == 200
    connection.close()
    with closing(server.connection()) as another, pytest.raises(ConnectionError):
        another.request("POST", CHAT, most * 2, {"content-type": "application/json"})


def test_a_connection_serves_many_requests(server: HttpRig) -> None:
    connection = server.connection()
    for _ in range(3):
        connection.request("GET", "/v1/models")
        assert json.loads(connection.getresponse().read())["object"] == "list"
    connection.request("POST", CHAT, b"{}", {"content-type": "application/json"})
    assert connection.getresponse().read()
    connection.request("HEAD", "/v1/models")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"")
    connection.close()


def test_pipelined_requests_are_answered_in_order(server: HttpRig) -> None:
    one = f"GET /version HTTP/1.1\r\nhost: {server.address}\r\n\r\n".encode()
    last = (
        f"GET /v1/models HTTP/1.1\r\nhost: {server.address}\r\nconnection: close\r\n\r\n".encode()
    )
    answer = raw(server, one + one + last)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.index(b'"version"') < answer.index(b'"list"')


def test_slow_request_heads_are_cut_off_but_idle_connections_are_not(
    server: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "HEAD_SECONDS", 0.3)
    with connect(server) as slow, connect(server) as idle:
        slow.sendall(b"GET /v1/models HTTP/1.1\r\n")
        assert receive_all(slow) == b""  # closed
        idle.sendall(f"GET /version HTTP/1.0\r\nhost: {server.address}\r\n\r\n".encode())
        assert receive_all(idle).startswith(b"HTTP/1.1 200")


def test_a_refused_body_that_never_arrives_is_cut_off(
    server: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "HEAD_SECONDS", 0.3)
    with connect(server) as sock:
        head = f"POST /nowhere HTTP/1.1\r\nhost: {server.address}\r\ncontent-length: 100\r\n\r\n"
        sock.sendall(head.encode() + b"x")
        answer = receive_all(sock)
        assert answer.startswith(b"HTTP/1.1 404")


def hold_and_release(engine: EngineClient) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
    """Return two coroutines: one holds back messages to the engine, one releases them."""
    held: list[Any] = []

    async def hold() -> None:
        held.append(engine.put)
        engine.put = lambda message: held.append(message)  # type: ignore[method-assign]

    async def release() -> None:
        engine.put = held[0]  # type: ignore[method-assign]
        for message in held[1:]:
            engine.put(message)

    return hold, release


def test_a_waiting_stream_sends_keep_alives(
    server: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "KEEP_ALIVE_SECONDS", 0.1)
    engine = server.rig.daemon.engine
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    connection = server.connection()
    hold, release = hold_and_release(engine)
    server.rig.call(hold())
    connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.readline() == exchange_module.KEEP_ALIVE.split(b"\n")[0] + b"\n"
    server.rig.call(release())
    rest = answer.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    connection.close()


def test_a_body_counts_towards_memory_limits_until_its_stream_ends(server: HttpRig) -> None:
    """The messages of a response stay in memory while it waits for the engine."""
    engine, incoming = server.rig.daemon.engine, server.rig.server.guard.incoming
    body = {"model": MODEL, "input": "x" * 1000, "stream": True, "max_output_tokens": 4}
    hold, release = hold_and_release(engine)
    server.rig.call(hold())
    connection = server.connection()
    connection.request(
        "POST", "/v1/responses", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.readline().startswith(b"event: response.created")
    assert incoming.bytes_held[""] > 1000
    server.rig.call(release())
    assert b"event: response." in answer.read()
    connection.close()
    wait_for(lambda: not incoming.bytes_held[""])


def test_a_disconnect_ends_the_turn_and_stores_the_sent_text(slow: HttpRig) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": LONG,
        "ignore_eos": True,
        "stream": True,
    }
    connection = slow.connection()
    connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    named = answer.headers["x-pensieve-conversation-id"]
    text = ""
    while text.count(" ") < 3:
        line = answer.readline()
        if line.startswith(b"data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"]
            text += delta.get("content") or ""
    answer.close()
    connection.close()
    wait_for(lambda: slow.rig.num_live == 0)
    _, reply = slow.rig.messages(named)
    assert reply.content.startswith(text)
    assert reply.num_tokens < LONG


def test_a_disconnect_before_the_first_token_stores_no_messages(slow: HttpRig) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": LONG}
    connection = slow.connection()
    connection.request(
        "POST",
        CHAT,
        json.dumps({**body, "ignore_eos": True}),
        {"content-type": "application/json"},
    )
    wait_for(lambda: slow.rig.num_live == 1)
    connection.close()
    wait_for(lambda: slow.rig.num_live == 0)

    async def conversations() -> Any:
        daemon = slow.rig.daemon
        return await daemon.threads.in_read_thread("", daemon.reader.list_conversations, 10, "")

    found = slow.rig.call(conversations()).conversations
    assert all(each.num_messages == 0 for each in found)


def test_a_disconnect_ends_an_unstored_turn_despite_its_idempotency_key(tmp_path: Path) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "store": False}
    with http_rig(tmp_path / "data", program=(*ECHO, "--seconds", "0.05")) as slow:
        followers = slow.rig.daemon.conversations.followers
        followers._limits = replace(followers._limits, grace_seconds=600.0)
        connection = slow.connection()
        connection.request(
            "POST",
            CHAT,
            json.dumps({**body, "max_tokens": 3000, "ignore_eos": True}),
            {"content-type": "application/json", "idempotency-key": "of nothing stored"},
        )
        wait_for(lambda: slow.rig.num_live == 1)
        connection.close()
        wait_for(lambda: slow.rig.num_live == 0)


def test_a_client_that_reads_no_answers_is_cut_off(
    server: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "STALL_SECONDS", 0.3)
    one = f"GET /v1/models HTTP/1.1\r\nhost: {server.address}\r\n\r\n".encode()
    host, _, port = server.address.rpartition(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect((host, int(port)))
        with pytest.raises(ConnectionError):  # when the daemon stops reading and closes
            sock.sendall(one * 1_000_000)
    assert server.ask("GET", "/v1/models").status == 200


def test_unread_answer_bytes_of_a_tenant_are_limited(tmp_path: Path) -> None:
    given, entry = callers.new_token("red", admin=False)
    (token,) = callers.tokens_of(tmp_path / "tokens", entry.encode())
    little = callers.Token(token.sha256, "red", limits=Limits(unread_bytes=100))
    with http_rig(
        tmp_path / "data", http={"tokens": (little,)}, limits={"red": little.limits}
    ) as server:
        headers = {"x-api-key": given}
        assert server.ask("GET", "/version", headers=headers).status == 200
        answer = server.ask("GET", "/v1/models", headers=headers)
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
        assert "unread bytes; read them first" in answer.error["message"]

        async def unread() -> int:
            return server.rig.daemon.allowance("red").num_unread_bytes

        wait_for(lambda: server.rig.call(unread()) == 0)


@pytest.mark.parametrize("origin", ["http://[", "http://", "x", "//", "\x80"])
def test_a_malformed_origin_is_refused(server: HttpRig, origin: str) -> None:
    assert server.ask("GET", "/v1/models", headers={"origin": origin}).status == 403


def test_accepted_sockets_have_tcp_nodelay() -> None:
    """asyncio does not set TCP_NODELAY on sockets of `socket.create_server`."""
    with bound_socket("127.0.0.1:0") as listening:
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
