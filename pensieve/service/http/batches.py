"""`/v1/files` and `/v1/batches`: the jobs of `pensieve batch`, as OpenAI's API has them.

**An uploaded file is a job that is only checked.**  So it is stored, counted, limited, deleted and forgotten
as jobs are, a restart keeps it, and what is wrong with its requests is known before a batch is made of it.
A batch is a new job with a copy of the lines: one file may become several batches, and may be deleted while
they run.

Both are the tenant's alone.  They are forgotten a month after their end, as all jobs are.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

from pensieve.errors import DeadlineExceeded, InvalidArgument, NotFound, WrongJobState
from pensieve.service.daemon import Daemon
from pensieve.service.grpc.auth import Caller, group_of
from pensieve.service.http.batch_objects import (
    Content,
    FileId,
    batch_object,
    file_id_of,
    file_object,
    is_file,
    listed,
    result_files,
)
from pensieve.service.http.bodies import Bodies
from pensieve.service.http.exchange import Exchange
from pensieve.service.http.uploads import Upload
from pensieve.service.jobs.values import JobHeader, Jobs, JobView
from pensieve.service.openai import Refusal, RequestKind
from pensieve.service.openai.fields import Fields
from pensieve.store.job_records import JobState, ResultBytes, Which
from pensieve.store.records import ID_PATTERN

NAME_CHARACTERS_MAX = 128
FILES_LISTED, BATCHES_LISTED = 100, 20  # where a client does not say how many
FILES_LISTED_MAX, BATCHES_LISTED_MAX = 10_000, 100
QUERY_FIELDS_MAX = 16
METADATA_MAX, KEY_CHARACTERS_MAX, VALUE_CHARACTERS_MAX = 16, 64, 512
CHUNK_BYTES = 256 << 10
SIZES_MAX = 1 << 16  # of jobs that have ended, remembered


class _OfJobs:
    def __init__(self, jobs: Jobs | None) -> None:
        """`jobs`: None of a daemon that has none."""
        self._found = jobs

    @property
    def _jobs(self) -> Jobs:
        if self._found is None:
            raise NotFound("this daemon takes no batches")
        return self._found

    async def _job(self, by: Caller, job_id: str) -> JobView:
        if not ID_PATTERN.fullmatch(job_id):
            raise NotFound("there is no such job")
        return await self._jobs.get(by.tenant, job_id)


class Files(_OfJobs):
    def __init__(self, daemon: Daemon, bodies: Bodies, jobs: Jobs | None) -> None:
        super().__init__(jobs)
        self._daemon, self._bodies = daemon, bodies
        self._sizes: OrderedDict[tuple[object, ...], ResultBytes] = OrderedDict()

    async def upload(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        jobs, incoming = self._jobs, self._bodies.front.guard.incoming
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

    async def all(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        await exchange.no_body()  # from now on it is seen when the client leaves
        query = _query(exchange)
        purpose, order = query.text("purpose"), query.text("order") or "desc"
        if order not in ("asc", "desc"):
            raise Refusal("order", "is not one of asc, desc")
        limit, after = _limit(query, FILES_LISTED, FILES_LISTED_MAX), query.text("after")
        query.end()
        found: list[tuple[JobView, FileId]] = []
        for view in await self._jobs.list(by.tenant):
            if is_file(view) and purpose in (None, "batch"):
                found.append((view, FileId(Content.UPLOAD, view.job_id)))
            elif not is_file(view) and purpose in (None, "batch_output"):
                found += [(view, each) for each in result_files(view)]
        found.sort(key=lambda each: each[0].number, reverse=order == "desc")
        ids = [str(file_id) for _, file_id in found]
        first = _place(ids, after)
        shown = found[first : first + limit]
        data = [await self._object(by, view, file_id) for view, file_id in shown]
        return listed(data, has_more=first + limit < len(found))

    async def one(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return await self._object(by, *await self._file(exchange, by))

    async def content(self, exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
        view, file_id = await self._file(exchange, by)
        await self._bodies.front.body(exchange, by)  # from now on it is seen when the client leaves
        kind = "application/octet-stream"
        if exchange.method == "HEAD":
            await exchange.answer_bytes(b"", kind)
            return None
        exchange.begin_bytes(kind)
        async for chunk in _concatenated(self._lines(by, view.job_id, file_id.content)):
            await self._write(exchange, chunk)
        await exchange.end_bytes()
        return None

    async def delete(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        view, file_id = await self._file(exchange, by)
        if file_id.content is not Content.UPLOAD:
            raise WrongJobState(
                f"this file is a part of a batch: DELETE /v1/batches/{view.job_id} deletes all of it"
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

    async def _object(self, by: Caller, view: JobView, file_id: FileId) -> Mapping[str, Any]:
        num_bytes = view.num_bytes
        if file_id.content in (Content.OUTPUT, Content.ERRORS):
            found = await self._result_bytes(by, view)
            num_bytes = found.answers if file_id.content is Content.OUTPUT else found.errors
        return file_object(view, file_id, num_bytes)

    async def _result_bytes(self, by: Caller, view: JobView) -> ResultBytes:
        """All results are read for it, but of a job that has ended only once."""
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
        which = Which.ANSWERS if content is Content.OUTPUT else Which.ERRORS
        async for results in self._jobs.results(by.tenant, job_id, which, 0):
            for result in results:
                yield result.text.removesuffix(b"\n") + b"\n"

    async def _write(self, exchange: Exchange, chunk: bytes) -> None:
        try:
            async with asyncio.timeout(self._daemon.config.stall_seconds):
                await exchange.write(chunk)
        except TimeoutError:
            raise DeadlineExceeded("nothing was taken of what was sent") from None


class Batches(_OfJobs):
    def __init__(self, bodies: Bodies, jobs: Jobs | None) -> None:
        super().__init__(jobs)
        self._bodies = bodies

    async def create(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        jobs, fields = self._jobs, Fields(await self._bodies.json(exchange, by))
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
            raise Refusal("input_file_id", "is no file that was uploaded")
        file = await self._job(by, file_id.job_id)
        details = {"input_file_id": given, **({"metadata": metadata} if metadata else {})}
        header = JobHeader(
            f"batch_{secrets.token_hex(12)}", file.name, endpoint=endpoint, details=details
        )
        lines = _concatenated(lines_of(jobs, by.tenant, file.job_id))
        return batch_object(await jobs.create(by.tenant, header, lines))

    async def all(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        query = _query(exchange)
        limit, after = _limit(query, BATCHES_LISTED, BATCHES_LISTED_MAX), query.text("after")
        query.end()
        found = [each for each in await self._jobs.list(by.tenant) if not is_file(each)]
        found.sort(key=lambda each: -each.number)
        first = _place([each.job_id for each in found], after)
        data = [batch_object(each) for each in found[first : first + limit]]
        return listed(data, has_more=first + limit < len(found))

    async def one(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return batch_object(await self._batch(exchange, by))

    async def cancel(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        await self._bodies.front.body(exchange, by)  # which says nothing
        view = await self._batch(exchange, by)
        return batch_object(await self._jobs.cancel(by.tenant, view.job_id))

    async def delete(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        """What OpenAI's API lacks."""
        view = await self._batch(exchange, by)
        await self._jobs.delete(by.tenant, view.job_id)
        return {"id": view.job_id, "object": "batch", "deleted": True}

    async def _batch(self, exchange: Exchange, by: Caller) -> JobView:
        view = await self._job(by, exchange.values["job_id"])
        if is_file(view):
            raise NotFound("this is a file, and no batch")
        return view


async def lines_of(jobs: Jobs, tenant: str, job_id: str) -> AsyncIterator[bytes]:
    """As in the file: blank lines were not kept, but each of the others has the number that it had."""
    number = 0
    async for page in jobs.lines(tenant, job_id):
        for line in page:
            yield b"\n" * (line.number - number - 1) + line.text + b"\n"
            number = line.number


async def _concatenated(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """In pieces of some length."""
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


def _query(exchange: Exchange) -> Fields:
    text = exchange.scope.get("query_string", b"").decode("latin-1")
    try:
        return Fields(dict(parse_qsl(text, max_num_fields=QUERY_FIELDS_MAX)))
    except ValueError:
        raise InvalidArgument("query", f"has more than {QUERY_FIELDS_MAX} fields") from None


def _limit(query: Fields, default: int, most: int) -> int:
    given = query.text("limit")
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 9 and 1 <= int(given) <= most):
        raise Refusal("limit", f"must lie in 1..{most}")
    return int(given)


def _place(ids: list[str], after: str | None) -> int:
    if after is None:
        return 0
    if after not in ids:
        raise Refusal("after", "is none of these")
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
