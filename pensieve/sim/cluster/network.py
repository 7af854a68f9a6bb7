"""The links over which KV is handed over: one of each direction for every host.

A hand-over has the whole link of its source and of its target; another one of the same source or target waits
until it is through.  That is as much per second as if they shared the link, and the first are through sooner.
A replica is a host.  `Links.ends` says when a hand-over would be through, `reserve` has it happen.
"""

from __future__ import annotations

from collections import defaultdict

BIN_SECONDS = 1.0  # in which bytes are counted, for a peak


class Links:
    def __init__(self, bytes_per_second: float) -> None:
        assert bytes_per_second > 0, "a link that brings nothing is no link"
        self._rate = bytes_per_second
        self._out_free: dict[str, float] = {}  # by source: from when on its link is free
        self._in_free: dict[str, float] = {}  # by target
        self._bins: dict[tuple[str, str], dict[int, float]] = defaultdict(
            lambda: defaultdict(float)
        )  # by host and direction: bytes of each second
        self.num_bytes = 0.0
        self.count = 0

    def _begins(self, source: str, target: str, now: float) -> float:
        return max(now, self._out_free.get(source, 0.0), self._in_free.get(target, 0.0))

    def ends(self, source: str, target: str, num_bytes: float, now: float) -> float:
        """When it would be through."""
        return self._begins(source, target, now) + num_bytes / self._rate

    def reserve(self, source: str, target: str, num_bytes: float, now: float) -> float:
        """It happens; returns when it is through."""
        begins = self._begins(source, target, now)
        ends = begins + num_bytes / self._rate
        self._out_free[source] = self._in_free[target] = ends
        self.num_bytes += num_bytes
        self.count += 1
        for host in ((source, "out"), (target, "in")):
            self._spread(self._bins[host], begins, ends)
        return ends

    def _spread(self, bins: dict[int, float], begins: float, ends: float) -> None:
        at = begins
        while at < ends:
            index = int(at / BIN_SECONDS)
            until = min((index + 1) * BIN_SECONDS, ends)
            bins[index] += (until - at) * self._rate
            at = until if until > at else ends

    def peak_bits_per_second(self) -> float:
        """Of the busiest second of any host, in one direction."""
        most = max((max(bins.values()) for bins in self._bins.values()), default=0.0)
        return 8 * most / BIN_SECONDS
