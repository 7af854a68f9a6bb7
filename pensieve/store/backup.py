"""Backups of a SQLite history, in a folder.

Each `Backup.write` adds a *moment*: the state of the database at that time. Any moment can be restored.

    FOLDER/history                the identity of the history that is backed up here
    FOLDER/lock                   locked by the process that writes to the folder
    FOLDER/generation-000001/
        base.db                   the whole database; SQLite can open it
        base.json                 the description of base.db, and the SHA-256 of the description
        00000001.segment, …       the pages that changed since the previous segment, or since the base
        newest                    the number of the newest segment

To restore the moment of segment k, write the first k segments over the base. A segment is a line with the
format, a line with its description (JSON), the compressed page numbers and pages, and the SHA-256 of all
these. Each segment also contains the SHA-256 of the file before it. Every file and every generation is first
written under another name, synced and renamed. So a crash leaves no incomplete file that looks complete.

`Backup.write` copies the database in one read transaction (SQLite's online backup) to an unnamed temporary
file in the database's folder. Then it compares page digests to find the changed pages. So any number of
processes may write to the database, commits do no extra work, and checkpoints are not restricted. The read
transaction is closed before the backup folder is written, because that folder may be slow, full or
unreachable.

`restore` checks every file and the whole restored database. It replaces the history of a data folder only
after these checks.

Deleted text stays in a generation until the generation is dropped (see docs/backup.md).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from pensieve.errors import (
    BackupDamaged,
    NotFound,
    StoreError,
    StoreLocked,
    StoreTooNew,
    StoreUnavailable,
)
from pensieve.store import connection, verify
from pensieve.store.bodies import corrected_byte_counts, pack_tokens, unpack_tokens
from pensieve.store.connection import open_read_only, preferred_driver, read_only
from pensieve.store.durable import new_file, sync
from pensieve.store.folder import (
    RESTORING_NAME,
    DataFolder,
    history_identity,
    set_history_identity,
)
from pensieve.store.migrations import STEPS, remove_copies

if TYPE_CHECKING:
    from sqlite3 import Connection

IDENTITY_NAME = "history"
LOCK_NAME = "lock"
BASE_NAME = "base.db"
DESCRIPTION_NAME = "base.json"
NEWEST_NAME = "newest"
PARTIAL = ".partial"
GENERATION = re.compile("generation-([0-9]{6,})")
FORMAT = b"pensieve segment 1\n"
BASE_FORMAT = 1
GENERATION_SECONDS = 86_400.0
# Limit for the pages of a segment, because `restore` holds them in memory. Larger changes need a new base.
SEGMENT_BYTES_MAX = 256 * 2**20
ROOM_BYTES = 64 * 2**20  # free disk space that the temporary copy of the database must leave
DIGEST_BYTES = 32
BLOCK_BYTES = 4 * 2**20
COMPRESSION = 1
HEADER_BYTES, PAGE_BYTES_AT, SCHEMA_AT = 100, 16, 60  # offsets in SQLite's database header


@dataclass(frozen=True)
class Base:
    """The description of a base."""

    history: str
    generation: int
    time: float
    page_bytes: int
    num_pages: int
    schema: int
    sha256: str  # SHA-256 of base.db
    format: int = BASE_FORMAT

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_pages


class RestorePoints(NamedTuple):
    """The restorable moments of one generation."""

    generation: int
    path: Path
    times: tuple[float, ...]  # the time of the base, then of each segment
    num_bytes: int
    damage: str = ""  # the damage that makes later moments unusable


@dataclass(frozen=True)
class Restored:
    generation: int
    segment: int  # 0: the base
    time: float
    conversations: int
    messages: int
    damage: str  # why no later moment was restored


@dataclass
class _Chain:
    """The generation that is being written."""

    path: Path
    base: Base
    digests: bytes  # one digest per page, at the last segment
    previous: str  # SHA-256 of the last segment, or of the base
    number: int = 0  # number of the last segment


# -- writing --


class Backup:
    """Writes the backup folder of one history. The folder is locked until `release` or `close`.

    A failed `write` leaves earlier moments valid, and the next `write` tries again.
    """

    def __init__(
        self,
        folder: Path,
        database: Path,
        now: Callable[[], float] = time.time,
        driver: Any = preferred_driver,
    ) -> None:
        self._path = folder
        self._database = database
        self._now = now
        self._driver = driver
        self._in_use = threading.Lock()
        self._lock: int | None = None
        self._source: Connection | None = None
        self._version: Any = None  # SQLite's data_version at the last write
        self._chain: _Chain | None = None

    def write(self, keep_seconds: float = 0.0) -> Base:
        """Back up the current state if the history has changed. Return the base of the current generation.

        Also drops old generations, but keeps all moments of the last `keep_seconds`. 0 keeps everything.
        """
        with self._in_use, as_store_errors(self._path):
            if self._lock is None or self._chain is None or not self._chain.path.exists():
                self._open_folder()
            try:
                self._write()
            except self._driver.Error as error:
                self._close_source()
                raise connection.pensieve_error(error, self._database) from error
            if keep_seconds:
                _drop_old(self._path, self._now() - keep_seconds)
            assert self._chain is not None
            return self._chain.base

    def release(self) -> None:
        """Unlock the folder. If another process writes to it, the next `write` begins a new generation."""
        with self._in_use:
            self._unlock()

    def close(self) -> None:
        with self._in_use:
            self._close_source()
            self._unlock()
            self._chain = None

    def _write(self) -> None:
        if self._source is None:
            self._source = open_read_only(self._database, self._driver)
        version = self._source.execute("PRAGMA data_version").fetchone()
        chain, moment = self._chain, self._now()
        needs_base = chain is None or (
            chain.number > 0 and not 0 <= moment - chain.base.time < GENERATION_SECONDS
        )
        if version == self._version and not needs_base:
            return
        with self._temporary_copy(self._source) as copy:
            if chain is None or needs_base or not self._append(chain, copy, moment):
                self._begin(copy, moment)
        self._version = version

    @contextmanager
    def _temporary_copy(self, source: Connection) -> Iterator[IO[bytes]]:
        """Copy a snapshot of the database to an unnamed temporary file."""
        folder = self._database.parent
        _check_room(folder, self._database.stat().st_size + ROOM_BYTES)
        descriptor, path = tempfile.mkstemp(prefix=f"{self._database.name}.copy-", dir=folder)
        with os.fdopen(descriptor, "rb") as copy:
            try:
                target = self._driver.connect(path)
            finally:
                os.unlink(path)
            with closing(target):
                target.execute("PRAGMA journal_mode = OFF").fetchall()
                target.execute("PRAGMA synchronous = OFF").fetchall()
                source.backup(target)
            yield copy

    def _open_folder(self) -> None:
        """Create the folder if it is missing, and lock it."""
        self._unlock()
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._unlock()
            raise StoreLocked(f"another process is writing to the backup {self._path}") from None
        identity_path, identity = self._path / IDENTITY_NAME, history_identity(self._database)
        if not identity_path.exists():
            with new_file(identity_path) as file:
                file.write(f"{identity}\n".encode())
        if identity_path.read_text(encoding="ascii").strip() != identity:
            self._unlock()
            raise StoreError(f"the backup {self._path} belongs to another history")
        for partial in self._path.glob(f"generation-*{PARTIAL}"):
            shutil.rmtree(partial)
        if self._chain is not None and not _is_newest(self._path, self._chain):
            self._chain = None

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _close_source(self) -> None:
        source, self._source, self._version = self._source, None, None
        if source is not None:
            with suppress(self._driver.Error):
                source.close()

    def _begin(self, copy: IO[bytes], moment: float) -> None:
        """Write a new generation with its base."""
        num_bytes = os.fstat(copy.fileno()).st_size
        _check_room(self._path, num_bytes)
        number = 1 + max((number for number, _ in _generations(self._path)), default=0)
        path = self._path / f"generation-{number:06}"
        partial = path.with_name(path.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        try:
            copy.seek(0)
            with new_file(partial / BASE_NAME) as file:
                shutil.copyfileobj(copy, file, BLOCK_BYTES)
                file.seek(0)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            copy.seek(0)
            header = copy.read(HEADER_BYTES)
            page_bytes = int.from_bytes(header[PAGE_BYTES_AT : PAGE_BYTES_AT + 2], "big")
            schema = int.from_bytes(header[SCHEMA_AT : SCHEMA_AT + 4], "big")
            identity, num_pages = history_identity(self._database), num_bytes // page_bytes
            base = Base(identity, number, moment, page_bytes, num_pages, schema, sha256)
            text = json.dumps(asdict(base), sort_keys=True)
            with new_file(partial / DESCRIPTION_NAME) as file:
                file.write(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n".encode())
            _write_newest(partial, 0)
            partial.replace(path)
            sync(self._path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._chain = _Chain(path, base, _digests(copy, page_bytes), sha256)

    def _append(self, chain: _Chain, copy: IO[bytes], moment: float) -> bool:
        """Write a segment if a page has changed. Return False if the changes exceed a segment's limit."""
        page_bytes = chain.base.page_bytes
        digests = _digests(copy, page_bytes)
        changed = [
            at // DIGEST_BYTES + 1
            for at in range(0, len(digests), DIGEST_BYTES)
            if digests[at : at + DIGEST_BYTES] != chain.digests[at : at + DIGEST_BYTES]
        ]
        if len(changed) * page_bytes > SEGMENT_BYTES_MAX:
            return False
        if not changed:
            return True
        number = chain.number + 1
        head = {
            "number": number,
            "time": moment,
            "page_bytes": page_bytes,
            "num_pages": len(digests) // DIGEST_BYTES,
            "num_changed": len(changed),
            "previous": chain.previous,
        }
        packer = zlib.compressobj(COMPRESSION)
        with new_file(chain.path / f"{number:08}.segment") as file:
            file.write(FORMAT + json.dumps(head).encode() + b"\n")
            file.write(packer.compress(pack_tokens(changed)))
            for page in changed:
                copy.seek((page - 1) * page_bytes)
                file.write(packer.compress(copy.read(page_bytes)))
            file.write(packer.flush())
            file.seek(0)
            sha256 = hashlib.file_digest(file, "sha256")
            file.write(sha256.digest())
        _write_newest(chain.path, number)
        chain.digests, chain.previous, chain.number = digests, sha256.hexdigest(), number
        return True


