"""Reads from the write-ahead log what transactions have changed, before a checkpoint lets go of it.

Belongs to the thread that has the writer's connection; only `Feed.take` is called in another.

A feed lives as long as the connection.  While there is one, SQLite's own checkpoints are off, and the writer
calls `committed` behind each transaction and `collect` before it truncates the log.  `collect` makes a
checkpoint that waits for nobody; its answer says how many frames the log has.  Those that were not read yet
are read from the file: from the one behind the last if the salts are the same, from the first if the log was
begun anew.

Nothing here fails a transaction or a deletion.  What goes wrong ends the feeds, and each says why.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.errors import StoreUnavailable

if TYPE_CHECKING:
    from sqlite3 import Connection

GATHERED_BYTES_MAX = 64 * 2**20  # of a feed whose folder is slow, full or gone
CHECKPOINT_FRAMES = 1000  # as SQLite itself
FRAMES_MAX = 2 * GATHERED_BYTES_MAX // 4096  # read at once; only a reader makes the log longer
# Magic, format, page size, checkpoint, two salts; two checksums follow.
HEADER = struct.Struct(">IIIIII")
HEADER_BYTES = 32
FRAME = struct.Struct(">IIII")  # page, pages of the database behind a commit (else 0), two salts
FRAME_BYTES = 24
UNREADABLE = (OSError, ValueError, struct.error)


class Changes(NamedTuple):
    """The pages that differ from those before, at one moment between two transactions."""

    pages: dict[int, bytes]
    num_pages: int  # of the whole database
    time: float


class Feed:
    """What has changed and was not taken yet."""

    def __init__(self, page_bytes: int, bytes_max: int) -> None:
        self.page_bytes = page_bytes
        self.failure = ""  # why nothing more will come
        self._bytes_max = bytes_max
        self._lock = Lock()
        self._gathered: Changes | None = None

    def add(self, changes: Changes) -> None:
        with self._lock:
            self._add(changes)

    def take(self) -> Changes | None:
        """What has gathered since the last call; None if nothing has."""
        with self._lock:
            taken, self._gathered = self._gathered, None
        return taken

    def give_back(self, changes: Changes) -> None:
        """They could not be written; what came since is newer."""
        with self._lock:
            newer, self._gathered = self._gathered, changes
            if newer is not None:
                self._add(newer)

    def _add(self, changes: Changes) -> None:
        if self._gathered is not None:
            changes = changes._replace(pages={**self._gathered.pages, **changes.pages})
        self._gathered = changes
        if len(changes.pages) * self.page_bytes > self._bytes_max:
            self._gathered = None
            self.failure = f"more than {self._bytes_max >> 20} MiB of changes could not be written"

    def end(self, reason: str) -> None:
        with self._lock:
            self.failure = self.failure or reason
            self._gathered = None


class Capture:
    """The feeds of one writer."""

    def __init__(self, log_path: Path, now: Callable[[], float], driver: Any) -> None:
        self._log_path = log_path
        self._now = now
        self._driver = driver
        self._feeds: list[Feed] = []
        self._salts = (0, 0)
        self._num_frames = 0  # of the log with these salts, that were read

    def begin(self, conn: Connection, bytes_max: int = GATHERED_BYTES_MAX) -> Feed:
        """A feed that begins with all that the log holds now."""
        self.collect(conn)
        conn.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
        pages: dict[int, bytes] = {}
        try:
            if num_frames := _checkpoint(conn):
                self._read_new(num_frames)
                pages = self._read(0, num_frames)
        except (*UNREADABLE, self._driver.Error) as error:
            self._forget_ended(conn)
            raise StoreUnavailable(f"the write-ahead log cannot be read: {error}") from error
        feed = Feed(_number(conn, "PRAGMA page_size"), bytes_max)
        feed.add(Changes(pages, _number(conn, "PRAGMA page_count"), self._now()))
        self._feeds.append(feed)
        return feed

    def end(self, conn: Connection, feed: Feed) -> None:
        feed.end("it was ended")
        self._forget_ended(conn)

    def committed(self, conn: Connection) -> None:
        """Behind a transaction: checkpoint, as SQLite would, when the log has become long."""
        if self._feeds and self._is_long():
            self.collect(conn)

    def collect(self, conn: Connection) -> None:
        """Put what was committed into the feeds; from here on the log may go."""
        if not self._feeds:
            return
        try:
            num_frames = _checkpoint(conn)
            if num_frames:
                pages = self._read_new(num_frames)
                changes = Changes(pages, _number(conn, "PRAGMA page_count"), self._now())
                for feed in self._feeds if pages else ():
                    feed.add(changes)
        except (*UNREADABLE, self._driver.Error) as error:
            self.abandon(f"the write-ahead log could not be read: {error}")
        self._forget_ended(conn)

    def abandon(self, reason: str) -> None:
        """The connection is closed, or frames may have been missed."""
        for feed in self._feeds:
            feed.end(reason)
        self._feeds.clear()

    def _forget_ended(self, conn: Connection) -> None:
        self._feeds = [feed for feed in self._feeds if not feed.failure]
        if not self._feeds:
            # Should it fail, the log only grows until it is begun anew.
            with contextlib.suppress(self._driver.Error):
                conn.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_FRAMES}").fetchall()

    def _is_long(self) -> bool:
        """Whether there are so many frames behind those that were read."""
        try:
            log = os.open(self._log_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True  # `collect` will say why
        try:
            header = os.pread(log, HEADER.size, 0)
            if len(header) < HEADER.size:
                return False
            _, _, page_bytes, _, *salts = HEADER.unpack(header)
            known = self._num_frames if tuple(salts) == self._salts else 0
            offset = HEADER_BYTES + (known + CHECKPOINT_FRAMES) * (FRAME_BYTES + page_bytes)
            frame = os.pread(log, FRAME.size, offset)
            return len(frame) == FRAME.size and list(FRAME.unpack(frame)[2:]) == salts
        except OSError:
            return True
        finally:
            os.close(log)

    def _read_new(self, num_frames: int) -> dict[int, bytes]:
        salts = self._read_salts()
        first = self._num_frames if salts == self._salts else 0
        pages = self._read(first, num_frames)
        self._salts, self._num_frames = salts, num_frames
        return pages

    def _read_salts(self) -> tuple[int, int]:
        with self._log_path.open("rb") as log:
            *_, salt, other = HEADER.unpack(log.read(HEADER.size))
        return salt, other

    def _read(self, first: int, num_frames: int) -> dict[int, bytes]:
        """The frames [first, num_frames) of the log; a page that is there twice, as it was last."""
        pages: dict[int, bytes] = {}
        if num_frames - first > FRAMES_MAX:  # it would take the thread long, and much memory
            raise ValueError(f"{num_frames - first} frames are too many at once")
        with self._log_path.open("rb") as log:
            _, _, page_bytes, _, *salts = HEADER.unpack(log.read(HEADER.size))
            frame_bytes = FRAME_BYTES + page_bytes
            log.seek(HEADER_BYTES + first * frame_bytes)
            commits = True
            for _ in range(first, num_frames):
                frame = log.read(frame_bytes)
                if len(frame) < frame_bytes:
                    raise ValueError("it ends before its last frame")
                page, commits, *found = FRAME.unpack_from(frame)
                if found != salts:
                    raise ValueError("a frame is not of this log")
                pages[page] = frame[FRAME_BYTES:]
        if not commits:
            raise ValueError("its last frame commits nothing")
        return pages


def _checkpoint(conn: Connection) -> int:
    """Move what is possible into the database; returns the frames of the log."""
    _, num_frames, _ = conn.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return max(0, int(num_frames))


def _number(conn: Connection, query: str) -> int:
    number: int = conn.execute(query).fetchone()[0]
    return number
