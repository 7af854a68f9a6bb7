"""A form with a file (multipart/form-data), taken apart as its bytes come; nothing of the file is kept here.

    preamble ─> delimiter ─> head of a part ─> its data ─> delimiter ─> … ─> closing delimiter ─> the rest

`push` gives what a piece of the body says: that a part begins, and pieces of its data.  However the body is
cut, all pieces of a part are its data.  What is withheld is shorter than a delimiter or a head, so a form of
any length takes little memory; looking for a delimiter takes time in proportion to the body.
"""

from __future__ import annotations

from email.message import Message
from enum import Enum
from typing import NamedTuple

from pensieve.errors import InvalidArgument

BOUNDARY_CHARACTERS_MAX = 70
HEAD_BYTES_MAX = 8 << 10
PREAMBLE_BYTES_MAX = 8 << 10
PARTS_MAX = 16


class PartBegan(NamedTuple):
    """What follows is this field's."""

    name: str
    filename: str | None  # None: it is no file


class PartData(NamedTuple):
    """A piece of the field that began last."""

    data: bytes


class State(Enum):
    """What comes next."""

    PREAMBLE = "preamble"
    DELIMITED = "delimited"  # two bytes that say whether another part follows
    HEAD = "head"
    DATA = "data"
    END = "end"


class Multipart:
    def __init__(self, content_type: str) -> None:
        found = _header("content-type", content_type)
        try:
            boundary = found.get_boundary() or ""
        except (ValueError, LookupError):  # in a charset that cannot be read
            boundary = ""
        if found.get_content_type() != "multipart/form-data":
            raise InvalidArgument("content-type", "must be multipart/form-data")
        if not 1 <= len(boundary) <= BOUNDARY_CHARACTERS_MAX or not boundary.isascii():
            raise InvalidArgument("content-type", "has no boundary, or one that cannot be")
        self._delimiter = b"\r\n--" + boundary.encode()
        self._state = State.PREAMBLE
        self._bytes = bytearray(b"\r\n")  # that are not understood yet; the first line may delimit
        self._num_passed = 0  # bytes of the preamble
        self._num_parts = 0

    def push(self, chunk: bytes) -> list[PartBegan | PartData]:
        self._bytes += chunk
        found: list[PartBegan | PartData] = []
        while self._step(found):
            pass
        return found

    def end(self) -> None:
        """The body has ended."""
        if self._state is not State.END:
            raise _broken("ends before its closing boundary")

    def _step(self, found: list[PartBegan | PartData]) -> bool:
        """Understand what comes next; False: more bytes are needed."""
        if self._state is State.PREAMBLE:
            is_over, passed = self._until_delimiter()
            self._num_passed += len(passed)
            if self._num_passed > PREAMBLE_BYTES_MAX:
                raise _broken("has no boundary at its beginning")
            return is_over
        if self._state is State.DELIMITED:
            return self._after_delimiter()
        if self._state is State.HEAD:
            return self._head(found)
        if self._state is State.DATA:
            is_over, data = self._until_delimiter()
            if data:
                found.append(PartData(data))
            return is_over
        self._bytes.clear()
        return False

    def _until_delimiter(self) -> tuple[bool, bytes]:
        """What lies before it, and whether it has come."""
        place = self._bytes.find(self._delimiter)
        is_there = place >= 0
        end = place if is_there else max(len(self._bytes) - len(self._delimiter) + 1, 0)
        before = bytes(self._bytes[:end])
        del self._bytes[: end + len(self._delimiter) if is_there else end]
        if is_there:
            self._state = State.DELIMITED
        return is_there, before

    def _after_delimiter(self) -> bool:
        if len(self._bytes) < 2:
            return False
        mark = bytes(self._bytes[:2])
        del self._bytes[:2]
        if mark == b"--":
            self._state = State.END
        elif mark == b"\r\n":
            self._num_parts += 1
            if self._num_parts > PARTS_MAX:
                raise _broken(f"has more than {PARTS_MAX} parts")
            self._state = State.HEAD
        else:
            raise _broken("has something else than a line end behind a boundary")
        return True

    def _head(self, found: list[PartBegan | PartData]) -> bool:
        place = self._bytes.find(b"\r\n\r\n")
        if (place if place >= 0 else len(self._bytes)) > HEAD_BYTES_MAX:
            raise _broken(f"has a part whose head is larger than {HEAD_BYTES_MAX:,} bytes")
        if place < 0:
            return False
        lines = bytes(self._bytes[:place]).decode("utf-8", "replace").split("\r\n")
        del self._bytes[: place + 4]
        found.append(_part(lines))
        self._state = State.DATA
        return True


def _part(lines: list[str]) -> PartBegan:
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() != "content-disposition":
            continue
        head = _header("content-disposition", value)
        field = head.get_param("name", header="content-disposition")
        if head.get_content_disposition() == "form-data" and isinstance(field, str):
            return PartBegan(field, _filename(head))
    raise _broken("has a part without a name")


def _filename(head: Message) -> str | None:
    """`filename*` may be in any charset, and have what is no text in it."""
    try:
        found = head.get_filename()
    except (ValueError, LookupError):
        raise _broken("has a filename in a charset that cannot be read") from None
    return None if found is None else found.encode("utf-8", "replace").decode()


def _header(name: str, value: str) -> Message:
    """For its parameters."""
    found = Message()
    found[name] = value.strip()
    return found


def _broken(problem: str) -> InvalidArgument:
    return InvalidArgument("form", problem)