def _digests(copy: IO[bytes], page_bytes: int) -> bytes:
    """Return the digests of all pages, concatenated."""
    copy.seek(0)
    digests = bytearray()
    while page := copy.read(page_bytes):
        digests += hashlib.sha256(page).digest()
    return bytes(digests)


def _is_newest(folder: Path, chain: _Chain) -> bool:
    """Return whether no other process has written to the folder since the chain's last segment."""
    generations = [path for _, path in _generations(folder)]
    if not generations or generations[-1] != chain.path:
        return False
    try:
        return int((chain.path / NEWEST_NAME).read_text(encoding="ascii")) == chain.number
    except (OSError, ValueError):
        return False


def _write_newest(folder: Path, number: int) -> None:
    with new_file(folder / NEWEST_NAME) as file:
        file.write(f"{number}\n".encode())


def _drop_old(folder: Path, kept_since: float) -> None:
    """Drop the generations that are not needed to restore any moment since `kept_since`."""
    generations, first = [path for _, path in _generations(folder)], 0
    for index, path in enumerate(generations):
        with suppress(StoreError):  # a damaged generation is dropped once a later one is old enough
            if read_base_description(path).time <= kept_since:
                first = index
    for path in generations[:first]:
        partial = path.with_name(path.name + PARTIAL)
        path.replace(partial)
        shutil.rmtree(partial)


