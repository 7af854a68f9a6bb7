"""Predict whether fetching KV of a conversation is faster than computing it, part by part.

The last part of the KV is fetched first, because it costs most to recompute. A part is worth its transfer if

    seconds to compute the part, given the tokens before it  >  bytes of the part / speed of the link

A transfer is worth beginning if its parts together save more time than the latency of the link. The seconds
to compute are the engine's prediction, times the ratio of measured to predicted time of recent prompts (the
pace, see admission.py).

The speed of a link is a moving average over the transfers from its address; the latest transfer counts a
quarter. If there was no transfer in the last KNOWN_SECONDS, the link counts as unknown, and LATENCY_SECONDS
and BYTES_PER_SECOND are assumed. With these values, a transfer may not seem worth it. The link is tried
anyway if computing takes at least TRIAL_LATENCIES times the assumed latency, because the first part shows how
fast the link is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LATENCY_SECONDS = 0.02
BYTES_PER_SECOND = 50e6
TRIAL_LATENCIES = 10.0
KNOWN_SECONDS = 600.0
LATEST_SHARE = 1 / 4
LINKS_MAX = 1024  # remembered addresses; the least recently used address is dropped first


@dataclass
class LinkSpeed:
    latency_seconds: float
    bytes_per_second: float
    learned_at: float


@dataclass(frozen=True)
class WantedKv:
    num_tokens: int
    token_bytes: int
    compute_seconds: Callable[[int, int], float]  # of tokens [start, stop), given the tokens before

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.token_bytes

    @property
    def seconds(self) -> float:
        """The time to compute all of this KV."""
        return self.compute_seconds(0, self.num_tokens)


class TransferTimes:
    """The speeds of links, by address. Has no clock: `now` is an argument."""

    def __init__(self) -> None:
        self._links: dict[str, LinkSpeed] = {}

    def link(self, address: str, now: float) -> LinkSpeed | None:
        """Return the speed of a link; None if it is unknown or was learned too long ago."""
        found = self._links.get(address)
        return found if found is not None and now - found.learned_at < KNOWN_SECONDS else None

    def bytes_per_second(self, address: str, now: float) -> float:
        found = self.link(address, now)
        return found.bytes_per_second if found is not None else BYTES_PER_SECOND

    def is_worth(self, address: str, wanted: WantedKv, part_bytes: int, now: float) -> bool:
        """Whether a transfer is worth beginning."""
        found = self.link(address, now)
        if found is None and wanted.seconds >= TRIAL_LATENCIES * LATENCY_SECONDS:
            return True
        latency = found.latency_seconds if found is not None else LATENCY_SECONDS
        rate, step = self.bytes_per_second(address, now), max(part_bytes // wanted.token_bytes, 1)
        saved, stop = 0.0, wanted.num_tokens
        while stop and (gain := gain_of(wanted, max(stop - step, 0), stop, rate)) > 0:
            saved, stop = saved + gain, max(stop - step, 0)
        return saved > latency

    def learn(
        self, address: str, latency_seconds: float, num_bytes: int, seconds: float, now: float
    ) -> None:
        """Learn from a transfer; `seconds` count from its first byte."""
        if not num_bytes:
            return
        rate, old = num_bytes / max(seconds, 1e-6), self.link(address, now)
        self._links.pop(address, None)
        if old is not None:
            rate = old.bytes_per_second + (rate - old.bytes_per_second) * LATEST_SHARE
            latency_seconds = (
                old.latency_seconds + (latency_seconds - old.latency_seconds) * LATEST_SHARE
            )
        self._links[address] = LinkSpeed(latency_seconds, rate, now)
        if len(self._links) > LINKS_MAX:
            del self._links[next(iter(self._links))]


def gain_of(wanted: WantedKv, start: int, stop: int, bytes_per_second: float) -> float:
    """Return the seconds saved by transferring the KV of these tokens instead of computing it."""
    return (
        wanted.compute_seconds(start, stop) - (stop - start) * wanted.token_bytes / bytes_per_second
    )
