"""Hostile bytes on the HTTP socket: heads, framing, paths, and other protocols."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.api.http import connections as connections_module
from tests.api.http.rig_http import MODEL, HttpRig, http_rig
from tests.api.http.test_front import connect, raw, receive_all

CHAT = "/v1/chat/completions"
BODY = json.dumps(
    {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
).encode()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    with http_rig(Path(tmp_path_factory.mktemp("http")) / "data") as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_breaks(rig: HttpRig, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that the next request is served, and that the log has no internal error."""
    yield
    assert rig.chat("hello").status == 200
    assert "incident" not in caplog.text
    assert "Fatal error" not in caplog.text


def head(rig: HttpRig, line: str, *lines: str) -> bytes:
    return "\r\n".join([line, f"host: {rig.address}", *lines, "", ""]).encode("latin-1")


def statuses(answer: bytes) -> list[int]:
    return [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


def send_and_receive(rig: HttpRig, data: bytes) -> bytes:
    """Like `raw`, but tolerates a reset: a connection may be closed before everything was sent."""
    found = b""
    with connect(rig) as sock:
        try:
            sock.sendall(data)
            while chunk := sock.recv(65536):
                found += chunk
        except ConnectionError:
            pass
    return found


# -- data that is not HTTP/1.1 --


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100 + b"\r\n\r\n",
        b"\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\n folded: x\r\n\0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\na b: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\na: \0\r\n\r\n",
        b"\0" * 5000 + b"\r\n\r\n",
    ],
    ids=lambda data: repr(data[:30]),
)
def test_malformed_http_is_refused_and_the_connection_closed(rig: HttpRig, data: bytes) -> None:
    assert statuses(send_and_receive(rig, data)) in ([400], [])


def test_upgrade_requests_are_ignored(rig: HttpRig) -> None:
    for kind in ("websocket", "h2c"):
        asked = head(
            *(rig, "GET /version HTTP/1.1", f"upgrade: {kind}", "connection: upgrade, close"),
            *("sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version: 13"),
        )
        assert statuses(raw(rig, asked)) == [200]


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "PUT", "PATCH", "FOO", "GET" * 100])
def test_other_http_methods_get_404_and_echo_no_headers(rig: HttpRig, method: str) -> None:
    secret = "x-secret: squirrel"
    answer = raw(rig, head(rig, f"{method} {CHAT} HTTP/1.1", secret, "connection: close"))
    assert statuses(answer) == [404]
    assert b"squirrel" not in answer


def test_head_and_options_answers_have_no_body(rig: HttpRig) -> None:
    for path in ("/", "/v1/models", "/health", CHAT):
        for method in ("HEAD", "OPTIONS"):
            answer = rig.ask(method, path)
            assert answer.body == b""
            assert answer.status in (200, 204, 404), path
            assert "access-control-allow-origin" not in answer.headers


# -- heads --


def test_heads_with_too_many_bytes_or_lines_are_refused_before_parsing(rig: HttpRig) -> None:
    line = "GET /version HTTP/1.1"
    fits = [f"a{number}: b" for number in range(connections_module.LINES_MAX - 10)]
    assert statuses(raw(rig, head(rig, line, *fits, "connection: close"))) == [200]
    for lines in (
        ["a: b"] * 1000,
        ["a: " + "b" * (200 << 10)],
        ["a: " + "b" * 1000] * 40,
        [f"cookie: {'c' * 30_000}", "d: " + "e" * 5000],
    ):
        assert statuses(send_and_receive(rig, head(rig, line, *lines))) in ([431], []), len(lines)
    long = head(rig, f"GET /{'p' * 40_000} HTTP/1.1")
    assert statuses(send_and_receive(rig, long)) in ([431], [])


def test_a_large_head_after_another_request_is_refused(rig: HttpRig) -> None:
    """Both requests come in one piece, or with a body in between."""
    line = "GET /version HTTP/1.1"
    large = head(rig, line, *["a: b"] * 5000)
    assert statuses(send_and_receive(rig, head(rig, line) + large)) in ([200, 431], [200])
    posted = head(rig, f"POST {CHAT} HTTP/1.1", f"content-length: {len(BODY)}") + BODY
    assert statuses(send_and_receive(rig, posted + head(rig, line) + large)) in (
        [200, 200, 431],
        [200, 200],
    )


