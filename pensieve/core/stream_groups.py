"""Which streamed turns of an iteration attend together, and the pages that each group stages.

A group's pages fill a staging arena at most (`packed` says which turns make a group, and in which order).
Turns that begin with the same chunks are kept together as far as an arena holds them, so what they share is
copied once for all of them.

What is packed in one iteration is packed alike in the next, as long as the same turns stream and their pages
still fit: then it is not searched again, but every PACK_EVERY iterations.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from pensieve.core.cache_config import CacheConfig
from pensieve.core.iteration import PageGroup, Slice
from pensieve.core.iteration_cost import work_of
from pensieve.core.prefix_tree import Branch, Chunk
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.stream_packing import Item, packed
from pensieve.core.turn import Turn

PACK_EVERY = 32
PathOf = Callable[[Turn], list[Branch]]


class StreamGroups:
    def __init__(self, cache: CacheConfig, config: SchedulerConfig, path_of: PathOf) -> None:
        chunk_tokens, pages_max = cache.chunk_tokens, cache.staging_pages
        self._size, self._pages_max = chunk_tokens, pages_max
        self._cost = config.cost
        self._copy_seconds, self._group_seconds = config.copy_seconds, config.group_seconds
        self._path_of = path_of
        self._indexes = array("i", range(pages_max))
        self._full = array("i", [chunk_tokens]) * pages_max
        self._none = array("i", [0]) * pages_max
        self._kept: tuple[list[int], list[list[int]]] = (
            [],
            [],
        )  # turn ids, and groups of their items
        self._age = 0

    def arranged(
        self,
        slices: Sequence[Slice],
        streamed: Mapping[int, Turn],
        filled_before: Mapping[Chunk, int],
    ) -> tuple[tuple[Slice, ...], tuple[PageGroup, ...]]:
        """The iteration's slices, those of streamed turns behind the others, and their groups."""
        resident: list[Slice] = []
        pieces: dict[int, list[Slice]] = {turn_id: [] for turn_id in streamed}
        for piece in slices:
            of_turn = pieces.get(piece.turn_id)
            (resident if of_turn is None else of_turn).append(piece)
        clusters = self._clusters([streamed[turn_id] for turn_id in pieces], pieces)
        items = [self._item(cluster, pieces) for cluster in clusters]
        before = self._cost.iteration_seconds((each.start, each.stop) for each in resident)
        arranged, groups = resident, []
        for indexes in self._packed(list(pieces), items, before):
            first, group = len(arranged), _Group(self, filled_before)
            for index in indexes:
                for turn in clusters[index]:
                    arranged += group.with_turn(turn, pieces[turn.turn_id])
            groups.append(group.closed(first, len(arranged)))
        return tuple(arranged), tuple(groups)

    def _packed(self, turn_ids: list[int], items: list[Item], before: float) -> list[list[int]]:
        self._age += 1
        kept_ids, groups = self._kept
        is_known = turn_ids == kept_ids and sum(map(len, groups)) == len(items)
        if is_known and self._age < PACK_EVERY and self._fit(items, groups):
            return groups
        groups = packed(items, self._pages_max, before, self._group_seconds)
        self._kept, self._age = (turn_ids, groups), 0
        return groups

    def _fit(self, items: Sequence[Item], groups: Iterable[Iterable[int]]) -> bool:
        return all(sum(items[i].pages for i in group) <= self._pages_max for group in groups)

    def _clusters(
        self, turns: Sequence[Turn], pieces: Mapping[int, list[Slice]]
    ) -> list[list[Turn]]:
        """Turns that share their first chunks, parted where an arena does not hold them all."""
        by_root: dict[int, list[Turn]] = {}
        for turn in turns:
            branch = turn.chunks[0].branch
            is_shared = branch is not None and len(branch.holders) > 1
            by_root.setdefault(id(branch if is_shared else turn), []).append(turn)
        clusters: list[list[Turn]] = []
        for sharing in by_root.values():
            if len(sharing) == 1:
                clusters.append(sharing)
                continue
            left = 0
            seen: set[Branch] = set()
            for turn in sharing:
                path, stop = self._path_of(turn), self._num_pages(pieces[turn.turn_id])
                own = sum(_length(each, stop) for each in path if each not in seen)
                if own > left:
                    clusters.append([])
                    left, own = self._pages_max, stop
                    seen.clear()
                clusters[-1].append(turn)
                seen.update(path)
                left -= own
        return clusters

    def _item(self, cluster: Sequence[Turn], pieces: Mapping[int, list[Slice]]) -> Item:
        spans = [(each.start, each.stop) for turn in cluster for each in pieces[turn.turn_id]]
        if len(cluster) == 1:
            num_pages = self._num_pages(pieces[cluster[0].turn_id])
        else:
            stops = {
                branch: self._num_pages(pieces[turn.turn_id])
                for turn in cluster
                for branch in self._path_of(turn)
            }
            num_pages = sum(_length(branch, stop) for branch, stop in stops.items())
        work = work_of(spans)
        attention = self._cost.attention_seconds(work.pairs, work.keys)
        return Item(num_pages, self._copy_seconds * num_pages, attention)

    def _num_pages(self, pieces: Sequence[Slice]) -> int:
        return -(-pieces[-1].stop // self._size)

    def pages(self, first: int, stop: int) -> array[int]:
        """Indexes into a group's pages."""
        return self._indexes[first:stop]


class _Group:
    """A group while its turns are put into it."""

    def __init__(self, groups: StreamGroups, filled_before: Mapping[Chunk, int]) -> None:
        self._groups, self._filled_before = groups, filled_before
        self._host_pages, self._loaded, self._stored = array("i"), array("i"), array("i")
        self._begins: dict[Branch, int] = {}  # where the pages of a shared branch are

    def with_turn(self, turn: Turn, pieces: Sequence[Slice]) -> list[Slice]:
        """The turn's slices, whose page tables are indexes into the group's pages."""
        groups, stop = self._groups, self._groups._num_pages(pieces)
        table = array("i")
        is_decode = len(pieces) == 1 and pieces[0].stop - pieces[0].start == 1
        for branch in groups._path_of(turn):
            count = _length(branch, stop)
            if not count:
                break
            is_shared = len(branch.holders) > 1
            begin = self._begins.get(branch) if is_shared else None
            if begin is None:
                begin = len(self._host_pages)
                if is_shared:
                    self._begins[branch] = begin
                pages = turn.page_table[branch.start : branch.start + count]
                self._add(pages, branch.chunks, is_decode and branch.start + count == stop)
            table += groups.pages(begin, begin + count)
        size = groups._size
        return [each._replace(page_table=table[: -(-each.stop // size)]) for each in pieces]

    def _add(self, pages: array[int], chunks: Sequence[Chunk], is_decode: bool) -> None:
        """Pages of a branch's first chunks; a decode writes to the last of them, and to nothing else."""
        groups, before = self._groups, self._filled_before
        self._host_pages += pages
        if is_decode:
            last = chunks[len(pages) - 1]
            self._loaded += groups._full[: len(pages) - 1]
            self._loaded.append(before[last])
            self._stored += groups._none[: len(pages) - 1]
            self._stored.append(last.filled)
            return
        for chunk in chunks[: len(pages)]:
            self._loaded.append(before.get(chunk, chunk.filled))
            self._stored.append(chunk.filled if chunk in before else 0)

    def closed(self, first_slice: int, stop_slice: int) -> PageGroup:
        return PageGroup(first_slice, stop_slice, self._host_pages, self._loaded, self._stored)


def _length(branch: Branch, stop: int) -> int:
    """How many of its chunks are among the first `stop` of a context."""
    return max(min(branch.end, stop) - branch.start, 0)
