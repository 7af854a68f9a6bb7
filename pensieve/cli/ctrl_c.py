"""What Ctrl-C does in `pensieve chat`: it never interrupts anything but the line editor.

Python runs the handler of SIGINT in the main thread, between any two bytecodes: a handler that raises
leaves the locks of whoever was just running (gRPC, threading) held for ever, and one that takes a lock, or
starts a thread, waits for itself.  So from `with CtrlC()` to the end of the process, the handler takes no
lock, and raises in one place only:

    at the prompt          it raises KeyboardInterrupt out of input(), and `line` returns None; not out of
                           what readline calls (completion), which would swallow it: there it does nothing
    while a reply comes    it queues the function that stops the reply; a thread of ours calls that
    anywhere else          it sets `pressed`, which the main thread looks at where it can turn back: while
                           the daemon starts, between two tries to reach one, before a reply begins

*Why no press does harm.*  Only the main thread writes `at_prompt`, the handler included, which clears it
as it raises.  So within `line` it raises at most once, and only between two assignments that lie inside
the `try` that catches it.  Outside of `line` nothing is raised: a second press while a reply stops, one
that comes late, or ten of them, set a flag that is set already.  SimpleQueue.put may be called by a handler
that interrupts anything, itself included.

*Why no press is lost.*  One that comes within microseconds of Enter still clears the line.  A later one
leaves `pressed` set, and `stopping` looks there after it has said what to stop: whichever of handler and
main thread comes second sees what the first has done.  At the prompt, a signal that comes just before
readline begins to wait wakes nobody; a timer ends that wait a few times a second, and pending handlers run.
(A line that is typed, or pasted, and entered in between is cleared with it.)

*Why no word is lost.*  On Ctrl-C a terminal throws away what was written and not shown yet, unless NOFLSH
is set, and so it is.  Nor does it write ^C, which would stand in rows that are written again (reply_view.py).

When the program is about to end, SIGINT is ignored: a press must not disturb that.
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

WAKE_SECONDS = 0.2  # how late a press at the prompt, or between two tries, may be noticed
PATIENCE_SECONDS = 3.0  # after which another press gives up waiting for the reply to stop
Action = Callable[[], None]


class CtrlC:
    """A context manager of the main thread; entered once, for the rest of the process."""

    def __init__(self) -> None:
        self.pressed = False  # and not answered yet by a prompt
        self.at_prompt = False  # within `line`
        self._stop: Action | None = None
        self._to_call: SimpleQueue[Action | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._call, name="ctrl-c", daemon=True)
        self._terminal: list[Any] | None = None  # its attributes before

    def __enter__(self) -> Self:
        self._thread.start()
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGALRM, _wake)  # for good: a late one must not end the program
        self._keep_output()
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
        """A line that was typed; None if Ctrl-C was pressed instead.  EOFError at the end of input."""
        signal.setitimer(signal.ITIMER_REAL, WAKE_SECONDS, WAKE_SECONDS)
        try:
            self.at_prompt = True
            try:
                self.pressed = False  # whatever came before this prompt is over
                return input(prompt)
            finally:
                self.at_prompt = False
        except KeyboardInterrupt:
            return None
        except SystemError as error:  # Python's, if the press came just as readline had the line
            if not isinstance(error.__cause__, KeyboardInterrupt):
                raise
            return None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    @contextlib.contextmanager
    def stopping(self, stop: Action, give_up: Action) -> Iterator[None]:
        """A first press calls `stop`, and one that comes PATIENCE_SECONDS later `give_up`; in a thread."""
        self._stop = _StopPresses(stop, give_up)
        if self.pressed:
            self._to_call.put(self._stop)
        try:
            yield
        finally:
            self._stop = None

    def check(self) -> None:
        """End the program if Ctrl-C was pressed; to be called where nothing is under way."""
        if self.pressed:
            raise KeyboardInterrupt

    def sleep(self, seconds: float) -> bool:
        """Whether that time has passed without a press."""
        end = time.monotonic() + seconds
        while not self.pressed and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, WAKE_SECONDS))
        return not self.pressed

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.at_prompt:
            if frame is not None and frame.f_code is _wake.__code__:
                frame = frame.f_back  # it interrupted that one
            if frame is None or frame.f_code is not CtrlC.line.__code__:
                return  # readline has called back, and would swallow what is raised there
            self.at_prompt = False
            raise KeyboardInterrupt
        self.pressed = True
        if self._stop is not None:
            self._to_call.put(self._stop)

    def _call(self) -> None:
        """In the thread.  Each call has one of its own: a daemon that is gone answers none."""
        while (action := self._to_call.get()) is not None:
            threading.Thread(target=action, daemon=True).start()

    def _keep_output(self) -> None:
        with contextlib.suppress(termios.error, ValueError, OSError):  # no terminal
            terminal = termios.tcgetattr(sys.stdin.fileno())
            attributes = [*terminal]
            attributes[3] |= termios.NOFLSH
            attributes[3] &= ~termios.ECHOCTL
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, attributes)
            self._terminal = terminal


def _wake(number: int, frame: FrameType | None) -> None:
    """Nothing; that it was called lets other handlers run."""


class _StopPresses:
    """What the presses during one reply do; calls may overlap, and the first of them counts."""

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
