"""Accept ranks from other machines: rank 0 listens until all have arrived.

    accept ──> a thread for each connection: handshake.py ──> arrived
                                                └─ refused: reported, and the connection is closed

Rank 0's main thread runs the listener.  An arrived rank waits for its settings.  If this rank disconnects
before all ranks have arrived, rank 0 waits for a replacement.  When all ranks have arrived, rank 0 stops
listening.  A later rank cannot connect, and tries again after a while.

Ranks are numbered by host name, then by device.  So ranks of one machine get consecutive numbers.  The shards
of a stage (ranks.py) are then on one machine, if that machine has enough ranks.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from pensieve.errors import AddressInUse, ConfigError, DeviceError
from pensieve.model.parallel.handshake import (
    FRAME_BYTES_MAX,
    HANDSHAKE_SECONDS,
    RankIdentity,
    RankRefused,
    receive_rank,
    tuned,
)
from pensieve.model.parallel.rank_messages import RankPipe

HANDSHAKES_MAX = 32  # concurrent handshakes
POLL_SECONDS = 0.2


class RemoteRanks(NamedTuple):
    """The ranks to expect from other machines."""

    num_ranks: int
    host: str  # address of this machine's interface to the other ranks
    port: int
    secret: bytes
    expected: RankIdentity  # each rank's versions, device and model must match
    wait_seconds: float


class Arrived(NamedTuple):
    pipe: RankPipe
    arrival: RankIdentity


def split_address(text: str, flag: str = "--rank-address") -> tuple[str, int]:
    """Parse HOST:PORT; HOST must be the address of one interface."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{flag} must be HOST:PORT, not {text!r}")
    if host in ("0.0.0.0", "::", "*"):
        raise ConfigError(
            f"{flag} {text}: needs the address of one network interface, not of all interfaces"
        )
    return host, int(port)


class Arrivals:
    def __init__(self, remote_ranks: RemoteRanks, report: Callable[[str], None]) -> None:
        self._remote_ranks, self._report = remote_ranks, report
        self._arrived: list[Arrived] = []
        self._verdicts: queue.SimpleQueue[Arrived | str] = queue.SimpleQueue()
        self._handshakes = threading.Semaphore(HANDSHAKES_MAX)
        address = (remote_ranks.host, remote_ranks.port)
        family = socket.AF_INET6 if ":" in remote_ranks.host else socket.AF_INET
        try:
            self._socket = socket.create_server(address, family=family)
        except OSError as error:
            kind = AddressInUse if error.errno == 98 else ConfigError
            raise kind(f"--rank-address {address[0]}:{address[1]}: {error.strerror}") from error
        self.address = f"{remote_ranks.host}:{self._socket.getsockname()[1]}"

    def wait(self) -> list[Arrived]:
        """Return all ranks in the order of their numbers; raise DeviceError if they do not arrive in time."""
        num_ranks, seconds = self._remote_ranks.num_ranks, self._remote_ranks.wait_seconds
        self._report(f"waiting at {self.address} for {_ranks(num_ranks)} from other machines")
        deadline = time.monotonic() + seconds
        try:
            while len(self._arrived) < num_ranks:
                if time.monotonic() > deadline:
                    raise DeviceError(self._missing_ranks())
                if select.select([self._socket], [], [], POLL_SECONDS)[0]:
                    self._accept()
                self._take_verdicts()
                self._drop_disconnected()
        except BaseException:
            for each in self._arrived:
                each.pipe.close()
            raise
        finally:
            self._socket.close()
        return sorted(
            self._arrived, key=lambda each: (each.arrival.host, each.arrival.device_index)
        )

    def _missing_ranks(self) -> str:
        hosts = sorted(each.arrival.host for each in self._arrived)
        missing = self._remote_ranks.num_ranks - len(hosts)
        found = f"{', '.join(hosts)} connected" if hosts else "none connected"
        return (
            f"{missing} of {_ranks(self._remote_ranks.num_ranks)} from other machines did not connect to "
            f"{self.address} within {self._remote_ranks.wait_seconds:g} s ({found}). Is `pensieve rank` "
            "running there?"
        )

    def _accept(self) -> None:
        try:
            sock, (host, *_) = self._socket.accept()
        except OSError:
            return  # the client has disconnected
        if not self._handshakes.acquire(blocking=False):
            sock.close()
            return
        threading.Thread(target=self._shake_hands, args=(sock, host), daemon=True).start()

    def _shake_hands(self, sock: socket.socket, host: str) -> None:
        pipe = RankPipe(sock, FRAME_BYTES_MAX)
        try:
            tuned(sock).settimeout(HANDSHAKE_SECONDS)
            arrival = receive_rank(pipe, self._remote_ranks.secret, self._remote_ranks.expected)
            sock.settimeout(None)
            self._verdicts.put(Arrived(pipe, arrival))
        except (RankRefused, OSError) as error:
            pipe.close()
            self._verdicts.put(f"a rank from {host} was refused: {error}")
        finally:
            self._handshakes.release()

    def _take_verdicts(self) -> None:
        while True:
            try:
                verdict = self._verdicts.get_nowait()
            except queue.Empty:
                return
            if isinstance(verdict, str):
                self._report(verdict)
            elif len(self._arrived) == self._remote_ranks.num_ranks:
                with contextlib.suppress(OSError):
                    verdict.pipe.send("refused", text="all ranks have arrived")
                verdict.pipe.close()
            else:
                with contextlib.suppress(OSError):  # `_drop_disconnected` will notice
                    verdict.pipe.send("accepted")
                self._arrived.append(verdict)
                self._report_num(f"{verdict.arrival.host} connected")

    def _drop_disconnected(self) -> None:
        for each in [each for each in self._arrived if each.pipe.has_ended()]:
            each.pipe.close()
            self._arrived.remove(each)
            self._report_num(f"{each.arrival.host} disconnected")

    def _report_num(self, text: str) -> None:
        self._report(f"{text}: {len(self._arrived)} of {self._remote_ranks.num_ranks}")


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
