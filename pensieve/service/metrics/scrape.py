"""The text of all metrics at this moment, for whoever asks: Prometheus, or `pensieve admin metrics`.

The engine is asked for its figures and has ENGINE_SECONDS; if it does not answer, its metrics are missing
this time.  What takes longer the more there is (counting the history, listing the jobs) is done by the
threads that own it, at most once in COUNT_SECONDS, and is as it was the last time until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from pensieve.errors import PensieveError
from pensieve.service.daemon import Daemon
from pensieve.service.figures import Quantiles
from pensieve.service.jobs.values import Jobs
from pensieve.service.metrics import collect
from pensieve.service.metrics.families import FAMILIES
from pensieve.service.metrics.text import exposition

ENGINE_SECONDS = 2.0
COUNT_SECONDS = 15.0
PREFIX = "pensieve_"


class Scrape:
    """Belongs to the loop."""

    def __init__(
        self,
        daemon: Daemon,
        jobs: Jobs | None,
        loop_lag: Callable[[], Quantiles],
        audit_lines_lost: Callable[[], int],
    ) -> None:
        self._daemon, self._jobs = daemon, jobs
        self._loop_lag, self._audit_lines_lost = loop_lag, audit_lines_lost
        self._num_stored = 0
        self._of_jobs: collect.Found = {}
        self._count_due = 0.0  # by the loop's clock

    async def text(self) -> str:
        daemon, now = self._daemon, asyncio.get_running_loop().time()
        if now >= self._count_due:
            self._count_due = now + COUNT_SECONDS
            await self._count()
        figures = await self._engine_figures()
        running = 0 if daemon.loading else daemon.conversations.turns.num_live
        states = {"stored": float(self._num_stored), "running": float(running)}
        of_engine: collect.Found = {}
        ready = daemon.engine.ready
        if figures and ready is not None:
            of_engine = collect.of_engine(figures, ready)
            states["cached"] = figures["conversations_cached"]
        samples = {
            **collect.of_turns(daemon.meter),
            **collect.of_conversations(daemon),
            **of_engine,
            **collect.of_states(**states),
            **collect.of_service(daemon, self._loop_lag(), self._audit_lines_lost(), now),
            **self._of_jobs,
        }
        common = {"model_name": daemon.engine.model_name, "engine": "0"}
        if daemon.config.replica:
            common["replica"] = daemon.config.replica
        return "\n".join([*exposition(FAMILIES, samples, PREFIX, common), ""])

    async def _engine_figures(self) -> dict[str, float]:
        daemon = self._daemon
        if daemon.loading or not daemon.engine.serving:
            return {}
        with suppress(TimeoutError, PensieveError):
            async with asyncio.timeout(ENGINE_SECONDS):
                return (await daemon.stats()).figures
        return {}

    async def _count(self) -> None:
        with suppress(TimeoutError, PensieveError):
            async with asyncio.timeout(ENGINE_SECONDS):
                self._num_stored = await self._daemon.reads.num_conversations()
                if self._jobs is not None:
                    self._of_jobs = collect.of_jobs(await self._jobs.list(None))
