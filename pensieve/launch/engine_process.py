"""The engine process: `python -m pensieve.launch.engine_process FD`, started by `pensieve serve`.

    reader thread    frames from the service    → Mailbox
    main thread      Engine.run
    writer thread    Outbox → one frame of everything that was published since the last one

The first frame says the settings; then the model is loaded, each stage told, and `ready` says what the
engine can hold.  When the pipe ends the service is gone, and with it everybody who could read a
reply: the process ends at once.  It has nothing to save; the history is the service's.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from pensieve import gc_pause as cycles
from pensieve.config import Settings, resolve
from pensieve.engine.mailbox import Mailbox, Outbox
from pensieve.engine.pipe import BrokenPipe, frames, message_of, pack, pack_events
from pensieve.engine.ports import Sink
from pensieve.errors import DeviceError, PensieveError
from pensieve.launch.cpu_threads import spin_briefly
from pensieve.launch.engine import BuiltEngine, Report, build_engine, load_texts, one_line

MESSAGES_MAX = 65_536


Build = Callable[[Settings, Path, Report, Mailbox, Sink], BuiltEngine]


def main(fd: int, build: Build) -> int:
    spin_briefly()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is the service's to handle
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    try:
        return serve(sock, build)
    except BaseException as error:
        traceback.print_exc()
        code = error.exit_code if isinstance(error, PensieveError) else DeviceError.exit_code
        _tell(sock, pack(["died", one_line(error), code]))
        return code


def serve(sock: socket.socket, build: Build) -> int:
    incoming = frames(sock)
    (kind, written, folder), _ = next(incoming)
    if kind != "settings":
        raise BrokenPipe(f"{kind!r} where the settings were expected")
    settings = resolve(written, {}).settings

    def report(line: str) -> None:
        sock.sendall(pack(["stage", line]))

    mailbox, outbox = Mailbox(MESSAGES_MAX), Outbox()
    built = build(settings, Path(folder), report, mailbox, outbox)
    ready = {
        "context_max": built.context_max,
        "vocab_size": built.vocab_size,
        "device_pages": built.device_pages,
        "host_pages": built.host_pages,
        "page_bytes": built.page_bytes,
        "chunk_tokens": settings.chunk_tokens,
    }
    cycles.settle()
    sock.sendall(pack(["ready", ready]))

    def read() -> None:
        try:
            for frame in incoming:
                mailbox.put(message_of(frame))
        except PensieveError:
            traceback.print_exc()
        except OSError:
            pass  # the service was killed
        os._exit(0)

    def write() -> None:
        while events := outbox.drain():
            try:
                sock.sendall(pack_events(events))
            except OSError:
                return  # the reader notices too

    threads = [threading.Thread(target=each, daemon=True) for each in (read, write)]
    for thread in threads:
        thread.start()
    try:
        built.engine.run()
    finally:
        outbox.close()
        threads[1].join()
    return 0


def _tell(sock: socket.socket, frame: bytes) -> None:
    try:
        sock.sendall(frame)
    except OSError:
        return


def build_with_model(
    settings: Settings, folder: Path, report: Report, mailbox: Mailbox, sink: Sink
) -> BuiltEngine:
    # The service has told already what it found in the chat template.
    return build_engine(
        settings, folder, load_texts(folder, lambda line: None), report, mailbox, sink
    )


if __name__ == "__main__":
    status = main(int(sys.argv[1]), build_with_model)
    if status:
        # What a device that has failed would be asked in Python's own farewell may never be answered.
        sys.stderr.flush()
        os._exit(status)
