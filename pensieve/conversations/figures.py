"""How the service process is, in figures: how late its loop is, what waits for the store, what commits take.

A `LoopLag` asks the loop to be called each LOOK_SECONDS; by what it is called later than that, every stream
stood still.  All else is looked up when somebody asks.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LOOK_SECONDS = 0.1
WINDOW_SECONDS = 60.0
ESTABLISHED = "01"  # in /proc/net/tcp


@dataclass(frozen=True)
class Quantiles:
    """In seconds; of none, zeros."""

    p50: float = 0.0
    p99: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        found = sorted(values)
        if not found:
            return cls()
        return cls(_at(found, 0.5), _at(found, 0.99), found[-1])


class Waiting(NamedTuple):
    """Jobs of a pool of threads that have not ended."""

    num_jobs: int
    oldest_seconds: float  # since the first of them was put in


class LoopLag:
    """Belongs to the loop."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque()  # when, and how late

    async def measure(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(LOOK_SECONDS)
            self.add(loop.time(), max(loop.time() - before - LOOK_SECONDS, 0.0))

    def add(self, now: float, late: float) -> None:
        self._late.append((now, late))
        while self._late[0][0] < now - WINDOW_SECONDS:
            self._late.popleft()

    def quantiles(self) -> Quantiles:
        return Quantiles.of([late for _, late in self._late])


def num_connections(port: int) -> int | None:
    """Those that this machine's network has to a port of its own; takes longer the more there are of any."""
    found = None
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{name}", encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except OSError:  # not Linux
            continue
        here = f":{port:04X}"
        found = (found or 0) + sum(row[1].endswith(here) and row[3] == ESTABLISHED for row in rows)
    return found


def _at(found: Sequence[float], share: float) -> float:
    return found[max(math.ceil(share * len(found)) - 1, 0)]