def _check_room(folder: Path, num_bytes: int) -> None:
    if shutil.disk_usage(folder).free < num_bytes:
        raise StoreUnavailable(
            f"not enough disk space in {folder}: {num_bytes >> 20} MiB are needed"
        )


@contextmanager
def as_store_errors(path: Path) -> Iterator[None]:
    """Convert an OSError to a StoreUnavailable that names the backup folder."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"the backup {path}: {error.strerror or error}") from error


# -- reading --


def points(folder: Path) -> list[RestorePoints]:
    """Return the restorable moments, oldest generation first. Reads only the descriptions."""
    return [_points(number, path) for number, path in _generations(folder)]


def read_base_description(folder: Path) -> Base:
    path = folder / DESCRIPTION_NAME
    try:
        text, digest, _ = _read(path).decode(errors="replace").split("\n")
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise ValueError
        fields = json.loads(text)
        if fields["format"] > BASE_FORMAT:
            raise StoreTooNew(
                f"{path} has the format of a newer Pensieve; restore it with that version"
            )
        return Base(**fields)
    except (ValueError, TypeError, KeyError):
        raise BackupDamaged(f"{path} fails its checksum") from None


def check_database(path: Path, driver: Any = preferred_driver) -> list[str]:
    """Return at most 100 problems of a database that no process has open."""
    problems = verify.integrity_check(path, driver, immutable=True)
    return problems or verify.verify(path, driver, None, "", immutable=True)


def _generations(folder: Path) -> list[tuple[int, Path]]:
    """Return number and path of each complete generation, oldest first."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise StoreError(f"the backup {folder} cannot be read: {error.strerror}") from error
    found = [(match, folder / name) for name in names if (match := GENERATION.fullmatch(name))]
    return sorted((int(match[1]), path) for match, path in found)


