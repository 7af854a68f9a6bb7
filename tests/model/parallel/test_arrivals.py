"""Ranks of other machines that connect: which are accepted, which are refused and why, which are missing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable

import pytest

from pensieve.engine.pipe import LENGTHS
from pensieve.errors import ConfigError, DeviceError
from pensieve.model.parallel.arrivals import Arrivals, RemoteRanks, split_address
from pensieve.model.parallel.handshake import (
    FRAME_BYTES_MAX,
    RankIdentity,
    RankRefused,
    described,
    present,
    receive_rank,
)
from pensieve.model.parallel.rank_messages import ControlMessage, RankPipe
from pensieve.model.parallel.rank_store import Keys, RankStore

SECRET = b"a secret of all machines"
HERE = described("cpu", "f1", "/models/here", 0, 2)


def other_identity(**changes: object) -> RankIdentity:
    return HERE._replace(folder="/models/there", **changes)  # type: ignore[arg-type]


class HandshakeResults:
    """The results of both sides of a handshake."""

    def __init__(self, ranks_secret: bytes, arrival: RankIdentity) -> None:
        ours, theirs = socket.socketpair()
        self.accepted: RankIdentity | None = None
        self.why_refused = self.why_left = ""
        rank = threading.Thread(target=self._present, args=(theirs, ranks_secret, arrival))
        rank.start()
        pipe = RankPipe(ours, FRAME_BYTES_MAX)
        try:
            self.accepted = receive_rank(pipe, SECRET, HERE)
            pipe.send("accepted")
        except RankRefused as error:
            self.why_refused = str(error)
        pipe.close()
        rank.join()

    def _present(self, sock: socket.socket, secret: bytes, arrival: RankIdentity) -> None:
        try:
            present(RankPipe(sock, FRAME_BYTES_MAX), secret, arrival)
        except RankRefused as error:
            self.why_left = str(error)
        sock.close()


def test_a_rank_with_the_secret_and_the_same_settings_is_accepted() -> None:
    both = HandshakeResults(SECRET, other_identity(num_threads=7))
    assert (both.why_refused, both.why_left) == ("", "")
    assert both.accepted == other_identity(num_threads=7)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "f2"}, "other weights: f2, and rank 0 has f1"),
        ({"pensieve": "9.9"}, "pensieve 9.9, and rank 0 has"),
        ({"torch": "1.0"}, "torch 1.0, and rank 0 has"),
        ({"device": "cuda"}, "another device: cuda, and rank 0 has cpu"),
        ({"protocol": 99}, "protocol 99, and rank 0 has 1"),
        ({"num_threads": "many"}, "is not understood"),
    ],
)
def test_a_rank_with_other_settings_gets_the_reason_for_its_refusal(
    changes: dict[str, object], why: str
) -> None:
    both = HandshakeResults(SECRET, other_identity(**changes))
    assert both.accepted is None
    assert why in both.why_refused
    assert why in both.why_left


def test_a_peer_without_the_secret_learns_nothing_and_is_refused() -> None:
    both = HandshakeResults(b"another secret altogether", other_identity())
    assert both.accepted is None
    assert "does not know the secret" in both.why_refused
    assert "perhaps its secret differs" in both.why_left


def test_rank_0_must_prove_the_secret_too() -> None:
    """A false rank 0 that accepts any proof has no proof itself, and echoes what it received."""
    ours, theirs = socket.socketpair()
    pipe = RankPipe(ours)

    def pretend() -> None:
        pipe.send("challenge", nonce="00" * 32)
        proof = pipe.receive()
        assert isinstance(proof, ControlMessage)
        pipe.send("proof", mac=proof.values["mac"])

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(RankRefused, match="does not know the secret"):
        present(RankPipe(theirs, FRAME_BYTES_MAX), SECRET, other_identity())
    thread.join()
    theirs.close()
    assert pipe.receive() is None, "the rank must send nothing to a false rank 0"
    ours.close()


def frame(head: bytes, body: bytes = b"") -> bytes:
    return LENGTHS.pack(len(head), len(body)) + head + body


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        frame(b'["iteration",0,false,[],[],[],[],[]]'),
        frame(b" " * 5000),  # too long for a rank that is not trusted yet
        frame(b"[" * 4000),
        frame(b"{}"),
        frame(json.dumps(["proof", ["no", "values"]]).encode()),
        frame(json.dumps(["proof", {"nonce": "zz", "mac": "zz"}]).encode()),
        frame(json.dumps(["arrival", other_identity()._asdict()]).encode()),
        b"",
    ],
)
def test_invalid_handshake_bytes_are_refused(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(RankRefused):
        receive_rank(RankPipe(ours, FRAME_BYTES_MAX), SECRET, HERE)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_frame_above_the_size_limit_is_refused(
    is_trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger has a lower limit than a trusted rank. A longer frame is not read, even if it is valid."""
    monkeypatch.setattr("pensieve.engine.pipe.FRAME_BYTES_MAX", 8192)
    bytes_max = 8192 if is_trusted else FRAME_BYTES_MAX
    for num_bytes, is_taken in ((bytes_max, True), (bytes_max + 1, False)):
        ours, theirs = socket.socketpair()
        pipe = RankPipe(ours, FRAME_BYTES_MAX)
        if is_trusted:
            pipe.trust()
        body = b'["proof", {}]'
        theirs.sendall(frame(body + b" " * (num_bytes - len(body))))
        assert pipe.receive() == (ControlMessage("proof", {}) if is_taken else None)
        theirs.close()
        ours.close()


