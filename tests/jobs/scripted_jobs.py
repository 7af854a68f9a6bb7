"""Jobs over a real job store. Their lines are answered when a test says so.

A line that is not a JSON object is refused. Any other line is answered with its own text.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from pensieve.errors import InvalidArgument
from pensieve.jobs.job_records import (
    JobKey,
    JobLine,
    JobOutcome,
    JobState,
    JobUsage,
    NewAnswer,
    NewJob,
    NewRefusal,
    Result,
    ResultBytes,
    ResultKind,
    StoredJob,
)
from pensieve.jobs.job_store import JobStore
from pensieve.jobs.values import JobHeader, JobView

LOOK_SECONDS = 0.01


class ScriptedJobs:
    """Runs on the event loop."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.store = JobStore.open(folder)
        self.headers: list[tuple[str, JobHeader]] = []
        self.num_chunks = 0

    async def create(self, tenant: str, header: JobHeader, chunks: AsyncIterator[bytes]) -> JobView:
        key = JobKey(tenant, header.job_id)
        self.headers.append((tenant, header))
        options = {"endpoint": header.endpoint, "check_only": header.check_only}
        self.store.create(NewJob(key, header.name, header.sha256, options))
        try:
            text = b""
            async for chunk in chunks:
                self.num_chunks += 1
                text += chunk
            digest = hashlib.sha256(text).hexdigest()
            if header.sha256 not in ("", digest):
                raise InvalidArgument("sha256", "does not match the uploaded file")
            lines = [JobLine(n, line) for n, line in enumerate(text.splitlines(), 1) if line]
            self.store.append_lines(key, lines)
            self.store.received(key)
        except BaseException:
            self.store.delete(key)
            raise
        for line in lines:
            if not line.text.startswith(b"{"):
                error = {"code": "invalid_json", "message": "is no JSON", "line": line.number}
                refused = {"custom_id": None, "response": None, "error": error}
                self.store.refuse(key, [NewRefusal(line.number, json.dumps(refused).encode())])
        if header.check_only:
            self.store.set_state(key, JobState.ENDED, JobOutcome.CHECKED)
        else:
            self.store.set_state(key, JobState.WAITING)
            self.store.set_state(key, JobState.RUNNING)
        return await self.get(*key)

    def work(self, key: JobKey, num_lines: int) -> None:
        """Answer `num_lines` lines of a running job."""
        if self.store.get(key).state is not JobState.RUNNING:
            return
        answers = []
        for line in self.store.pending_lines(key, limit=max(num_lines, 1))[:num_lines]:
            request = json.loads(line.text)
            text = {
                "custom_id": request["custom_id"],
                "response": request.get("q", ""),
                "error": None,
            }
            answers.append(NewAnswer(line.number, json.dumps(text).encode(), JobUsage(9, 5, 2)))
        if not self.store.answer(key, answers).num_pending:
            self.store.set_state(key, JobState.ENDED, JobOutcome.COMPLETED)

    async def get(self, tenant: str, job_id: str) -> JobView:
        return view_of(self.store.get(JobKey(tenant, job_id)))

    async def list(self, tenant: str | None) -> Sequence[JobView]:
        return [view_of(job) for job in self.store.list_jobs(tenant)]

    async def pause(self, tenant: str, job_id: str) -> JobView:
        return view_of(self.store.set_state(JobKey(tenant, job_id), JobState.PAUSED))

    async def resume(self, tenant: str, job_id: str) -> JobView:
        return view_of(self.store.set_state(JobKey(tenant, job_id), JobState.RUNNING))

    async def cancel(self, tenant: str, job_id: str) -> JobView:
        key = JobKey(tenant, job_id)
        return view_of(self.store.set_state(key, JobState.ENDED, JobOutcome.CANCELLED))

    async def delete(self, tenant: str, job_id: str) -> None:
        self.store.delete(JobKey(tenant, job_id))

    async def results(
        self, tenant: str, job_id: str, which: ResultKind, after: int
    ) -> AsyncIterator[Sequence[Result]]:
        while page := self.store.results(JobKey(tenant, job_id), after, 1000, which):
            yield page
            after = page[-1].line

    async def lines(self, tenant: str, job_id: str) -> AsyncIterator[Sequence[JobLine]]:
        after = 0
        while page := self.store.lines(JobKey(tenant, job_id), after):
            yield page
            after = page[-1].number

    async def result_bytes(self, tenant: str, job_id: str) -> ResultBytes:
        return self.store.result_bytes(JobKey(tenant, job_id))

    async def watch(self, tenant: str, job_id: str) -> AsyncIterator[JobView]:
        key, shown = JobKey(tenant, job_id), None
        while True:
            view = view_of(self.store.get(key))
            if view != shown:
                yield view
                shown = view
            if view.state is JobState.ENDED:
                return
            await asyncio.sleep(LOOK_SECONDS)


def view_of(job: StoredJob) -> JobView:
    running = job.state is JobState.RUNNING
    return JobView(
        job_id=job.key.job_id,
        tenant=job.key.tenant,
        number=job.number,
        name=job.name,
        sha256=job.sha256,
        num_bytes=job.num_bytes,
        endpoint=job.options["endpoint"],
        check_only=job.options["check_only"],
        state=job.state,
        outcome=job.outcome,
        problem=job.problem,
        num_lines=job.num_lines,
        num_answered=job.num_answered,
        num_refused=job.num_refused,
        num_running=min(3, job.num_pending) if running else 0,
        prompt_tokens=job.usage.prompt_tokens,
        saved_tokens=job.usage.saved_tokens,
        output_tokens=job.usage.output_tokens,
        tokens_per_second=120.0 if running else 0.0,
        seconds_left=0.5 * job.num_pending if running else None,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
    )
