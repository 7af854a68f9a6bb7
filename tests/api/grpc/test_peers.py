"""A daemon keeps little in memory for hostile HTTP/2 peers without a token."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.api.grpc import server
from pensieve.client import Client
from pensieve.client.admin import Admin
from pensieve.errors import DeadlineExceeded, QueueFull
from pensieve.guard import callers
from pensieve.guard.exposure import Listening
from pensieve.guard.request_bodies import (
    RECEIVING_MAX,
    BodyLimits,
    IncomingBodies,
    UnknownCallerLimits,
)
from pensieve.v1 import admin_pb2, conversation_pb2
from tests.conversations.raw_http2 import DATA, END_STREAM, RST_STREAM, RawPeer, frame
from tests.conversations.rig_daemon import DaemonRig, ServeProcess, wait_for

MIB = 1 << 20
GROWTH_MAX = 128 * MIB
SEND = "/pensieve.v1.ConversationService/SendMessage"
HEALTH = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
BODY = b"\0" + struct.pack(">I", 3 * MIB) + b"x" * (3 * MIB - 1)  # lacks its last byte


class Guarded(ServeProcess):
    """A daemon that requires tokens, and a valid token."""

    def __init__(self, folder: Path, **parameters: Mapping[str, Any]) -> None:
        self.token, entry = callers.new_token("a", admin=False)
        tokens = folder / "tokens.toml"
        tokens.write_text(entry)
        tokens.chmod(0o600)
        super().__init__(folder / "data", "--token-file", str(tokens), parameters=parameters)

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
            stream = peer.call(WATCH)
            peer.body(stream, bytes(5), patience=1.0, end=True)


def answers_that_are_never_taken(peers: contextlib.ExitStack, address: str) -> None:
    for _ in range(10):
        peer = peers.enter_context(RawPeer(address, window=0))
        for _ in range(2000):
            peer.body(peer.call(HEALTH), bytes(5), patience=1.0, end=True)


def long_headers(peers: contextlib.ExitStack, address: str) -> None:
    for _ in range(10):
        peer = peers.enter_context(RawPeer(address))
        for _ in range(500):
            peer.call(SEND, ("x-long", "a" * 7000))


def calls_of_every_method(peers: contextlib.ExitStack, address: str) -> None:
    """Start calls of every method, because gRPC may have a queue per method."""
    services = [
        service
        for file in (conversation_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
    ]
    paths = [f"/{each.full_name}/{method.name}" for each in services for method in each.methods]
    assert len(paths) > 15
    for _ in range(20):
        peer = peers.enter_context(RawPeer(address))
        for number in range(1000):
            peer.call(paths[number % len(paths)], ("x-long", "a" * 3500))


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


def half_sent_bodies_with_a_token(guarded: Guarded, peers: contextlib.ExitStack) -> None:
    peer = peers.enter_context(RawPeer(guarded.address))
    for _ in range(100):
        stream = peer.call(SEND, ("authorization", f"Bearer {guarded.token}"))
        peer.body(stream, BODY, patience=0.02)


@pytest.mark.parametrize(
    "attack",
    [
        half_sent_bodies,
        half_sent_bodies_to_the_method_for_everybody,
        watches_of_health,
        answers_that_are_never_taken,
        long_headers,
        calls_of_every_method,
        calls_whose_answers_nobody_reads,
        many_connections,
        a_compression_bomb,
    ],
)
def test_a_client_without_a_token_costs_little_memory(
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


def test_unfinished_bodies_of_a_client_with_a_token_are_limited(guarded: Guarded) -> None:
    before = guarded.resident_bytes()
    with contextlib.ExitStack() as peers:
        half_sent_bodies_with_a_token(guarded, peers)
        growth = guarded.resident_bytes() - before
    print(f"{growth / MIB:.1f} MiB")
    assert growth < RECEIVING_MAX * len(BODY) + 16 * MIB
    assert guarded.ask()


def test_connections_above_the_limit_are_closed_but_the_operator_can_connect(
    tmp_path: Path,
) -> None:
    daemon = Guarded(tmp_path, listening={"connections_max": 20})
    daemon.start()
    with contextlib.ExitStack() as peers:
        opened = [peers.enter_context(RawPeer(daemon.address)) for _ in range(50)]
        wait_for(lambda: sum(each.is_closed for each in opened) == 30)
        with Admin(f"unix:{daemon.data / 'admin.sock'}") as admin:
            assert admin.stats().serving
    wait_for(lambda: daemon.ask(), 30)
    assert daemon.stop() == 0


class Call:
    """A call's context whose body and end are triggered by the test."""

    def __init__(self, body: Any = None) -> None:
        self.arrived: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.end: Callable[[Any], None] = lambda context: None
        self.is_read = False
        if body is not None:
            self.arrived.set_result(body)

    async def read(self) -> Any:
        self.is_read = True
        return await self.arrived

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.end = callback


