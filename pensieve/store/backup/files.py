"""The files of a backup: a base with its description, and segments.

    base.db     a database of SQLite, complete; it can be opened as it is
    base.json   its description, with the SHA-256 of base.db and, in a line of its own, of the description
    N.segment   a line with the format, a line with the description (JSON), the compressed changes (numbers of
                pages, then pages), and the SHA-256 of all that
    newest      the number of the newest segment, written after it; older backups have no such file

Whatever does not agree with its checksum is BackupDamaged, which names the file.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path

from pensieve.errors import BackupDamaged, StoreTooNew
from pensieve.store.backup.capture import Changes
from pensieve.store.bodies import pack_tokens, unpack_tokens
from pensieve.store.durable import new_file

BASE_NAME = "base.db"
DESCRIPTION_NAME = "base.json"
NEWEST_NAME = "newest"
FORMAT = b"pensieve segment 1\n"
BASE_FORMAT = 1
DIGEST_BYTES = 32
HASH_BYTES = 4 * 2**20
COMPRESSION = 1


@dataclass(frozen=True)
class Base:
    """What the description of a base says."""

    history: str
    generation: int
    time: float
    page_bytes: int
    num_pages: int
    schema: int
    sha256: str  # of the database
    format: int = BASE_FORMAT

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_pages


@dataclass(frozen=True)
class SegmentHead:
    """What the description of a segment says."""

    history: str
    generation: int
    number: int  # from 1 on
    time: float
    page_bytes: int
    num_pages: int  # of the database
    num_changed: int
    previous: str  # SHA-256 of the segment before it, or of the base


@dataclass(frozen=True)
class Segment:
    head: SegmentHead
    changes: Changes
    sha256: str


def write_base_description(folder: Path, base: Base) -> None:
    text = json.dumps(asdict(base), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    with new_file(folder / DESCRIPTION_NAME) as file:
        file.write(f"{text}\n{digest}\n".encode())


def read_base_description(folder: Path) -> Base:
    path = folder / DESCRIPTION_NAME
    try:
        text, digest, _ = _read(path).decode(errors="replace").split("\n")
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise ValueError
        fields = json.loads(text)
        if fields["format"] > BASE_FORMAT:
            raise StoreTooNew(f"{path} has a format of a newer Pensieve, which can restore it")
        return Base(**fields)
    except (ValueError, TypeError, KeyError):
        raise BackupDamaged(f"{path} fails its checksum") from None


def write_newest(folder: Path, number: int) -> None:
    with new_file(folder / NEWEST_NAME) as file:
        file.write(f"{number}\n".encode())


def read_newest(folder: Path) -> int | None:
    """The number of the newest segment that was written, 0 for none; None if that is not known."""
    path = folder / NEWEST_NAME
    try:
        return int(_read(path)) if path.exists() else None
    except ValueError:
        raise BackupDamaged(f"{path} is not a number") from None


def write_segment(path: Path, head: SegmentHead, changes: Changes) -> str:
    """Returns its SHA-256."""
    numbers = sorted(changes.pages)
    packer = zlib.compressobj(COMPRESSION)
    parts = [FORMAT, json.dumps(asdict(head), sort_keys=True).encode(), b"\n"]
    parts.append(packer.compress(pack_tokens(numbers)))
    parts += [packer.compress(changes.pages[number]) for number in numbers]
    parts.append(packer.flush())
    digest = hashlib.sha256()
    with new_file(path) as file:
        for part in parts:
            digest.update(part)
            file.write(part)
        file.write(digest.digest())
    return digest.hexdigest()


def read_segment_head(path: Path) -> SegmentHead:
    """The description alone; the checksum is not looked at."""
    try:
        with path.open("rb") as file:
            if file.readline(len(FORMAT)) != FORMAT:
                raise ValueError
            return SegmentHead(**json.loads(file.readline(4096)))
    except OSError as error:
        raise BackupDamaged(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError):
        raise BackupDamaged(f"{path} is not a whole segment") from None


def read_segment(path: Path) -> Segment:
    """All of it, checked."""
    data = _read(path)
    whole, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    found = hashlib.sha256(whole)
    if found.digest() != digest:
        raise BackupDamaged(f"{path} fails its checksum")
    head = read_segment_head(path)
    content = zlib.decompress(whole.split(b"\n", 2)[2])
    pages_at = 4 * head.num_changed
    numbers: array[int] = unpack_tokens(content[:pages_at])
    pages = {
        number: content[at : at + head.page_bytes]
        for number, at in zip(numbers, range(pages_at, len(content), head.page_bytes), strict=True)
    }
    return Segment(head, Changes(pages, head.num_pages, head.time), found.hexdigest())


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BackupDamaged(f"{path} cannot be read: {error.strerror}") from error
