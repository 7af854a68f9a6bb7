"""Read a multipart/form-data request with one file, and stream the file.

Form fields may come before or after the file. Headers, parts and fields have size limits, and the file is
passed on in chunks, so memory is bounded. The time limits are the same as for job uploads over gRPC
(guard/request_bodies.py).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from pensieve.api.http.exchange import Exchange
from pensieve.errors import InvalidArgument
from pensieve.extras import need
from pensieve.guard.request_bodies import IncomingBodies

PURPOSE = "the HTTP API"
CHUNK_BYTES = 256 << 10  # bytes of the file in a chunk
CONTENT_TYPE_BYTES_MAX = 1 << 10
BOUNDARY_BYTES_MAX = 70  # RFC 2046
PARTS_MAX = 16
HEADERS_MAX = 8  # per part
HEADER_BYTES_MAX = 4 << 10  # per header of a part
FIELD_BYTES_MAX = 4 << 10

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # the client gets the errors


class PartBegan(NamedTuple):
    """The start of a part. The following `PartData` belong to this part."""

    name: str
    filename: str


class PartData(NamedTuple):
    """A piece of data of the current part."""

    data: bytes


class MultipartForm:
    """An incremental parser of a form."""

    def __init__(self, content_type: str) -> None:
        self._library = need("http", "python_multipart.multipart", PURPOSE)
        self._pieces: deque[PartBegan | PartData] = deque()
        self._num_parts = 0
        self._name, self._value = b"", b""  # of the current header
        self._disposition = b""
        self._has_ended = False
        self._parser = self._library.MultipartParser(
            self._boundary(content_type),
            {
                "on_part_begin": self._part_began,
                "on_header_field": self._header_name_came,
                "on_header_value": self._header_value_came,
                "on_header_end": self._header_ended,
                "on_headers_finished": self._headers_ended,
                "on_part_data": self._data_came,
                "on_end": self._ended,
            },
            max_header_count=HEADERS_MAX,
            max_header_size=HEADER_BYTES_MAX,
        )

    def push(self, data: bytes) -> None:
        """Parse the next bytes. Then call `pop` until it returns None."""
        try:
            self._parser.write(data)
        except self._library.MultipartParseError as error:
            raise InvalidArgument("form", f"is not valid multipart/form-data: {error}") from None

    def pop(self) -> PartBegan | PartData | None:
        """Return the next parsed piece. None: more bytes are needed."""
        return self._pieces.popleft() if self._pieces else None

    def end(self) -> None:
        """Check that the form is complete."""
        if not self._has_ended:
            raise InvalidArgument("form", "ends before its closing boundary")

    def _boundary(self, content_type: str) -> bytes:
        if len(content_type) > CONTENT_TYPE_BYTES_MAX:
            raise InvalidArgument(
                "content-type", f"is longer than {CONTENT_TYPE_BYTES_MAX:,} bytes"
            )
        kind, options = self._library.parse_options_header(content_type)
        if kind != b"multipart/form-data":
            raise InvalidArgument("content-type", "must be multipart/form-data")
        boundary: bytes = options.get(b"boundary", b"")
        if not boundary or not boundary.isascii():
            raise InvalidArgument("content-type", "needs a boundary of ASCII characters")
        if len(boundary) > BOUNDARY_BYTES_MAX:
            problem = f"has a boundary of more than {BOUNDARY_BYTES_MAX} bytes"
            raise InvalidArgument("content-type", problem)
        return boundary

    # -- called by the parser --

    def _part_began(self) -> None:
        self._num_parts += 1
        if self._num_parts > PARTS_MAX:
            raise InvalidArgument("form", f"has more than {PARTS_MAX} parts")
        self._disposition = b""

    def _header_name_came(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value_came(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ended(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name, self._value = b"", b""

    def _headers_ended(self) -> None:
        kind, options = self._library.parse_options_header(self._disposition)
        if kind != b"form-data" or not options.get(b"name"):
            raise InvalidArgument("form", "has a part without a name")
        name, filename = options[b"name"], options.get(b"filename", b"")
        self._pieces.append(
            PartBegan(name.decode("utf-8", "replace"), filename.decode("utf-8", "replace"))
        )

    def _data_came(self, data: bytes, start: int, end: int) -> None:
        self._pieces.append(PartData(data[start:end]))

    def _ended(self) -> None:
        self._has_ended = True


class Upload:
    def __init__(self, exchange: Exchange, incoming: IncomingBodies, group: str) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._form = MultipartForm(exchange.headers.get("content-type", ""))
        self._raw = incoming.bodies(_Chunks(exchange), group)
        self._field = ""  # name of the current field; "" for the file

    async def find_file(self) -> None:
        """Read fields up to the first byte of the file."""
        while (piece := await self._next()) is not None:
            if self._take(piece):
                return
        raise InvalidArgument("file", "is missing")

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the file's data. Afterwards, `fields` is complete."""
        data = bytearray()
        while (piece := await self._next()) is not None:
            if self._take(piece):
                raise InvalidArgument("file", "may appear only once")
            if isinstance(piece, PartData) and not self._field:
                data += piece.data
            if len(data) >= CHUNK_BYTES:
                yield bytes(data)
                data.clear()
        if data:
            yield bytes(data)

    def _take(self, piece: PartBegan | PartData) -> bool:
        """Store a piece of a field. Return whether this piece begins the file."""
        if isinstance(piece, PartBegan) and piece.name == "file":
            self._field, self.filename = "", piece.filename
            return True
        if isinstance(piece, PartBegan):
            if piece.name in self.fields:
                raise InvalidArgument("form", f"has the field {piece.name[:80]!r} twice")
            self._field = piece.name
            self.fields[piece.name] = ""
        elif self._field:
            text = self.fields[self._field] + piece.data.decode("utf-8", "replace")
            if len(text) > FIELD_BYTES_MAX:
                raise InvalidArgument("form", f"has a field of more than {FIELD_BYTES_MAX:,} bytes")
            self.fields[self._field] = text
        return False

    async def _next(self) -> PartBegan | PartData | None:
        while (piece := self._form.pop()) is None:
            chunk = await anext(self._raw, None)
            if chunk is None:
                self._form.end()
                return None
            self._form.push(chunk)
        return piece


class _Chunks:
    """An HTTP request as a BodySource: each piece of the body is one message."""

    def __init__(self, exchange: Exchange) -> None:
        self.read = exchange.read_chunk
        self.add_done_callback: Any = exchange.add_done_callback
