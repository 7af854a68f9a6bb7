"""What somebody without a token can make a daemon hold: peers that speak HTTP/2 as they like."""

from __future__ import annotations

import contextlib
import gzip
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pensieve.client import Client
from pensieve.service.grpc import auth
from tests.service.raw_http2 import RawPeer
from tests.service.rig_daemon import ServeProcess

MIB = 1 << 20
GROWTH_MAX = 64 * MIB
SEND = "/pensieve.v1.ConversationService/SendMessage"
HEALTH = "/grpc.health.v1.Health/Check"
BODY = b"\0" + struct.pack(">I", 3 * MIB) + b"x" * (3 * MIB - 1)  # one byte is missing


class Guarded(ServeProcess):
    """A daemon that wants tokens, and one that it knows."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.token, entry = auth.new_token("a", admin=False)
        tokens = folder / "tokens.toml"
        tokens.write_text(entry)
        tokens.chmod(0o600)
        super().__init__(folder / "data", "--token-file", str(tokens), *arguments)

    def resident_bytes(self) -> int:
        assert self.process is not None
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * 4096

    def ask(self) -> str:
        with Client(self.address, token=self.token) as client:
            return client.conversation("c").ask("hello", max_tokens=4, ignore_eos=True).text


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    daemon = Guarded(tmp_path)
    daemon.start()
    daemon.ask()
    yield daemon
    assert daemon.stop() == 0


def half_sent_bodies(peers: contextlib.ExitStack, address: str) -> None:
    peer = peers.enter_context(RawPeer(address))
    for _ in range(60):
        peer.body(peer.call(SEND), BODY, patience=0.02)


def half_sent_bodies_to_the_method_for_everybody(peers: contextlib.ExitStack, address: str) -> None:
    for _ in range(4):
        peer = peers.enter_context(RawPeer(address))
        for _ in range(60):
            peer.body(peer.call(HEALTH), BODY, patience=0.02)


def watches_of_health(peers: contextlib.ExitStack, address: str) -> None:
    for _ in range(4):
        peer = peers.enter_context(RawPeer(address))
        for _ in range(3000):
            stream = peer.call("/grpc.health.v1.Health/Watch")
            peer.body(stream, bytes(5), patience=1.0, end=True)


def long_headers(peers: contextlib.ExitStack, address: str) -> None:
    for _ in range(10):
        peer = peers.enter_context(RawPeer(address))
        for _ in range(500):
            peer.call(SEND, ("x-long", "a" * 7000))


def calls_whose_answers_nobody_reads(peers: contextlib.ExitStack, address: str) -> None:
    for _ in range(10):
        peer = peers.enter_context(RawPeer(address, reads=False))
        for _ in range(2000):
            peer.call(SEND)


def many_connections(peers: contextlib.ExitStack, address: str) -> None:
    for _ in range(2000):
        peer = peers.enter_context(RawPeer(address, reads=False))
        peer.call(SEND)


def a_compression_bomb(peers: contextlib.ExitStack, address: str) -> None:
    packed = gzip.compress(b"\0" * (256 * MIB), 9)
    peer = peers.enter_context(RawPeer(address))
    for path in (SEND, HEALTH):
        stream = peer.call(path, ("grpc-encoding", "gzip"))
        body = b"\1" + struct.pack(">I", len(packed)) + packed
        peer.body(stream, body, patience=1.0, end=True)


@pytest.mark.parametrize(
    "attack",
    [
        half_sent_bodies,
        half_sent_bodies_to_the_method_for_everybody,
        watches_of_health,
        long_headers,
        calls_whose_answers_nobody_reads,
        many_connections,
        a_compression_bomb,
    ],
)
def test_somebody_without_a_token_costs_little_memory(
    guarded: Guarded, attack: Callable[[contextlib.ExitStack, str], None]
) -> None:
    before = guarded.resident_bytes()
    with contextlib.ExitStack() as peers:
        attack(peers, guarded.address)
        largest = 0
        for _ in range(20):
            largest = max(largest, guarded.resident_bytes())
            time.sleep(0.05)
    print(f"{attack.__name__}: {(largest - before) / MIB:.1f} MiB")
    assert largest - before < GROWTH_MAX
    assert guarded.ask()
