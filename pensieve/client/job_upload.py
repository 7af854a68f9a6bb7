"""A file on its way to a daemon, as the messages of a CreateJob.

What is on the disk, or in memory, can be sent again; what comes from an iterator cannot.  A file that cannot
be read, or an iterator that fails, ends the messages without the last one, so that the daemon stores nothing;
the error is kept for whoever sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from pensieve.client.requests import check_id, check_text, new_id
from pensieve.errors import ConfigError
from pensieve.v1 import jobs_pb2 as pb

JobSource = str | Path | bytes | Iterable[bytes]
CHUNK_BYTES = 256 << 10


class JobUpload:
    """The messages of one file; `messages` makes them anew for each try."""

    def __init__(
        self,
        source: JobSource,
        job_id: str | None,
        name: str,
        endpoint: str,
        check_only: bool,
    ) -> None:
        self.error: Exception | None = None  # of the source
        self.can_repeat = isinstance(source, str | Path | bytes)
        self._source = source
        self.header = pb.JobHeader(
            job_id=new_id() if job_id is None else check_id(job_id, "job_id"),
            name=check_text("name", name),
            endpoint=check_text("endpoint", endpoint),
            check_only=check_only,
        )
        if self.can_repeat:
            digest = hashlib.sha256()
            for chunk in self._chunks():
                digest.update(chunk)
                self.header.num_bytes += len(chunk)
            self.header.sha256 = digest.hexdigest()

    def messages(self) -> Iterator[pb.CreateJobRequest]:
        """To be sent in this order."""
        yield pb.CreateJobRequest(header=self.header)
        try:
            for chunk in self._chunks():
                yield pb.CreateJobRequest(chunk=chunk)
        except Exception as error:
            self.error = error
            return
        yield pb.CreateJobRequest(complete=True)

    def _chunks(self) -> Iterator[bytes]:
        source = self._source
        if isinstance(source, str | Path):
            try:
                with Path(source).open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        yield chunk
            except OSError as error:
                raise ConfigError(f"cannot read {source}: {error.strerror}") from error
            return
        for each in [source] if isinstance(source, bytes) else source:
            for first in range(0, len(each), CHUNK_BYTES):
                yield each[first : first + CHUNK_BYTES]
