"""The audit log: one JSON object per line, written by a thread.

    admin         a call of an operator's method, or a call about another tenant's job; written at its end
    delete        a deletion: who deleted which conversation or job, and the outcome
    token         the first use of a token over a connection, and then at most one line per hour
    refused       a caller was refused; at most REFUSED_PER_SECOND lines, then a count
    reload        the token file or certificate was reloaded, or could not be used
    start, stop   the daemon has started or stopped

If the daemons of a cluster share no secret, the forwarding daemon and the owner both log a forwarded call.
The owner's line has `"forwarded": "not verified"`. Its `peer` is the sender: the other daemon, or a client
that claims to be a daemon.

A token is logged by its `name` in the token file, or by the first digits of its digest. No line contains text
of a conversation. Values from clients are quoted as JSON and shortened.

A slow or full disk never delays a call. Lines wait in a queue of at most LINES_MAX, and further lines are
lost. The next line that can be written is {"event": "lost"} with the number of lost lines. Lines are written
in batches. A partly written batch is removed again. If the file was moved away (logrotate), a new file is
created, readable by its owner only. Lines are not synced.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full, Queue

from pensieve.errors import ConfigError
from pensieve.guard.callers import Caller
from pensieve.guard.limits import Bucket

log = logging.getLogger("pensieve")
LINES_MAX = 10_000
BATCH_LINES_MAX = 500
CHARACTERS_MAX = 128  # maximum per value
CLOSE_SECONDS = 5.0
USE_LOGGED_SECONDS = 3600.0  # between two lines about one token and connection
USES_MAX = 10_000  # remembered pairs of token and connection; the oldest are forgotten
REFUSED_PER_SECOND = 1.0  # bursts have up to ten seconds' worth of lines


@dataclass(frozen=True, slots=True)
class AuditedCall:
    """The values of the log line of an ended call. If its request was not received, the ids are empty."""

    method: str
    is_deletion: bool = False
    conversation_id: str = ""
    prefix_id: str = ""
    job_id: str = ""
    of_tenant: str = ""  # another tenant, named by the operator
    is_forwarded: bool = False  # the sender claims to be a forwarding daemon, but has not proved it


class Audit:
    """Writes events to the audit log, if there is one. Runs on the event loop."""

    def __init__(self, file: AuditLog | None, now: Callable[[], float]) -> None:
        """`now`: the event loop's clock."""
        self._file = file
        self._now = now
        self._used: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._refusals = Bucket(REFUSED_PER_SECOND, now())
        self._num_left_out = 0

    def token_used(self, token: str, tenant: str, peer: str) -> None:
        if not token:
            return
        key, now = (token, peer), self._now()
        last = self._used.get(key)
        if last is not None and now - last < USE_LOGGED_SECONDS:
            return
        self._used[key] = now
        self._used.move_to_end(key)
        if len(self._used) > USES_MAX:
            self._used.popitem(last=False)
        self._write("token", token=token, tenant=tenant, peer=peer)

    def refused(self, method: str, peer: str, reason: str, token: str) -> None:
        """`token`: the name of the token of a caller without permission; empty for an unknown caller."""
        if self._refusals.seconds_until(1.0, self._now()):
            self._num_left_out += 1
            return
        self._refusals.spend(1.0, self._now())
        num_left_out, self._num_left_out = self._num_left_out, 0
        self._write(
            "refused",
            method=_method_name(method),
            peer=peer,
            reason=reason,
            token=token,
            left_out=num_left_out or None,
        )

    def ended(self, call: AuditedCall, by: Caller, peer: str, outcome: str, seconds: float) -> None:
        self._write(
            "delete" if call.is_deletion else "admin",
            method="" if call.is_deletion else call.method,
            conversation_id=call.conversation_id,
            prefix_id=call.prefix_id,
            job_id=call.job_id,
            of_tenant=call.of_tenant,
            forwarded="not verified" if call.is_forwarded else "",
            token=by.token,
            tenant=by.tenant,
            peer=peer,
            outcome=outcome,
            seconds=round(seconds, 3),
        )

    def tokens_reloaded(self, num_tokens: int, problem: str) -> None:
        self._write("reload", what="tokens", tokens=num_tokens, outcome=problem or "OK")

    def certificate_reloaded(self, problem: str) -> None:
        """Log the reload. Any thread may call this."""
        self._write("reload", what="certificate", outcome=problem or "OK")

    def started(self, address: str) -> None:
        self._write("start", address=address)

    def stopped(self) -> None:
        self._write("stop")

    def _write(self, event: str, **fields: str | float | None) -> None:
        if self._file is not None:
            self._file.write(event, **fields)


def _method_name(method: str) -> str:
    return method.rpartition("/")[2]


class AuditLog:
    def __init__(self, path: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """Open the file. Raises ConfigError if that fails. Later failures are only logged."""
        self._path = path
        self._wall_clock = wall_clock
        self._file = -1
        self._num_lost = 0  # since the last written line; used by both threads
        self._lock = threading.Lock()  # guards `_num_lost`
        self._loss_reported = False  # the daemon's log has reported lost lines
        self._lines: Queue[str | None] = Queue(LINES_MAX)
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """The number of lines lost since the last written line."""
        return self._num_lost

    def write(self, event: str, **fields: str | float | None) -> None:
        """Queue a line and return at once; empty fields are omitted."""
        entry: dict[str, str | float] = {"time": round(self._wall_clock(), 3), "event": event}
        for name, value in fields.items():
            if isinstance(value, str):
                value = value[:CHARACTERS_MAX]
            if value is not None and value != "":
                entry[name] = value
        try:
            self._lines.put_nowait(json.dumps(entry))
        except Full:
            self._lose(1)

    def close(self) -> None:
        """Write the queued lines. Give up after CLOSE_SECONDS."""
        with contextlib.suppress(Full):
            self._lines.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)

    # -- in the thread --

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._lines.get()]
            with contextlib.suppress(Empty):
                while len(batch) < BATCH_LINES_MAX:
                    batch.append(self._lines.get_nowait())
            is_open = None not in batch
            self._write_batch([line for line in batch if line is not None])
        self._close_file()

    def _write_batch(self, lines: list[str]) -> None:
        if not lines:
            return
        lost, report = self._num_lost, []
        if lost:
            report = [
                json.dumps({"time": round(self._wall_clock(), 3), "event": "lost", "lines": lost})
            ]
        try:
            self._append("".join(f"{line}\n" for line in (*report, *lines)).encode())
        except OSError as error:
            self._close_file()
            self._lose(len(lines))
            if not self._loss_reported:
                log.warning("the audit log cannot be written, and loses lines: %s", error.strerror)
            self._loss_reported = True
            return
        self._lose(-lost)
        if self._loss_reported:
            log.warning("the audit log can be written again; %d lines are lost", lost)
        self._loss_reported = False

    def _append(self, text: bytes) -> None:
        if self._file < 0 or self._was_moved():
            self._close_file()
            self._open()
        before = os.fstat(self._file).st_size
        if os.write(self._file, text) < len(text):
            os.ftruncate(self._file, before)  # the disk is full: remove the partial line
            raise OSError(0, "the disk is full")

    def _was_moved(self) -> bool:
        try:
            at_path = self._path.stat()
        except FileNotFoundError:
            return True
        opened = os.fstat(self._file)
        return (at_path.st_dev, at_path.st_ino) != (opened.st_dev, opened.st_ino)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        os.fchmod(self._file, 0o600)

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def _lose(self, num_lines: int) -> None:
        with self._lock:
            self._num_lost += num_lines