def remote_ranks(num_ranks: int, seconds: float = 60.0) -> RemoteRanks:
    return RemoteRanks(num_ranks, "127.0.0.1", 0, SECRET, HERE, seconds)


class Visitors:
    """Ranks that connect to an address, for use in a thread."""

    def __init__(self, address: str) -> None:
        self._address = split_address(address)
        self.sockets: list[socket.socket] = []

    def come(self, arrival: RankIdentity, secret: bytes = SECRET) -> socket.socket:
        sock = socket.create_connection(self._address, 60)
        self.sockets.append(sock)
        present(RankPipe(sock, FRAME_BYTES_MAX), secret, arrival)
        return sock

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


def ranks_after_visits(
    num_ranks: int, visits: Callable[[Visitors], None]
) -> tuple[list[str], list[str]]:
    """Return the ranks in their order (host and device index of each), and the reported lines."""
    lines: list[str] = []
    arrivals = Arrivals(remote_ranks(num_ranks), lines.append)
    visitors = Visitors(arrivals.address)
    thread = threading.Thread(target=visits, args=(visitors,))
    thread.start()
    found = arrivals.wait()
    thread.join()
    for each in found:
        each.pipe.close()
    visitors.close()
    return [f"{each.arrival.host}/{each.arrival.device_index}" for each in found], lines


def test_ranks_of_a_machine_are_neighbours_in_any_order_of_arrival() -> None:
    def visits(visitors: Visitors) -> None:
        for host, index in (("b", 1), ("a", 1), ("b", 0), ("a", 0)):
            visitors.come(other_identity(host=host, device_index=index))

    found, lines = ranks_after_visits(4, visits)
    assert found == ["a/0", "a/1", "b/0", "b/1"]
    assert lines[1:] == [
        "b connected: 1 of 4",
        "a connected: 2 of 4",
        "b connected: 3 of 4",
        "a connected: 4 of 4",
    ]


def test_a_rank_that_disconnects_is_awaited_again() -> None:
    def visits(visitors: Visitors) -> None:
        visitors.come(other_identity(host="a")).close()
        with pytest.raises(RankRefused):
            visitors.come(other_identity(host="x"), b"not the secret at all")
        visitors.come(other_identity(host="b"))
        gone.wait(60)
        visitors.come(other_identity(host="c"))

    gone = threading.Event()

    class Noting(list[str]):
        def append(self, line: str) -> None:
            super().append(line)
            if "disconnected" in line:
                gone.set()

    lines = Noting()
    arrivals = Arrivals(remote_ranks(2), lines.append)
    visitors = Visitors(arrivals.address)
    thread = threading.Thread(target=visits, args=(visitors,))
    thread.start()
    found = arrivals.wait()
    thread.join()
    assert [each.arrival.host for each in found] == ["b", "c"]
    assert any("a disconnected" in line for line in lines)
    assert any("was refused: it does not know the secret" in line for line in lines)
    for each in found:
        each.pipe.close()
    visitors.close()


def test_the_error_names_the_missing_ranks() -> None:
    arrivals = Arrivals(remote_ranks(3, 6.0), lambda line: None)
    visitors = Visitors(arrivals.address)
    thread = threading.Thread(target=visitors.come, args=(other_identity(host="host-b"),))
    thread.start()
    with pytest.raises(
        DeviceError,
        match=r"2 of 3 ranks from other machines did not connect .* \(host-b connected\)",
    ):
        arrivals.wait()
    thread.join()
    assert visitors.sockets[0].recv(1) == b"", "the connection must be closed"
    visitors.sockets[0].close()


def test_a_rank_address_must_name_one_interface() -> None:
    assert split_address("10.0.0.5:5000") == ("10.0.0.5", 5000)
    assert split_address("[fd00::5]:5000") == ("fd00::5", 5000)
    for wrong in ("0.0.0.0:5000", "[::]:5000", "10.0.0.5", ":5000", "10.0.0.5:x"):
        with pytest.raises(ConfigError, match="--rank-address"):
            split_address(wrong)
    there_is_none = remote_ranks(1)._replace(host="192.0.2.7")
    with pytest.raises(ConfigError, match=r"--rank-address 192.0.2.7:0"):
        Arrivals(there_is_none, lambda line: None)


def test_ranks_share_keys_until_one_of_them_ends() -> None:
    keys = Keys()
    one, other = RankStore(keys.answer), RankStore(keys.answer)
    one.set("a/0", bytes(range(256)))
    assert other.get("a/0") == bytes(range(256))
    assert (one.add("n", 2), other.add("n", 3)) == (2, 5)
    assert other.check(["a/0", "n"])
    assert not other.check(["a/0", "b"])
    assert one.delete_key("n")
    assert not one.delete_key("n")
    assert other.num_keys() == 1
    found: list[str] = []

    def wait() -> None:
        try:
            other.wait(["never"])
        except DeviceError as error:
            found.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    keys.give_up("rank 2 ended")
    thread.join()
    assert found == ["rank 2 ended"]
