"""The file of a job on its way in: pieces of any length become numbered lines, a few at a time.

A line that is longer than any may be is kept up to where that is certain, so it is refused by its number like
others and takes no memory.  Blank lines have a number and are not kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from pensieve.errors import InvalidArgument, StorageFull
from pensieve.service.jobs.values import JobHeader
from pensieve.service.openai import LINE_BYTES_MAX
from pensieve.store.job_records import JobLine

FILE_BYTES_MAX = 2 << 30
LINES_MAX = 100_000  # with a request
NUMBERS_MAX = 200_000  # lines, blank ones included
PAGE_BYTES, PAGE_LINES = 256 << 10, 1000  # of lines that are stored at once


class Receiving:
    def __init__(self, header: JobHeader, bytes_left: int | None = None) -> None:
        """`bytes_left`: of the tenant's storage; None: any number."""
        self._header = header
        self._bytes_left = bytes_left
        self._digest = hashlib.sha256()
        self._line = bytearray()  # the last one, so far
        self._is_open = False  # it has begun
        self._num_lines = self.num_bytes = self._num_requests = 0

    @property
    def num_bytes_max(self) -> int:
        """That it has, or will have."""
        return max(self._header.num_bytes, self.num_bytes)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    async def lines(
        self,
        chunks: AsyncIterator[bytes],
        in_thread: Callable[[Callable[[], list[JobLine]]], Awaitable[list[JobLine]]],
    ) -> AsyncIterator[list[JobLine]]:
        """Pages of them; what a chunk holds is found `in_thread`, for it may be a million lines."""
        page: list[JobLine] = []
        num_stored = 0  # bytes of the file, with those of blank lines
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
        *whole, rest = chunk.split(b"\n")
        found = []
        for each in whole:
            self._add(each)
            if (line := self._end_line()) is not None:
                found.append(line)
        if rest:
            self._add(rest)
        return found

    def check(self) -> None:
        """All of it is here, and it is what was said."""
        header = self._header
        if header.num_bytes and header.num_bytes != self.num_bytes:
            raise InvalidArgument(
                "num_bytes", f"{self.num_bytes:,} bytes arrived, not {header.num_bytes:,}"
            )
        if header.sha256 and header.sha256 != self.sha256:
            raise InvalidArgument("sha256", "is not that of what arrived")
        if not self._num_requests:
            raise InvalidArgument("chunk", "the file has no line")

    def _take(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self.num_bytes += len(chunk)
        if self.num_bytes > FILE_BYTES_MAX:
            raise InvalidArgument("chunk", f"a file has at most {FILE_BYTES_MAX:,} bytes")
        if self._bytes_left is not None and self.num_bytes > self._bytes_left:
            raise StorageFull(f"this tenant has room for {self._bytes_left:,} more bytes of jobs")

    def _add(self, text: bytes) -> None:
        self._is_open = True
        self._line += text[: LINE_BYTES_MAX + 1 - len(self._line)]

    def _end_line(self) -> JobLine | None:
        self._num_lines += 1
        if self._num_lines > NUMBERS_MAX:
            raise InvalidArgument("chunk", f"a file has at most {NUMBERS_MAX:,} lines")
        text, self._line, self._is_open = bytes(self._line), bytearray(), False
        if not text.strip():
            return None
        self._num_requests += 1
        if self._num_requests > LINES_MAX:
            raise InvalidArgument("chunk", f"a file has at most {LINES_MAX:,} requests")
        return JobLine(self._num_lines, text.removesuffix(b"\r"))
