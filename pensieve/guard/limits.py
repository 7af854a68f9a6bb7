"""What a tenant may take of the daemon, and what it has taken.

    turns_max             turns at once: running, waiting, about to begin, and warms
    tokens_per_second     on average; new and sampled tokens, what a warm computes, and of each other call
                          that changes the history at least one
    requests_per_second   on average, of all methods but the operator's and health
    calls_max             calls at once; a stream is one until its client has taken its end
    storage_bytes         of its conversations; more is refused, what runs is stored all the same
    prefixes_max          that it has declared
    unread_bytes          of answers that are on their way, or that the client does not take
    weight                of its turns where more wait than can run; see core/fair_queue.py

Tokens are paid for when a turn has ended: those it brought and those of its reply, not those found in the
cache.  A tenant may save up BURST_SECONDS of its rates.  One in debt is refused until it is out of it, but
may read and delete.  A tenant beyond its limits is slowed down: refusals for limits, and all errors of one in
debt, come at REFUSALS_PER_SECOND, and the calls of one in debt begin at CALLS_PER_SECOND; none waits longer
than PAUSE_SECONDS_MAX.

Allowances belong to the loop.  Other limits take force at once: what was saved or owed stays, and turns and
calls that are there go on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TypeVar

from pensieve.errors import DeadlineExceeded, PensieveError, QueueFull

Key = TypeVar("Key")
BURST_SECONDS = 10.0
UNREAD_BYTES_MAX = 64 << 20
PREFIXES_MAX = 256
REFUSALS_PER_SECOND = 10.0
CALLS_PER_SECOND = 50.0
PAUSE_SECONDS_MAX = 1.0


@dataclass(frozen=True)
class Limits:
    turns_max: int | None = None
    tokens_per_second: float | None = None
    requests_per_second: float | None = None
    calls_max: int | None = None
    storage_bytes: int | None = None
    unread_bytes: int = UNREAD_BYTES_MAX
    weight: float = 1.0
    prefixes_max: int = PREFIXES_MAX


NO_LIMITS = Limits()
LIMIT_NAMES = tuple(each.name for each in fields(Limits))
WHOLE = frozenset({"turns_max", "calls_max", "storage_bytes", "unread_bytes", "prefixes_max"})


class Bucket:
    """A rate, and what was saved up of it."""

    def __init__(self, rate: float | None, now: float, least: float = 0.0) -> None:
        """It holds BURST_SECONDS of the rate, but at least `least`."""
        self.rate = rate
        self.saved = 0.0  # below 0: owed
        self._least = least
        self._counted_at = now
        self.saved = self.most

    def change(self, rate: float | None, now: float) -> None:
        """Another rate; what was saved or owed stays, as far as there is room."""
        if rate == self.rate:
            return
        self._count(now)
        had_rate, self.rate = self.rate is not None, rate
        self.saved = min(self.saved, self.most) if had_rate else self.most

    def level(self, now: float) -> float | None:
        """What is saved up now; None without a limit."""
        if self.rate is None:
            return None
        self._count(now)
        return self.saved

    def seconds_until(self, amount: float, now: float) -> float:
        """From now until so much is saved up; 0 if it is."""
        if self.rate is None:
            return 0.0
        self._count(now)
        return max(amount - self.saved, 0.0) / self.rate

    def spend(self, amount: float, now: float) -> None:
        if self.rate is not None:
            self._count(now)
            self.saved -= amount

    def pause(self, now: float) -> float:
        """Spend 1, and say how long to wait until it was saved up; at most PAUSE_SECONDS_MAX."""
        wait = min(self.seconds_until(1.0, now), PAUSE_SECONDS_MAX)
        if wait < PAUSE_SECONDS_MAX:  # or the debt would grow for ever
            self.spend(1.0, now)
        return wait

    @property
    def most(self) -> float:
        return 0.0 if self.rate is None else max(self.rate * BURST_SECONDS, self._least)

    def _count(self, now: float) -> None:
        earned = (self.rate or 0.0) * (now - self._counted_at)
        self.saved = min(self.saved + earned, self.most)
        self._counted_at = now


class Allowance:
    """The present state of one tenant's limits."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.num_calls = 0
        self.num_unread_bytes = 0
        self.tokens = Bucket(limits.tokens_per_second, now)
        self.requests = Bucket(limits.requests_per_second, now, least=1.0)
        self._refusals = Bucket(REFUSALS_PER_SECOND, now)
        self._calls = Bucket(CALLS_PER_SECOND, now)  # in debt

    def change(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.tokens.change(limits.tokens_per_second, now)
        self.requests.change(limits.requests_per_second, now)

    def exceeded(self, num_turns: int, now: float) -> QueueFull | None:
        """Which limit another turn would exceed beside this many; None if it would not."""
        limits = self.limits
        if limits.turns_max is not None and num_turns >= limits.turns_max:
            return _full("turns_max", f"this token may run {limits.turns_max} turns at once")
        return self.in_debt(now)

    def in_debt(self, now: float) -> QueueFull | None:
        if wait := self.tokens.seconds_until(0.0, now):
            rate = self.limits.tokens_per_second
            return _full(
                "tokens_per_second", f"this token may use {rate:g} tokens per second", wait
            )
        return None

    def spend(self, num_tokens: int, now: float) -> None:
        self.tokens.spend(num_tokens, now)

    def has_spare(self, now: float) -> bool:
        """Half of what can be saved up is: then what nobody waits for may have some of it."""
        return not self.tokens.seconds_until(self.tokens.most / 2, now)

    def request(self, now: float) -> QueueFull | None:
        """Count a request; which limit it exceeds, if it does, and then it counts for nothing."""
        if wait := self.requests.seconds_until(1.0, now):
            rate = self.limits.requests_per_second
            text = f"this token may send {rate:g} requests per second"
            return _full("requests_per_second", text, wait)
        self.requests.spend(1.0, now)
        return None

    def seconds_to_refuse(self, error: PensieveError, now: float) -> float:
        """How long this error waits until its caller is told."""
        is_for_limit = isinstance(error, QueueFull) and error.limit
        if not is_for_limit and self.in_debt(now) is None:
            return 0.0
        return self._refusals.pause(now)

    def seconds_to_begin(self, now: float) -> float:
        """How long a call that is let in waits until its request is received."""
        return 0.0 if self.in_debt(now) is None else self._calls.pause(now)

    def calls_exceeded(self, allowed: int = 1) -> QueueFull | None:
        """Whether there are more calls than `allowed` times those that may be, the present one included."""
        calls_max = self.limits.calls_max
        if calls_max is None or self.num_calls <= allowed * calls_max:
            return None
        return _full("calls_max", f"this token may have {calls_max} calls at once")

    def unread_exceeded(self, num_bytes: int) -> QueueFull | None:
        """Whether so many bytes more would be too many that nobody has read."""
        if self.num_unread_bytes + num_bytes <= self.limits.unread_bytes:
            return None
        text = f"this token's clients have {self.num_unread_bytes:,} bytes to read first"
        return _full("unread_bytes", text)


class Allowances:
    """Those of all tenants.  A tenant that nothing is said of has no limits."""

    def __init__(self, limits: Mapping[str, Limits], now: float) -> None:
        self._of_tenant = {tenant: Allowance(each, now) for tenant, each in limits.items()}

    def __len__(self) -> int:
        return len(self._of_tenant)

    @property
    def num_calls(self) -> int:
        return sum(each.num_calls for each in self._of_tenant.values())

    @property
    def tenants(self) -> list[str]:
        return sorted(self._of_tenant)

    def known(self, tenant: str) -> Allowance | None:
        """Of a tenant that has called, or that something is said of."""
        return self._of_tenant.get(tenant)

    def of(self, tenant: str, now: float) -> Allowance:
        found = self._of_tenant.get(tenant)
        if found is None:
            found = self._of_tenant[tenant] = Allowance(NO_LIMITS, now)
        return found

    def change(self, limits: Mapping[str, Limits], now: float) -> None:
        """Other limits are in force from now on."""
        for tenant in {*limits, *self._of_tenant}:
            self.of(tenant, now).change(limits.get(tenant, NO_LIMITS), now)
        for tenant, allowance in [*self._of_tenant.items()]:
            if tenant not in limits and not allowance.num_calls:
                del self._of_tenant[tenant]

    @property
    def storage(self) -> dict[str, int]:
        return {
            tenant: each.limits.storage_bytes
            for tenant, each in self._of_tenant.items()
            if each.limits.storage_bytes is not None
        }


def _full(limit: str, text: str, wait: float | None = None) -> QueueFull:
    error = QueueFull(text)
    error.limit, error.retry_after_seconds = limit, wait
    return error


class Counts(Counter[Key]):
    """Numbers by key; a key at zero is forgotten, so that the numbers never outgrow what they count."""

    def __setitem__(self, key: Key, number: int) -> None:
        """Called by `+=` and `-=`, which alone change a number."""
        if number:
            super().__setitem__(key, number)
        else:
            self.pop(key, None)


class Watchers:
    """The calls that watch one kind of thing.

    Each tenant has a limit, and all tenants together have one. The first watcher of a tenant is always let
    in, so no tenant can lock out another.
    """

    def __init__(self, of_tenant_max: int, of_all_max: int) -> None:
        self._of_tenant_max, self._of_all_max = of_tenant_max, of_all_max
        self._counts = Counts[str]()  # by tenant

    @contextmanager
    def enter(self, tenant: str) -> Iterator[None]:
        """Count a watcher while it watches; QueueFull if there are too many."""
        num_watchers = self._counts[tenant]
        if num_watchers >= self._of_tenant_max:
            raise QueueFull(f"{num_watchers} clients of this tenant watch already; end one first")
        if num_watchers and self._counts.total() >= self._of_all_max:
            raise QueueFull("too many clients of this daemon watch already; try again later")
        self._counts[tenant] += 1
        try:
            yield
        finally:
            self._counts[tenant] -= 1


async def delivered(seconds: float, writing: Awaitable[None]) -> None:
    """Wait until something is written; DeadlineExceeded if its reader takes nothing for so long."""
    try:
        async with asyncio.timeout(seconds):
            await writing
    except TimeoutError:
        raise DeadlineExceeded("nothing was taken of what was sent") from None
