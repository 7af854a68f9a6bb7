"""Store batch jobs: the uploaded lines, and one result for each line.

    create ──> receiving ──> checking ──> waiting <──> running
                                 │           ^ │          │ ^
                                 │           │ v          v │
                                 │           └───paused─────┘
                                 v                 v
                               ended (completed | cancelled | failed | checked)

A job can change to `ended` from each of the states checking, waiting, running and paused.

Each job has its own database, `DIGEST.db` in the folder `jobs` of the data folder, named by a digest of
tenant and id:

* Deleting a job removes a file. This needs no space, so it works on a full disk. It erases every byte,
  however large the job was, and does not affect other jobs.
* A damaged file affects only its job. The job can be deleted like any other job.

Invariants, whatever happens to the process or the disk:

* Every public method is one transaction. The effect is complete or absent, and is on the disk when the method
  returns (store/connection.py).
* A line has one text, and at most one result. A second result is ignored, so a caller that does not know
  whether its write was committed can write again. An ended job accepts no results.
* The counts and sums of a job match its results, because they are written in the same transaction.

Tables:

    job        one row: the job without its lines
    lines      the lines of the file, unchanged
    names      the first line with each custom_id; the key is a digest, because custom_ids may be long
    results    one row for each line with a result; the key is the line, so there is never a second row

Lines and results are separate, so writing a result rewrites no line. No row is ever deleted. Deleting a job
removes its whole file. Each text has a checksum, because disks may damage data.

After a kill -9, the next `open` treats a job according to its state:

    not created yet, or receiving         the file is removed; nothing was acknowledged to the client
    checking                              kept; the lines are checked again, with the same refusals
    waiting, running, paused              kept, with the committed results; other lines are pending
    ended                                 kept
    being deleted                         leftover SQLite files are removed; a deletion removes the database
                                          file first

A job's row is read once when the store is opened (a few milliseconds for each job) and kept in memory. After
a failed write, the row is read again, because it is unknown whether the write was committed. Only a few files
are open at a time. This process must hold the lock of the data folder (store/folder.py). Only one thread at a
time may use the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve.errors import (
    AlreadyExists,
    NotFound,
    PensieveError,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
    WrongJobState,
    one_line,
)
from pensieve.jobs.job_records import (
    JOB_TRANSITIONS,
    Duplicate,
    JobKey,
    JobLine,
    JobOutcome,
    JobState,
    JobUsage,
    NewAnswer,
    NewJob,
    NewRefusal,
    Result,
    ResultBytes,
    ResultKind,
    StoredJob,
)
from pensieve.store.backend import BUSY_TIMEOUT_SECONDS, STATEMENT_SECONDS
from pensieve.store.bodies import canonical_json
from pensieve.store.connection import WriterConnection, preferred_driver
from pensieve.store.conversation_rows import digest
from pensieve.store.durable import sync
from pensieve.store.folder import JOBS_NAME
from pensieve.store.migrations import migrate
from pensieve.store.records import check_id

if TYPE_CHECKING:
    from sqlite3 import Connection

OPEN_MAX = 4  # open files at a time
PAGE_BYTES = 1 << 20  # size of a page's texts; a page with a single text may be larger
APPLICATION_ID = 0x50656E4A  # "PenJ"
LAST_RESORT = "delete the job"
OUR_FILE = re.compile(r"(?P<database>[0-9a-f]{32}\.db)(?P<beside>.*)")


class JobFile:
    """The database of one job, and its job as last read."""

    def __init__(self, writer: WriterConnection) -> None:
        self.writer = writer
        self.job: StoredJob | None = None  # None before the first read
        self.is_current = False  # whether `job` matches the disk


class JobStore:
    """The store. Open it with `JobStore.open`, and close it before the data folder is released."""

    def __init__(
        self,
        path: Path,
        now: Callable[[], float] = time.time,
        driver: Any = preferred_driver,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
        statement_seconds: float = STATEMENT_SECONDS,
    ) -> None:
        self.path = path
        self.unreadable: dict[str, str] = {}  # problems of unreadable files, by name
        self._now = now
        self._driver = driver
        self._busy_timeout_seconds = busy_timeout_seconds
        self._statement_seconds = statement_seconds
        self._files: dict[Path, JobFile] = {}  # readable jobs
        self._open: dict[Path, WriterConnection] = {}  # open files, in the order of use
        self._load_new_jobs()

    @classmethod
    def open(cls, folder: Path, **options: Any) -> JobStore:
        """Open the jobs of a data folder that this process has locked. Clean up after a killed process.

        Unreadable files are listed in `unreadable`. They are tried again when jobs are listed.
        """
        path = folder / JOBS_NAME
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            sync(folder)
            return cls(path, **options)
        except OSError as error:
            raise StoreUnavailable(f"{path} cannot be used: {error.strerror}") from error

    def close(self) -> None:
        """Close all files. A second call does nothing."""
        for path in [*self._open]:
            self._close(path)

    def __enter__(self) -> JobStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- jobs --

    def create(self, new: NewJob) -> StoredJob:
        """Create a job without lines, in state `receiving`. Raises AlreadyExists if the tenant has its id."""
        check_id("job_id", new.key.job_id)
        path = self._path(new.key)
        with contextlib.suppress(NotFound):
            self._require(new.key)
            raise AlreadyExists(f"job {new.key.job_id!r} already exists")
        number = 1 + max((file.job.number for file in self._files.values() if file.job), default=0)
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StoreUnavailable(f"cannot create {path}: {error.strerror}") from error
        file = JobFile(self._writer(path))
        try:
            with self._open_writer(path, file).writing() as conn:
                conn.execute(
                    "INSERT INTO job (number, tenant, job_id, name, sha256, options, state, created_at)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        number,
                        *new.key,
                        new.name,
                        new.sha256,
                        canonical_json(dict(new.options)).decode(),
                        JobState.RECEIVING,
                        self._now(),
                    ),
                )
                file.job = _find_job(conn)
            self._sync()
        except BaseException:
            self._remove(path)
            raise
        assert file.job is not None
        file.is_current = True
        self._files[path] = file
        return file.job

    def get(self, key: JobKey) -> StoredJob:
        return self._read(*self._require(key))

    def list_jobs(self, tenant: str | None = None) -> list[StoredJob]:
        """Return the jobs of a tenant, or of all tenants, in the order of their creation.

        If a job cannot be read now, its last known state is returned.
        """
        if self.unreadable:
            self._load_new_jobs()
        jobs = []
        for path, file in self._files.items():
            with contextlib.suppress(PensieveError):
                self._read(path, file)
            if file.job is not None and tenant in (None, file.job.key.tenant):
                jobs.append(file.job)
        return sorted(jobs, key=lambda job: job.number)

    def stored_bytes(self, tenant: str) -> int:
        """Return the size of the lines and results of a tenant's jobs."""
        return sum(job.num_bytes for job in self.list_jobs(tenant))

    def set_state(
        self,
        key: JobKey,
        state: JobState,
        outcome: JobOutcome | None = None,
        problem: str = "",
    ) -> StoredJob:
        """Change the state of a job. `outcome` is required for `ended`, and only allowed then.

        Setting the current state again changes nothing, not even the outcome. Raises WrongJobState if the
        change is not allowed, or if the outcome is `completed` and lines are pending.
        """
        assert (outcome is not None) == (state is JobState.ENDED)
        with self._writing(key) as (conn, job):
            if state is not job.state:
                if state not in JOB_TRANSITIONS[job.state]:
                    raise WrongJobState(
                        f"job {key.job_id!r} is {job.state} and cannot become {state}"
                    )
                if outcome is JobOutcome.COMPLETED and job.num_pending:
                    raise WrongJobState(
                        f"{job.num_pending} lines of job {key.job_id!r} have no result"
                    )
                _set_state(conn, state, outcome, problem, self._now())
        return self.get(key)

    def delete(self, key: JobKey) -> None:
        """Erase a job from the disk, in any state, even if it cannot be read."""
        path = self._path(key)
        if not path.exists():
            raise NotFound(f"there is no job {key.job_id!r}")
        self._remove(path)

    def discard(self, key: JobKey) -> None:
        """Delete a job if it is still `receiving` in this process. Otherwise do nothing."""
        path = self._path(key)
        file = self._files.get(path)
        if file is not None and file.job is not None and file.job.state is JobState.RECEIVING:
            self._remove(path)

    def forget_older(self, before: float, limit: int = 16) -> list[JobKey]:
        """Delete at most `limit` jobs that ended before `before`. Return their keys."""
        old = [
            job.key
            for job in self.list_jobs()
            if job.ended_at is not None and job.ended_at < before
        ]
        for key in old[:limit]:
            self.delete(key)
        return old[:limit]

    # -- lines --

    def append_lines(self, key: JobKey, lines: Sequence[JobLine]) -> StoredJob:
        """Append lines to a job that is `receiving`. An existing line keeps its text."""
        num_lines = num_bytes = 0
        with self._writing(key, JobState.RECEIVING) as (conn, _):
            for line in lines:
                inserted = conn.execute(
                    "INSERT INTO lines VALUES (?, ?, ?) ON CONFLICT (line) DO NOTHING",
                    (line.number, zlib.crc32(line.text), line.text),
                ).rowcount
                num_lines += inserted
                num_bytes += inserted * len(line.text)
            conn.execute(
                "UPDATE job SET num_lines = num_lines + ?, num_bytes = num_bytes + ?",
                (num_lines, num_bytes),
            )
        return self.get(key)

    def received(
        self, key: JobKey, sha256: str = "", options: Mapping[str, Any] | None = None
    ) -> StoredJob:
        """Change a job from `receiving` to `checking`. From then on, it survives a crash.

        Call this when all its lines are stored. `sha256` and `options`, if given, replace the earlier values.
        """
        with self._writing(key, JobState.RECEIVING, JobState.CHECKING) as (conn, job):
            if job.state is JobState.RECEIVING:
                new_options = canonical_json(
                    dict(job.options if options is None else options)
                ).decode()
                conn.execute(
                    "UPDATE job SET sha256 = ?, options = ?", (sha256 or job.sha256, new_options)
                )
                _set_state(conn, JobState.CHECKING, None, "", self._now())
        return self.get(key)

    def name_lines(self, key: JobKey, names: Sequence[tuple[int, str]]) -> list[Duplicate]:
        """Record the custom_ids of lines, in order. Return the lines that repeat an earlier custom_id.

        Repeating the call returns the same result.
        """
        duplicates = []
        with self._writing(key, JobState.RECEIVING, JobState.CHECKING) as (conn, _):
            for line, custom_id in names:
                name = digest(custom_id)
                conn.execute("INSERT OR IGNORE INTO names VALUES (?, ?)", (name, line))
                found = conn.execute("SELECT line FROM names WHERE key = ?", (name,))
                (first,) = found.fetchone()
                if first != line:
                    duplicates.append(Duplicate(line, custom_id, first))
        return duplicates

    def pending_lines(self, key: JobKey, after: int = 0, limit: int = 1000) -> list[JobLine]:
        """Return pending lines with numbers above `after`, in order, up to about 1 MiB; [] at the end."""
        pending = " AND NOT EXISTS (SELECT 1 FROM results r WHERE r.line = l.line)"
        return self._lines(key, after, limit, pending)

    def lines(self, key: JobKey, after: int = 0, limit: int = 1000) -> list[JobLine]:
        """Return lines with numbers above `after`, in order, up to about 1 MiB; [] at the end."""
        return self._lines(key, after, limit)

    # -- results --

    def answer(self, key: JobKey, answers: Sequence[NewAnswer]) -> StoredJob:
        """Store answers of lines. A line that has a result keeps it."""
        return self._insert(key, answers)

    def refuse(self, key: JobKey, refusals: Sequence[NewRefusal]) -> StoredJob:
        """Store refusals of lines. A line that has a result keeps it."""
        return self._insert(key, refusals)

    def results(
        self, key: JobKey, after: int = 0, limit: int = 1000, kind: ResultKind = ResultKind.ALL
    ) -> list[Result]:
        """Return results of lines with numbers above `after`, in the order of lines, up to about 1 MiB.

        The list is empty if there are no more results yet.
        """
        page = self._page(
            key,
            "SELECT line, crc, text, is_answer FROM results WHERE line > ? AND is_answer IN (?, ?)"
            " ORDER BY line LIMIT ?",
            (after, kind is not ResultKind.ERRORS, kind is ResultKind.ANSWERS, limit),
        )
        return [Result(line, text, bool(is_answer)) for line, _, text, is_answer in page]

    def result_bytes(self, key: JobKey) -> ResultBytes:
        """Return the sizes of the files of answers and of errors."""
        with self._reading(key) as conn:
            rows = conn.execute(
                "SELECT is_answer, sum(length(text) + 1) FROM results GROUP BY is_answer"
            ).fetchall()
        found = {bool(is_answer): int(num_bytes) for is_answer, num_bytes in rows}
        return ResultBytes(found.get(True, 0), found.get(False, 0))

    # -- inside --

    def _insert(self, key: JobKey, results: Sequence[NewAnswer | NewRefusal]) -> StoredJob:
        states = set(JobState) - {JobState.RECEIVING, JobState.ENDED}
        num_answered = num_refused = num_bytes = prompt = saved = output = 0
        with self._writing(key, *states) as (conn, _):
            for result in results:
                is_answer = isinstance(result, NewAnswer)
                inserted = conn.execute(
                    "INSERT INTO results VALUES (?, ?, ?, ?) ON CONFLICT (line) DO NOTHING",
                    (result.line, is_answer, zlib.crc32(result.text), result.text),
                )
                if not inserted.rowcount:
                    continue
                num_bytes += len(result.text)
                if isinstance(result, NewAnswer):
                    num_answered += 1
                    prompt += result.usage.prompt_tokens
                    saved += result.usage.saved_tokens
                    output += result.usage.output_tokens
                else:
                    num_refused += 1
            conn.execute(
                "UPDATE job SET num_answered = num_answered + ?, num_refused = num_refused + ?,"
                " num_bytes = num_bytes + ?, prompt_tokens = prompt_tokens + ?,"
                " saved_tokens = saved_tokens + ?, output_tokens = output_tokens + ?",
                (num_answered, num_refused, num_bytes, prompt, saved, output),
            )
        return self.get(key)

    def _lines(self, key: JobKey, after: int, limit: int, where: str = "") -> list[JobLine]:
        query = f"SELECT line, crc, text FROM lines l WHERE line > ?{where} ORDER BY line LIMIT ?"
        return [JobLine(line, text) for line, _, text in self._page(key, query, (after, limit))]

    def _page(self, key: JobKey, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return the checked rows (line, crc, text, …) of a query, as many as fit into a page."""
        page: list[tuple[Any, ...]] = []
        num_bytes = 0
        with self._reading(key) as conn:
            rows = conn.execute(query, values)
            for row in rows:
                line, crc, text = row[:3]
                num_bytes += len(text)
                if page and num_bytes > PAGE_BYTES:
                    break
                if zlib.crc32(text) != crc:
                    raise StoreCorrupt(f"job {key.job_id!r}: line {line} fails its checksum")
                page.append(row)
            rows.close()
        return page

    @contextlib.contextmanager
    def _writing(self, key: JobKey, *states: JobState) -> Iterator[tuple[Connection, StoredJob]]:
        """Run one transaction on a job in one of these states."""
        path, file = self._require(key)
        job = self._read(path, file)
        if states and job.state not in states:
            raise WrongJobState(f"job {key.job_id!r} is {job.state}")
        file.is_current = False
        with self._open_writer(path, file).writing() as conn:
            yield conn, job
            changed = _find_job(conn)
        file.job, file.is_current = changed, True

    @contextlib.contextmanager
    def _reading(self, key: JobKey) -> Iterator[Connection]:
        path, file = self._require(key)
        with self._open_writer(path, file).reading() as conn:
            yield conn

    def _read(self, path: Path, file: JobFile) -> StoredJob:
        """Return the job. Read the disk if the state in memory may be wrong."""
        if not file.is_current:
            with self._open_writer(path, file).reading() as conn:
                file.job = _find_job(conn) or file.job
            file.is_current = True
        assert file.job is not None
        return file.job

    def _require(self, key: JobKey) -> tuple[Path, JobFile]:
        path = self._path(key)
        if path not in self._files:
            if not path.exists():
                raise NotFound(f"there is no job {key.job_id!r}")
            file = self._load(path)
            if file is None:
                raise NotFound(f"there is no job {key.job_id!r}")
            self._files[path] = file
        return path, self._files[path]

    def _path(self, key: JobKey) -> Path:
        return self.path / f"{digest(key.tenant, key.job_id).hex()}.db"

    def _load_new_jobs(self) -> None:
        """Load the jobs that are not known yet, and remove leftover files."""
        self.unreadable.clear()
        for path in sorted(self.path.iterdir()):
            if (match := OUR_FILE.fullmatch(path.name)) is None or path in self._files:
                continue
            if match["beside"]:
                if not path.with_name(match["database"]).exists():
                    path.unlink(missing_ok=True)  # left by an interrupted deletion
                continue
            try:
                file = self._load(path)
            except PensieveError as error:
                self.unreadable[path.name] = one_line(error)
                continue
            if file is not None:
                self._files[path] = file
                self._close(path)

    def _load(self, path: Path) -> JobFile | None:
        """Load a job of an earlier process. If it was still `receiving`, remove its file and return None."""
        file = JobFile(self._writer(path))
        with self._open_writer(path, file).reading() as conn:
            file.job = _find_job(conn)
        if file.job is None or file.job.state is JobState.RECEIVING:
            self._remove(path)
            return None
        if self._path(file.job.key) != path:
            self._close(path)
            raise StoreError(f"{path} has the wrong name for its job")
        file.is_current = True
        return file

    def _writer(self, path: Path) -> WriterConnection:
        return WriterConnection(
            path,
            lambda db: migrate(db, path, STEPS, APPLICATION_ID, LAST_RESORT),
            self._driver,
            self._busy_timeout_seconds,
            self._statement_seconds,
            noun="the job",
        )

    def _open_writer(self, path: Path, file: JobFile) -> WriterConnection:
        """Return an open writer. If OPEN_MAX are open, the least recently used writer is closed first."""
        self._open.pop(path, None)
        while len(self._open) >= OPEN_MAX:
            self._close(next(iter(self._open)))
        self._open[path] = file.writer
        return file.writer

    def _close(self, path: Path) -> None:
        writer = self._open.pop(path, None)
        if writer is not None:
            with contextlib.suppress(
                PensieveError
            ):  # SQLite's log stays, and is read at the next opening
                writer.close()

    def _remove(self, path: Path) -> None:
        """Remove a job's files, the database first. Side files without a database are removed later."""
        self._close(path)
        self._files.pop(path, None)
        self.unreadable.pop(path.name, None)
        try:
            path.unlink(missing_ok=True)
            self._sync()
            for side_file in self.path.glob(f"{path.name}*"):
                side_file.unlink(missing_ok=True)
            self._sync()
        except OSError as error:
            raise StoreUnavailable(f"{path} cannot be removed: {error.strerror}") from error

    def _sync(self) -> None:
        try:
            sync(self.path)
        except OSError as error:
            raise StoreUnavailable(f"{self.path} cannot be used: {error.strerror}") from error


def _find_job(conn: Connection) -> StoredJob | None:
    """Return the job of a database; None if the database is new."""
    row = conn.execute(
        "SELECT number, tenant, job_id, name, sha256, options, state, outcome, problem, num_lines,"
        " num_answered, num_refused, prompt_tokens, saved_tokens, output_tokens, num_bytes,"
        " created_at, started_at, ended_at FROM job"
    ).fetchone()
    if row is None:
        return None
    try:
        options, state = json.loads(row[5]), JobState(row[6])
        outcome = JobOutcome(row[7]) if row[7] else None
        if not isinstance(options, dict):
            raise ValueError("options are not an object")
    except ValueError as error:
        raise StoreCorrupt(f"a job's row is damaged: {error}") from error
    return StoredJob(
        number=row[0],
        key=JobKey(row[1], row[2]),
        name=row[3],
        sha256=row[4],
        options=options,
        state=state,
        outcome=outcome,
        problem=row[8],
        num_lines=row[9],
        num_answered=row[10],
        num_refused=row[11],
        usage=JobUsage(*row[12:15]),
        num_bytes=row[15],
        created_at=row[16],
        started_at=row[17],
        ended_at=row[18],
    )


def _set_state(
    conn: Connection, state: JobState, outcome: JobOutcome | None, problem: str, now: float
) -> None:
    conn.execute(
        "UPDATE job SET state = ?, outcome = ?, problem = ?,"
        " started_at = CASE WHEN ? = 'running' THEN coalesce(started_at, ?) ELSE started_at END,"
        " ended_at = CASE WHEN ? = 'ended' THEN ? ELSE NULL END",
        (state, outcome, problem, state, now, state, now),
    )


STEPS = {
    "m001_initial": (
        f"PRAGMA application_id = {APPLICATION_ID}",
        """
        CREATE TABLE job (
            number INTEGER NOT NULL,
            tenant TEXT NOT NULL,
            job_id TEXT NOT NULL,
            name TEXT NOT NULL,
            sha256 TEXT NOT NULL,
            options TEXT NOT NULL,
            state TEXT NOT NULL,
            outcome TEXT,
            problem TEXT NOT NULL DEFAULT '',
            num_lines INTEGER NOT NULL DEFAULT 0,
            num_answered INTEGER NOT NULL DEFAULT 0,
            num_refused INTEGER NOT NULL DEFAULT 0,
            prompt_tokens INTEGER NOT NULL DEFAULT 0,
            saved_tokens INTEGER NOT NULL DEFAULT 0,
            output_tokens INTEGER NOT NULL DEFAULT 0,
            num_bytes INTEGER NOT NULL DEFAULT 0,
            created_at REAL NOT NULL,
            started_at REAL,
            ended_at REAL
        ) STRICT
        """,
        """
        CREATE TABLE lines (
            line INTEGER PRIMARY KEY,
            crc INTEGER NOT NULL,
            text BLOB NOT NULL
        ) STRICT
        """,
        """
        CREATE TABLE names (
            key BLOB PRIMARY KEY,
            line INTEGER NOT NULL REFERENCES lines
        ) STRICT, WITHOUT ROWID
        """,
        """
        CREATE TABLE results (
            line INTEGER PRIMARY KEY REFERENCES lines,
            is_answer INTEGER NOT NULL,
            crc INTEGER NOT NULL,
            text BLOB NOT NULL
        ) STRICT
        """,
    ),
}
