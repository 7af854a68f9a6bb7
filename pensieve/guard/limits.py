"""The limits of tenants, and their usage.

    turns_max             simultaneous turns and warm-ups (KV computed in advance), running or waiting
    tokens_per_second     mean rate of new and sampled tokens, and of tokens that warm-ups compute; any other
                          call that changes the history is charged one token
    requests_per_second   mean rate of calls, except health checks and the operator's methods
    calls_max             simultaneous calls; a stream counts until its client has received the end
    storage_bytes         size of the conversations; above it, new data is refused, but the replies of
                          running turns are still stored
    prefixes_max          declared prefixes
    unread_bytes          bytes of answers that clients have not received yet
    weight                share of the engine if more turns wait than can run; see core/fair_queue.py

A turn is charged when it ends: for its new tokens and its reply, but not for cached tokens. A tenant can save
up what its rates allow in BURST_SECONDS. A tenant that has spent more than it had saved is *in debt*. Such a
tenant may only read and delete. Its calls are delayed to at most CALLS_PER_SECOND, its errors to at most
REFUSALS_PER_SECOND. Errors about exceeded limits are delayed for every tenant. No call waits longer than
PAUSE_SECONDS_MAX.

Use allowances only on the event loop. Changed limits take effect at once. Saved amounts and debts stay, and
running turns and calls continue.
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
INTEGER_LIMITS = frozenset(
    {"turns_max", "calls_max", "storage_bytes", "unread_bytes", "prefixes_max"}
)


class Bucket:
    """A token bucket: it fills at a rate, up to a maximum, and may be in debt."""

    def __init__(self, rate: float | None, now: float, minimum: float = 0.0) -> None:
        """The maximum is what the rate adds in BURST_SECONDS, but at least `minimum`."""
        self.rate = rate
        self.saved = 0.0  # negative: debt
        self._minimum = minimum
        self._filled_at = now
        self.saved = self.maximum

    def change(self, rate: float | None, now: float) -> None:
        """Set another rate. The saved amount or debt stays, limited to the new maximum."""
        if rate == self.rate:
            return
        self._refill(now)
        had_rate, self.rate = self.rate is not None, rate
        self.saved = min(self.saved, self.maximum) if had_rate else self.maximum

    def level(self, now: float) -> float | None:
        """Return the saved amount; None without a limit."""
        if self.rate is None:
            return None
        self._refill(now)
        return self.saved

    def seconds_until(self, amount: float, now: float) -> float:
        """Return the time until this amount is saved."""
        if self.rate is None:
            return 0.0
        self._refill(now)
        return max(amount - self.saved, 0.0) / self.rate

    def spend(self, amount: float, now: float) -> None:
        if self.rate is not None:
            self._refill(now)
            self.saved -= amount

    def pause(self, now: float) -> float:
        """Spend 1, and return how many seconds to wait for it, at most PAUSE_SECONDS_MAX."""
        wait = min(self.seconds_until(1.0, now), PAUSE_SECONDS_MAX)
        if wait < PAUSE_SECONDS_MAX:  # the longest pause spends nothing, so the debt stays bounded
            self.spend(1.0, now)
        return wait

    @property
    def maximum(self) -> float:
        return 0.0 if self.rate is None else max(self.rate * BURST_SECONDS, self._minimum)

    def _refill(self, now: float) -> None:
        earned = (self.rate or 0.0) * (now - self._filled_at)
        self.saved = min(self.saved + earned, self.maximum)
        self._filled_at = now


class Allowance:
    """The limits and usage of one tenant."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.num_calls = 0
        self.num_unread_bytes = 0
        self.tokens = Bucket(limits.tokens_per_second, now)
        self.requests = Bucket(limits.requests_per_second, now, minimum=1.0)
        self._refusals = Bucket(REFUSALS_PER_SECOND, now)
        self._calls = Bucket(CALLS_PER_SECOND, now)  # used while in debt

    def change(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.tokens.change(limits.tokens_per_second, now)
        self.requests.change(limits.requests_per_second, now)

    def exceeded(self, num_turns: int, now: float) -> QueueFull | None:
        """Return the error if one more turn would exceed a limit."""
        limits = self.limits
        if limits.turns_max is not None and num_turns >= limits.turns_max:
            return _limit_error(
                "turns_max", f"your tenant may run {limits.turns_max} turns at once"
            )
        return self.in_debt(now)

    def in_debt(self, now: float) -> QueueFull | None:
        if wait := self.tokens.seconds_until(0.0, now):
            rate = self.limits.tokens_per_second
            return _limit_error(
                "tokens_per_second", f"your tenant may use {rate:g} tokens per second", wait
            )
        return None

    def spend(self, num_tokens: int, now: float) -> None:
        self.tokens.spend(num_tokens, now)

    def has_spare(self, now: float) -> bool:
        """Return whether background turns may run: at least half of the maximum must be saved."""
        return not self.tokens.seconds_until(self.tokens.maximum / 2, now)

    def count_request(self, now: float) -> QueueFull | None:
        """Count a request, or return the error if it exceeds the limit."""
        if wait := self.requests.seconds_until(1.0, now):
            rate = self.limits.requests_per_second
            text = f"your tenant may send {rate:g} requests per second"
            return _limit_error("requests_per_second", text, wait)
        self.requests.spend(1.0, now)
        return None

    def seconds_to_refuse(self, error: PensieveError, now: float) -> float:
        """Return how long to wait before this error is sent."""
        is_for_limit = isinstance(error, QueueFull) and error.limit
        if not is_for_limit and self.in_debt(now) is None:
            return 0.0
        return self._refusals.pause(now)

    def seconds_to_begin(self, now: float) -> float:
        """Return how long to wait before the request of an admitted call is received."""
        return 0.0 if self.in_debt(now) is None else self._calls.pause(now)

    def calls_exceeded(self, allowed: int = 1) -> QueueFull | None:
        """Return the error if there are more than `allowed` * calls_max calls, this call included."""
        calls_max = self.limits.calls_max
        if calls_max is None or self.num_calls <= allowed * calls_max:
            return None
        return _limit_error("calls_max", f"your tenant may have {calls_max} calls at once")

    def unread_exceeded(self, num_bytes: int) -> QueueFull | None:
        """Return the error if this many more bytes would exceed unread_bytes."""
        if self.num_unread_bytes + num_bytes <= self.limits.unread_bytes:
            return None
        text = f"your tenant's clients have {self.num_unread_bytes:,} unread bytes; read them first"
        return _limit_error("unread_bytes", text)


class Allowances:
    """The allowances of all tenants; by default a tenant has no limits."""

    def __init__(self, limits: Mapping[str, Limits], now: float) -> None:
        self._by_tenant = {tenant: Allowance(each, now) for tenant, each in limits.items()}

    def __len__(self) -> int:
        return len(self._by_tenant)

    @property
    def num_calls(self) -> int:
        return sum(each.num_calls for each in self._by_tenant.values())

    @property
    def tenants(self) -> list[str]:
        return sorted(self._by_tenant)

    def known(self, tenant: str) -> Allowance | None:
        """Return the allowance of a tenant that has limits or has called."""
        return self._by_tenant.get(tenant)

    def of(self, tenant: str, now: float) -> Allowance:
        found = self._by_tenant.get(tenant)
        if found is None:
            found = self._by_tenant[tenant] = Allowance(NO_LIMITS, now)
        return found

    def change(self, limits: Mapping[str, Limits], now: float) -> None:
        """Replace the limits."""
        for tenant in {*limits, *self._by_tenant}:
            self.of(tenant, now).change(limits.get(tenant, NO_LIMITS), now)
        for tenant, allowance in [*self._by_tenant.items()]:
            if tenant not in limits and not allowance.num_calls:
                del self._by_tenant[tenant]

    @property
    def storage(self) -> dict[str, int]:
        return {
            tenant: each.limits.storage_bytes
            for tenant, each in self._by_tenant.items()
            if each.limits.storage_bytes is not None
        }


def _limit_error(limit: str, text: str, wait: float | None = None) -> QueueFull:
    error = QueueFull(text)
    error.limit, error.retry_after_seconds = limit, wait
    return error


class Counts(Counter[Key]):
    """Counters by key; a counter at zero is removed, so that memory is bounded."""

    def __setitem__(self, key: Key, number: int) -> None:
        """Called by `+=` and `-=` only."""
        if number:
            super().__setitem__(key, number)
        else:
            self.pop(key, None)


class Watchers:
    """Counts the watching calls of one kind, and limits them per tenant and in total.

    The total does not limit the first watcher of a tenant, so no tenant can lock out another.
    """

    def __init__(self, of_tenant_max: int, of_all_max: int) -> None:
        self._of_tenant_max, self._of_all_max = of_tenant_max, of_all_max
        self._counts = Counts[str]()  # by tenant

    @contextmanager
    def enter(self, tenant: str) -> Iterator[None]:
        """Count a watcher while the context lasts; raises QueueFull if there are too many."""
        num_watchers = self._counts[tenant]
        if num_watchers >= self._of_tenant_max:
            raise QueueFull(
                f"{num_watchers} clients of this tenant are watching already; end one first"
            )
        if num_watchers and self._counts.total() >= self._of_all_max:
            raise QueueFull("too many clients of this daemon are watching; try again later")
        self._counts[tenant] += 1
        try:
            yield
        finally:
            self._counts[tenant] -= 1


async def write_within(seconds: float, writing: Awaitable[None]) -> None:
    """Wait for a write; raises DeadlineExceeded if the client reads nothing for `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await writing
    except TimeoutError:
        raise DeadlineExceeded("the client read nothing of the answer for too long") from None
