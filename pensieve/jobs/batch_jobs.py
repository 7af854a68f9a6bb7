"""Receive batch jobs, check them, run them and report on them. Runs on the event loop.

    event loop      the running jobs, their runs in the engine, and watchers
    jobs thread     the store of jobs (job_store.py), one call at a time
    text pool       reading and tokenizing lines, writing answers

At most two *activities* run at a time. One checks the lines of a job in state `checking`. The other runs a
job in state `running` or `waiting`. The tenants are served in rotation, and a tenant's jobs run in the order
of their creation. A job is skipped while it is paused, while its file is locked, or while its tenant has used
up its tokens.

The store determines which lines are pending. An activity begins with the pending lines of its job. If it ends
early (pause, cancel, deletion, shutdown), the lines without a result are still pending. An operation on a job
first *holds* the job: its activity is told to end, and no activity of the job begins until the operation is
done.

A job's turns are background turns, which get the capacity that interactive turns leave free. A job has as
many turns at a time as are expected to fit into the device tier's pages (core/group_feed.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from pensieve.conversations.daemon import Daemon
from pensieve.conversations.daemon_config import Sources
from pensieve.conversations.history import Texts
from pensieve.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    QueueFull,
    StorageFull,
    Unavailable,
    WrongJobState,
    one_line,
)
from pensieve.jobs.batch_line import LINE_BYTES_MAX
from pensieve.jobs.job_homes import JobHomes
from pensieve.jobs.job_records import (
    JobKey,
    JobLine,
    JobOutcome,
    JobState,
    NewJob,
    Result,
    ResultBytes,
    ResultKind,
    StoredJob,
)
from pensieve.jobs.job_run import JobRun
from pensieve.jobs.job_store import JobStore
from pensieve.jobs.values import JobHeader, JobView
from pensieve.jobs.worker import Activity, JobsConfig, StoreThread, Worker

T = TypeVar("T")
log = logging.getLogger("pensieve")
JOBS_MAX = 100  # jobs per tenant that have not ended
RETRY_SECONDS = 2.0
POLL_SECONDS = 1.0
FORGET_SECONDS = 3600.0
DELAY_SECONDS = 5.0  # delay before a job that could not continue is tried again
ACTIVE_STATES = {JobState.WAITING, JobState.RUNNING}
# the states of the jobs of each activity
ACTIVITIES = (JobState.CHECKING,), (JobState.RUNNING, JobState.WAITING)
FILE_BYTES_MAX = 2 << 30
REQUESTS_MAX = 100_000  # lines with a request
LINES_MAX = 200_000  # lines, including blank ones
PAGE_BYTES, PAGE_LINES = 256 << 10, 1000  # size of one write: about this many bytes or lines


class BatchJobs:
    def __init__(
        self,
        daemon: Daemon,
        store: JobStore,
        texts: Texts,
        config: JobsConfig | None = None,
        sources: Sources | None = None,
    ) -> None:
        self._daemon, self._now = daemon, (sources or Sources()).wall_clock
        self._config = config or JobsConfig()
        self._store = StoreThread(store)
        self.homes = JobHomes(daemon) if daemon.store.is_shared else None
        self._worker = Worker(daemon, texts, self._store, self._config, self._now)
        self._loop = asyncio.get_running_loop()
        self._activities: dict[JobKey, Activity] = {}
        self._held: set[JobKey] = set()
        self._problems: dict[JobKey, str] = {}  # why a job does not continue
        # by the loop's clock
        self._delayed_until: dict[JobKey, float] = {}
        self._incoming: dict[JobKey, IncomingFile] = {}
        # (is a check, tenant) -> number of the activity of this kind that last served the tenant
        self._last_served: dict[tuple[bool, str], int] = {}
        self._num_activities = 0
        self._closing = False
        # set when an activity may have a job
        self._wake_events = [asyncio.Event() for _ in ACTIVITIES]
        self._tasks: list[asyncio.Task[None]] = []
        events = daemon.events
        events.engine_up.subscribe(self._engine_up)
        events.engine_down.subscribe(self._engine_down)
        events.draining.subscribe(self._drain)
        events.closing.subscribe(self._close)

    # -- events of the daemon --

    def _engine_up(self) -> None:
        self._worker.engine_up.set()
        if not self._tasks:
            work = [self._work(*each) for each in zip(ACTIVITIES, self._wake_events, strict=True)]
            more = [self._forget()] if self.homes is None else [self._forget(), self._keep_homes()]
            self._tasks = [self._loop.create_task(each) for each in (*work, *more)]

    def _engine_down(self, reason: str) -> None:
        self._worker.engine_up.clear()
        had_others = self._daemon.conversations.turns.num_live > 0
        for run in self._runs():
            run.engine_lost(had_others)

    def _drain(self) -> None:
        """Stop the activities. The next daemon continues the jobs."""
        self._closing = True
        for activity in self._activities.values():
            activity.stop()
        self._wake_all()

    async def _close(self) -> None:
        self._drain()
        await asyncio.gather(*(each.ended.wait() for each in list(self._activities.values())))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store.close()

    # -- calls of clients --

    async def create(self, tenant: str, header: JobHeader, chunks: AsyncIterator[bytes]) -> JobView:
        key = JobKey(tenant, header.job_id)
        jobs = await self._store.call(tenant, self._store.jobs.list_jobs, tenant)
        if self._closing:
            raise Unavailable("the daemon is shutting down")
        receiving = self._new_incoming_file(key, header, jobs)
        options: dict[str, Any] = {"endpoint": header.endpoint, "check_only": header.check_only}
        if header.details:
            options["details"] = dict(header.details)
        in_thread = partial(self._daemon.threads.in_text_pool, tenant)
        call, store = self._store.call, self._store.jobs
        self._incoming[key] = receiving
        try:
            if self.homes is not None:
                await self.homes.add(key, self._now())
            new = NewJob(key, header.name, header.sha256, options)
            await call(tenant, store.create, new)
            async for lines in receiving.lines(chunks, in_thread):
                await call(tenant, store.append_lines, key, lines)
            receiving.check()
            options["num_bytes"] = receiving.num_bytes
            job = await call(tenant, store.received, key, receiving.sha256, options)
        except BaseException:
            await asyncio.shield(call(tenant, store.discard, key))
            if self.homes is not None:
                await asyncio.shield(self.homes.remove(key))
            raise
        finally:
            del self._incoming[key]
        self._wake_all()
        return self._view(job)

    def _new_incoming_file(
        self, key: JobKey, header: JobHeader, jobs: Sequence[StoredJob]
    ) -> IncomingFile:
        """Check that the tenant may have another job. Uploads in progress count as jobs."""
        if key in self._incoming or any(job.key == key for job in jobs):
            raise AlreadyExists(f"job {key.job_id!r} already exists")
        others = [each for each in self._incoming if each.tenant == key.tenant]
        unended = [job for job in jobs if job.state is not JobState.ENDED]
        if len({job.key for job in unended} | set(others)) >= JOBS_MAX:
            raise QueueFull(f"this tenant already has {JOBS_MAX} unfinished jobs; try again later")
        allowed = self._daemon.allowance(key.tenant).limits.storage_bytes
        if allowed is None:
            return IncomingFile(header)
        used = sum(job.num_bytes for job in jobs if job.key not in self._incoming)
        used += sum(self._incoming[each].num_bytes_max for each in others)
        if used + header.num_bytes >= allowed:
            raise StorageFull(f"this tenant's jobs may use at most {allowed:,} bytes")
        return IncomingFile(header, header.num_bytes or allowed - used)

    async def get(self, tenant: str, job_id: str) -> JobView:
        return self._view(await self._call_store(self._store.jobs.get, JobKey(tenant, job_id)))

    async def list(self, tenant: str | None) -> Sequence[JobView]:
        jobs = await self._store.call(tenant or "", self._store.jobs.list_jobs, tenant)
        return [self._view(job) for job in jobs]

    async def pause(self, tenant: str, job_id: str) -> JobView:
        return await self._change(JobKey(tenant, job_id), JobState.PAUSED, ACTIVE_STATES)

    async def resume(self, tenant: str, job_id: str) -> JobView:
        key = JobKey(tenant, job_id)
        job = await self._call_store(self._store.jobs.get, key)
        if job.state in ACTIVE_STATES:
            return self._view(job)
        return await self._change(key, JobState.WAITING, {JobState.PAUSED})

    async def cancel(self, tenant: str, job_id: str) -> JobView:
        states = set(JobState) - {JobState.RECEIVING}
        return await self._change(
            JobKey(tenant, job_id), JobState.ENDED, states, JobOutcome.CANCELLED
        )

    async def delete(self, tenant: str, job_id: str) -> None:
        key = JobKey(tenant, job_id)
        await self._hold_and_run(key, lambda: self._call_store(self._store.jobs.delete, key))
        if self.homes is not None:
            await self.homes.remove(key)
        self._problems.pop(key, None)
        self._delayed_until.pop(key, None)

    async def results(
        self, tenant: str, job_id: str, kind: ResultKind, after: int
    ) -> AsyncIterator[Sequence[Result]]:
        key = JobKey(tenant, job_id)
        while page := await self._call_store(self._store.jobs.results, key, after, kind=kind):
            yield page
            after = page[-1].line

    async def lines(self, tenant: str, job_id: str) -> AsyncIterator[Sequence[JobLine]]:
        key, after = JobKey(tenant, job_id), 0
        while page := await self._call_store(self._store.jobs.lines, key, after):
            yield page
            after = page[-1].number

    async def result_bytes(self, tenant: str, job_id: str) -> ResultBytes:
        return await self._call_store(self._store.jobs.result_bytes, JobKey(tenant, job_id))

    async def watch(self, tenant: str, job_id: str) -> AsyncIterator[JobView]:
        before: JobView | None = None
        while True:
            view = await self.get(tenant, job_id)
            if view != before:
                yield view
            if view.state is JobState.ENDED:
                return
            before = view
            await asyncio.sleep(POLL_SECONDS)

    # -- activities --

    def _runs(self) -> Sequence[JobRun]:
        return [each.run for each in self._activities.values() if each.run is not None]

    async def _work(self, states: Sequence[JobState], wake: asyncio.Event) -> None:
        """Run the jobs that are in one of these states, one after the other."""
        while not self._closing:
            wake.clear()
            retry_seconds: float | None = RETRY_SECONDS
            try:
                jobs = await self._store.call("", self._store.jobs.list_jobs)
                jobs = [job for job in jobs if job.state in states]
                if (job := self._next(jobs, states)) is not None:
                    await self._run_activity(job)
                    continue
                if not jobs:
                    retry_seconds = None  # a new job sets `wake`
            except Exception as error:  # any error: otherwise jobs would stop silently
                log.error("batch jobs cannot continue for now, will retry", exc_info=error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_seconds):
                    await wake.wait()

    def _next(self, jobs: Sequence[StoredJob], states: Sequence[JobState]) -> StoredJob | None:
        """Return the next job.

        The tenant that was served longest ago comes first. Of its jobs, a running job comes first, then the
        oldest waiting job.
        """
        now = self._loop.time()

        def may_run(job: StoredJob) -> bool:
            if job.key in self._held or self._delayed_until.get(job.key, 0) > now:
                return False
            return job.state is JobState.CHECKING or self._daemon.allowance(
                job.key.tenant
            ).has_spare(now)

        return min(
            filter(may_run, jobs),
            key=lambda job: (
                self._last_served.get((job.state is JobState.CHECKING, job.key.tenant), 0),
                states.index(job.state),
                job.number,
            ),
            default=None,
        )

    async def _run_activity(self, job: StoredJob) -> None:
        key = job.key
        if key in self._held or self._closing:
            return
        activity = self._activities[key] = Activity(key, self._loop.time())
        self._num_activities += 1
        is_check = job.state is JobState.CHECKING
        self._last_served[is_check, key.tenant] = self._num_activities
        try:
            if is_check:
                await self._worker.check(job, activity)
            else:
                await self._worker.run(job, activity)
            self._problems.pop(key, None)
        except Unavailable as error:
            self._delay(key, one_line(error))
        except Exception as error:
            log.error("job %s of tenant %r failed", key.job_id, key.tenant, exc_info=error)
            await self._set_failed(key, one_line(error) or type(error).__name__)
        finally:
            activity.stop()
            del self._activities[key]
            activity.ended.set()
            self._wake_all()

    def _delay(self, key: JobKey, problem: str) -> None:
        log.warning("job %s of tenant %r has to wait: %s", key.job_id, key.tenant, problem)
        self._problems[key] = problem
        self._delayed_until[key] = self._loop.time() + DELAY_SECONDS

    async def _set_failed(self, key: JobKey, problem: str) -> None:
        ended, failed = JobState.ENDED, JobOutcome.FAILED
        try:
            await self._store.set_state(key, ended, failed, problem)
        except Exception:
            self._delay(key, problem)

    async def _forget(self) -> None:
        while keep := self._config.keep_seconds:
            try:
                while await self._store.call("", self._store.jobs.forget_older, self._now() - keep):
                    await asyncio.sleep(0.1)
            except Exception as error:
                log.warning("cannot delete old batch jobs, will retry", exc_info=error)
            await asyncio.sleep(FORGET_SECONDS)

    async def _keep_homes(self) -> None:
        """Publish regularly which jobs this daemon has.

        This also covers jobs that were forgotten, and jobs from before the history was shared.
        """
        assert self.homes is not None
        while True:
            seconds = FORGET_SECONDS
            try:
                since = self._now()
                jobs = await self._store.call("", self._store.jobs.list_jobs)
                keys = {job.key for job in jobs} | set(self._incoming)
                keep = self._config.keep_seconds
                await self.homes.keep(keys, since, since - keep if keep else None)
            except Exception as error:
                log.warning("cannot publish which batch jobs are here, will retry", exc_info=error)
                seconds = RETRY_SECONDS
            await asyncio.sleep(seconds)

    # -- inside --

    async def _call_store(
        self, function: Callable[..., T], key: JobKey, *arguments: Any, **named: Any
    ) -> T:
        """Call the store about a job. Raises OwnedElsewhere or Unavailable if another daemon has it."""
        try:
            return await self._store.call(key.tenant, function, key, *arguments, **named)
        except NotFound:
            if self.homes is not None:
                await self.homes.raise_if_elsewhere(key)
            raise

    async def _change(
        self,
        key: JobKey,
        state: JobState,
        before: Collection[JobState],
        outcome: JobOutcome | None = None,
    ) -> JobView:
        """Change a job's state. If it is not one of `before`, raise WrongJobState and change nothing."""
        job = await self._call_store(self._store.jobs.get, key)
        if job.state is not state:
            if job.state not in before:
                raise WrongJobState(f"job {key.job_id!r} is {job.state} and cannot become {state}")
            job = await self._hold_and_run(key, lambda: self._store.set_state(key, state, outcome))
            self._delayed_until.pop(key, None)
        return self._view(job)

    async def _hold_and_run(self, key: JobKey, operation: Callable[[], Awaitable[T]]) -> T:
        """End the job's activity, and run the operation while no activity of the job may begin."""
        if key in self._incoming:
            raise WrongJobState(f"the file of job {key.job_id!r} is still being uploaded")
        if key in self._held:
            raise QueueFull("another operation on this job is in progress; try again in a moment")
        self._held.add(key)
        try:
            if (activity := self._activities.get(key)) is not None:
                activity.stop()
                await activity.ended.wait()
            return await operation()
        finally:
            self._held.discard(key)
            self._wake_all()

    def _wake_all(self) -> None:
        for each in self._wake_events:
            each.set()

    def _view(self, job: StoredJob) -> JobView:
        activity, now = self._activities.get(job.key), self._loop.time()
        problem = job.problem or self._problems.get(job.key, "")
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
            problem or (activity.problem if activity is not None else ""),
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


