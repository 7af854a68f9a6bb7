"""Reload tokens and certificates when their files change.

The token file is checked every second, and TLS files at every handshake. A changed file may be unusable, for
example half written or writable by others. Then the log names the problem, and the old values stay in force.
After an error, the token file is read again every second. Otherwise a temporary error (no free file
descriptor) could keep a removed token valid. If the watcher itself fails, the daemon stops.

The token file also has the tenants' limits. When they change, saved amounts and debts stay, and running turns
continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from pensieve.errors import ConfigError, whole_line
from pensieve.guard.callers import Token, read_tokens

log = logging.getLogger("pensieve")
POLL_SECONDS = 1.0
T = TypeVar("T")
Stamp = tuple[tuple[int, int, int], ...]


class Watched:
    """Files to watch for changes."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._stamp: Stamp | None = ()

    def has_changed(self) -> bool:
        """Return whether a file has changed since the last call; True at the first call."""
        before, self._stamp = self._stamp, self._current_stamp()
        return self._stamp != before

    def _current_stamp(self) -> Stamp | None:
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return None
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)


async def watch_tokens(
    path: Path,
    before: Sequence[Token],
    use: Callable[[Sequence[Token]], None],
    on_reload: Callable[[int, str], None] = lambda num_tokens, problem: None,
) -> None:
    """Call `use` with the new tokens whenever the file changes. Never returns.

    `on_reload` gets the number of tokens in force, and the problem with the changed file, if any.
    """
    file = Watched(path)
    problem = ""
    while True:
        has_changed = file.has_changed()
        if has_changed or problem:
            try:
                tokens = read_tokens(path)
                use(tokens)
            except Exception as error:
                reported, problem = problem, whole_line(error)
                if has_changed or problem != reported:
                    log.error("the tokens stay as they were: %s", problem)
                    on_reload(len(before), problem)
            else:
                if tokens != before or problem:
                    log.info("%d tokens are in force from now on", len(tokens))
                    on_reload(len(tokens), "")
                before, problem = tokens, ""
        await asyncio.sleep(POLL_SECONDS)


class Reloaded(Generic[T]):
    """A value that is read from files, and reloaded when they change."""

    def __init__(
        self,
        name: str,
        files: Sequence[Path | None],
        read: Callable[[], T],
        on_reload: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """`read` may raise ConfigError; `on_reload` gets the problem with changed files, if any."""
        self._name, self._read, self._on_reload = name, read, on_reload
        self._files = Watched(*(path for path in files if path is not None))
        self._files.has_changed()
        self.value = read()

    def if_changed(self) -> T | None:
        """Return the new value; None if nothing changed, or the new files cannot be used."""
        if not self._files.has_changed():
            return None
        try:
            self.value = self._read()
        except ConfigError as error:
            log.error("%s stays as it was: %s", self._name, error)
            self._on_reload(whole_line(error))
            return None
        log.info("%s was read again", self._name)
        self._on_reload("")
        return self.value
