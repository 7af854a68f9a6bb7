"""What happened to chunks and why: a bounded memory for whoever asks about one conversation."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

from pensieve.core.prefix_tree import Chunk

HAPPENINGS_MAX = 8192
HOLDERS_NAMED_MAX = 4


class Happening(NamedTuple):
    at: float
    conversation_ids: tuple[str, ...]  # some of the holders
    chunk_index: int
    what: str  # a key of SENTENCES
    value: float | None = None  # its retention value
    rival: float | None = None  # of what stayed in its place


SENTENCES = {
    "dropped": "dropped from the host tier, which was full",
    "condemned": "not copied to the host tier, which was full of more valuable ones, "
    "or not worth the copy",
    "recomputed": "dropped from the host tier: computing it again was quicker than copying it",
    "lost": "dropped from the device tier: its page was needed and no copy was kept",
    "discarded": "discarded: the turn that computed it failed",
    "evicted": "dropped on request",
    "moved": "moved to the host on request",
}


class Chronicle:
    def __init__(self, happenings_max: int = HAPPENINGS_MAX) -> None:
        self._happenings: deque[Happening] = deque(maxlen=happenings_max)

    def note(
        self,
        chunk: Chunk,
        now: float,
        what: str,
        value: float | None = None,
        rival: float | None = None,
    ) -> None:
        if chunk.branch is not None:
            names = (holder.conversation_id for holder in reversed(chunk.branch.holders))
            some = tuple(islice(names, HOLDERS_NAMED_MAX))
            self._happenings.append(Happening(now, some, chunk.index, what, value, rival))

    def of(self, conversation_id: str, now: float) -> list[tuple[float, str]]:
        """(seconds ago, sentence), the latest last; what happened at once to many chunks is one."""
        told: list[tuple[float, str]] = []
        group: list[Happening] = []
        for each in self._happenings:
            if conversation_id not in each.conversation_ids:
                continue
            if group and (each.at, each.what) != (group[0].at, group[0].what):
                told.append((now - group[0].at, _sentence(group)))
                group = []
            group.append(each)
        if group:
            told.append((now - group[0].at, _sentence(group)))
        return told


def _sentence(group: list[Happening]) -> str:
    first, last = group[0].chunk_index, group[-1].chunk_index
    which = f"chunk {first}" if len(group) == 1 else f"{len(group)} chunks, {first} to {last},"
    text = f"{which} {SENTENCES[group[0].what]}"
    value, rival = group[-1].value, group[-1].rival
    if value is not None and rival is not None:
        text += f" (retention value {value:.3g}, that of what stayed {rival:.3g})"
    elif value is not None:
        text += f" (retention value {value:.3g})"
    return text
