"""Which streamed turns of an iteration attend together, and the pages that each group stages.

A group's pages fill a staging arena at most (`packed` says which turns make a group, and in which order).
Turns that begin with the same chunks are kept together as far as an arena holds them, so what they share is
copied once for all of them.

What is packed in one iteration is packed alike in the next, as long as the same turns stream and their pages
still fit: then it is not searched again, but every PACK_EVERY iterations.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

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
        self.size, self._pages_max = chunk_tokens, pages_max
        self._cost = config.cost
        self._copy_seconds, self._group_seconds = config.copy_seconds, config.group_seconds
        self.path_of = path_of
        self.indexes = array("i", range(pages_max))
        self.full = array("i", [chunk_tokens]) * pages_max
        self.none = array("i", [0]) * pages_max
        self._kept: tuple[list[int], list[list[int]]] = (
            [],
            [],
        )  # turn ids, and those of each group
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
        turn_ids = list(pieces)
        kept_ids, groups = self._kept
        self._age += 1
        if self._age < PACK_EVERY and turn_ids == kept_ids:
            made = self._made(resident, groups, streamed, pieces, filled_before)
            if all(len(group.host_pages) <= self._pages_max for group in made[1]):
                return made
        groups = self._packed([streamed[turn_id] for turn_id in turn_ids], pieces, resident)
        self._kept, self._age = (turn_ids, groups), 0
        return self._made(resident, groups, streamed, pieces, filled_before)

    def _made(
        self,
        resident: Sequence[Slice],
        groups: Sequence[Sequence[int]],
        streamed: Mapping[int, Turn],
        pieces: Mapping[int, list[Slice]],
        filled_before: Mapping[Chunk, int],
    ) -> tuple[tuple[Slice, ...], tuple[PageGroup, ...]]:
        arranged, made = list(resident), []
        for turn_ids in groups:
            first, group = len(arranged), _Group(self, filled_before)
            for turn_id in turn_ids:
                group.add(streamed[turn_id], pieces[turn_id], arranged)
            made.append(group.closed(first, len(arranged)))
        return tuple(arranged), tuple(made)

    def _packed(
        self, turns: Sequence[Turn], pieces: Mapping[int, list[Slice]], resident: Sequence[Slice]
    ) -> list[list[int]]:
        """The turns of each group, by their ids."""
        clusters = self._clusters(turns, pieces)
        items = [self._item(cluster, pieces) for cluster in clusters]
        before = self._cost.iteration_seconds((each.start, each.stop) for each in resident)
        groups = packed(items, self._pages_max, before, self._group_seconds)
        return [[turn.turn_id for i in group for turn in clusters[i]] for group in groups]

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
                path, stop = self.path_of(turn), self.num_pages(pieces[turn.turn_id])
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
            num_pages = self.num_pages(pieces[cluster[0].turn_id])
        else:
            stops = {
                branch: self.num_pages(pieces[turn.turn_id])
                for turn in cluster
                for branch in self.path_of(turn)
            }
            num_pages = sum(_length(branch, stop) for branch, stop in stops.items())
        work = work_of(spans)
        attention = self._cost.attention_seconds(work.pairs, work.keys)
        return Item(num_pages, self._copy_seconds * num_pages, attention)

    def num_pages(self, pieces: Sequence[Slice]) -> int:
        return -(-pieces[-1].stop // self.size)


class _Group:
    """A group while its turns are put into it."""

    def __init__(self, groups: StreamGroups, filled_before: Mapping[Chunk, int]) -> None:
        self._groups, self._filled_before = groups, filled_before
        self._host_pages, self._loaded, self._stored = array("i"), array("i"), array("i")
        self._begins: dict[Branch, int] = {}  # where the pages of a shared branch are

    def add(self, turn: Turn, pieces: Sequence[Slice], slices: list[Slice]) -> None:
        """Put in the turn, and its slices behind these; their page tables are indexes into the pages."""
        groups, first = self._groups, pieces[0]
        is_decode = len(pieces) == 1 and first.stop - first.start == 1
        stop, count = groups.num_pages(pieces), len(turn.chunks)
        if is_decode and stop == count and _is_alone(turn):
            begin = len(self._host_pages)
            self._add(turn.page_table, turn.chunks, True)
            table = groups.indexes[begin : begin + count]
            # As `_replace` does, in a third of the time: there is one for each turn that generates.
            slices.append(Slice(*first[:4], table, *first[5:]))
            return
        table = array("i")
        for branch in groups.path_of(turn):
            count = _length(branch, stop)
            if not count:
                break
            is_shared = len(branch.holders) > 1
            begins = self._begins.get(branch) if is_shared else None
            if begins is None:
                begins = len(self._host_pages)
                if is_shared:
                    self._begins[branch] = begins
                pages = turn.page_table[branch.start : branch.start + count]
                self._add(pages, branch.chunks, is_decode and branch.start + count == stop)
            table += groups.indexes[begins : begins + count]
        for each in pieces:
            slices.append(each._replace(page_table=table[: -(-each.stop // groups.size)]))

    def _add(self, pages: array[int], chunks: Sequence[Chunk], is_decode: bool) -> None:
        """Pages of a branch's first chunks; a decode writes to the last of them, and to nothing else."""
        groups, before = self._groups, self._filled_before
        self._host_pages += pages
        if is_decode:
            last = chunks[len(pages) - 1]
            self._loaded += groups.full[: len(pages) - 1]
            self._loaded.append(before[last])
            self._stored += groups.none[: len(pages) - 1]
            self._stored.append(last.filled)
            return
        for chunk in chunks[: len(pages)]:
            self._loaded.append(before.get(chunk, chunk.filled))
            self._stored.append(chunk.filled if chunk in before else 0)

    def closed(self, first_slice: int, stop_slice: int) -> PageGroup:
        return PageGroup(first_slice, stop_slice, self._host_pages, self._loaded, self._stored)


def _is_alone(turn: Turn) -> bool:
    """Nobody else holds its chunks."""
    first, last = turn.chunks[0].branch, turn.chunks[-1].branch
    return first is last and first is not None and len(first.holders) == 1


def _length(branch: Branch, stop: int) -> int:
    """How many of its chunks are among the first `stop` of a context."""
    return max(min(branch.end, stop) - branch.start, 0)
