"""The process of a rank other than 0, which rank 0 starts."""

from __future__ import annotations

import signal
import socket
import sys


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with rank 0, and not before
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    from pensieve.model.parallel.worker import serve

    serve(sock)


if __name__ == "__main__":
    main(int(sys.argv[1]))
