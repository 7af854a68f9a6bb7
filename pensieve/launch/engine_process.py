"""The engine process of a daemon. It reads messages from a pipe and writes events to it.

The service starts it as `python -m pensieve.launch.engine_process FD`, where FD is a socket.

    reader thread    frames from the service → Mailbox
    main thread      Engine.run
    writer thread    Outbox → one frame with all events since the last frame,
                     or a heartbeat with the main thread's loop counter

**Start.** The process imports torch, reads the settings from the first frame, loads the model and sends
`ready` with the sizes of its memory. It sends a `stage` frame when a step of the start begins.

**End.** When the pipe is closed, the service is gone, and the process exits immediately. It has nothing to
save, because the service has the history. If the reader or writer thread fails, the process exits, too.
Otherwise the other threads would wait forever. An engine that fails sends a last frame, `died`, with the
error as one line and an exit code. PensieveErrors before `ready` (a setting, model or device that cannot be
used) are meant for the operator. Any other error also prints a traceback.

**Backpressure.** If the mailbox is full, the reader thread waits. Then the pipe fills, and the service
rejects messages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from pensieve import gc_pause
from pensieve.config import Settings, resolve
from pensieve.engine.hand_over import verified
from pensieve.engine.mailbox import Mailbox, Outbox
from pensieve.engine.messages import ImportKv
from pensieve.engine.pipe import (
    BEAT_SECONDS,
    BrokenPipe,
    Frame,
    frames,
    message_of,
    pack,
    pack_alive,
    pack_events,
)
from pensieve.engine.ports import Sink
from pensieve.errors import DeviceError, PensieveError, Unavailable, whole_line
from pensieve.launch.cpu_threads import prepare_threads
from pensieve.launch.engine import BuiltEngine, build_engine
from pensieve.launch.model_folder import Report, load_texts

MESSAGES_MAX = 65_536
SHOWN_SECONDS = 0.05  # the summary names only steps of the start that took at least this long
Build = Callable[[Settings, Path, Report, Mailbox, Sink], BuiltEngine]
Prepare = Callable[[Report], None]


class _Stages:
    """Sends a line when a step of the start begins, and measures how long each step takes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._began = [(time.monotonic(), "first steps")]

    def __call__(self, line: str) -> None:
        self._began.append((time.monotonic(), line.partition(":")[0]))
        self._sock.sendall(pack(["stage", line]))

    def summary(self) -> str:
        ends = [began for began, _ in self._began[1:]] + [time.monotonic()]
        durations = [
            (end - began, name) for end, (began, name) in zip(ends, self._began, strict=True)
        ]
        slow = (
            f"{name} {seconds:.1f} s" for seconds, name in durations if seconds >= SHOWN_SECONDS
        )
        total = sum(seconds for seconds, _ in durations)
        return ": ".join(filter(None, (f"the engine started in {total:.1f} s", ", ".join(slow))))


def main(fd: int, build: Build, prepare: Prepare = lambda report: None) -> int:
    """Run an engine until the pipe is closed. Return the exit code.

    `prepare` runs before the settings arrive. So the service may start this process before it has the
    settings.
    """
    prepare_threads()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    incoming, mailbox, outbox = frames(sock), Mailbox(MESSAGES_MAX), Outbox()
    try:
        stages = _Stages(sock)
        prepare(stages)
        built = _start(sock, incoming, build, mailbox, outbox, stages)
    except PensieveError as error:  # an error for the operator, not a bug
        return _end(sock, error)
    except (BrokenPipeError, ConnectionResetError):  # the service process is gone
        return 0
    except BaseException as error:
        traceback.print_exc()
        return _end(sock, error)
    try:
        _run(sock, incoming, built, mailbox, outbox)
    except BaseException as error:
        traceback.print_exc()
        return _end(sock, error)
    return 0


def _start(
    sock: socket.socket,
    incoming: Iterator[Frame],
    build: Build,
    mailbox: Mailbox,
    outbox: Outbox,
    stages: _Stages,
) -> BuiltEngine:
    """Read the settings, build the engine and send `ready`."""
    first = next(incoming, None)
    if first is None:
        raise BrokenPipeError
    (kind, written, folder), _ = first
    if kind != "settings":
        raise BrokenPipe(f"{kind!r} where the settings were expected")
    settings = resolve(written, {}).settings
    built = build(settings, Path(folder), stages, mailbox, outbox)
    ready = {
        "context_max": built.context_max,
        "vocab_size": built.vocab_size,
        "device_pages": built.pages.device,
        "host_pages": built.pages.host,
        "page_bytes": built.page_bytes,
        "chunk_tokens": settings.chunk_tokens,
        "iteration_cost": asdict(built.engine.scheduler.config.cost),
        "kv_compatibility": dict(built.kv_compatibility.facts),
        "kv_refusal": built.kv_compatibility.refusal,
        **built.computes,
    }
    if (smallest := built.smallest_tbt) is not None:
        ready["tbt_seconds_min"], ready["tbt_source"] = smallest
    gc_pause.freeze()
    stages(stages.summary())
    sock.sendall(pack(["ready", ready]))
    return built


def _run(
    sock: socket.socket,
    incoming: Iterator[Frame],
    built: BuiltEngine,
    mailbox: Mailbox,
    outbox: Outbox,
) -> None:
    """Run the engine until it fails. The process exits when the pipe is closed."""
    engine = built.engine

    def read() -> None:
        status = 0
        try:
            for frame in incoming:
                message = message_of(frame)
                if isinstance(message, ImportKv):  # verify in this thread, to delay no iteration
                    message = verified(message, engine.hand_over.slot_bytes)
                mailbox.put_when_there_is_room(message)
        except Unavailable:
            return  # the engine has failed; the main thread reports the error and exits
        except OSError:
            pass  # the service was killed
        except BaseException:
            traceback.print_exc()
            status = DeviceError.exit_code
        os._exit(status)

    def write() -> None:
        try:
            while (events := outbox.drain(BEAT_SECONDS)) is not None:
                sock.sendall(pack_events(events) if events else pack_alive(engine.num_rounds))
        except OSError:
            return  # the reader thread also notices this, and exits the process
        except BaseException:
            traceback.print_exc()
            os._exit(DeviceError.exit_code)

    reader, writer = (threading.Thread(target=each, daemon=True) for each in (read, write))
    reader.start()
    writer.start()
    try:
        engine.run()
    finally:
        outbox.close()
        writer.join()


def _end(sock: socket.socket, error: BaseException) -> int:
    """Tell the service why the process ends, and return the exit code."""
    code = error.exit_code if isinstance(error, PensieveError) else DeviceError.exit_code
    with contextlib.suppress(OSError):
        sock.sendall(pack(["died", whole_line(error), code]))
    return code


def import_torch(report: Report) -> None:
    report("importing torch")
    with gc_pause.paused():
        from pensieve.model.lean_imports import defer_compiler

        defer_compiler()


def build_with_model(
    settings: Settings, folder: Path, report: Report, mailbox: Mailbox, sink: Sink
) -> BuiltEngine:
    from pensieve.model.lean_imports import disable_distributed

    report("importing transformers")
    with gc_pause.paused():
        if settings.tensor_parallel == settings.pipeline_stages == 1:
            disable_distributed()
        import pensieve.launch.executor  # noqa: F401
    # Report nothing here, because the service process loads the same template and reports the differences.
    texts = load_texts(folder, lambda line: None, settings.chat_template)
    return build_engine(settings, folder, texts, report, mailbox, sink)


if __name__ == "__main__":
    status = main(int(sys.argv[1]), build_with_model, import_torch)
    if status:
        # A normal exit of Python calls the device driver. If the device has failed, that call may hang.
        sys.stderr.flush()
        os._exit(status)
