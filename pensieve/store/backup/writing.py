"""Writes generations to the folder of a backup: bases, segments, and what is dropped.

    BackupFolder   the folder, which one process writes to; knows the complete generations
    BaseCopy       a base while it is copied, in generation-N.partial; `run` and then `finish`
    Chain          the segments of a generation, each behind the one before

All of it runs in the backup thread, or in a process that serves nothing.  A failure of the folder is a
StoreUnavailable, or an OSError on the way there; what was being written then is not there, and what was
written before stays good.  A partial generation is removed by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO

from pensieve.errors import StoreError, StoreLocked, StoreUnavailable
from pensieve.store.backend import Source
from pensieve.store.backup.capture import Changes, Feed
from pensieve.store.backup.files import (
    BASE_NAME,
    Base,
    SegmentHead,
    read_base_description,
    sha256_of,
    write_base_description,
    write_newest,
    write_segment,
)
from pensieve.store.durable import new_file, sync

IDENTITY_NAME = "history"
LOCK_NAME = "lock"
PARTIAL = ".partial"
GENERATION = re.compile("generation-([0-9]{6,})")
BLOCK_BYTES = 4 * 2**20
PAUSE_SECONDS = 0.02  # between two blocks: the disk serves others, too
SCHEMA_AT = 60  # of the first page: user_version


@dataclass(frozen=True)
class Generation:
    number: int
    path: Path
    time: float  # of its base
    is_sound: bool = True  # as far as its description says


def _generation(number: int, path: Path) -> Generation:
    try:
        return Generation(number, path, read_base_description(path).time)
    except StoreError:  # it is in the way of nothing, and goes with its time
        return Generation(number, path, path.stat().st_mtime, is_sound=False)


def generations_in(folder: Path) -> list[tuple[int, Path]]:
    """The complete ones by number, the oldest first."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise StoreError(f"the backup {folder} cannot be read: {error.strerror}") from error
    found = [(match, folder / name) for name in names if (match := GENERATION.fullmatch(name))]
    return sorted((int(match[1]), path) for match, path in found)


