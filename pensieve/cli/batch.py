"""`pensieve batch`: run a file of requests as a job of a daemon.

    FILE ──> find or create the job ──> wait for its end ──> OUT and the file of errors

The job's id is derived from the file's digest. So after a crash of this process or of the daemon, the same
command finds the job again, and finished requests are not computed again. Both output files appear only when
they are complete. Ctrl-C ends this command, not the job. If the command has started a daemon of its own, the
daemon ends, too, and the job stays in the data folder. Ctrl-C raises an exception only at safe points
(ctrl_c.py)."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TextIO

from pensieve.cli.admin_stats import seconds_text
from pensieve.cli.ctrl_c import CtrlC
from pensieve.cli.flags import add_settings, tls_to, with_settings
from pensieve.cli.reaching import (
    check_engine_flags,
    check_reach_flags,
    daemon_of,
    server_info_of,
    start_daemon,
)
from pensieve.config import ENGINE, REACH, Resolved, settings_for
from pensieve.errors import (
    AlreadyExists,
    ConfigError,
    InvalidArgument,
    NotFound,
    PensieveError,
    Unavailable,
)

if TYPE_CHECKING:
    from pensieve.client import Client, Job

LOOK_SECONDS = (0.05, 1.0)  # first and maximum time between two queries of the job
ERRORS_SHOWN = 10
NAME_CHARACTERS_MAX = 60  # how much of the file name is used as the job's name
DIGEST_DIGITS = 16  # digits of the file's digest in the job's id
LINE_SECONDS = 10.0  # time between two progress lines in a log
CLEAR = "\r\x1b[K"
STATES = {
    "receiving": "the file is being sent",
    "checking": "checking the lines",
    "waiting": "waits in the queue of jobs",
    "paused": "paused (`pensieve admin jobs resume` continues it)",
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests, with lower priority than conversations",
        description="Answer a file of requests in OpenAI's Batch format (JSON lines with custom_id, method, "
        "url and body). The command uses the daemon at --address, or the `pensieve serve` that has the data "
        "folder, or else starts a daemon of its own. Common beginnings of requests are computed once. Repeat "
        "the command to continue an interrupted job: no line is answered twice.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="file of requests, one per line")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUT",
        help="file for the answers, in the order of the requests",
    )
    parser.add_argument(
        "--errors",
        type=Path,
        metavar="FILE",
        help="file for the errors, if there are any (default: OUT with .errors before its suffix)",
    )
    parser.add_argument(
        "--name", metavar="ID", help="id of the job (default: made from the digest of the file)"
    )
    parser.add_argument(
        "--again", action="store_true", help="answer all requests again, in a new job"
    )
    parser.add_argument(
        "--check", action="store_true", help="only check the lines, and report errors"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_settings(parser, settings_for(REACH, ENGINE))
    parser.set_defaults(run=with_settings(run))


class Requests(NamedTuple):
    """The file of requests, with the digest of its content."""

    path: Path
    sha256: str


@dataclass(frozen=True)
class JobDaemon:
    """The daemon for a job."""

    client: Client
    name: str
    after_exit_text: str  # what happens to the job after this process ends: "continues at ADDRESS"
    repeat_purpose: str  # what repeating the command is for: "wait for its results"


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    requests = _requests(arguments.file)
    output, errors = _targets(arguments)
    with CtrlC() as ctrl_c, contextlib.ExitStack() as stack:
        progress = stack.enter_context(ProgressLine(sys.stderr))
        daemon = _reach(stack, resolved, progress, ctrl_c)
        ctrl_c.check()
        job_id = _job_id(arguments, requests)
        try:
            job = _find_or_create(daemon, job_id, requests, arguments.check, progress, ctrl_c)
            job = _wait_for_end(daemon.client, job, progress, ctrl_c)
            if arguments.check:
                return _report_check(arguments, daemon.client, job)
            progress.note("writing")
            shown = _write_results(daemon.client, job_id, output, errors, ctrl_c)
        except (KeyboardInterrupt, Unavailable) as error:
            progress.end()
            if arguments.check:
                with contextlib.suppress(PensieveError):
                    daemon.client.jobs.delete(job_id, timeout=1.0)
                raise
            print(_how_to_continue(arguments, job_id, daemon, error), file=sys.stderr)
            return 130 if isinstance(error, KeyboardInterrupt) else error.exit_code
    _print_summary(arguments, job, output, errors, shown)
    return 0 if job.outcome == "completed" and not job.num_refused else 1


# -- arguments --


def _requests(path: Path) -> Requests:
    try:
        with path.open("rb") as file:
            return Requests(path, hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise InvalidArgument("FILE", f"cannot read {path}: {error.strerror}") from error


def _targets(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Return the files for answers and errors. They are checked before anything is computed."""
    output: Path | None = arguments.output
    if arguments.check:
        return Path(), Path()
    if output is None:
        raise InvalidArgument("-o", "is missing: name a file for the answers")
    _check_target("-o", output)
    errors = arguments.errors or output.with_name(f"{output.stem}.errors{output.suffix}")
    _check_target("--errors", errors)
    paths = [path.resolve() for path in (arguments.file, output, errors)]
    if len(set(paths)) < len(paths):
        raise InvalidArgument("-o", "requests, answers and errors need three different files")
    return output, errors


