"""Check and run batch jobs. batch_jobs.py starts and stops each check or run as an `Activity`.

**Checking** validates each line before anything is computed.

**Running** gives the pending lines to the engine (job_run.py). If the engine dies, the next run begins when
the engine is ready again. Lines that the engine had begun are then retried one at a time. A line is refused
if the engine died DEATHS_MAX times while nothing but this line was in the engine. So a request that kills the
engine causes only a few restarts, and no answer is lost if the engine is killed for another reason.

**A tenant in debt** has used more tokens than its limit allows (guard/limits.py). Then no more lines are
submitted. When no line of the job is left in the engine, the activity ends, and another tenant's job may run.
The job continues when the tenant again has half of the tokens that it can save up.

**A full disk.** No more lines are submitted until the answers are written. The job's `problem` explains this.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

from pensieve.api.openai.request import Served
from pensieve.conversations.constraints import ConstraintChecker
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.history import Texts
from pensieve.conversations.threads import FairPool
from pensieve.conversations.turns import BACKGROUND_ATTEMPT_ID_MIN
from pensieve.core.group_feed import FeedConfig
from pensieve.errors import Unavailable, one_line
from pensieve.jobs.batch_line import LineError
from pensieve.jobs.job_records import (
    JobKey,
    JobLine,
    JobOutcome,
    JobState,
    NewAnswer,
    NewRefusal,
    StoredJob,
)
from pensieve.jobs.job_run import JobRun, ReadyLine
from pensieve.jobs.job_store import JobStore
from pensieve.jobs.prepared import LineReader, PreparedLine, ResultWriter, engine_error, refusal
from pensieve.text import CallStyle

WINDOW_TOKENS = 16 << 20  # prompt tokens in memory at a time
LINES_PER_TASK = 32  # lines read in the text pool before other work may run
DEATHS_MAX = 2  # deaths of the engine while only this line was in it
RETRY_SECONDS = 2.0
POLL_SECONDS = 1.0
KEEP_SECONDS = 30 * 86_400.0
T = TypeVar("T")
RATE_SECONDS = 30.0  # window of `tokens_per_second`


@dataclass(frozen=True)
class JobsConfig:
    keep_seconds: float = KEEP_SECONDS  # how long an ended job is kept; 0: forever
    call_style: CallStyle | None = None  # how the model writes tool calls; None: they stay text


class StoreThread:
    """Runs the store of jobs in a separate thread, so that jobs do not delay commits of conversations."""

    def __init__(self, jobs: JobStore) -> None:
        self.jobs = jobs  # its methods must run through `call`
        self._pool = FairPool(asyncio.get_running_loop(), 1, "jobs")

    async def call(
        self, tenant: str, function: Callable[..., T], /, *arguments: Any, **named: Any
    ) -> T:
        return await self._pool.run(tenant, lambda: function(*arguments, **named))

    async def set_state(
        self, key: JobKey, state: JobState, outcome: JobOutcome | None = None, problem: str = ""
    ) -> StoredJob:
        return await self.call(key.tenant, self.jobs.set_state, key, state, outcome, problem)

    async def close(self) -> None:
        """Wait for running calls, then close the store."""
        await asyncio.to_thread(self._pool.close)
        self.jobs.close()


@dataclass
class Activity:
    """The check or the run of a job. Its code must return soon after `stopping` is set."""

    key: JobKey
    began_at: float
    stopping: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    run: JobRun | None = None
    problem: str = ""
    num_done: int = 0  # lines with a result since the activity began
    num_tokens: int = 0  # tokens of these lines
    # (time, `num_tokens` at that time)
    _history: deque[tuple[float, int]] = field(default_factory=deque)

    def stop(self) -> None:
        self.stopping = True
        if self.run is not None:
            self.run.stop()

    def record_done(self, num_lines: int, num_tokens: int, now: float) -> None:
        self.num_done += num_lines
        self.num_tokens += num_tokens
        self._history.append((now, self.num_tokens))
        while self._history[0][0] < now - RATE_SECONDS:
            self._history.popleft()

    def tokens_per_second(self, now: float) -> float:
        since = max(self.began_at, now - RATE_SECONDS)
        counted = [tokens for at, tokens in self._history if at >= since]
        if not counted or now <= since:
            return 0.0
        before = 0 if self._history[0][0] - self.began_at < RATE_SECONDS else counted[0]
        return (counted[-1] - before) / (now - since)

    def seconds_left(self, num_pending: int, now: float) -> float | None:
        if not self.num_done:
            return None
        return num_pending * (now - self.began_at) / self.num_done


class Worker:
    def __init__(
        self,
        daemon: Daemon,
        texts: Texts,
        store: StoreThread,
        config: JobsConfig,
        now: Callable[[], float],
    ) -> None:
        """`now` returns the time that result records get."""
        self._daemon, self._texts, self._store, self._now = daemon, texts, store, now
        self._config = config
        self._constraints = ConstraintChecker(texts.template.tokenizer)
        self._loop = asyncio.get_running_loop()
        self._attempt_ids = count(BACKGROUND_ATTEMPT_ID_MIN)
        self._names = count(1)
        self.engine_up = asyncio.Event()

    async def check(self, job: StoredJob, activity: Activity) -> None:
        """Validate each line before anything is computed, so that errors are known at once, by line."""
        reader, after, key = self._reader(job), 0, job.key
        while pending := await self._pending(job, after):
            after = pending[-1].number
            found = await self._read(reader, pending, activity)
            if activity.stopping:
                return
            lines = [each.line if isinstance(each, PreparedLine) else each for each in found]
            names = [(each.line, each.custom_id) for each in lines if each.custom_id is not None]
            duplicates = await self._store.call(key.tenant, self._store.jobs.name_lines, key, names)
            errors = {each.line: each for each in found if isinstance(each, LineError)}
            for line, custom_id, first in duplicates:
                text = f"custom_id: is already used in line {first}"
                error = LineError(line, custom_id, "duplicate_custom_id", text, "custom_id")
                errors.setdefault(line, error)
            await self._refuse(job, [errors[line] for line in sorted(errors)])
        if job.options.get("check_only"):
            await self._store.set_state(key, JobState.ENDED, JobOutcome.CHECKED)
        else:
            await self._store.set_state(key, JobState.WAITING)

    async def run(self, job: StoredJob, activity: Activity) -> None:
        """Run the job, one window of lines at a time, until no line is left or its tenant is in debt."""
        await self._store.set_state(job.key, JobState.RUNNING)
        while unfinished := await self._window(job, activity):
            await self._run_window(unfinished, job, activity)
            if activity.stopping or unfinished:
                return
        if not activity.stopping:
            await self._store.set_state(job.key, JobState.ENDED, JobOutcome.COMPLETED)

    async def _run_window(
        self, unfinished: dict[int, PreparedLine], job: StoredJob, activity: Activity
    ) -> None:
        deaths: dict[int, int] = {}  # by line: deaths of the engine while only this line was in it
        suspects: list[int] = []  # lines that may have killed the engine
        while unfinished and not activity.stopping:
            await self._wait_for_engine(activity)
            suspects = [each for each in suspects if each in unfinished]
            lines = [unfinished[suspects[0]]] if suspects else list(unfinished.values())
            run = await self._new_run(job.key, lines)
            if not await self._follow(run, job, activity, unfinished):
                return
            if run.was_lost:
                suspects = self._suspects(run, suspects, deaths)
                for line in [each for each in suspects if deaths.get(each) == DEATHS_MAX]:
                    if line in unfinished:
                        await self._refuse(
                            job, [engine_error(unfinished.pop(line).line, "ENGINE_DIED")]
                        )

    @staticmethod
    def _suspects(run: JobRun, before: list[int], deaths: dict[int, int]) -> list[int]:
        """Return the lines to try alone, in order. Lines that were just in the dead engine come last."""
        if not before:
            return sorted(run.begun)
        for line in run.begun if not run.had_others else ():
            deaths[line] = deaths.get(line, 0) + 1
        return [*(each for each in before if each not in run.begun), *run.begun]

    async def _new_run(self, key: JobKey, lines: Sequence[PreparedLine]) -> JobRun:
        ready = self._daemon.engine.ready
        if ready is None:
            raise Unavailable("the engine is starting")
        feed = FeedConfig(ready.device_pages, ready.chunk_tokens)
        share, weight = f"~batch/{key.tenant}", self._daemon.allowance(key.tenant).limits.weight
        name = f"{next(self._names)}"
        next_attempt_id, send = self._attempt_ids.__next__, self._daemon.engine.put
        root = await self._daemon.conversations.root_of(key.tenant)
        return await self._daemon.threads.in_text_pool(
            key.tenant,
            lambda: JobRun(name, lines, feed, next_attempt_id, share, weight, send, root=root),
        )

    async def _follow(
        self, run: JobRun, job: StoredJob, activity: Activity, unfinished: dict[int, PreparedLine]
    ) -> bool:
        """Follow a run until it is over, writing its answers, many lines per transaction.

        Returns False if the tenant has no tokens left, so that another tenant's job may run.
        """
        if activity.stopping or not self.engine_up.is_set():
            return True
        activity.run, tenant = run, job.key.tenant
        engine_events = self._daemon.events.engine_events
        engine_events.subscribe(run.engine_events)
        try:
            while True:
                run.changed.clear()
                allowance, now = self._daemon.allowance(tenant), self._loop.time()
                if allowance.in_debt(now) is not None:
                    run.is_held = True
                elif allowance.has_spare(now):
                    run.is_held = False
                run.go()
                if ready := run.take_ready():
                    await self._write(ready, run, job, activity)
                    for each in ready:
                        unfinished.pop(each.prepared.line.line, None)
                elif run.is_over:
                    return True
                elif run.is_idle and run.is_held:
                    return False
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_SECONDS):
                            await run.changed.wait()
        finally:
            engine_events.unsubscribe(run.engine_events)
            run.stop()  # does nothing if the run is over
            activity.run = None

    async def _write(
        self, ready: Sequence[ReadyLine], run: JobRun, job: StoredJob, activity: Activity
    ) -> None:
        """Write the results of lines, and retry until the disk accepts them. Submit nothing meanwhile."""
        tenant = job.key.tenant
        model, style = self._daemon.engine.model_name, self._config.call_style
        writer = ResultWriter(self._texts.template, model, self._now(), style)
        results = await self._daemon.threads.in_text_pool(
            tenant, lambda: [writer.result(each.prepared, each.choices) for each in ready]
        )
        num_tokens = sum(each.num_tokens for each in ready)
        while not activity.stopping:
            try:
                await self._store_results(job, results)
            except Unavailable as error:
                activity.problem = one_line(error)
                run.is_held = True
                await asyncio.sleep(RETRY_SECONDS)
            else:
                activity.problem = ""
                self._daemon.admission.charge(tenant, num_tokens, self._loop.time())
                activity.record_done(len(ready), num_tokens, self._loop.time())
                return

    async def _store_results(
        self, job: StoredJob, results: Sequence[NewAnswer | NewRefusal]
    ) -> None:
        answers = [each for each in results if isinstance(each, NewAnswer)]
        refusals = [each for each in results if isinstance(each, NewRefusal)]
        if answers:
            await self._store.call(job.key.tenant, self._store.jobs.answer, job.key, answers)
        if refusals:
            await self._store.call(job.key.tenant, self._store.jobs.refuse, job.key, refusals)

    async def _window(self, job: StoredJob, activity: Activity) -> dict[int, PreparedLine]:
        """Return the next lines without a result, by line number, with up to WINDOW_TOKENS tokens together.

        Lines that can no longer be read are refused.
        """
        found: dict[int, PreparedLine] = {}
        reader, after, num_tokens = self._reader(job), 0, 0
        while num_tokens < WINDOW_TOKENS and (lines := await self._pending(job, after)):
            after = lines[-1].number
            read = await self._read(reader, lines, activity)
            await self._refuse(job, [each for each in read if isinstance(each, LineError)])
            for each in read:
                if isinstance(each, PreparedLine):
                    found[each.line.line] = each
                    num_tokens += len(each.tokens)
            if activity.stopping:
                break
        return found

    async def _pending(self, job: StoredJob, after: int) -> list[JobLine]:
        return await self._store.call(
            job.key.tenant, self._store.jobs.pending_lines, job.key, after
        )

    async def _read(
        self, reader: LineReader, lines: Sequence[JobLine], activity: Activity
    ) -> list[PreparedLine | LineError]:
        found: list[PreparedLine | LineError] = []
        for first in range(0, len(lines), LINES_PER_TASK):
            if activity.stopping:
                break
            part = lines[first : first + LINES_PER_TASK]
            found += await self._daemon.threads.in_text_pool(
                reader.job.key.tenant, partial(reader.read_all, part)
            )
        return found

    async def _refuse(self, job: StoredJob, errors: Sequence[LineError]) -> None:
        await self._store_results(job, [refusal(each) for each in errors])

    def _reader(self, job: StoredJob) -> LineReader:
        daemon = self._daemon
        name = daemon.engine.model_name
        served = Served(
            daemon.defaults,
            {name, name.rpartition("/")[2]},
            daemon.engine.ready.vocab_size if daemon.engine.ready is not None else None,
            self._texts.template.options,
            self._config.call_style,
            self._texts.template.knows_developer,
        )
        template = self._texts.template
        return LineReader(job, served, template, daemon.context_max, self._constraints)

    async def _wait_for_engine(self, activity: Activity) -> None:
        while not (self.engine_up.is_set() or activity.stopping):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self.engine_up.wait()
