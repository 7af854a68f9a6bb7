"""What goes on with a job, and how it looks from outside; of the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pensieve.engine.messages import Message
from pensieve.service.jobs.job_run import JobRun
from pensieve.service.jobs.values import JobView
from pensieve.store.job_records import Job, JobKey

RATE_SECONDS = 30.0  # over which tokens per second are counted


@dataclass
class Activity:
    """A job is being checked, or run.  Whoever finds `stopping` set leaves at once."""

    key: JobKey
    began_at: float
    stopping: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    run: JobRun | None = None
    problem: str = ""
    num_done: int = 0  # lines that have their answers since it began
    num_tokens: int = 0  # that these took
    _before: deque[tuple[float, int]] = field(default_factory=deque)  # when, and `num_tokens` then

    def stop(self, put: Callable[[Message], None]) -> None:
        self.stopping = True
        if self.run is not None:
            self.run.stop(put)

    def done(self, num_lines: int, num_tokens: int, now: float) -> None:
        self.num_done += num_lines
        self.num_tokens += num_tokens
        self._before.append((now, self.num_tokens))
        while self._before[0][0] < now - RATE_SECONDS:
            self._before.popleft()

    def tokens_per_second(self, now: float) -> float:
        since = max(self.began_at, now - RATE_SECONDS)
        counted = [tokens for at, tokens in self._before if at >= since]
        if not counted or now <= since:
            return 0.0
        before = 0 if self._before[0][0] - self.began_at < RATE_SECONDS else counted[0]
        return (counted[-1] - before) / (now - since)

    def seconds_left(self, num_pending: int, now: float) -> float | None:
        if not self.num_done:
            return None
        return num_pending * (now - self.began_at) / self.num_done


def view_of(job: Job, activity: Activity | None, problem: str, now: float) -> JobView:
    run = activity.run if activity is not None else None
    return JobView(
        job.key.job_id,
        job.key.tenant,
        job.number,
        job.name,
        job.sha256,
        int(job.options.get("num_bytes", 0)),
        job.options.get("endpoint", ""),
        bool(job.options.get("check_only")),
        job.state,
        job.outcome,
        job.problem or problem or (activity.problem if activity is not None else ""),
        job.num_lines,
        job.num_answered,
        job.num_refused,
        run.num_running if run is not None else 0,
        *job.usage,
        activity.tokens_per_second(now) if activity is not None else 0.0,
        activity.seconds_left(job.num_pending, now) if activity is not None else None,
        job.created_at,
        job.started_at,
        job.ended_at,
        job.options.get("details", {}),
    )