def _points(number: int, path: Path) -> RestorePoints:
    times, num_bytes, damage = [], 0, ""
    try:
        base = read_base_description(path)
        times, num_bytes = [base.time], base.num_bytes
        for segment in _segment_paths(path):
            times.append(_read_head(segment)["time"])
            num_bytes += segment.stat().st_size
    except (BackupDamaged, StoreTooNew) as error:
        damage = str(error)
    return RestorePoints(number, path, tuple(times), num_bytes, damage)


def _segment_paths(path: Path) -> list[Path]:
    """Return the paths of all segments up to the newest, including missing files."""
    numbers = [int(found.stem) for found in path.glob("*.segment") if found.stem.isdecimal()]
    newest = path / NEWEST_NAME
    try:
        numbers.append(int(_read(newest)) if newest.exists() else 0)
    except ValueError:
        raise BackupDamaged(f"{newest} is not a number") from None
    return [path / f"{number:08}.segment" for number in range(1, max(numbers) + 1)]


def _read_head(segment: Path) -> dict[str, Any]:
    """Read only the description of a segment. Does not verify the checksum."""
    try:
        with segment.open("rb") as file:
            if file.readline(len(FORMAT)) != FORMAT:
                raise ValueError
            head: dict[str, Any] = json.loads(file.readline(4096))
            return head
    except OSError as error:
        raise BackupDamaged(f"{segment} cannot be read: {error.strerror}") from error
    except ValueError:
        raise BackupDamaged(f"{segment} is not a whole segment") from None


def _read_segment(path: Path, previous: str) -> tuple[dict[str, Any], dict[int, bytes], str]:
    """Read and check a segment: its description, its pages by number, and its SHA-256."""
    data = _read(path)
    whole, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    sha256 = hashlib.sha256(whole)
    if sha256.digest() != digest:
        raise BackupDamaged(f"{path} fails its checksum")
    head = _read_head(path)
    if head["previous"] != previous:
        raise BackupDamaged(f"{path} does not continue the file before it")
    content = zlib.decompress(whole.split(b"\n", 2)[2])
    pages_at, page_bytes = 4 * head["num_changed"], head["page_bytes"]
    starts = range(pages_at, len(content), page_bytes)
    numbers = zip(unpack_tokens(content[:pages_at]), starts, strict=True)
    return head, {page: content[at : at + page_bytes] for page, at in numbers}, sha256.hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BackupDamaged(f"{path} cannot be read: {error.strerror}") from error


# -- restoring --


class _RestoreOptions(NamedTuple):
    at: float | None
    to_last_good: bool
    driver: Any
    report: Callable[[str], None]


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
    """Restore the latest moment, or the latest moment not after `at`, to the data folder.

    If a file is damaged or missing, raises BackupDamaged, which names the file. With `to_last_good`, the last
    moment before the damage is restored instead, if necessary from an earlier generation. The data folder is
    locked meanwhile. If the restore is interrupted, the folder has either the complete old history or the
    complete new one. A backup with an older schema is restored unchanged; the next start migrates and checks
    it.
    """
    generations = points(folder)
    if not generations:
        raise NotFound(f"there is no backup in {folder}")
    target = DataFolder.open(data, "pensieve restore")
    clean = not target.stopped_unclean
    try:
        if target.database_bytes and not replace:
            raise StoreError(f"{data} already has a history; pass --replace to replace it")
        partial = data / RESTORING_NAME
        try:
            base, restored = _write_latest(
                generations, partial, _RestoreOptions(at, to_last_good, driver, report)
            )
            _put_in_place(partial, target, driver)
            set_history_identity(target.database_path, base.history)
            target.mark_damaged(False)
            clean = base.schema == len(STEPS)
        finally:
            with suppress(FileNotFoundError):
                partial.unlink()
    finally:
        target.close(clean)
    return restored


def _write_latest(
    generations: list[RestorePoints], partial: Path, wanted: _RestoreOptions
) -> tuple[Base, Restored]:
    """Write the latest undamaged moment that matches `wanted` to `partial`. Return base and result."""
    damage = ""
    for index, generation in reversed([*enumerate(generations)]):
        if wanted.at is not None and _is_later(generation, wanted.at, generations[:index]):
            continue
        try:
            base, segments = _files(generation, wanted.at)
            wanted.report(f"restoring generation {base.generation}, {len(segments)} segments")
            return base, _write_moment(generation.path, base, segments, partial, wanted, damage)
        except BackupDamaged as error:
            damage = damage or str(error)
            if not wanted.to_last_good:
                raise BackupDamaged(
                    f"{error}; pass --last-good to restore the last moment before the damage"
                ) from error
            wanted.report(str(error))
    if damage:
        raise BackupDamaged(f"{damage}; no earlier moment is usable")
    raise NotFound("the backup has no moment that old; --list shows its moments")


