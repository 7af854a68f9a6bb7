"""The audit log: JSON objects, one a line, written by a thread.

    admin         each call of an operator's method, and each call about another tenant's job, at its end
    delete        each deletion: who deleted which conversation or job, and how it ended
    token         the first use of a token over a connection, and again in each hour
    refused       a caller who is not known or may not do this; at most REFUSED_PER_SECOND, and then a count
    reload        the token file or the certificate was read again, or could not be used
    start, stop   of the daemon

Where daemons of a cluster share no secret, a forwarded call is in the logs of both daemons. The owner's line
has `"forwarded": "not verified"`, and `peer` is who has sent the call to the owner: the other daemon, or a
client that says so.

A token is named by its `name` in the token file, or by the beginning of its digest there. A line holds no
text of a conversation. A client's own words are quoted as JSON and shortened.

A slow or full disk never delays the loop or a call: lines wait in a queue of LINES_MAX, and are lost if it is
full. Lost lines are counted; the first line that can be written again is {"event": "lost"} with their number.
Part of a batch is never left in the file. A file that was moved away (logrotate) is made anew, readable by
its owner alone. Lines are not synced.
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
CHARACTERS_MAX = 128  # of one value
CLOSE_SECONDS = 5.0
AGAIN_SECONDS = 3600.0
USES_MAX = 10_000  # of tokens over connections that are remembered; the oldest are forgotten
REFUSED_PER_SECOND = 1.0  # ten seconds' worth can be saved up


@dataclass(frozen=True, slots=True)
class AuditedCall:
    """What a line says of a call that has ended; a call whose request never came has no ids."""

    method: str
    is_deletion: bool = False
    conversation_id: str = ""
    prefix_id: str = ""
    job_id: str = ""
    of_tenant: str = ""  # another tenant's, whom the operator named
    is_forwarded: bool = False  # as its sender says, which is not known to be a daemon


class Audit:
    """Writes events to the audit log; without a log it does nothing. Runs on the event loop."""

    def __init__(self, file: AuditLog | None, now: Callable[[], float]) -> None:
        """`now` is the loop's clock."""
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
        if last is not None and now - last < AGAIN_SECONDS:
            return
        self._used[key] = now
        self._used.move_to_end(key)
        if len(self._used) > USES_MAX:
            self._used.popitem(last=False)
        self._write("token", token=token, tenant=tenant, peer=peer)

    def refused(self, method: str, peer: str, reason: str, token: str) -> None:
        """`token` is that of a caller who is known and may not do this."""
        if self._refusals.seconds_until(1.0, self._now()):
            self._num_left_out += 1
            return
        self._refusals.spend(1.0, self._now())
        num_left_out, self._num_left_out = self._num_left_out, 0
        self._write(
            "refused",
            method=_short(method),
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
        """Any thread may call this."""
        self._write("reload", what="certificate", outcome=problem or "OK")

    def started(self, address: str) -> None:
        self._write("start", address=address)

    def stopped(self) -> None:
        self._write("stop")

    def _write(self, event: str, **fields: str | float | None) -> None:
        if self._file is not None:
            self._file.write(event, **fields)


def _short(method: str) -> str:
    return method.rpartition("/")[2]


class AuditLog:
    def __init__(self, path: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """Open the file, or raise ConfigError; if that fails later, it is only logged."""
        self._path = path
        self._wall_clock = wall_clock
        self._file = -1
        self._num_lost = 0  # since a line could be written; of both threads
        self._lock = threading.Lock()  # of the number
        self._is_late = False  # and the daemon's log says so
        self._lines: Queue[str | None] = Queue(LINES_MAX)
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Lines that were lost since the last one was written."""
        return self._num_lost

    def write(self, event: str, **fields: str | float | None) -> None:
        """Queue a line and return at once; fields without a value are left out."""
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
        """Write the queued lines; give up after CLOSE_SECONDS."""
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
            self._put_down([line for line in batch if line is not None])
        self._close_file()

    def _put_down(self, lines: list[str]) -> None:
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
            if not self._is_late:
                log.warning("the audit log cannot be written, and loses lines: %s", error.strerror)
            self._is_late = True
            return
        self._lose(-lost)
        if self._is_late:
            log.warning("the audit log can be written again; %d lines are lost", lost)
        self._is_late = False

    def _append(self, text: bytes) -> None:
        if self._file < 0 or self._was_moved():
            self._close_file()
            self._open()
        before = os.fstat(self._file).st_size
        if os.write(self._file, text) < len(text):
            os.ftruncate(self._file, before)  # the disk is full: no part of a line stays
            raise OSError(0, "the disk is full")

    def _was_moved(self) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return True
        ours = os.fstat(self._file)
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

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
