"""An echo engine that fails on demand, started with FAULTS [MESSAGES_MAX] FD.

FAULTS is a file with one word a line. An iteration removes the first line if the line fits it, and does this.
`copy` fits an iteration with copies, the other words an iteration with slices and without copies:

memory   the device has no memory left for the iteration
nan      the logits of the first turn are NaN
hang     the engine's main thread waits for ever
copy     the next swap-in or swap-out fails

Two words have an effect only on the first line, when the process starts:

start    the memory for the engine is refused
deaf     the engine's reader thread fails at the first message

A turn with the seed POISON kills the process each time. With the seed VENOM, the device fails. Then the
engine reports a failure for all its turns before it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

from pensieve.config import Settings
from pensieve.core.iteration import Iteration, Outcome, TurnFailure
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import EngineMessage
from pensieve.engine.ports import Executor, Sink
from pensieve.errors import DeviceError
from pensieve.launch import echo_engine
from pensieve.launch import engine_process as engine_main
from pensieve.launch.engine import BuiltEngine
from pensieve.launch.model_folder import Report

POISON, VENOM = 666, 667


class FaultyExecutor:
    depth = 1

    def __init__(self, executor: Executor, faults: Path) -> None:
        self._executor = executor
        self._faults = faults
        self._fault = ""

    def launch(self, iteration: Iteration) -> None:
        if any(start.sampling.seed == POISON for start in iteration.started):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(start.sampling.seed == VENOM for start in iteration.started):
            raise DeviceError("an illegal address was read")
        copies = bool(iteration.swap_ins or iteration.swap_outs)
        self._fault = ""
        if iteration.slices or copies:
            self._fault = take_fault(
                self._faults, ("copy",) if copies else ("memory", "nan", "hang")
            )
        if self._fault == "memory":
            raise MemoryError("the device has no memory left")
        if self._fault == "hang":
            threading.Event().wait()
        if self._fault == "copy":
            raise DeviceError("a copy failed: illegal address")
        self._iteration = iteration
        self._executor.launch(iteration)

    def collect(self) -> Outcome:
        outcome = self._executor.collect()
        if self._fault != "nan":
            return outcome
        attempt_id = self._iteration.slices[0].attempt_id
        others = tuple(each for each in outcome.samples if each.attempt_id != attempt_id)
        failure = TurnFailure(attempt_id, "NAN_LOGITS", "logits are not numbers")
        return Outcome(others, outcome.finished_copies, (failure,))


def take_fault(faults: Path, kinds: tuple[str, ...]) -> str:
    lines = faults.read_text().split() if faults.exists() else []
    if not lines or lines[0] not in kinds:
        return ""
    faults.write_text("\n".join(lines[1:]))
    return lines[0]


def fail(message: EngineMessage) -> None:
    raise RuntimeError("an unexpected error while handling a message")


def build(
    faults: Path, settings: Settings, folder: Path, report: Report, mailbox: Mailbox, sink: Sink
) -> BuiltEngine:
    if take_fault(faults, ("start",)):
        raise DeviceError("the host refuses to pin so much memory")
    if take_fault(faults, ("deaf",)):
        mailbox.put_when_there_is_room = fail  # type: ignore[method-assign]
    built = echo_engine.build(0.0, settings, folder, report, mailbox, sink)
    built.engine.executor = FaultyExecutor(built.engine.executor, faults)
    return built


if __name__ == "__main__":
    if len(sys.argv) > 3:
        engine_main.MESSAGES_MAX = int(sys.argv[2])
    sys.exit(engine_main.main(int(sys.argv[-1]), partial(build, Path(sys.argv[1]))))
