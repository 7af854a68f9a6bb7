"""Start `pensieve serve` for a benchmark, with a data folder that is removed afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pensieve.api.grpc.admin_socket import socket_address, socket_path
from pensieve.errors import Unavailable

START_SECONDS = 300.0


class BenchDaemon(NamedTuple):
    address: str
    admin_address: str
    pid: int


@contextlib.contextmanager
def serving(
    flags: Sequence[str], variables: Mapping[str, str] | None = None
) -> Iterator[BenchDaemon]:
    """Run a daemon with these flags and environment variables; yield when it is ready."""
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        data, ready = Path(folder) / "data", Path(folder) / "ready"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pensieve", "serve", "--data", str(data)),
                *("--address", "127.0.0.1:0", "--ready-file", str(ready), *flags),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(variables or {})},
        )
        lines: list[str] = []
        reader = _reader(process, lines)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    reader.join(1.0)
                    raise Unavailable("the daemon did not start: " + "".join(lines[-3:]).strip())
                time.sleep(0.02)
            address = ready.read_text().strip()
            yield BenchDaemon(address, socket_address(socket_path(data)), process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            reader.join()


def _reader(process: subprocess.Popen[str], lines: list[str]) -> threading.Thread:
    """Collect the daemon's log lines. If nobody read the pipe, a full pipe would block the daemon."""

    def read() -> None:
        assert process.stderr is not None
        with process.stderr:
            lines.extend(process.stderr)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread
