"""The engine process of a daemon (messages in from a pipe, events out).

Started by the service as `python -m pensieve.launch.engine_process FD`; FD is its end of the pipe.

    reader thread    frames from the service    → Mailbox
    main thread      Engine.run
    writer thread    Outbox → one frame of everything that was published since the last one,
                     or a sign of life with the number of the main thread's rounds

The first frame carries the settings; then the model is loaded, a frame reports each stage, and `ready`
carries what the engine can hold.  When the pipe ends the service is gone, and no one is left to read
a reply: the process ends at once.  It has nothing to save, as the service has the history.  If a reader or
writer thread fails, the process ends too: without it the others would wait for ever.

A mailbox that is full has the reader thread wait, and with it the pipe and the service, which then refuses.

The last frame of an engine that fails, `died`, carries the error as one line and an exit code.  An error
of our own before `ready` (a setting, a model or a device that cannot be used) is for the operator; any
other error also leaves a traceback on standard error.
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
SHOWN_SECONDS = 0.05  # of a stage that is named in the summary
Build = Callable[[Settings, Path, Report, Mailbox, Sink], BuiltEngine]
Prepare = Callable[[Report], None]


class _Stages:
    """Sends a line when a stage begins, and keeps how long each stage took."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._began = [(time.monotonic(), "first steps")]

    def __call__(self, line: str) -> None:
        self._began.append((time.monotonic(), line.partition(":")[0]))
        self._sock.sendall(pack(["stage", line]))

    def summary(self) -> str:
        ends = [began for began, _ in self._began[1:]] + [time.monotonic()]
        took = [(end - began, name) for end, (began, name) in zip(ends, self._began, strict=True)]
        slow = (f"{name} {seconds:.1f} s" for seconds, name in took if seconds >= SHOWN_SECONDS)
        total = sum(seconds for seconds, _ in took)
        return ": ".join(filter(None, (f"the engine started in {total:.1f} s", ", ".join(slow))))


def main(fd: int, build: Build, prepare: Prepare = lambda report: None) -> int:
    """Run an engine until the pipe ends.

    `prepare` needs no settings, so the service may start this process before it can send them.
    """
    prepare_threads()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C at a terminal is for the service to handle
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    incoming, mailbox, outbox = frames(sock), Mailbox(MESSAGES_MAX), Outbox()
    try:
        stages = _Stages(sock)
        prepare(stages)
        built = _start(sock, incoming, build, mailbox, outbox, stages)
    except PensieveError as error:  # for the operator to read; not a bug
        return _end(sock, error)
    except BrokenPipeError:  # the service has ended meanwhile
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
    """From the first frame to `ready`."""
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
        "kv_identity": dict(built.kv_identity.facts),
        "kv_refusal": built.kv_identity.refusal,
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
    """Until the pipe ends, which ends the process, or the engine fails."""
    engine = built.engine

    def read() -> None:
        status = 0
        try:
            for frame in incoming:
                message = message_of(frame)
                if isinstance(message, ImportKv):  # here it holds up no iteration
                    message = verified(message, engine.hand_over.slot_bytes)
                mailbox.put_when_there_is_room(message)
        except Unavailable:
            return  # the engine has failed, and the main thread says so before it ends
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
            return  # the reader thread notices too, and ends the process
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
    """Report why the process ends; its exit code."""
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
    # The service has reported what is in the template.
    texts = load_texts(folder, lambda line: None, settings.chat_template)
    return build_engine(settings, folder, texts, report, mailbox, sink)


if __name__ == "__main__":
    status = main(int(sys.argv[1]), build_with_model, import_torch)
    if status:
        # Python's own shutdown calls into the device, and one that has failed may never return.
        sys.stderr.flush()
        os._exit(status)
