"""File descriptors that are kept for later, in a process whose connections may use up all others.

Whoever needs some releases them and opens its own at once.  Another thread may be quicker, so an open may
fail all the same, and is tried again later.
"""

from __future__ import annotations

import os


class SpareDescriptors:
    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[int] = []

    def take(self) -> None:
        """Hold as many as there ought to be, or as can be had."""
        while len(self._held) < self._count:
            try:
                self._held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                return

    def release(self) -> None:
        while self._held:
            os.close(self._held.pop())
