"""Handle Ctrl-C in `pensieve chat` and `pensieve batch`. An exception interrupts only the line editor.

Python runs a SIGINT handler in the main thread, between any two bytecodes. If the handler raises an
exception, locks of the interrupted code (gRPC, threading) may stay locked forever. If the handler takes a
lock or starts a thread, it may deadlock with the interrupted code. So from `with CtrlC()` to the end of the
process, the handler takes no lock, and raises an exception only at the prompt:

    at the prompt          it raises KeyboardInterrupt out of input(), and `line` returns None. It does
                           nothing in functions that readline calls (completion), because readline would
                           swallow the exception.
    during a reply         it queues the function that stops the reply, for a thread of this class.
    anywhere else          it sets `pressed`. The main thread checks this flag at safe points: while the
                           daemon starts, between two attempts to reach a daemon, before a reply begins.

**Why a press does no harm.** Only the main thread writes `at_prompt`. The handler also runs in that thread,
and clears the flag before it raises. So within `line`, the handler raises at most once, inside the `try` that
catches the exception. Outside of `line`, it never raises. It may call SimpleQueue.put at any point, even
during another put.

**Why no press is lost.** A press within microseconds after Enter still clears the line. A later press sets
`pressed`. `stopping` first publishes its stop function and then checks the flag. So either the handler finds
the function, or the main thread finds the flag. A signal just before readline begins to wait does not
interrupt the wait. So a timer interrupts the wait several times per second, and Python runs pending handlers.
(If the user enters a line between the signal and the timer, that line is cleared, too.)

**Why no text is lost.** By default, a terminal discards pending output on Ctrl-C; NOFLSH prevents that.
ECHOCTL is turned off, because the terminal would print ^C into rows that are written again (reply_view.py).

**Why typed text does not mix with a reply.** The terminal echoes only within `line`. Keys that are pressed at
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

WAKE_SECONDS = 0.2  # maximum delay until a press has an effect
PATIENCE_SECONDS = 3.0  # after this time, another press gives up waiting for the reply to stop
Action = Callable[[], None]


class CtrlC:
    """Use in the main thread, once, for the rest of the process."""

    def __init__(self) -> None:
        self.pressed = False  # Ctrl-C was pressed since the start of the last prompt
        self.at_prompt = False  # the main thread is within `line`
        self._stop: Action | None = None
        self._to_call: SimpleQueue[Action | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._call, name="ctrl-c", daemon=True)
        self._terminal: list[Any] | None = None  # original attributes of the terminal

    def __enter__(self) -> Self:
        self._thread.start()
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(
            signal.SIGALRM, _wake
        )  # never restored, because a late alarm would then end the program
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
        """Return the entered line, or None after Ctrl-C. Raises EOFError at the end of input."""
        signal.setitimer(signal.ITIMER_REAL, WAKE_SECONDS, WAKE_SECONDS)
        self._echo(True)
        try:
            self.at_prompt = True
            try:
                self.pressed = False  # earlier presses were not meant for this prompt
                return input(prompt)
            finally:
                self.at_prompt = False
        except KeyboardInterrupt:
            return None
        except SystemError as error:  # raised by Python if the press comes while readline returns
            if not isinstance(error.__cause__, KeyboardInterrupt):
                raise
            return None
        finally:
            self._echo(False)
            signal.setitimer(signal.ITIMER_REAL, 0)

    @contextlib.contextmanager
    def stopping(self, stop: Action, give_up: Action) -> Iterator[None]:
        """During the block, the first press calls `stop`. A press PATIENCE_SECONDS later calls `give_up`.

        Both are called in other threads.
        """
        self._stop = _StopPresses(stop, give_up)
        if self.pressed:
            self._to_call.put(self._stop)
        try:
            yield
        finally:
            self._stop = None

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed. Call this only where an exception is safe."""
        if self.pressed:
            raise KeyboardInterrupt

    def sleep(self, seconds: float) -> bool:
        """Sleep until Ctrl-C is pressed. Return whether the time passed without a press."""
        end = time.monotonic() + seconds
        while not self.pressed and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, WAKE_SECONDS))
        return not self.pressed

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.at_prompt:
            if frame is not None and frame.f_code is _wake.__code__:
                frame = frame.f_back  # the signal came while the timer's handler ran
            if frame is None or frame.f_code is not CtrlC.line.__code__:
                return  # readline has called this function, and would swallow the exception
            self.at_prompt = False
            raise KeyboardInterrupt
        self.pressed = True
        if self._stop is not None:
            self._to_call.put(self._stop)

    def _call(self) -> None:
        """Run queued actions. Each gets its own thread, because it may hang if the daemon is dead."""
        while (action := self._to_call.get()) is not None:
            threading.Thread(target=action, daemon=True).start()

    def _prepare_terminal(self) -> None:
        with contextlib.suppress(termios.error, ValueError, OSError):  # there is no terminal
            self._terminal = termios.tcgetattr(sys.stdin.fileno())
            self._echo(False)

    def _echo(self, is_on: bool) -> None:
        """Turn the terminal's echo on or off. Keys in the terminal's queue are kept."""
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
    """Do nothing. The signal only makes Python run other pending handlers."""


class _StopPresses:
    """Handles the presses during one reply. Calls may overlap. The first call stops the reply."""

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
