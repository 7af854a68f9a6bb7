"""How far a batch job is: one changing line on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from pensieve.cli.admin_stats import seconds_text

if TYPE_CHECKING:
    from pensieve.client import Job

LINE_SECONDS = 10.0  # between two lines, where they stay
CLEAR = "\r\x1b[K"
STATES = {
    "receiving": "its file is on its way",
    "checking": "checking the lines",
    "waiting": "waits for its turn",
    "paused": "paused (`pensieve admin jobs resume` lets it go on)",
}


class Progress:
    """A context manager: in the end, nothing of the changing line is left."""

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now
        self._changes = stream.isatty()
        self._shown = ""  # what stands there, or the state of the last line
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def show(self, job: Job) -> None:
        """The job now; where lines stay, one each LINE_SECONDS and when its state has changed."""
        if self._changes:
            self._write(line_of(job))
        elif job.state != self._shown or self._now() >= self._shown_at + LINE_SECONDS:
            self._shown, self._shown_at = job.state, self._now()
            print(line_of(job), file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Something else than the job's state; where lines stay, once as long as it is the same."""
        if self._changes:
            self._write(text)
        elif text != self._shown:
            self._shown = text
            print(text, file=self._stream, flush=True)

    def end(self) -> None:
        if self._changes and self._shown:
            self._write("")

    def _write(self, text: str) -> None:
        if text != self._shown:
            self._stream.write(CLEAR + text)
            self._stream.flush()
            self._shown = text


def line_of(job: Job) -> str:
    """Where the job is, in one line."""
    done = job.num_answered + job.num_refused
    parts = [f"{done:,} of {job.num_lines:,} lines"]
    if job.state in STATES:
        parts.append(STATES[job.state])
    if job.num_refused:
        parts.append(f"{job.num_refused:,} refused")
    if job.tokens_per_second:
        parts.append(f"{job.tokens_per_second:,.0f} tokens/s")
    if job.saved_tokens:
        parts.append(f"{_saved(job)} of prompt tokens saved")
    if job.seconds_left is not None:
        parts.append(f"{seconds_text(job.seconds_left)} left")
    if job.problem:
        parts.append(job.problem)
    return ", ".join(parts)


def summary_of(job: Job) -> str:
    """What came of a job that has ended."""
    text = f"{job.num_answered:,} of {job.num_lines:,} lines answered"
    if job.num_refused:
        text += f", {job.num_refused:,} refused"
    text += f"; {job.prompt_tokens:,} prompt tokens"
    if job.saved_tokens:
        text += f" ({_saved(job)} saved)"
    text += f", {job.output_tokens:,} output tokens"
    if job.outcome != "completed":
        text = f"{job.outcome}{f' ({job.problem})' if job.problem else ''}: {text}"
    return text


def _saved(job: Job) -> str:
    return f"{job.saved_tokens / job.prompt_tokens:.0%}" if job.prompt_tokens else "0%"