def _check_target(flag: str, path: Path) -> None:
    if path.is_dir():
        raise InvalidArgument(flag, f"{path} is a folder")
    if path.exists() and not path.is_file():  # writing would replace it by a file
        raise InvalidArgument(flag, f"{path} is not a regular file")
    if not os.access(path.parent, os.W_OK):
        raise InvalidArgument(flag, f"the folder {path.parent} is missing or not writable")


def _job_name(requests: Requests) -> str:
    return requests.path.name.encode("utf-8", "replace").decode()[:NAME_CHARACTERS_MAX]


def _job_id(arguments: argparse.Namespace, requests: Requests) -> str:
    given: str | None = arguments.name
    job_id = given or f"batch-{requests.sha256[:DIGEST_DIGITS]}"
    return f"{job_id}-{secrets.token_hex(4)}" if arguments.again or arguments.check else job_id


# -- the daemon and the job --


def _reach(
    stack: contextlib.ExitStack, resolved: Resolved, progress: ProgressLine, ctrl_c: CtrlC
) -> JobDaemon:
    from pensieve.client import Client, Retry

    data, address = resolved.settings.data, resolved.settings.daemon
    if address is None:
        check_reach_flags(resolved)
        address = daemon_of(data)
    if address is None:
        daemon = start_daemon(stack, resolved, "pensieve batch", False, ctrl_c)
        client = stack.enter_context(Client(daemon.address))
        return JobDaemon(client, "the engine", f"is paused and kept in {data}", "resume it")
    token, tls = resolved.settings.token, tls_to(address, resolved)
    with Client(address, token=token, tls=tls, timeout=5.0, retry=Retry(retries=0)) as probe:
        info = server_info_of(probe)
    check_engine_flags(resolved, address, info)

    def wait(seconds: float) -> None:
        progress.note(f"{address} is not ready; retrying, Ctrl-C gives up")
        if not ctrl_c.sleep(seconds):
            raise KeyboardInterrupt

    client = stack.enter_context(
        Client(address, token=token, tls=tls, retry=Retry(retries=12), sleep=wait)
    )
    return JobDaemon(client, address, f"continues at {address}", "wait for its results")


def _find_or_create(
    daemon: JobDaemon,
    job_id: str,
    requests: Requests,
    check_only: bool,
    progress: ProgressLine,
    ctrl_c: CtrlC,
) -> Job:
    """Return the job of this file, or create the job. Wait if another process is sending the file."""
    jobs = daemon.client.jobs
    while True:
        ctrl_c.check()
        try:
            job = jobs.get(job_id)
        except NotFound:
            progress.note(f"sending {requests.path}")
            try:
                with ctrl_c.stopping(daemon.client.close, daemon.client.close):
                    return jobs.create(
                        requests.path,
                        job_id=job_id,
                        name=_job_name(requests),
                        check_only=check_only,
                    )
            except AlreadyExists:
                continue  # another process has created the job first
            except PensieveError:
                ctrl_c.check()  # Ctrl-C may have cancelled the call
                raise
        if job.state == "receiving":
            progress.note("another process is sending this file")
            ctrl_c.sleep(LOOK_SECONDS[1])
            continue
        if job.sha256 != requests.sha256:
            raise AlreadyExists(
                f"the job {job_id!r} exists already, for a file with other content than {requests.path}; "
                "choose another id with --name"
            )
        return job


def _wait_for_end(client: Client, job: Job, progress: ProgressLine, ctrl_c: CtrlC) -> Job:
    """Wait until the job has ended, and return it."""
    pause, most = LOOK_SECONDS
    while job.state != "ended":
        progress.show(job)
        if not ctrl_c.sleep(pause):
            raise KeyboardInterrupt
        pause = min(2 * pause, most)
        job = client.jobs.get(job.job_id)
    progress.show(job)
    return job


def _how_to_continue(
    arguments: argparse.Namespace, job_id: str, daemon: JobDaemon, error: BaseException
) -> str:
    problem = f"pensieve: {error}\n" if isinstance(error, PensieveError) else ""
    repeat = "Repeat the command"
    if arguments.again:
        repeat = f"Repeat the command with --name {job_id} instead of --again"
    return f"{problem}job {job_id} {daemon.after_exit_text}. {repeat} to {daemon.repeat_purpose}."


# -- results --


