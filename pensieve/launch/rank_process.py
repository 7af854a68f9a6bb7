"""The process of a rank other than 0, which rank 0 starts, or `pensieve rank` on another machine.

Its first argument is the number of its socket to rank 0.  A second one is that of a pipe: when that ends,
whoever has started it is gone, and the process ends too.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading


def main(fd: int, lifeline: int | None = None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with rank 0, and not before
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if lifeline is not None:
        threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    sock = socket.socket(fileno=fd)
    from pensieve.model.parallel.worker import serve

    serve(sock)


def _end_with(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
