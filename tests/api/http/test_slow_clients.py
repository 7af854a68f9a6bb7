"""Clients that send a byte at a time, or read nothing, are disconnected. Other clients do not notice."""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.api.http import connections as connections_module
from pensieve.api.http import exchange as exchange_module
from pensieve.api.http.listener import (
    ACCEPTED_AT_ONCE,
    CONNECTIONS_MAX,
    FILES_KEPT,
    connections_max,
)
from pensieve.guard.request_bodies import RECEIVING_MAX, BodyLimits
from tests.api.http.rig_http import MODEL, HttpRig, http_rig
from tests.api.http.test_front import connect, receive_all
from tests.conversations.rig_daemon import ECHO, PATIENCE_SECONDS, wait_for

CHAT = "/v1/chat/completions"
SLOW = (*ECHO, "--seconds=0.005")
NUM_SLOW = 60  # clients of each kind


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpRig]:
    monkeypatch.setattr(connections_module, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connections_module, "STALL_SECONDS", 0.5)
    with http_rig(tmp_path / "data", program=SLOW) as found:
        found.rig.server.guard.incoming._known = BodyLimits(RECEIVING_MAX, 1.0)
        yield found


def body(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 4, **fields}).encode()


def head(rig: HttpRig, method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", f"host: {rig.address}", *lines, "", ""]
    ).encode()


class Streaming:
    """A client that reads a long answer."""

    def __init__(self, rig: HttpRig, num_tokens: int) -> None:
        self._connection = rig.connection()
        options = {"include_usage": True}
        sent = body(stream=True, max_tokens=num_tokens, ignore_eos=True, stream_options=options)
        self._connection.request("POST", CHAT, sent, {"content-type": "application/json"})
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        self.data = b""
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        self.data = self._answer.read()

    def end(self) -> bytes:
        self._thread.join()
        self._connection.close()
        return self.data


def drip(sockets: list[socket.socket], pieces: Iterator[bytes]) -> list[socket.socket]:
    """Send one more piece on each connection. Return the connections that are still open."""
    piece, left = next(pieces), []
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.send(piece)
            left.append(sock)
    return left


def test_slow_heads_and_bodies_are_cut_off_while_a_stream_continues(rig: HttpRig) -> None:
    streaming = Streaming(rig, 1500)
    heads = [connect(rig) for _ in range(NUM_SLOW)]
    bodies = [connect(rig) for _ in range(NUM_SLOW)]
    chunked = [connect(rig) for _ in range(NUM_SLOW)]
    for sock in heads:
        sock.sendall(f"GET /version HTTP/1.1\r\nhost: {rig.address}\r\n".encode())
    for sock in bodies:
        sock.sendall(head(rig, "POST", CHAT, "content-length: 100000"))
    for sock in chunked:
        sock.sendall(head(rig, "POST", CHAT, "transfer-encoding: chunked"))
    left, names = [heads, bodies, chunked], itertools.count()
    drips = (
        (f"{next(names)}: "[:1].encode() for _ in itertools.count()),
        (b" " for _ in itertools.count()),
        (b"1\r\n \r\n" for _ in itertools.count()),
    )
    num_served = 0

    def all_closed() -> bool:
        nonlocal num_served
        left[:] = [drip(each, pieces) for each, pieces in zip(left, drips, strict=True)]
        assert rig.chat("Meanwhile").status == 200, "a short body waited for slow ones"
        num_served += 1
        return not any(left)

    wait_for(all_closed)
    assert num_served > 1
    data = streaming.end()
    assert data.endswith(b"data: [DONE]\n\n")
    assert b'"completion_tokens":1500' in data
    for sock in (*heads, *bodies, *chunked):
        sock.close()


def test_a_slow_body_gets_408(rig: HttpRig) -> None:
    with connect(rig) as sock:
        sock.sendall(head(rig, "POST", CHAT, "content-length: 1000") + b"{")
        answer = receive_all(sock)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"timeout"' in answer


def test_short_bodies_do_not_wait_behind_slow_long_bodies(rig: HttpRig) -> None:
    begun = exchange_module.SHORT_BODY_BYTES + 1000
    long = [connect(rig) for _ in range(2 * RECEIVING_MAX)]
    for sock in long:
        sock.sendall(head(rig, "POST", CHAT, f"content-length: {begun + 10}") + b" " * begun)
    for _ in range(5):
        assert rig.chat("Short").status == 200
    for sock in long:
        assert receive_all(sock).startswith(b"HTTP/1.1 408")
        sock.close()


def test_clients_that_read_nothing_are_cut_off_while_a_stream_continues(rig: HttpRig) -> None:
    streaming = Streaming(rig, 1500)
    host, _, port = rig.address.rpartition(":")
    stalled = []
    asked = body(stream=True, max_tokens=3000, ignore_eos=True, logprobs=False)
    for _ in range(20):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        sock.sendall(head(rig, "POST", CHAT, f"content-length: {len(asked)}") + asked)
        stalled.append(sock)
    wait_for(lambda: rig.rig.num_live > 10)
    assert rig.chat("Meanwhile").status == 200
    assert streaming.end().endswith(b"data: [DONE]\n\n")
    for sock in stalled:
        sock.close()
    wait_for(lambda: rig.rig.num_live == 0)


def test_a_flood_of_connections_is_accepted_a_few_at_a_time(rig: HttpRig) -> None:
    """The event loop accepts at most a few per step, so that running streams continue."""
    listener: Any
    (listener,) = rig.rig.server.other_listeners
    connections = listener._server.server_state.connections
    grown, are_in = list[int](), threading.Event()

    def look(before: int) -> None:
        grown.append(len(connections) - before)
        if len(connections) >= 400:
            are_in.set()
        else:
            rig.rig._loop.call_soon(look, len(connections))

    rig.rig._loop.call_soon_threadsafe(look, len(connections))
    flood = [connect(rig) for _ in range(400)]
    assert are_in.wait(PATIENCE_SECONDS)
    assert max(grown) <= 2 * ACCEPTED_AT_ONCE
    for sock in flood:
        sock.close()


@pytest.mark.parametrize(
    ("soft", "hard", "most", "raised"),
    [
        (20_000, 20_000, CONNECTIONS_MAX, None),
        (1024, 1 << 20, CONNECTIONS_MAX, CONNECTIONS_MAX + FILES_KEPT),
        (1024, 4096, 4096 - FILES_KEPT, 4096),
        (256, 256, 128, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, CONNECTIONS_MAX, None),
    ],
)
def test_the_connection_limit_follows_the_open_file_limit(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    most: int,
    raised: int | None,
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, given: limits.append(given))
    assert connections_max() == most
    assert limits[1:] in ([], [(raised, hard)] if raised else [(soft, hard)])
    assert ("ulimit -n" in caplog.text) == (most < CONNECTIONS_MAX)


def test_idle_connections_block_no_request_and_are_closed(
    rig: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "IDLE_SECONDS", 1.0)
    idle = [connect(rig) for _ in range(300)]
    assert rig.chat("Meanwhile").status == 200
    assert [receive_all(sock) for sock in idle] == [b""] * 300
    for sock in idle:
        sock.close()
