"""What the cache answers: an admission or a shortage, and where a conversation's chunks lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pensieve.core.iteration import PageCopy, SwapIn
from pensieve.core.prefix_tree import Chunk, Conversation


@dataclass(slots=True)
class Admission:
    """The pages of a turn's whole present context are reserved; what has to move for that."""

    copies: list[PageCopy] = field(default_factory=list)
    swap_ins: list[SwapIn] = field(default_factory=list)
    sources: list[Chunk] = field(default_factory=list)  # of `copies`; released at the commit
    device_tokens: int = 0  # of the turn's history, found on the device
    host_tokens: int = 0  # of the turn's history, on their way from the host
    copied: tuple[Chunk, Chunk] | None = None  # (source, target) of a copy on write


class Shortage(NamedTuple):
    """The turn does not fit now; it would if so many pages were available."""

    required_pages: int


class ChunkRun(NamedTuple):
    """Consecutive chunks of a conversation in the same location, with as many holders."""

    first_index: int
    num_chunks: int
    location: str
    num_holders: int


class Tail(NamedTuple):
    """A conversation's last chunk, partly used, that its turn may not append to: it copies it."""

    chunk: Chunk
    num_slots: int  # used by the conversation


def chunk_runs(conversation: Conversation) -> list[ChunkRun]:
    runs: list[ChunkRun] = []
    for branch in conversation.path():
        for chunk in branch.chunks:
            location, num_holders = chunk.location, len(branch.holders)
            if runs and (runs[-1].location, runs[-1].num_holders) == (location, num_holders):
                runs[-1] = runs[-1]._replace(num_chunks=runs[-1].num_chunks + 1)
            else:
                runs.append(ChunkRun(chunk.index, 1, location, num_holders))
    return runs


IsIntact = Callable[[int], bool]  # of a host page: it holds what was copied to it


def trusted(host_page: int) -> bool:
    """That nothing else writes to the host tier, where nobody looks."""
    return True
