"""The store of jobs in a thread of its own, so that no job keeps a conversation's commit waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from pensieve.service.fair_pool import FairPool
from pensieve.store.job_records import Job, JobKey, JobOutcome, JobState
from pensieve.store.job_store import JobStore

T = TypeVar("T")


class StoreThread:
    def __init__(self, jobs: JobStore) -> None:
        self.jobs = jobs  # whose methods are for `call`
        self._pool = FairPool(asyncio.get_running_loop(), 1, "jobs")

    async def call(
        self, tenant: str, function: Callable[..., T], /, *arguments: Any, **named: Any
    ) -> T:
        return await self._pool.run(tenant, lambda: function(*arguments, **named))

    async def set_state(
        self, key: JobKey, state: JobState, outcome: JobOutcome | None = None, problem: str = ""
    ) -> Job:
        return await self.call(key.tenant, self.jobs.set_state, key, state, outcome, problem)

    async def close(self) -> None:
        """Wait for what was called; no more is taken."""
        await asyncio.to_thread(self._pool.close)
        self.jobs.close()