class IncomingFile:
    """Split the upload of a job's file, which arrives in chunks of any length, into numbered lines.

    If a line is too long, only its beginning is kept, up to just over the limit. The line is refused later,
    with a message that names its number. Blank lines have a number and are not stored.
    """

    def __init__(self, header: JobHeader, bytes_left: int | None = None) -> None:
        """`bytes_left`: the rest of the tenant's storage; None: no limit."""
        self._header = header
        self._bytes_left = bytes_left
        self._digest = hashlib.sha256()
        self._line = bytearray()  # the beginning of an incomplete line
        self._is_open = False  # whether a line has begun
        self._num_lines = self.num_bytes = self._num_requests = 0

    @property
    def num_bytes_max(self) -> int:
        """The size that the header states, or the size so far if that is larger."""
        return max(self._header.num_bytes, self.num_bytes)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    async def lines(
        self,
        chunks: AsyncIterator[bytes],
        in_thread: Callable[[Callable[[], list[JobLine]]], Awaitable[list[JobLine]]],
    ) -> AsyncIterator[list[JobLine]]:
        """Yield pages of lines. Chunks are split `in_thread`, because a chunk may have a million lines."""
        page: list[JobLine] = []
        num_stored = 0  # bytes of the file up to the last page, including blank lines
        async for chunk in chunks:
            self._take(chunk)
            page += await in_thread(partial(self._split, chunk))
            if len(page) >= PAGE_LINES or self.num_bytes - num_stored >= PAGE_BYTES:
                num_stored = self.num_bytes
                if page:
                    yield page
                page = []
        if self._is_open and (line := self._end_line()) is not None:
            page.append(line)
        if page:
            yield page

    def _split(self, chunk: bytes) -> list[JobLine]:
        *complete, beginning = chunk.split(b"\n")
        found = []
        for each in complete:
            self._add(each)
            if (line := self._end_line()) is not None:
                found.append(line)
        if beginning:
            self._add(beginning)
        return found

    def check(self) -> None:
        """Check that the file is complete and matches its header."""
        header = self._header
        if header.num_bytes and header.num_bytes != self.num_bytes:
            raise InvalidArgument(
                "num_bytes", f"{self.num_bytes:,} bytes arrived, not {header.num_bytes:,}"
            )
        if header.sha256 and header.sha256 != self.sha256:
            raise InvalidArgument("sha256", "does not match the uploaded file")
        if not self._num_requests:
            raise InvalidArgument("chunk", "the file has no requests")

    def _take(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self.num_bytes += len(chunk)
        if self.num_bytes > FILE_BYTES_MAX:
            raise InvalidArgument("chunk", f"a file has at most {FILE_BYTES_MAX:,} bytes")
        if self._bytes_left is not None and self.num_bytes > self._bytes_left:
            raise StorageFull(f"this tenant's jobs may use only {self._bytes_left:,} more bytes")

    def _add(self, text: bytes) -> None:
        self._is_open = True
        self._line += text[: LINE_BYTES_MAX + 1 - len(self._line)]

    def _end_line(self) -> JobLine | None:
        self._num_lines += 1
        if self._num_lines > LINES_MAX:
            raise InvalidArgument("chunk", f"a file has at most {LINES_MAX:,} lines")
        text, self._line, self._is_open = bytes(self._line), bytearray(), False
        if not text.strip():
            return None
        self._num_requests += 1
        if self._num_requests > REQUESTS_MAX:
            raise InvalidArgument("chunk", f"a file has at most {REQUESTS_MAX:,} requests")
        return JobLine(self._num_lines, text.removesuffix(b"\r"))