def test_a_head_may_come_byte_by_byte(rig: HttpRig) -> None:
    with connect(rig) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked = head(rig, f"POST {CHAT} HTTP/1.1", f"content-length: {len(BODY)}")
        for byte in asked + BODY + head(rig, "GET /version HTTP/1.1", "connection: close"):
            sock.send(bytes([byte]))
        assert statuses(receive_all(sock)) == [200, 200]


def test_many_pipelined_requests_are_all_answered(rig: HttpRig) -> None:
    one = head(rig, "GET /version HTTP/1.1")
    posted = head(rig, f"POST {CHAT} HTTP/1.1", f"content-length: {len(BODY)}") + BODY
    last = head(rig, "GET /v1/models HTTP/1.1", "connection: close")
    with connect(rig) as sock:
        sock.sendall((one * 20 + posted) * 20 + last)
        assert statuses(receive_all(sock)) == [200] * (21 * 20 + 1)


# -- where a body ends --


def test_ambiguous_body_lengths_are_refused_and_the_rest_is_not_read(rig: HttpRig) -> None:
    smuggled = head(rig, "GET /v1/models HTTP/1.1")
    for lines in (
        ["content-length: 4", "transfer-encoding: chunked"],
        ["transfer-encoding: chunked", "content-length: 4"],
        ["content-length: 4", "content-length: 5"],
        ["content-length: 4, 5"],
        ["content-length: +4"],
        ["content-length: -4"],
        ["content-length: 0x4"],
        ["content-length: 4_0"],
        ["transfer-encoding: chunked, identity"],
        ["transfer-encoding: gzip, chunked"],
        ["transfer-encoding: xchunked"],
        ["transfer-encoding: chunked", "transfer-encoding: chunked"],
        ["transfer-encoding : chunked"],
        ["content-length: " + "9" * 400],
    ):
        asked = head(rig, f"POST {CHAT} HTTP/1.1", *lines) + b"0\r\n\r\n" + smuggled
        answer = send_and_receive(rig, asked)
        assert statuses(answer) in ([400], [413], [501]), lines
        assert b'"list"' not in answer


