"""What happened to cached chunks, and why; a bounded log for operators."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

from pensieve.core.prefix_tree import Chunk

EVENTS_MAX = 8192
HOLDERS_NAMED_MAX = 4


class EvictionEvent(NamedTuple):
    at: float
    conversation_ids: tuple[str, ...]  # some of the holders
    chunk_index: int
    what: str  # a key of DESCRIPTIONS
    value: float | None = None  # its retention value
    kept_value: float | None = None  # that of the chunk that was kept instead


DESCRIPTIONS = {
    "dropped": "dropped from the host tier, which was full",
    "marked_to_drop": "not copied to the host tier, which was full of more valuable ones, "
    "or not worth the copy",
    "recomputed": "dropped from the host tier: computing it again was quicker than copying it",
    "damaged": "dropped from the host tier: it was not what had been copied there",
    "lost": "dropped from the device tier: its page was needed and no copy was kept",
    "discarded": "discarded: the turn that computed it failed",
    "evicted": "dropped on request",
    "moved": "moved to the host on request",
}


class EvictionLog:
    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        self._events: deque[EvictionEvent] = deque(maxlen=events_max)

    def record(
        self,
        chunk: Chunk,
        now: float,
        what: str,
        value: float | None = None,
        kept_value: float | None = None,
    ) -> None:
        if chunk.branch is not None:
            names = (holder.conversation_id for holder in reversed(chunk.branch.holders))
            some = tuple(islice(names, HOLDERS_NAMED_MAX))
            self._events.append(EvictionEvent(now, some, chunk.index, what, value, kept_value))

    def lines_of(self, conversation_id: str, now: float) -> list[tuple[float, str]]:
        """(seconds ago, sentence), the latest last; what happened at once to many chunks is one."""
        lines: list[tuple[float, str]] = []
        group: list[EvictionEvent] = []
        for event in self._events:
            if conversation_id not in event.conversation_ids:
                continue
            if group and (event.at, event.what) != (group[0].at, group[0].what):
                lines.append((now - group[0].at, _sentence(group)))
                group = []
            group.append(event)
        if group:
            lines.append((now - group[0].at, _sentence(group)))
        return lines


def _sentence(group: list[EvictionEvent]) -> str:
    first, last = group[0].chunk_index, group[-1].chunk_index
    which = f"chunk {first}" if len(group) == 1 else f"{len(group)} chunks, {first} to {last},"
    text = f"{which} {DESCRIPTIONS[group[0].what]}"
    value, kept_value = group[-1].value, group[-1].kept_value
    if value is not None and kept_value is not None:
        text += f" (retention value {value:.3g}, that of what stayed {kept_value:.3g})"
    elif value is not None:
        text += f" (retention value {value:.3g})"
    return text
