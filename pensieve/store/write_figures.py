"""How writing the history goes, in figures: the writer adds to them, and any thread may look.

`num_commits` and the times are plain values that one thread changes, so who looks sees them as they were a
moment ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

COMMITS_MAX = 1024  # whose times are kept


class WriteFigures:
    def __init__(self, journal: Path | None = None) -> None:
        self.num_commits = 0
        self.on_commit: Callable[[float], None] = lambda seconds: None  # in the writer's thread
        self.on_full: Callable[[], None] = lambda: None  # the disk is; in the writer's thread
        self._journal = journal
        self._seconds: deque[float] = deque(maxlen=COMMITS_MAX)

    def committed(self, seconds: float) -> None:
        """A transaction is on the disk, which took so long, most of it for the disk's sync."""
        self._seconds.append(seconds)
        self.num_commits += 1
        self.on_commit(seconds)

    @property
    def commit_seconds(self) -> tuple[float, ...]:
        """Of the latest transactions."""
        return tuple(self._seconds)

    @property
    def journal_bytes(self) -> int:
        """The length of the write-ahead log; 0 where it is another program's (PostgreSQL's)."""
        if self._journal is None:
            return 0
        try:
            return self._journal.stat().st_size
        except FileNotFoundError:
            return 0
