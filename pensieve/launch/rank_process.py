"""The process of a rank other than 0. It is started by rank 0, or by `pensieve rank` on another machine.

The first argument is the descriptor of its socket to rank 0. The optional second argument is the descriptor
of a pipe from its parent process. When the pipe is closed, this process exits.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading


def main(fd: int, lifeline: int | None = None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if lifeline is not None:
        threading.Thread(target=_exit_when_closed, args=(lifeline,), daemon=True).start()
    sock = socket.socket(fileno=fd)
    from pensieve.model.parallel.worker import serve

    serve(sock)


def _exit_when_closed(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