class BackupFolder:
    def __init__(self, path: Path, lock: int, identity: str) -> None:
        self.path = path
        self.identity = identity
        self._lock = lock
        self.generations = [_generation(number, found) for number, found in generations_in(path)]
        for partial in path.glob(f"generation-*{PARTIAL}"):
            shutil.rmtree(partial)

    @classmethod
    def open(cls, path: Path, identity: str) -> BackupFolder:
        """For the history of this identity; the folder is made if it is missing."""
        with explained(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                named = path / IDENTITY_NAME
                if not named.exists():
                    with new_file(named) as file:
                        file.write(f"{identity}\n".encode())
                if named.read_text(encoding="ascii").strip() != identity:
                    raise StoreError(f"the backup {path} is of another history")
                return cls(path, lock, identity)
            except BlockingIOError:
                os.close(lock)
                raise StoreLocked(f"another process writes to the backup {path}") from None
            except BaseException:
                os.close(lock)
                raise

    def begin(self, source: Source, feed: Feed) -> BaseCopy:
        """A base of the source, as it is at the feed's latest change when the copy is finished."""
        with explained(self.path):
            needed, free = source.num_bytes, shutil.disk_usage(self.path).free
            if free < needed:
                raise OSError(errno.ENOSPC, f"there is no room for {needed >> 20} MiB")
            number = 1 + max([each.number for each in self.generations], default=0)
            path = self.path / f"generation-{number:06}"
            partial = path.with_name(path.name + PARTIAL)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
            return BaseCopy(self, source, feed, Generation(number, path, 0.0), partial)

    def drop_old(self, kept_since: float) -> None:
        """Drop the generations that are not needed for any moment since then."""
        starts = [each for each in self.generations if each.is_sound and each.time <= kept_since]
        while starts and self.generations[0] != starts[-1]:
            with explained(self.path):
                path = self.generations[0].path
                if path.exists():
                    partial = path.with_name(path.name + PARTIAL)
                    path.replace(partial)
                    shutil.rmtree(partial)
            del self.generations[0]

    def close(self) -> None:
        os.close(self._lock)


class BaseCopy:
    def __init__(
        self,
        folder: BackupFolder,
        source: Source,
        feed: Feed,
        generation: Generation,
        partial: Path,
    ) -> None:
        self.feed = feed
        self.stopped = False  # any thread may set it
        self._folder = folder
        self._source = source
        self._generation = generation
        self._partial = partial
        self._written: set[int] = set()  # the pages that came from the feed
        self._end = Changes({}, 0, 0.0)

    def run(self, pause_seconds: float = PAUSE_SECONDS) -> None:
        """Copy the file of the database, and what the feed has meanwhile.

        Of the file as long as it is now: what it grows by is in the feed.
        """
        page_bytes, offset, end = self.feed.page_bytes, 0, self._source.num_bytes
        with explained(self._folder.path), self._open() as base:
            while not (self.stopped or self.feed.failure):
                self._take(base)
                block = self._source.read(min(BLOCK_BYTES, end - offset), offset)
                block = block[: len(block) // page_bytes * page_bytes]
                if not block:
                    return
                self._put(base, block, offset)
                offset += len(block)
                time.sleep(pause_seconds)
        raise StoreUnavailable(self.feed.failure or "the copy was broken off")

    def finish(self) -> Chain:
        """After the feed was collected once more: complete the base and the generation."""
        folder, page_bytes = self._folder, self.feed.page_bytes
        with explained(folder.path):
            with self._open() as base:
                self._take(base)
                if self.feed.failure:
                    raise StoreUnavailable(self.feed.failure)
                base.truncate(self._end.num_pages * page_bytes)
                base.seek(SCHEMA_AT)
                (schema,) = struct.unpack(">I", base.read(4))
                base.flush()
                os.fsync(base.fileno())
            described = Base(
                folder.identity,
                self._generation.number,
                self._end.time,
                page_bytes,
                self._end.num_pages,
                schema,
                sha256_of(self._partial / BASE_NAME),
            )
            write_base_description(self._partial, described)
            write_newest(self._partial, 0)
            self._partial.replace(self._generation.path)
            sync(folder.path)
        done = Generation(self._generation.number, self._generation.path, described.time)
        folder.generations.append(done)
        return Chain(done, described)

    def discard(self) -> None:
        """Give the space back at once, where that is possible."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def _open(self) -> IO[bytes]:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        return os.fdopen(os.open(self._partial / BASE_NAME, flags, 0o600), "r+b")

    def _take(self, base: IO[bytes]) -> None:
        changes = self.feed.take()
        if changes is not None:
            write_pages(base, changes, self.feed.page_bytes)
            self._written.update(changes.pages)
            self._end = changes

    def _put(self, base: IO[bytes], block: bytes, offset: int) -> None:
        """Write a block of the file, but for pages of which there is a newer version."""
        page_bytes = self.feed.page_bytes
        first = offset // page_bytes + 1
        newer = self._written.intersection(range(first, first + len(block) // page_bytes))
        if not newer:
            base.seek(offset)
            base.write(block)
            return
        for number in range(first, first + len(block) // page_bytes):
            if number not in newer:
                base.seek((number - 1) * page_bytes)
                base.write(block[(number - first) * page_bytes :][:page_bytes])


def write_copy(source: Source, path: Path) -> Chain:
    """A generation of a base alone, of a history that nobody else uses meanwhile."""
    folder = BackupFolder.open(path, source.identity)
    try:
        feed = source.begin()
        copy = folder.begin(source, feed)
        try:
            copy.run(pause_seconds=0.0)
            source.collect()
            return copy.finish()
        finally:
            copy.discard()
            source.end(feed)
    finally:
        folder.close()


class Chain:
    """The segments of one generation."""

    def __init__(self, generation: Generation, base: Base) -> None:
        self.generation = generation
        self.time = base.time  # up to which everything is in it
        self._base = base
        self._number = 0
        self._previous = base.sha256
        self._lock = Lock()

    def ship(self, feed: Feed) -> None:
        """Append what the feed has; in one thread at a time, whoever asks."""
        with self._lock:
            if (changes := feed.take()) is None:
                return
            try:
                self.append(changes)
            except BaseException as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    feed.end(f"{self.generation.path} is not there any more")
                else:
                    feed.give_back(changes)
                raise

    def append(self, changes: Changes) -> None:
        head = SegmentHead(
            self._base.history,
            self._base.generation,
            self._number + 1,
            changes.time,
            self._base.page_bytes,
            changes.num_pages,
            len(changes.pages),
            self._previous,
        )
        path = self.generation.path
        with explained(path.parent):
            sha256 = write_segment(path / f"{head.number:08}.segment", head, changes)
            write_newest(path, head.number)
        self._number, self._previous = head.number, sha256
        self.time = changes.time


def write_pages(base: IO[bytes], changes: Changes, page_bytes: int) -> None:
    for number, page in changes.pages.items():
        base.seek((number - 1) * page_bytes)
        base.write(page)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """A failure of the folder, as a StoreUnavailable that names it."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"the backup {path}: {error.strerror or error}") from error
