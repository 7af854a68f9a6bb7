"""A form with one file, read as its request comes: the file goes on in pieces, and is never here as a whole.

Fields may come before the file and behind it.  The body's memory and time are bounded as those of a job's
file over gRPC are (service/grpc/incoming.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pensieve.errors import InvalidArgument
from pensieve.service.grpc.incoming import Incoming
from pensieve.service.http.exchange import Exchange
from pensieve.service.http.multipart import Multipart, PartBegan, PartData

CHUNK_BYTES = 256 << 10  # of a file, that go on at once
FIELD_BYTES_MAX = 4 << 10


class Upload:
    def __init__(self, exchange: Exchange, incoming: Incoming, group: str) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._parser = Multipart(exchange.headers.get("content-type", ""))
        self._raw = incoming.bodies(_Chunks(exchange), group)
        self._unread: list[PartBegan | PartData] = []  # by `_take`, the next one last
        self._field = ""  # that the data is of; "" for the file's

    async def find_file(self) -> None:
        """Read up to its first byte."""
        while (piece := await self._next()) is not None:
            if self._take(piece):
                return
        raise InvalidArgument("file", "is missing")

    async def chunks(self) -> AsyncIterator[bytes]:
        """Those of the file; afterwards `fields` are all there."""
        data = bytearray()
        while (piece := await self._next()) is not None:
            if self._take(piece):
                raise InvalidArgument("file", "a form has one file")
            if isinstance(piece, PartData) and not self._field:
                data += piece.data
            if len(data) >= CHUNK_BYTES:
                yield bytes(data)
                data.clear()
        if data:
            yield bytes(data)

    def _take(self, piece: PartBegan | PartData) -> bool:
        """Whether a file begins."""
        if isinstance(piece, PartBegan) and piece.name == "file":
            self._field, self.filename = "", piece.filename or ""
            return True
        if isinstance(piece, PartBegan):
            if not piece.name or piece.name in self.fields:
                raise InvalidArgument("form", "has a field without a name, or one twice")
            self._field = piece.name
            self.fields[piece.name] = ""
        elif self._field:
            text = self.fields[self._field] + piece.data.decode("utf-8", "replace")
            if len(text) > FIELD_BYTES_MAX:
                raise InvalidArgument("form", f"has a field of more than {FIELD_BYTES_MAX:,} bytes")
            self.fields[self._field] = text
        return False

    async def _next(self) -> PartBegan | PartData | None:
        while not self._unread:
            chunk = await anext(self._raw, None)
            if chunk is None:
                self._parser.end()
                return None
            self._unread = self._parser.push(chunk)[::-1]
        return self._unread.pop()


class _Chunks:
    """A request to whom takes in messages of gRPC: each piece of its body is one."""

    def __init__(self, exchange: Exchange) -> None:
        self.read = exchange.read_chunk
        self.add_done_callback: Any = exchange.add_done_callback
