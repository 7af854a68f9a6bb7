"""Reads a backup: which moments it has, and the history of one of them.

    points     of each generation the moments of its base and segments, from their descriptions alone
    restore    copies a base, writes the segments up to the moment over it, checks all of it on the way, then
               checks the database as a whole, and only then puts it into a data folder

A backup of an older schema is restored as it is; the next start brings it to the present one and checks
it again.  A moment is restored from the latest generation that has one.  If a file on the way is damaged
or missing, that is an error that names it; with `to_last_good` the moment before it is restored instead, if
need be of an earlier generation.  The file `newest` tells whether the newest segment is missing.  The data
folder is locked throughout, and has the old history or the new one as a whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.errors import BackupDamaged, NotFound, StoreError, StoreTooNew
from pensieve.store import verify
from pensieve.store.backup.files import (
    BASE_NAME,
    HASH_BYTES,
    Base,
    Segment,
    read_base_description,
    read_newest,
    read_segment,
    read_segment_head,
)
from pensieve.store.backup.writing import explained, generations_in, write_pages
from pensieve.store.bodies import miscounted
from pensieve.store.connection import preferred_driver, read_only
from pensieve.store.durable import sync
from pensieve.store.folder import RESTORING_NAME, DataFolder
from pensieve.store.migrations import STEPS, remove_copies


class Points(NamedTuple):
    """The moments of one generation."""

    generation: int
    path: Path
    times: tuple[float, ...]  # of the base, then of each segment
    num_bytes: int
    damage: str = ""  # what follows the last of them


@dataclass(frozen=True)
class Restored:
    generation: int
    segment: int  # 0: the base
    time: float
    conversations: int
    messages: int
    damage: str  # why it is not a later moment
    newest_known: bool  # else a later segment may be missing without a trace


def points(folder: Path) -> list[Points]:
    """What the descriptions say, the oldest generation first."""
    return [_points(number, path) for number, path in generations_in(folder)]


def restore(
    folder: Path,
    data: Path,
    at: float | None = None,
    *,
    to_last_good: bool = False,
    replace: bool = False,
    driver: Any = preferred_driver,
    report: Callable[[str], None] = lambda line: None,
) -> Restored:
    """Make the history of the latest moment, or of the latest one not after `at`, that of `data`."""
    generations = points(folder)
    if not generations:
        raise NotFound(f"{folder} has no backup")
    target = DataFolder.open(data, "pensieve restore")
    clean = not target.stopped_unclean
    try:
        if target.database_bytes and not replace:
            raise StoreError(f"{data} has a history; --replace puts the restored one in its place")
        partial = data / RESTORING_NAME
        try:
            wanted = _Wanted(at, to_last_good, driver, report)
            base, restored = _make(generations, partial, wanted)
            _put_in_place(partial, target, driver)
            target.set_identity(base.history)
            target.mark_damaged(False)
            clean = base.schema == len(STEPS)
        finally:
            with suppress(FileNotFoundError):
                partial.unlink()
    finally:
        target.close(clean)
    return restored


def check_database(path: Path, driver: Any = preferred_driver) -> list[str]:
    """The problems of a database that nobody uses, at most 100 sentences."""
    problems = verify.integrity_check(path, driver, immutable=True)
    return problems or verify.verify(path, driver, None, "", immutable=True)


class _Wanted(NamedTuple):
    at: float | None
    to_last_good: bool
    driver: Any
    report: Callable[[str], None]


def _make(generations: list[Points], partial: Path, wanted: _Wanted) -> tuple[Base, Restored]:
    """The database at `partial`, of the latest moment that is wanted and good; and what it began with."""
    damage = ""
    for index, generation in reversed([*enumerate(generations)]):
        if wanted.at is not None and _is_later(generation, wanted.at, generations[:index]):
            continue
        try:
            base, segments = _chain(generation, wanted.at)
            wanted.report(f"restoring generation {base.generation}, {len(segments)} segments")
            return base, _write(generation.path, base, segments, partial, wanted, damage)
        except BackupDamaged as error:
            damage = damage or str(error)
            if not wanted.to_last_good:
                raise BackupDamaged(f"{error}; --last-good restores what was before it") from error
            wanted.report(str(error))
    if damage:
        raise BackupDamaged(f"{damage}; nothing before it is good")
    raise NotFound("the backup has nothing as old as that; --list shows what it has")


def _is_later(generation: Points, at: float, earlier: list[Points]) -> bool:
    """Whether it is not needed: it begins later, or an earlier one goes on beyond this moment.

    The second is asked only where nobody knows when it begins.
    """
    if generation.times:
        return generation.times[0] > at
    return any(each.times and each.times[-1] > at for each in earlier)


def _points(number: int, path: Path) -> Points:
    times, num_bytes, damage = [], 0, ""
    try:
        base = read_base_description(path)
        times, num_bytes = [base.time], base.num_bytes
        for segment in _segment_paths(path):
            times.append(read_segment_head(segment).time)
            num_bytes += segment.stat().st_size
    except (BackupDamaged, StoreTooNew) as error:
        damage = str(error)
    return Points(number, path, tuple(times), num_bytes, damage)


def _chain(generation: Points, at: float | None) -> tuple[Base, list[Path]]:
    """The base and the segments up to `at`; times never fall within a chain, but for a clock set back."""
    base = read_base_description(generation.path)
    if base.schema > len(STEPS):
        raise StoreTooNew(
            f"{generation.path} has schema version {base.schema} and this Pensieve knows versions up to"
            f" {len(STEPS)}; restore it with the newer Pensieve that wrote it"
        )
    segments = _segment_paths(generation.path)
    if at is not None:
        num = len(segments)
        for index, path in enumerate(segments):
            with suppress(BackupDamaged):  # it is named when it is its turn
                if read_segment_head(path).time > at:
                    num = index
                    break
        segments = segments[:num]
    return base, segments


def _segment_paths(path: Path) -> list[Path]:
    """Up to the newest that was written; a missing one stands for itself, and cannot be read."""
    numbers = [int(found.stem) for found in path.glob("*.segment") if found.stem.isdecimal()]
    numbers.append(read_newest(path) or 0)
    return [path / f"{number:08}.segment" for number in range(1, max(numbers, default=0) + 1)]


def _write(
    path: Path, base: Base, segments: list[Path], partial: Path, wanted: _Wanted, damage: str
) -> Restored:
    _copy_base(path / BASE_NAME, base, partial)
    last, time = 0, base.time
    with explained(partial), partial.open("r+b") as database:
        try:
            for segment in _checked_segments(base, segments):
                write_pages(database, segment.changes, base.page_bytes)
                database.truncate(segment.head.num_pages * base.page_bytes)
                last, time = segment.head.number, segment.head.time
        except BackupDamaged as error:
            if not wanted.to_last_good:
                raise
            wanted.report(str(error))
            damage = damage or str(error)
        database.flush()
        os.fsync(database.fileno())
    wanted.report("checking it")
    problems = verify.integrity_check(partial, wanted.driver, immutable=True)
    if not problems and base.schema == len(
        STEPS
    ):  # what others should be, only their version knows
        _count_anew(partial, wanted)
        problems = verify.verify(partial, wanted.driver, None, "", immutable=True)
    if problems:
        raise BackupDamaged(
            f"{path} holds, up to segment {last}, a history that is damaged itself: {problems[0]}"
        )
    with read_only(partial, wanted.driver, immutable=True) as conn:
        (conversations,) = conn.execute("SELECT count(*) FROM conversations").fetchone()
        (messages,) = conn.execute("SELECT count(*) FROM messages").fetchone()
    known = read_newest(path) is not None
    return Restored(base.generation, last, time, conversations, messages, damage, known)


def _count_anew(partial: Path, wanted: _Wanted) -> None:
    """How much a tenant has is derived from what is there: a wrong number is no reason to lose that."""
    _remove_log(partial)  # of a restore that was killed here
    with read_only(partial, wanted.driver, immutable=True) as conn:
        right = miscounted(conn)
    if not right:
        return
    wanted.report(f"the bytes of {len(right)} tenants were miscounted, and are counted anew")
    conn = wanted.driver.connect(str(partial))
    try:
        with conn:
            conn.executemany(
                "INSERT OR REPLACE INTO tenants (tenant, stored_bytes) VALUES (?, ?)", right.items()
            )
    finally:
        conn.close()  # its log goes into the database


def _copy_base(source: Path, base: Base, partial: Path) -> None:
    digest = hashlib.sha256()
    with explained(partial):
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as copy:
            for block in _blocks(source):
                digest.update(block)
                copy.write(block)
    if digest.hexdigest() != base.sha256:
        raise BackupDamaged(f"{source} fails its checksum")


def _blocks(source: Path) -> Iterator[bytes]:
    try:
        with source.open("rb") as file:
            while block := file.read(HASH_BYTES):
                yield block
    except OSError as error:
        raise BackupDamaged(f"{source} cannot be read: {error.strerror}") from error


def _checked_segments(base: Base, segments: list[Path]) -> Iterator[Segment]:
    previous = base.sha256
    for number, path in enumerate(segments, 1):
        segment = read_segment(path)
        head = segment.head
        if (head.history, head.generation, head.number, head.page_bytes, head.previous) != (
            *(base.history, base.generation, number, base.page_bytes, previous),
        ):
            raise BackupDamaged(f"{path} does not follow what is before it")
        previous = segment.sha256
        yield segment


def _put_in_place(partial: Path, target: DataFolder, driver: Any) -> None:
    database = target.database_path
    with explained(database):
        remove_copies(database)
        with suppress(driver.Error):  # of a damaged one, what can be had
            _empty_log(database, driver)
        _remove_log(database)  # of the old history: it must not meet the new one
        partial.replace(database)
        sync(database.parent)


def _remove_log(database: Path) -> None:
    for side in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            database.with_name(database.name + side).unlink()


def _empty_log(database: Path, driver: Any) -> None:
    """So that the old history is whole without its log, should we be killed before it is replaced."""
    conn = driver.connect(str(database), isolation_level=None)
    try:
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        conn.close()