def test_an_unfinished_body_times_out_and_frees_its_slot() -> None:
    async def run() -> None:
        incoming = IncomingBodies(known=BodyLimits(receiving_max=2, seconds=4.0))
        calls = [Call() for _ in range(2)]
        stuck = [asyncio.ensure_future(incoming.body(call, "a")) for call in calls]
        while not all(call.is_read for call in calls):
            await asyncio.sleep(0)
        incoming._known = BodyLimits(receiving_max=2, seconds=60.0)  # for the calls that follow
        assert (await incoming.body(Call(b"whole"), "b"))[0] == b"whole", (
            "another tenant must not wait"
        )
        assert not stuck[0].done()
        assert (await incoming.body(Call(b"whole"), "a"))[0] == b"whole"
        for task in stuck:
            with pytest.raises(DeadlineExceeded):
                await task

    asyncio.run(run())


def test_calls_waiting_for_unfinished_bodies_are_dropped() -> None:
    async def run() -> None:
        incoming = IncomingBodies(known=BodyLimits(receiving_max=1, seconds=0.05))
        calls = [Call() for _ in range(50)]
        tasks = [asyncio.ensure_future(incoming.body(call, "a")) for call in calls]
        first = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, DeadlineExceeded) for each in first)
        assert sum(call.is_read for call in calls) < 10, "calls must wait at the same time"
        assert (await incoming.body(Call(b"whole"), "a"))[0] == b"whole"

    asyncio.run(run())


def test_stranger_health_checks_per_connection_are_limited_until_answered() -> None:
    async def run() -> None:
        incoming = IncomingBodies(unknown=UnknownCallerLimits(calls_max=2))
        calls = [Call(b""), Call(b"")]
        for call in calls:
            assert await incoming.unknown_callers_body(call, "one", is_watch=False) == b""
        with pytest.raises(QueueFull):
            await incoming.unknown_callers_body(Call(b""), "one", is_watch=False)
        assert await incoming.unknown_callers_body(Call(b""), "another", is_watch=False) == b""
        calls[0].end(calls[0])
        assert await incoming.unknown_callers_body(Call(b""), "one", is_watch=False) == b""

    asyncio.run(run())


def test_stranger_watches_are_limited_separately_from_checks() -> None:
    async def run() -> None:
        incoming = IncomingBodies(unknown=UnknownCallerLimits(calls_max=1, watches_max=2))
        watches = [Call(b""), Call(b"")]
        for number, watch in enumerate(watches):
            assert await incoming.unknown_callers_body(watch, f"{number}", is_watch=True) == b""
        with pytest.raises(QueueFull):
            await incoming.unknown_callers_body(Call(b""), "2", is_watch=True)
        assert await incoming.unknown_callers_body(Call(b""), "0", is_watch=False) == b""
        watches[1].end(watches[1])
        assert await incoming.unknown_callers_body(Call(b""), "2", is_watch=True) == b""

    asyncio.run(run())


def test_an_unfinished_stranger_body_is_dropped_for_a_newer_one() -> None:
    async def run() -> None:
        incoming = IncomingBodies(unknown=UnknownCallerLimits(receiving_max=2, seconds=1000.0))
        stuck = []
        for number in range(10):
            body = incoming.unknown_callers_body(Call(), f"{number}", is_watch=False)
            stuck.append(asyncio.ensure_future(body))
            await asyncio.sleep(0)
        assert await incoming.unknown_callers_body(Call(b""), "x", is_watch=False) == b""
        for task in stuck[:-1]:
            with pytest.raises(DeadlineExceeded):
                await task
        assert not stuck[-1].done()
        stuck[-1].cancel()

    asyncio.run(run())