@pytest.mark.parametrize(
    "chunks",
    [
        *(b"zz\r\n", b"-1\r\n\r\n", b"1\r\nab\r\n", b"ffffffffffffffffffffff\r\n", b"\0\r\n"),
        b"1;" + b"e" * 50_000 + b"\r\n",
        b"0\r\n" + b"a: b\r\n" * 10_000,
    ],
    ids=lambda chunks: repr(chunks[:20]),
)
@pytest.mark.parametrize("path", [CHAT, "/nowhere"])
def test_malformed_chunks_end_the_connection(
    rig: HttpRig, path: str, chunks: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds while the body is read, and while an unread body is discarded."""
    monkeypatch.setattr(connections_module, "HEAD_SECONDS", 0.5)
    asked = head(rig, f"POST {path} HTTP/1.1", "transfer-encoding: chunked")
    with connect(rig) as sock:
        sock.sendall(asked)
        if path == "/nowhere":
            assert statuses(sock.recv(65536)) == [404]
        try:
            sock.sendall(chunks)
            sock.shutdown(socket.SHUT_WR)
            assert statuses(receive_all(sock)) in ([400], [])
        except ConnectionError:
            pass  # the daemon has closed the connection


def test_an_endless_body_is_cut_off_at_the_limit(rig: HttpRig) -> None:
    asked = head(rig, f"POST {CHAT} HTTP/1.1", "transfer-encoding: chunked")
    with connect(rig) as sock:
        sock.sendall(asked)
        num_bytes = 0
        try:
            while num_bytes < 256 << 20:
                num_bytes += sock.send(b"10000\r\n" + b" " * 65536 + b"\r\n")
        except OSError:
            pass
        assert num_bytes < 64 << 20


# -- paths, and how they are shown --


@pytest.mark.parametrize(
    "path",
    [
        *("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/files/..%2f..%2fetc%2fpasswd"),
        *(
            "/v1/files/%00",
            "/v1/files/a/content/../../x",
            "//etc/passwd",
            "/./",
            "/v1/models/../..",
        ),
        *("http://evil.example/v1/models", "*", "/%ff%fe", "/%0d%0ax-evil:%201", "/\\..\\..\\x"),
        *("/v1/responses/..%2f", "/v1/conversations/%0a/items", "/v1/batches/a%0d%0ab"),
        *("/pensieve/explain/%2e%2e%2f", "/v1/models/" + "m" * 20_000, "/page.html", "/server.pem"),
        *("/v1/conversations/conv_x/items/..%2f..", "/v1/files/'%20OR%201=1", "/v1/files/%f0%9f"),
    ],
    ids=lambda path: path[:30],
)
def test_hostile_paths_expose_no_files(
    rig: HttpRig, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    for method in ("GET", "DELETE"):
        answer = raw(rig, head(rig, f"{method} {path} HTTP/1.1", "connection: close"))
        assert statuses(answer)[0] in (400, 404, 200)
        assert b"root:" not in answer
        assert b"\r\nx-evil" not in answer
        if statuses(answer) == [200]:
            assert b'"runs"' in answer, path  # the conversation does not exist
    assert not any("\n" in each.getMessage() for each in caplog.records)


def test_answer_headers_contain_no_bytes_of_the_request(rig: HttpRig) -> None:
    """Headers never contain line ends or other bytes of the request."""
    nasty = "zo\xeb \x7f\x80 \xff"  # ids are hexadecimal digits
    for name in ("x-session-id", "idempotency-key", "x-openwebui-chat-id", "origin", "host"):
        lines = [f"{name}: {nasty}", f"content-length: {len(BODY)}", "connection: close"]
        if name == "host":
            asked = "\r\n".join([f"POST {CHAT} HTTP/1.1", *lines, "", ""]).encode("latin-1")
        else:
            asked = head(rig, f"POST {CHAT} HTTP/1.1", *lines)
        answer = raw(rig, asked + BODY)
        assert statuses(answer)[0] in (200, 400, 403), name
        shown = answer.partition(b"\r\n\r\n")[0]
        assert shown.isascii()
        assert b"zo" not in shown
    evil = "x\r\nset-cookie: a=b"
    sneaky = head(rig, "OPTIONS / HTTP/1.1", f"access-control-request-headers: {evil}")
    assert b"set-cookie" not in raw(
        rig, sneaky.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    )


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil@localhost"),
        *("localhost@evil.example", "[::1", "0x7f000001", "127.1", "localhost.", "", "a b"),
        *("[::1].evil.example", "[::1]evil.example:80", "localhost:80@evil.example", "\xe9vil"),
    ],
)
def test_host_names_that_resemble_local_names_are_refused(rig: HttpRig, host: str) -> None:
    asked = f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
    assert statuses(raw(rig, asked.encode("latin-1")))[0] in (400, 403)


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "http://{}.evil.example", "http://evil.example:{port}", "file://", "http://[x"),
        *("http://evil.example/{}", "http://{}@evil.example", "{}", "https://evil.example#{}", ""),
    ],
)
def test_origins_that_resemble_the_daemons_origin_are_refused(rig: HttpRig, origin: str) -> None:
    port = rig.address.rpartition(":")[2]
    given = origin.replace("{port}", port).replace("{}", rig.address)
    for method in ("GET", "OPTIONS"):
        answer = rig.ask(method, "/v1/models", headers={"origin": given})
        assert answer.status == 403, given
        assert "access-control-allow-origin" not in answer.headers


# -- many at once --


def test_connections_above_the_limit_get_503_with_retry_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pensieve.api.http import listener as listener_module

    monkeypatch.setattr(listener_module, "connections_max", lambda: 20)
    with http_rig(tmp_path / "data") as rig:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        connection = rig.connection()
        asked = json.dumps({**body, "max_tokens": 2000, "ignore_eos": True})
        connection.request("POST", CHAT, asked, {"content-type": "application/json"})
        streamed = connection.getresponse()
        assert streamed.status == 200
        held = [connect(rig) for _ in range(19)]
        for sock in held:  # each is also a connection at the server
            sock.sendall(head(rig, "GET /version HTTP/1.1"))
            assert statuses(sock.recv(65536)) == [200]
        for _ in range(30):
            answer = raw(rig, b"")
            assert statuses(answer) == [503]
            assert b"retry-after: 1" in answer
        assert streamed.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        for sock in held:
            sock.close()
        deadline = time.monotonic() + 60
        while (status := statuses(raw(rig, head(rig, "GET /version HTTP/1.0"))[:15])) != [200]:
            assert status == [503]
            assert time.monotonic() < deadline