def _write_results(
    client: Client, job_id: str, output: Path, errors: Path, ctrl_c: CtrlC
) -> list[str]:
    """Write both files, and return the first errors in words. The file of errors exists only if needed."""

    def lines(kind: str) -> Iterator[bytes]:
        for line in client.jobs.results(job_id, kind):
            ctrl_c.check()
            yield line

    _write(output, lines("answers"))
    refused = lines("errors")
    first = [*islice(refused, ERRORS_SHOWN)]
    if first:
        _write(errors, chain(first, refused))
    else:
        errors.unlink(missing_ok=True)  # left by an earlier run
    return [_error_text(line) for line in first]


def _write(path: Path, lines: Iterable[bytes]) -> None:
    from pensieve.store.durable import new_file

    try:
        with new_file(path, 0o666, shared=True) as file:  # limited by the umask
            file.writelines(line + b"\n" for line in lines)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _error_text(line: bytes) -> str:
    """Return the error of a request, such as `line 4 ("a-4"): max_tokens must be at least 1`."""
    error: dict[str, Any] = {}
    custom_id = None
    with contextlib.suppress(ValueError, AttributeError):
        found = json.loads(line)
        custom_id = found.get("custom_id")
        response = found.get("response") or {}
        error = found.get("error") or response.get("body", {}).get("error") or {}
    where = f"line {error['line']}" if "line" in error else "a line"
    name = f" ({json.dumps(custom_id)})" if custom_id else ""
    text = " ".join(str(error.get("message", "has no answer")).split())
    return f"{where}{name}: {''.join(each if each.isprintable() else '?' for each in text)}"


def _report_check(arguments: argparse.Namespace, client: Client, job: Job) -> int:
    shown = [_error_text(line) for line in client.jobs.results(job.job_id, "errors")]
    client.jobs.delete(job.job_id)
    if arguments.json:
        print(json.dumps({"lines": job.num_lines, "refused": job.num_refused, "problems": shown}))
    else:
        print("\n".join(shown) or f"nothing is wrong with {job.num_lines:,} lines")
    return 1 if job.num_refused or job.outcome != "checked" else 0


def _print_summary(
    arguments: argparse.Namespace, job: Job, output: Path, errors: Path, shown: list[str]
) -> None:
    for line in shown:
        print(line, file=sys.stderr)
    if job.num_refused > len(shown):
        print(f"and {job.num_refused - len(shown):,} more, in {errors}", file=sys.stderr)
    if arguments.json:
        figures = {
            name: getattr(job, name)
            for name in (
                *("job_id", "outcome", "problem", "num_lines", "num_answered", "num_refused"),
                *("prompt_tokens", "saved_tokens", "output_tokens"),
            )
        }
        paths = {"output": str(output), "errors": str(errors) if job.num_refused else None}
        print(json.dumps(figures | paths))
        return
    print(f"{summary_of(job)}; answers in {output}" + (f", errors in {errors}" if shown else ""))


class ProgressLine:
    """Shows one changing line on a terminal, or lines in a log. Leaving the context clears the line."""

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now
        self._changes = stream.isatty()
        self._shown = ""  # the line on the terminal; in a log, the last text or state
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
        """Show the state of a job. In a log, do so every LINE_SECONDS and when the state changes."""
        if self._changes:
            self._write(line_of(job))
        elif job.state != self._shown or self._now() >= self._shown_at + LINE_SECONDS:
            self._shown, self._shown_at = job.state, self._now()
            print(line_of(job), file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Show a text instead of the job's state. In a log, do not repeat the same text."""
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
    """Return the state of a job in one line."""
    done = job.num_answered + job.num_refused
    parts = [f"{done:,} of {job.num_lines:,} lines"]
    if job.state in STATES:
        parts.append(STATES[job.state])
    if job.num_refused:
        parts.append(f"{job.num_refused:,} refused")
    if job.tokens_per_second:
        parts.append(f"{job.tokens_per_second:,.0f} tokens/s")
    if job.saved_tokens:
        parts.append(f"{_saved_share(job)} of prompt tokens saved")
    if job.seconds_left is not None:
        parts.append(f"{seconds_text(job.seconds_left)} left")
    if job.problem:
        parts.append(job.problem)
    return ", ".join(parts)


def summary_of(job: Job) -> str:
    """Return the result of a job that has ended."""
    text = f"{job.num_answered:,} of {job.num_lines:,} lines answered"
    if job.num_refused:
        text += f", {job.num_refused:,} refused"
    text += f"; {job.prompt_tokens:,} prompt tokens"
    if job.saved_tokens:
        text += f" ({_saved_share(job)} saved)"
    text += f", {job.output_tokens:,} output tokens"
    if job.outcome != "completed":
        text = f"{job.outcome}{f' ({job.problem})' if job.problem else ''}: {text}"
    return text


def _saved_share(job: Job) -> str:
    return f"{job.saved_tokens / job.prompt_tokens:.0%}" if job.prompt_tokens else "0%"