def test_a_watch_without_a_token_ends_after_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STRANGERS_WATCH_SECONDS", 0.1)
    token, entry = callers.new_token("a", admin=False)
    path = tmp_path / "tokens.toml"
    path.write_text(entry)
    path.chmod(0o600)
    data = tmp_path / "data"
    tokens = callers.read_tokens(path)
    listening = Listening("127.0.0.1:0", data / "admin.sock", tokens=tokens)
    with DaemonRig(data, listening=listening) as rig:
        watch: Any = rig.channel.unary_stream(WATCH)
        known = watch(b"", metadata=[("authorization", f"Bearer {token}")])
        assert next(known) == b"\x08\x01"
        with pytest.raises(grpc.RpcError, match="watch again"):
            list(watch(b"", timeout=30))
        assert known.is_active()
        known.cancel()


def test_half_open_requests_do_not_block_the_operator(tmp_path: Path) -> None:
    """This also holds without tokens, when all callers count as one tenant."""
    over = threading.Event()

    def unfinished() -> Iterator[bytes]:
        over.wait()
        yield from ()

    with DaemonRig(tmp_path / "data") as rig:
        path = "/pensieve.v1.ConversationService/GetConversation"
        call: Any = rig.channel.stream_unary(path, request_serializer=bytes)
        calls = [call.future(unfinished()) for _ in range(4 * RECEIVING_MAX)]
        incoming = rig.server.guard.incoming
        wait_for(lambda: "" in incoming._slots and incoming._slots[""].locked(), 30)
        answer = rig.admin.GetStats(admin_pb2.GetStatsRequest(), timeout=20)
        assert answer.stats.serving
        for each in calls:
            each.cancel()
        over.set()


def test_empty_and_immediately_cancelled_calls_log_no_fault(
    guarded: Guarded,
) -> None:
    with contextlib.ExitStack() as peers:
        peer = peers.enter_context(RawPeer(guarded.address))
        bearer = ("authorization", f"Bearer {guarded.token}")
        for _ in range(50):
            peer.send(frame(RST_STREAM, 0, peer.call(SEND, bearer), struct.pack(">I", 8)))
        stream = peer.call(SEND, bearer)
        peer.body(stream, b"", patience=0.1, end=True)
        peer.send(frame(DATA, END_STREAM, stream))
        wait_for(lambda: stream in peer.ended)
    assert guarded.ask()
    assert "incident" not in guarded.log.read_text()
    assert "Traceback" not in guarded.log.read_text()


def test_health_answers_many_checks_without_a_token(guarded: Guarded) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        check: Any = channel.unary_unary(HEALTH)
        for _ in range(1500):
            assert check(b"", timeout=30) == b"\x08\x01"
        begin: Any = channel.unary_stream(WATCH)
        watches = [begin(b"") for _ in range(20)]
        for watch in watches:
            assert next(watch) == b"\x08\x01"
            watch.cancel()
        assert check(b"", timeout=30) == b"\x08\x01"


def many_watches(peers: contextlib.ExitStack, address: str) -> None:
    peer = peers.enter_context(RawPeer(address))
    for _ in range(600):
        peer.body(peer.call(WATCH), bytes(5), patience=1.0, end=True)


def bodies_that_never_end(peers: contextlib.ExitStack, address: str) -> None:
    peer = peers.enter_context(RawPeer(address))
    for _ in range(200):
        peer.body(peer.call(HEALTH), BODY[:1000], patience=0.02)


def answers_untaken(peers: contextlib.ExitStack, address: str) -> None:
    peer = peers.enter_context(RawPeer(address, window=0))
    for _ in range(600):
        peer.body(peer.call(HEALTH), bytes(5), patience=1.0, end=True)


@pytest.mark.parametrize("attack", [many_watches, bodies_that_never_end, answers_untaken])
def test_hostile_strangers_do_not_block_health_checks(
    guarded: Guarded, attack: Callable[[contextlib.ExitStack, str], None]
) -> None:
    """Otherwise an orchestrator would restart the daemon."""
    with contextlib.ExitStack() as peers, grpc.insecure_channel(guarded.address) as channel:
        check: Any = channel.unary_unary(HEALTH)
        assert check(b"", timeout=30) == b"\x08\x01"
        attack(peers, guarded.address)
        for _ in range(20):
            assert check(b"", timeout=20) == b"\x08\x01"
