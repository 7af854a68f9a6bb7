"""Handle Ctrl-C in `pensieve chat`: it interrupts nothing but the line editor.

Python runs a SIGINT handler in the main thread, between any two bytecodes. A handler that raises leaves locks
of the interrupted code (gRPC, threading) held for ever. A handler that takes a lock or starts a thread may
wait for itself. So from `with CtrlC()` to the end of the process, the handler takes no lock and raises in one
place only:

    at the prompt          it raises KeyboardInterrupt out of input(), and `line` returns None. In functions
                           that readline calls (completion) it does nothing: they would swallow the exception.
    while a reply comes    it queues the function that stops the reply, for a thread of this class.
    anywhere else          it sets `pressed`. The main thread checks it where it can turn back: while the
                           daemon starts, between two attempts to reach a daemon, before a reply begins.

*Why no press does harm.*  Only the main thread writes `at_prompt`, also from the handler, which clears the
flag when it raises. So within `line` the handler raises at most once, between two assignments inside the
`try` that catches the exception. Outside of `line` it never raises: further presses set a flag that is
already set. A handler may call SimpleQueue.put at any point, even during another put.

*Why no press is lost.*  A press within microseconds of Enter still clears the line. A later press leaves
`pressed` set, and `stopping` checks the flag after it has published its stop function: whichever of handler
and main thread comes second sees what the first has done. A signal just before readline begins to wait wakes
nobody, so a timer ends that wait several times a second, and pending handlers run. (A line that is typed and
entered in between is cleared too.)

*Why no text is lost.*  By default a terminal discards unshown output on Ctrl-C; NOFLSH prevents that. Without
ECHOCTL it does not print ^C, which would stand in rows that are written again (reply_view.py).

*Why typed text does not mix with a reply.*  The terminal echoes only within `line`. Keys that are pressed at
other times stay in the terminal's queue until the next prompt.

Before the program ends, SIGINT is ignored, so that a press does not disturb the shutdown.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Self

WAKE_SECONDS = 0.2  # longest delay of a press at the prompt, or between two attempts
PATIENCE_SECONDS = 3.0  # a press so long after the first one gives up waiting for the reply to stop
Action = Callable[[], None]


class CtrlC:
    """Use in the main thread, once, for the rest of the process."""

    def __init__(self) -> None:
        self.pressed = False  # since the last prompt began
        self.at_prompt = False  # within `line`
        self._stop: Action | None = None
        self._to_call: SimpleQueue[Action | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._call, name="ctrl-c", daemon=True)
        self._terminal: list[Any] | None = None  # attributes of the terminal at the start

    def __enter__(self) -> Self:
        self._thread.start()
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(
            signal.SIGALRM, _wake
        )  # never restored: a late alarm must not end the program
        self._prepare_terminal()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._to_call.put(None)
        if self._terminal is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._terminal)

    def line(self, prompt: str) -> str | None:
        """Return the line that is typed, or None after Ctrl-C.  Raises EOFError at the end of input."""
        signal.setitimer(signal.ITIMER_REAL, WAKE_SECONDS, WAKE_SECONDS)
        self._echo(True)
        try:
            self.at_prompt = True
            try:
                self.pressed = False  # earlier presses meant something else
                return input(prompt)
            finally:
                self.at_prompt = False
        except KeyboardInterrupt:
            return None
        except SystemError as error:  # Python raises it if the press comes as readline returns
            if not isinstance(error.__cause__, KeyboardInterrupt):
                raise
            return None
        finally:
            self._echo(False)
            signal.setitimer(signal.ITIMER_REAL, 0)

    @contextlib.contextmanager
    def stopping(self, stop: Action, give_up: Action) -> Iterator[None]:
        """Let the first press call `stop`, and a press PATIENCE_SECONDS later `give_up`; in other threads."""
        self._stop = _StopPresses(stop, give_up)
        if self.pressed:
            self._to_call.put(self._stop)
        try:
            yield
        finally:
            self._stop = None

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed.  Call it only where nothing is under way."""
        if self.pressed:
            raise KeyboardInterrupt

    def sleep(self, seconds: float) -> bool:
        """Return whether the time passed without a press."""
        end = time.monotonic() + seconds
        while not self.pressed and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, WAKE_SECONDS))
        return not self.pressed

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.at_prompt:
            if frame is not None and frame.f_code is _wake.__code__:
                frame = frame.f_back  # the signal came while the timer's handler ran
            if frame is None or frame.f_code is not CtrlC.line.__code__:
                return  # in a function that readline calls, which would swallow the exception
            self.at_prompt = False
            raise KeyboardInterrupt
        self.pressed = True
        if self._stop is not None:
            self._to_call.put(self._stop)

    def _call(self) -> None:
        """Run in the thread of this class.  Each action gets its own thread: a dead daemon answers none."""
        while (action := self._to_call.get()) is not None:
            threading.Thread(target=action, daemon=True).start()

    def _prepare_terminal(self) -> None:
        with contextlib.suppress(termios.error, ValueError, OSError):  # no terminal
            self._terminal = termios.tcgetattr(sys.stdin.fileno())
            self._echo(False)

    def _echo(self, is_on: bool) -> None:
        """Let the terminal show what is typed, or not.  Keys that wait in its queue are kept."""
        if self._terminal is None:
            return
        attributes = [*self._terminal]
        attributes[3] |= termios.NOFLSH
        attributes[3] &= ~termios.ECHOCTL
        if not is_on:
            attributes[3] &= ~termios.ECHO
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, attributes)


def _wake(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python runs other pending handlers beside this one."""


class _StopPresses:
    """Act on the presses during one reply.  Calls may overlap; the first one stops the reply."""

    def __init__(self, stop: Action, give_up: Action) -> None:
        self._stop, self._give_up = stop, give_up
        self._lock = threading.Lock()
        self._pressed_at: float | None = None

    def __call__(self) -> None:
        now = time.monotonic()
        with self._lock:
            is_first = self._pressed_at is None
            if self._pressed_at is None:
                self._pressed_at = now
            waited = now - self._pressed_at
        if is_first:
            self._stop()
        elif waited >= PATIENCE_SECONDS:
            self._give_up()