def _is_later(generation: RestorePoints, at: float, earlier: list[RestorePoints]) -> bool:
    """Return whether a generation begins after `at`.

    If its first moment cannot be read, return whether an earlier generation has a moment after `at`.
    """
    if generation.times:
        return generation.times[0] > at
    return any(each.times and each.times[-1] > at for each in earlier)


def _files(generation: RestorePoints, at: float | None) -> tuple[Base, list[Path]]:
    """Return the base, and the segments before the first segment that is later than `at`."""
    base = read_base_description(generation.path)
    if base.schema > len(STEPS):
        raise StoreTooNew(
            f"{generation.path} has schema version {base.schema} and this Pensieve knows versions up to"
            f" {len(STEPS)}; restore it with the newer Pensieve that wrote it"
        )
    segments = _segment_paths(generation.path)
    for index, path in enumerate(segments if at is not None else ()):
        with suppress(BackupDamaged):  # reported when the segment is read
            if _read_head(path)["time"] > at:
                return base, segments[:index]
    return base, segments


def _write_moment(
    path: Path,
    base: Base,
    segments: list[Path],
    partial: Path,
    wanted: _RestoreOptions,
    damage: str,
) -> Restored:
    _copy_base(path / BASE_NAME, base, partial)
    last, moment, previous = 0, base.time, base.sha256
    with as_store_errors(partial), partial.open("r+b") as database:
        try:
            for segment_path in segments:
                head, pages, previous = _read_segment(segment_path, previous)
                for number, page in pages.items():
                    database.seek((number - 1) * base.page_bytes)
                    database.write(page)
                database.truncate(head["num_pages"] * base.page_bytes)
                last, moment = head["number"], head["time"]
        except BackupDamaged as error:
            if not wanted.to_last_good:
                raise
            wanted.report(str(error))
            damage = damage or str(error)
        database.flush()
        os.fsync(database.fileno())
    wanted.report("checking the restored history")
    problems = verify.integrity_check(partial, wanted.driver, immutable=True)
    # A database with an older schema can be checked only by the Pensieve version that wrote it.
    if not problems and base.schema == len(STEPS):
        _correct_byte_counters(partial, wanted)
        problems = verify.verify(partial, wanted.driver, None, "", immutable=True)
    if problems:
        raise BackupDamaged(
            f"the history in {path}, up to segment {last}, was damaged when it was backed up: {problems[0]}"
        )
    with read_only(partial, wanted.driver, immutable=True) as conn:
        (conversations,) = conn.execute("SELECT count(*) FROM conversations").fetchone()
        (messages,) = conn.execute("SELECT count(*) FROM messages").fetchone()
    return Restored(base.generation, last, moment, conversations, messages, damage)


def _correct_byte_counters(partial: Path, wanted: _RestoreOptions) -> None:
    """Correct the byte counters of tenants, because a wrong counter must not block a restore."""
    _remove_log(partial)  # may be left by an earlier restore that was killed in this function
    with read_only(partial, wanted.driver, immutable=True) as conn:
        corrected = corrected_byte_counts(conn)
    if not corrected:
        return
    wanted.report(
        f"the byte counters of {len(corrected)} tenants were wrong and have been corrected"
    )
    with closing(wanted.driver.connect(str(partial))) as conn, conn:
        conn.executemany(
            "INSERT OR REPLACE INTO tenants (tenant, stored_bytes) VALUES (?, ?)", corrected.items()
        )


def _copy_base(source: Path, base: Base, partial: Path) -> None:
    try:
        with source.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BackupDamaged(f"{source} cannot be read: {error.strerror}") from error
    if found != base.sha256:
        raise BackupDamaged(f"{source} fails its checksum")
    with as_store_errors(partial):
        partial.touch(mode=0o600)
        shutil.copyfile(source, partial)


def _put_in_place(partial: Path, target: DataFolder, driver: Any) -> None:
    database = target.database_path
    with as_store_errors(database):
        remove_copies(database)
        with suppress(driver.Error):  # a damaged log may not be readable
            _empty_log(database, driver)
        _remove_log(database)  # SQLite must not apply the old log to the new history
        partial.replace(database)
        sync(database.parent)


def _remove_log(database: Path) -> None:
    for side in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            database.with_name(database.name + side).unlink()


def _empty_log(database: Path, driver: Any) -> None:
    """Move the log into the database, so that the old history is complete without the log.

    Otherwise a kill after `_remove_log` would leave an incomplete history.
    """
    with closing(driver.connect(str(database), isolation_level=None)) as conn:
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
