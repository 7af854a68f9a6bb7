"""Limit the calls that watch something for as long as their client likes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pensieve.errors import QueueFull
from pensieve.service.counts import Counts


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
