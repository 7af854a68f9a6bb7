"""`/v1/files` and `/v1/batches`: batch jobs in the form of OpenAI's API.

An uploaded file is stored as a job whose lines are only checked. So files are stored, limited, deleted and
forgotten like jobs, and a client learns of invalid requests before it creates a batch. A batch is a new job
with a copy of the lines. Several batches may use one file, and the file may be deleted while they run.

    file-ID            an uploaded file: a job whose lines are only checked (`is_file`)
    batch_ID           any other job, however it was created
    file-input.JOB     the lines of a job that was created without an uploaded file
    file-output.JOB    the job's answers so far
    file-errors.JOB    the job's refusals so far

The id of an upload is `file-` and hexadecimal digits, so no id is ambiguous.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from pensieve.api.forwarded import FORWARDED
from pensieve.api.grpc.http_forwarding import tokens_of
from pensieve.api.http.exchange import Exchange, is_descending, limit_of, query_of
from pensieve.api.http.requests import ApiRequests
from pensieve.api.http.routes import refuse_as_unknown
from pensieve.api.http.uploads import Upload
from pensieve.api.json_fields import Fields, Refusal
from pensieve.api.openai.request import RequestKind
from pensieve.errors import InvalidArgument, NotFound, WrongJobState
from pensieve.guard.callers import Caller, group_of
from pensieve.guard.limits import write_within
from pensieve.jobs.job_homes import JobLists
from pensieve.jobs.job_records import JobOutcome, JobState, ResultBytes, ResultKind
from pensieve.jobs.values import DaemonJobs, JobHeader, JobView
from pensieve.store.records import ID_PATTERN

NAME_CHARACTERS_MAX = 128
FILES_LISTED, BATCHES_LISTED = 100, 20  # defaults of `limit`
FILES_LISTED_MAX, BATCHES_LISTED_MAX = 10_000, 100
METADATA_MAX, KEY_CHARACTERS_MAX, VALUE_CHARACTERS_MAX = 16, 64, 512
CHUNK_BYTES = 256 << 10
SIZES_MAX = 1 << 16  # the result sizes of this many ended jobs are remembered
UPLOADED = re.compile(r"file-[0-9a-f]{24}")
STATUSES = {
    JobState.RECEIVING: "validating",
    JobState.CHECKING: "validating",
    JobState.WAITING: "in_progress",
    JobState.RUNNING: "in_progress",
    JobState.PAUSED: "in_progress",
}
OUTCOMES = {
    JobOutcome.COMPLETED: "completed",
    JobOutcome.CHECKED: "completed",
    JobOutcome.CANCELLED: "cancelled",
    JobOutcome.FAILED: "failed",
}


class _JobEndpoints:
    def __init__(self, jobs: DaemonJobs | None, lists: JobLists | None) -> None:
        """`jobs`: None if this daemon takes none. `lists`: None if no other daemon shares the history."""
        self._jobs_or_none, self._lists = jobs, lists

    @property
    def _jobs(self) -> DaemonJobs:
        if self._jobs_or_none is None:
            raise NotFound("this daemon does not run batches")
        return self._jobs_or_none

    async def _job(self, by: Caller, job_id: str) -> JobView:
        if not ID_PATTERN.fullmatch(job_id):
            raise NotFound("there is no such job")
        return await self._jobs.get(by.tenant, job_id)

    async def _list(self, exchange: Exchange, by: Caller) -> Sequence[JobView]:
        if self._lists is None or FORWARDED in exchange.scope:
            return await self._jobs.list(by.tenant)
        return await self._lists.all(by.tenant, tokens_of(exchange.scope["headers"]))


class Files(_JobEndpoints):
    def __init__(
        self,
        requests: ApiRequests,
        jobs: DaemonJobs | None,
        stall_seconds: float,
        lists: JobLists | None = None,
    ) -> None:
        super().__init__(jobs, lists)
        self._requests, self._stall_seconds = requests, stall_seconds
        self._sizes: OrderedDict[tuple[object, ...], ResultBytes] = OrderedDict()

    async def upload(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        jobs, incoming = self._jobs, self._requests.front.guard.incoming
        upload = Upload(exchange, incoming, group_of(by, exchange.peer()))
        await upload.find_file()
        name = upload.filename.rpartition("/")[2][:NAME_CHARACTERS_MAX] or "upload"
        header = JobHeader(f"file-{secrets.token_hex(12)}", name, check_only=True)

        async def chunks() -> AsyncIterator[bytes]:
            async for each in upload.chunks():
                yield each
            _check_form(upload.fields)

        view = await jobs.create(by.tenant, header, chunks())
        return file_object(view, FileId(Content.UPLOAD, view.job_id), view.num_bytes)

    async def list_all(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        await exchange.no_body()  # from now on, a disconnect is noticed
        query = Fields(query_of(exchange))
        purpose, descending = query.text("purpose"), is_descending(query.text("order"))
        limit = limit_of(query.text("limit"), FILES_LISTED, FILES_LISTED_MAX)
        after = query.text("after")
        query.end()
        found: list[tuple[JobView, FileId]] = []
        for view in await self._list(exchange, by):
            if is_file(view) and purpose in (None, "batch"):
                found.append((view, FileId(Content.UPLOAD, view.job_id)))
            elif not is_file(view) and purpose in (None, "batch_output"):
                found += [(view, each) for each in result_files(view)]
        found.sort(key=lambda each: each[0].number, reverse=descending)
        ids = [str(file_id) for _, file_id in found]
        first = _index_after(ids, after)
        shown = found[first : first + limit]
        remote_sizes = await self._remote_sizes(exchange, shown)
        data = [
            await self._object(by, view, file_id, remote_sizes.get((view.home, view.job_id)))
            for view, file_id in shown
            if not _is_remote_result(view, file_id) or (view.home, view.job_id) in remote_sizes
        ]
        return list_body(data, has_more=first + limit < len(found))

    async def sizes(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        """Answer another daemon, which builds a list, with the sizes of jobs' results."""
        if FORWARDED not in exchange.scope:
            return await refuse_as_unknown(exchange, by)
        await exchange.no_body()  # from now on, a disconnect of the other daemon is noticed
        requested_ids, sizes = set(exchange.scope["query_string"].decode("latin-1").split(",")), {}
        for view in await self._jobs.list(by.tenant):
            if view.job_id in requested_ids:
                with contextlib.suppress(NotFound):
                    sizes[view.job_id] = await self._result_bytes(by, view)
        return {"sizes": sizes}

    async def get(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return await self._object(by, *await self._file(exchange, by))

    async def content(self, exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
        view, file_id = await self._file(exchange, by)
        await self._requests.front.body(exchange)  # from now on, a disconnect is noticed
        kind = "application/octet-stream"
        if exchange.method == "HEAD":
            await exchange.answer_bytes(b"", kind)
            return None
        exchange.begin_bytes(kind)
        async for chunk in _concatenate(self._lines(by, view.job_id, file_id.content)):
            await write_within(self._stall_seconds, exchange.write(chunk))
        await exchange.end_bytes()
        return None

    async def delete(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        view, file_id = await self._file(exchange, by)
        if file_id.content is not Content.UPLOAD:
            raise WrongJobState(
                f"this file belongs to a batch; DELETE /v1/batches/{view.job_id} deletes the whole batch"
            )
        await self._jobs.delete(by.tenant, view.job_id)
        return {"id": str(file_id), "object": "file", "deleted": True}

    async def _file(self, exchange: Exchange, by: Caller) -> tuple[JobView, FileId]:
        file_id = file_id_of(exchange.values["job_id"])
        if file_id is None:
            raise NotFound("there is no such file")
        view = await self._job(by, file_id.job_id)
        if is_file(view) != (file_id.content is Content.UPLOAD):
            raise NotFound("there is no such file")
        return view, file_id

    async def _remote_sizes(
        self, exchange: Exchange, shown: Iterable[tuple[JobView, FileId]]
    ) -> Mapping[tuple[str, str], ResultBytes]:
        """Return the sizes of results at other daemons, by home and job_id."""
        views = [view for view, file_id in shown if _is_remote_result(view, file_id)]
        if self._lists is None or not views:
            return {}
        return await self._lists.sizes(views, tokens_of(exchange.scope["headers"]))

    async def _object(
        self, by: Caller, view: JobView, file_id: FileId, found: ResultBytes | None = None
    ) -> Mapping[str, Any]:
        """Describe a file. `found`: the sizes of the job's results, if they are known."""
        num_bytes = view.num_bytes
        if _is_result(file_id):
            found = found or await self._result_bytes(by, view)
            num_bytes = found.answers if file_id.content is Content.OUTPUT else found.errors
        return file_object(view, file_id, num_bytes)

    async def _result_bytes(self, by: Caller, view: JobView) -> ResultBytes:
        """Return the sizes of a job's results. This reads all results, but only once for an ended job."""
        key = (by.tenant, view.job_id, view.number, view.num_answered, view.num_refused)
        if (found := self._sizes.get(key)) is None:
            found = await self._jobs.result_bytes(by.tenant, view.job_id)
            if view.state is JobState.ENDED:
                self._sizes[key] = found
                while len(self._sizes) > SIZES_MAX:
                    self._sizes.popitem(last=False)
        return found

    async def _lines(self, by: Caller, job_id: str, content: Content) -> AsyncIterator[bytes]:
        if content in (Content.UPLOAD, Content.INPUT):
            async for line in lines_of(self._jobs, by.tenant, job_id):
                yield line
            return
        kind = ResultKind.ANSWERS if content is Content.OUTPUT else ResultKind.ERRORS
        async for results in self._jobs.results(by.tenant, job_id, kind, 0):
            for result in results:
                yield result.text.removesuffix(b"\n") + b"\n"


class Batches(_JobEndpoints):
    def __init__(
        self, requests: ApiRequests, jobs: DaemonJobs | None, lists: JobLists | None = None
    ) -> None:
        super().__init__(jobs, lists)
        self._requests = requests

    async def create(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        jobs, fields = self._jobs, Fields(await self._requests.json(exchange, by))
        given, endpoint = fields.needed_text("input_file_id"), fields.needed_text("endpoint")
        if endpoint not in {kind.value for kind in RequestKind}:
            known = ", ".join(kind.value for kind in RequestKind)
            raise Refusal("endpoint", f"is not one of {known}")
        if fields.needed_text("completion_window") != "24h":
            raise Refusal("completion_window", "only '24h' is supported")
        metadata = _metadata(fields)
        fields.end()
        file_id = file_id_of(given)
        if file_id is None or file_id.content is not Content.UPLOAD:
            raise Refusal("input_file_id", "must be the id of an uploaded file")
        file = await self._job(by, file_id.job_id)
        details = {"input_file_id": given, **({"metadata": metadata} if metadata else {})}
        header = JobHeader(
            f"batch_{secrets.token_hex(12)}", file.name, endpoint=endpoint, details=details
        )
        lines = _concatenate(lines_of(jobs, by.tenant, file.job_id))
        return batch_object(await jobs.create(by.tenant, header, lines))

    async def list_all(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        query = Fields(query_of(exchange))
        limit = limit_of(query.text("limit"), BATCHES_LISTED, BATCHES_LISTED_MAX)
        after = query.text("after")
        query.end()
        found = [each for each in await self._list(exchange, by) if not is_file(each)]
        found.sort(key=lambda each: -each.number)
        first = _index_after([each.job_id for each in found], after)
        data = [batch_object(each) for each in found[first : first + limit]]
        return list_body(data, has_more=first + limit < len(found))

    async def get(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return batch_object(await self._batch(exchange, by))

    async def cancel(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        await self._requests.front.body(exchange)  # its content does not matter
        view = await self._batch(exchange, by)
        return batch_object(await self._jobs.cancel(by.tenant, view.job_id))

    async def delete(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        """Delete a batch. OpenAI's API has no such call."""
        view = await self._batch(exchange, by)
        await self._jobs.delete(by.tenant, view.job_id)
        return {"id": view.job_id, "object": "batch", "deleted": True}

    async def _batch(self, exchange: Exchange, by: Caller) -> JobView:
        view = await self._job(by, exchange.values["job_id"])
        if is_file(view):
            raise NotFound("this is a file, not a batch")
        return view


async def lines_of(jobs: DaemonJobs, tenant: str, job_id: str) -> AsyncIterator[bytes]:
    """Yield the lines of the file. Blank lines were not stored; empty lines replace them."""
    number = 0
    async for page in jobs.lines(tenant, job_id):
        for line in page:
            yield b"\n" * (line.number - number - 1) + line.text + b"\n"
            number = line.number


async def _concatenate(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    piece = bytearray()
    async for line in lines:
        piece += line
        if len(piece) >= CHUNK_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def _check_form(fields: Mapping[str, str]) -> None:
    if fields.get("purpose") != "batch":
        raise InvalidArgument("purpose", "only 'batch' is supported")
    for name in fields:
        if name != "purpose":
            raise Refusal(name[:80], "is not supported", "unsupported_parameter")


def _index_after(ids: list[str], after: str | None) -> int:
    if after is None:
        return 0
    if after not in ids:
        raise Refusal("after", "is not in this list")
    return ids.index(after) + 1


def _metadata(fields: Fields) -> Mapping[str, Any]:
    found, where = fields.object("metadata") or {}, fields.where("metadata")
    if len(found) > METADATA_MAX:
        raise Refusal(where, f"has more than {METADATA_MAX} keys")
    for key, value in found.items():
        if not isinstance(value, str):
            raise Refusal(where, "must hold strings", "invalid_type")
        if len(key) > KEY_CHARACTERS_MAX or len(value) > VALUE_CHARACTERS_MAX:
            problem = f"has a key of more than {KEY_CHARACTERS_MAX} characters, or a value of more"
            raise Refusal(where, f"{problem} than {VALUE_CHARACTERS_MAX}")
    return found


class Content(StrEnum):
    """The part of a job that a file holds."""

    UPLOAD = "upload"
    INPUT = "input"
    OUTPUT = "output"
    ERRORS = "errors"


class FileId(NamedTuple):
    """The job that a file belongs to, and the part of the job."""

    content: Content
    job_id: str

    def __str__(self) -> str:
        if self.content is Content.UPLOAD:
            return self.job_id
        return f"file-{self.content}.{self.job_id}"


def file_id_of(text: str) -> FileId | None:
    """Parse a file id; None if it is invalid."""
    if UPLOADED.fullmatch(text):
        return FileId(Content.UPLOAD, text)
    kind, _, job_id = text.removeprefix("file-").partition(".")
    if text.startswith("file-") and job_id and kind in ("input", "output", "errors"):
        return FileId(Content(kind), job_id)
    return None


def is_file(view: JobView) -> bool:
    """Return whether a job exists only for its uploaded file."""
    return view.check_only and UPLOADED.fullmatch(view.job_id) is not None


def _is_result(file_id: FileId) -> bool:
    return file_id.content in (Content.OUTPUT, Content.ERRORS)


def _is_remote_result(view: JobView, file_id: FileId) -> bool:
    return bool(view.home) and _is_result(file_id)


def result_files(view: JobView) -> list[FileId]:
    if view.state is not JobState.ENDED:
        return []
    counts = {Content.OUTPUT: view.num_answered, Content.ERRORS: view.num_refused}
    return [FileId(content, view.job_id) for content, count in counts.items() if count]


def file_object(view: JobView, file_id: FileId, num_bytes: int) -> dict[str, Any]:
    is_result = _is_result(file_id)
    created_at = view.ended_at if is_result and view.ended_at is not None else view.created_at
    name = f"{view.job_id}_{file_id.content}.jsonl" if is_result else view.name
    return {
        "id": str(file_id),
        "object": "file",
        "bytes": num_bytes,
        "created_at": int(created_at),
        "filename": name,
        "purpose": "batch_output" if is_result else "batch",
        "status": "processed",
        "status_details": _status_details(view) if file_id.content is Content.UPLOAD else None,
        "expires_at": None,
    }


def _status_details(view: JobView) -> str | None:
    if not view.num_refused:
        return None
    return f"{view.num_refused:,} of {view.num_lines:,} requests cannot be answered"


def batch_object(view: JobView) -> dict[str, Any]:
    files = {each.content: str(each) for each in result_files(view)}
    given = view.details.get("input_file_id")
    ended_at = None if view.ended_at is None else int(view.ended_at)
    status = STATUSES[view.state] if view.outcome is None else OUTCOMES[view.outcome]
    ended = {f"{each}_at": ended_at if status == each else None for each in OUTCOMES.values()}
    return {
        "id": view.job_id,
        "object": "batch",
        "endpoint": view.endpoint,
        "model": None,
        "errors": _errors(view) if status == "failed" else None,
        "input_file_id": given or str(FileId(Content.INPUT, view.job_id)),
        "completion_window": "24h",
        "status": status,
        "output_file_id": files.get(Content.OUTPUT),
        "error_file_id": files.get(Content.ERRORS),
        "created_at": int(view.created_at),
        "in_progress_at": None if view.started_at is None else int(view.started_at),
        **ended,
        "expires_at": None,
        "expired_at": None,
        "finalizing_at": None,
        "cancelling_at": ended["cancelled_at"],
        "request_counts": {
            "total": view.num_lines,
            "completed": view.num_answered,
            "failed": view.num_refused,
        },
        "usage": {
            "input_tokens": view.prompt_tokens,
            "input_tokens_details": {"cached_tokens": view.saved_tokens},
            "output_tokens": view.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},  # not counted for jobs
            "total_tokens": view.prompt_tokens + view.output_tokens,
        },
        "metadata": view.details.get("metadata"),
    }


def _errors(view: JobView) -> dict[str, Any]:
    error = {"code": "job_failed", "message": view.problem, "line": None, "param": None}
    return {"object": "list", "data": [error]}


def list_body(data: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
