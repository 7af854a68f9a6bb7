"""SQL of one job's database, as functions on a connection; each runs inside its caller's transaction.

    job        one row: the job without its lines
    lines      the lines of the file, as they came
    names      which line has a custom_id, by its digest: it may be of any length
    results    one row for each line that has its result; its key is the line, so that there is never a second

Lines and results are apart, so that writing a result rewrites no line.  Nothing is ever taken out of these
tables: a job is deleted with its file.  Each text has a checksum, for disks lose bits.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve.errors import StoreCorrupt
from pensieve.store.bodies import canonical_json
from pensieve.store.conversation_rows import digest
from pensieve.store.job_records import (
    Duplicate,
    Job,
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
    Which,
)
from pensieve.store.migrations import Step, migrate

if TYPE_CHECKING:
    from sqlite3 import Connection

APPLICATION_ID = 0x50656E4A  # "PenJ"
LAST_RESORT = "delete the job"
PAGE_BYTES = 1 << 20  # of the texts of a page; one of a single text may be larger


def m001_initial(db: Any) -> None:
    for statement in (
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
        "PRAGMA user_version = 1",
    ):
        db.conn.execute(statement)


STEPS: tuple[Step, ...] = (m001_initial,)


def migrate_job(db: Any, path: Path) -> None:
    """Bring the database of a job to the newest schema."""
    migrate(db, path, STEPS, APPLICATION_ID, LAST_RESORT)


def insert_job(conn: Connection, new: NewJob, number: int, now: float) -> None:
    conn.execute(
        "INSERT INTO job (number, tenant, job_id, name, sha256, options, state, created_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            number,
            new.key.tenant,
            new.key.job_id,
            new.name,
            new.sha256,
            canonical_json(dict(new.options)).decode(),
            JobState.RECEIVING,
            now,
        ),
    )


def find_job(conn: Connection) -> Job | None:
    """The job of a database; None of one that was just made."""
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
            raise ValueError("options are no object")
    except ValueError as error:
        raise StoreCorrupt(f"a job's row is damaged: {error}") from error
    return Job(
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


def set_state(
    conn: Connection, state: JobState, outcome: JobOutcome | None, problem: str, now: float
) -> None:
    conn.execute(
        "UPDATE job SET state = ?, outcome = ?, problem = ?,"
        " started_at = CASE WHEN ? = 'running' THEN coalesce(started_at, ?) ELSE started_at END,"
        " ended_at = CASE WHEN ? = 'ended' THEN ? ELSE NULL END",
        (state, outcome, problem, state, now, state, now),
    )


def complete(conn: Connection, sha256: str, options: Mapping[str, Any]) -> None:
    """What is known of a file once it is there."""
    written = canonical_json(dict(options)).decode()
    conn.execute("UPDATE job SET sha256 = ?, options = ?", (sha256, written))


def insert_lines(conn: Connection, lines: Iterable[JobLine]) -> None:
    """Those that are there already are passed over."""
    num_lines = num_bytes = 0
    for line in lines:
        inserted = conn.execute(
            "INSERT INTO lines VALUES (?, ?, ?) ON CONFLICT (line) DO NOTHING",
            (line.number, *_checked(line.text)),
        )
        num_lines += inserted.rowcount
        num_bytes += inserted.rowcount * len(line.text)
    conn.execute(
        "UPDATE job SET num_lines = num_lines + ?, num_bytes = num_bytes + ?",
        (num_lines, num_bytes),
    )


def name_lines(conn: Connection, names: Iterable[tuple[int, str]]) -> list[Duplicate]:
    """The first line with a custom_id has it; the others are returned."""
    duplicates = []
    for line, custom_id in names:
        key = digest(custom_id)
        conn.execute("INSERT OR IGNORE INTO names VALUES (?, ?)", (key, line))
        (first,) = conn.execute("SELECT line FROM names WHERE key = ?", (key,)).fetchone()
        if first != line:
            duplicates.append(Duplicate(line, custom_id, first))
    return duplicates


def insert_results(conn: Connection, results: Iterable[NewAnswer | NewRefusal]) -> None:
    """Those of lines that have a result already are passed over, and count nothing."""
    num_answered = num_refused = num_bytes = prompt = saved = output = 0
    for result in results:
        is_answer = isinstance(result, NewAnswer)
        inserted = conn.execute(
            "INSERT INTO results VALUES (?, ?, ?, ?) ON CONFLICT (line) DO NOTHING",
            (result.line, is_answer, *_checked(result.text)),
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


PENDING = "NOT EXISTS (SELECT 1 FROM results r WHERE r.line = l.line)"


def some_lines(
    conn: Connection, job_id: str, after: int, limit: int, *, pending: bool
) -> list[JobLine]:
    """Lines, or those without a result, from behind a line on, as many as fit into a page."""
    which = f" AND {PENDING}" if pending else ""
    rows = conn.execute(
        f"SELECT line, crc, text FROM lines l WHERE line > ?{which} ORDER BY line LIMIT ?",
        (after, limit),
    )
    page: list[JobLine] = []
    num_bytes = 0
    for line, crc, text in rows:
        num_bytes += len(text)
        if page and num_bytes > PAGE_BYTES:
            break
        page.append(JobLine(line, _whole(job_id, line, crc, text)))
    rows.close()
    return page


def some_results(
    conn: Connection, job_id: str, after: int, limit: int, which: Which
) -> list[Result]:
    """Results in the order of the lines, from behind a line on, as many as fit into a page."""
    rows = conn.execute(
        "SELECT line, is_answer, crc, text FROM results WHERE line > ? AND is_answer IN (?, ?)"
        " ORDER BY line LIMIT ?",
        (after, which is not Which.ERRORS, which is Which.ANSWERS, limit),
    )
    page: list[Result] = []
    num_bytes = 0
    for line, is_answer, crc, text in rows:
        num_bytes += len(text)
        if page and num_bytes > PAGE_BYTES:
            break
        page.append(Result(line, _whole(job_id, line, crc, text), bool(is_answer)))
    rows.close()
    return page


def result_bytes(conn: Connection) -> ResultBytes:
    rows = conn.execute(
        "SELECT is_answer, sum(length(text) + 1) FROM results GROUP BY is_answer"
    ).fetchall()
    found = {bool(is_answer): int(num_bytes) for is_answer, num_bytes in rows}
    return ResultBytes(found.get(True, 0), found.get(False, 0))


def _checked(text: bytes) -> tuple[int, bytes]:
    return zlib.crc32(text), text


def _whole(job_id: str, line: int, crc: int, text: bytes) -> bytes:
    if zlib.crc32(text) != crc:
        raise StoreCorrupt(f"the job {job_id!r}: line {line} fails its checksum")
    return text
