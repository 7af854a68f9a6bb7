"""A rank on another machine than rank 0: it connects, has a process compute, and connects again.

    connect ──> handshake ──accepted──> a process with the connection (rank_process.py) ──it ends──┐
       ^            └ refused, or nobody listens                                                    │
       └────────── after a pause, twice as long each time, until one was accepted <─────────────────┘

Rank 0's engine ends when any rank dies or hangs, and another is started.  The connection of its ranks ends
with it, and so do their processes; what is here has no model and no state, and brings a new process to the
next engine.

The process has the connection as its own, and a pipe from here as its standard input: it ends with the one as
with the other.  So none is left behind when this one is killed.  One that does not end (it was stopped, or
its device hangs) is killed a while after the connection has ended.

Nothing that the engine refuses ends the command, since an upgrade of several machines passes through such
states: each refusal is a line of the log.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from pensieve.config import Settings, read_secret
from pensieve.errors import ConfigError
from pensieve.launch import programs
from pensieve.launch.model_folder import resolve_model, weights_fingerprint
from pensieve.model.parallel.arrivals import split_address
from pensieve.model.parallel.handshake import (
    FRAME_BYTES_MAX,
    HANDSHAKE_SECONDS,
    RankIdentity,
    RankRefused,
    described,
    present,
    tuned,
)
from pensieve.model.parallel.rank_messages import RankPipe

PAUSE_SECONDS_MIN = 0.5
PAUSE_SECONDS_MAX = 15.0
STOP_SECONDS = 5.0
LOOK_SECONDS = 0.2


class LeaderAddress(NamedTuple):
    """Where rank 0 listens, and what is known to both."""

    host: str
    port: int
    secret: bytes


class RemoteRank:
    def __init__(
        self, leader: LeaderAddress, own: RankIdentity, report: Callable[[str], None]
    ) -> None:
        self._leader, self._own, self._report = leader, own, report
        self._stopping = threading.Event()
        self.pid: int | None = None  # of the process that computes

    def stop(self) -> None:
        """Have `run` return; may be called in a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        pause, reason = PAUSE_SECONDS_MIN, ""
        while not self._stopping.is_set():
            try:
                sock = self._connected()
            except (RankRefused, OSError) as error:
                if str(error) != reason:
                    reason = str(error)
                    self._report(f"{self._leader.host}:{self._leader.port}: {reason}; trying again")
            else:
                pause, reason = PAUSE_SECONDS_MIN, ""
                self._report("accepted; computing for the engine")
                status = self._compute(sock)
                if self._stopping.is_set():
                    return
                self._report(f"the engine is gone (status {status}); connecting again")
            self._stopping.wait(pause * random.uniform(0.75, 1.25))
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    def _connected(self) -> socket.socket:
        address = (self._leader.host, self._leader.port)
        sock = socket.create_connection(address, HANDSHAKE_SECONDS)
        try:
            present(RankPipe(tuned(sock), FRAME_BYTES_MAX), self._leader.secret, self._own)
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        return sock

    def _compute(self, sock: socket.socket) -> int:
        """In a process, until it ends."""
        with sock:
            process = subprocess.Popen(
                [*programs.RANK, str(sock.fileno()), "0"],
                pass_fds=[sock.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this one, which ends it
                env={**os.environ, "LOCAL_RANK": str(self._own.device_index)},
            )
            self.pid = process.pid
            try:
                return self._watch(process, sock)
            finally:
                assert process.stdin is not None
                process.stdin.close()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _watch(self, process: subprocess.Popen[bytes], sock: socket.socket) -> int:
        """Until it ends, or does not though the connection did: then it hangs."""
        connection = select.poll()
        connection.register(
            sock, getattr(select, "POLLRDHUP", 0)
        )  # an error or an end, in any case
        ended_at = float("inf")
        while not self._stopping.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(LOOK_SECONDS)
            now = time.monotonic()
            if connection.poll(0):
                ended_at = min(ended_at, now)
            if now > ended_at + STOP_SECONDS:
                break
        return -signal.SIGKILL


def rank_of(settings: Settings, report: Callable[[str], None]) -> RemoteRank:
    """By the settings of `pensieve rank`."""
    import torch

    secret = read_secret(settings.cluster_secret).encode()
    host, port = split_address(settings.leader or "", "--leader")
    folder = resolve_model(settings.model, report)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {device}: there are {torch.cuda.device_count()} GPUs")
    fingerprint = weights_fingerprint(folder)
    threads = settings.threads or torch.get_num_threads()
    own = described(kind, fingerprint, str(folder.resolve()), int(index or 0), threads)
    report(f"a rank of {host}:{port}: {folder}, fingerprint {fingerprint}")
    return RemoteRank(LeaderAddress(host, port, secret), own, report)
