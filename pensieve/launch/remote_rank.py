"""A rank on another machine than rank 0. It connects to rank 0, starts a computing process, and reconnects.

    connect ──> handshake ──accepted──> process with the connection (rank_process.py) ──ends──┐
       ^            └ refused, or nothing listens                                              │
       └────────── after a pause that doubles until a connection is accepted <─────────────────┘

When any rank dies or hangs, the engine of rank 0 ends and another engine starts. When the old engine ends,
its connections to the ranks are closed, and the computing process of each rank exits. This module has neither
model nor state. It starts a new computing process for the next engine.

The computing process owns the connection. Its standard input is a pipe from the `pensieve rank` process. The
computing process exits when the connection or the pipe is closed, so it does not outlive `pensieve rank`. If
it does not exit within STOP_SECONDS after the connection was closed (it was stopped, or its device hangs),
`pensieve rank` closes the pipe, and kills the process after another STOP_SECONDS.

If the engine refuses the rank, `pensieve rank` logs the refusal and tries again, because refusals are normal
while several machines are upgraded.
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
POLL_SECONDS = 0.2


class LeaderAddress(NamedTuple):
    """The address of rank 0, and the shared secret."""

    host: str
    port: int
    secret: bytes


class RemoteRank:
    def __init__(
        self, leader: LeaderAddress, own: RankIdentity, report: Callable[[str], None]
    ) -> None:
        self._leader, self._own, self._report = leader, own, report
        self._stopping = threading.Event()
        self.pid: int | None = None  # process id of the computing process

    def stop(self) -> None:
        """Make `run` return. May be called in a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        pause, reason = PAUSE_SECONDS_MIN, ""
        while not self._stopping.is_set():
            try:
                sock = self._connect()
            except (RankRefused, OSError) as error:
                if str(error) != reason:
                    reason = str(error)
                    self._report(f"{self._leader.host}:{self._leader.port}: {reason}; retrying")
            else:
                pause, reason = PAUSE_SECONDS_MIN, ""
                self._report("accepted; computing for the engine")
                status = self._compute(sock)
                if self._stopping.is_set():
                    return
                self._report(f"the engine is gone (status {status}); reconnecting")
            self._stopping.wait(pause * random.uniform(0.75, 1.25))
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    def _connect(self) -> socket.socket:
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
        """Run the computing process until it ends. Return its exit status."""
        with sock:
            process = subprocess.Popen(
                [*programs.RANK, str(sock.fileno()), "0"],
                pass_fds=[sock.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                # this process handles Ctrl-C, and ends the computing process
                start_new_session=True,
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
        """Wait until the process ends, and return its exit status.

        Return -SIGKILL if `_compute` must end the process: because of `stop`, or because the process still
        runs STOP_SECONDS after its connection was closed.
        """
        connection = select.poll()
        connection.register(
            sock, getattr(select, "POLLRDHUP", 0)
        )  # poll reports errors and hang-ups in any case
        ended_at = float("inf")
        while not self._stopping.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(POLL_SECONDS)
            now = time.monotonic()
            if connection.poll(0):
                ended_at = min(ended_at, now)
            if now > ended_at + STOP_SECONDS:
                break
        return -signal.SIGKILL


def rank_of(settings: Settings, report: Callable[[str], None]) -> RemoteRank:
    """Create the rank that the settings of `pensieve rank` describe."""
    import torch

    secret = read_secret(settings.cluster_secret).encode()
    host, port = split_address(settings.leader or "", "--leader")
    folder = resolve_model(settings.model, report)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {device}: this machine has {torch.cuda.device_count()} GPUs")
    fingerprint = weights_fingerprint(folder)
    threads = settings.threads or torch.get_num_threads()
    own = described(kind, fingerprint, str(folder.resolve()), int(index or 0), threads)
    report(f"rank for the engine at {host}:{port}: {folder}, fingerprint {fingerprint}")
    return RemoteRank(LeaderAddress(host, port, secret), own, report)
