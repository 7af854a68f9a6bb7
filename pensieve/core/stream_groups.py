"""Which streamed turns of an iteration attend together, and the pages that each group stages.

A group's pages fill a staging arena at most (`packed` says which turns make a group, and in which order).
Turns that begin with the same chunks are kept together as far as an arena holds them, so what they share is
copied once for all of them.

Packing takes milliseconds, so groups are kept from one iteration to the next and *mended*: whoever streams no
more is taken out, and who is new, or outgrows its group's arena, goes to the group with the fewest pages,
or begins one.  Any groups whose pages fit are right; these are only less even.  They are packed anew every
PACK_EVERY iterations, and once as many turns have come and left as half of them.
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

PACK_EVERY = 512
CHANGED_SHARE = 0.5
MENDED_TWICE = 2  # once for who came and left, once for what has grown
GROWING = (
    8  # one turn in so many may grow by a page in an iteration (those that generate: one in 32)
)
SLACK = (
    1 / 16
)  # of an arena, is left to a group that was full, so that it is not full again at once
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
        self._kept: list[list[int]] = []  # the turn ids of each group
        self._sizes: list[int] = []  # pages of each, in the iteration before
        self._age = self._num_changed = 0  # iterations and turns since they were packed

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
        self._age += 1
        num_changed_max = CHANGED_SHARE * len(pieces)
        if self._kept and self._age < PACK_EVERY:
            known: dict[tuple[int, ...], _Group] = {}
            for _ in range(MENDED_TWICE):
                self._mend(streamed, pieces)
                made = self._made(resident, streamed, pieces, filled_before, known)
                if self._num_changed > num_changed_max:
                    break
                if max(self._sizes) <= self._pages_max:
                    return made
        turns = [streamed[turn_id] for turn_id in pieces]
        self._kept = self._packed(turns, pieces, resident)
        self._age = self._num_changed = 0
        return self._made(resident, streamed, pieces, filled_before, {})

    def _mend(self, streamed: Mapping[int, Turn], pieces: Mapping[int, list[Slice]]) -> None:
        """Keep the groups, with the turns that stream now; those that share chunks may be parted."""
        stays = [[each for each in group if each in pieces] for group in self._kept]
        sizes = [size for size, group in zip(self._sizes, stays, strict=True) if group]
        groups = [group for group in stays if group]
        loose = pieces.keys() - {each for group in groups for each in group}
        self._num_changed += len(loose) + sum(map(len, self._kept)) - sum(map(len, groups))
        for number, group in enumerate(groups):
            is_full = sizes[number] > self._pages_max - len(group) // GROWING
            for turn_id in reversed(group) if is_full else ():
                if sizes[number] > self._pages_max * (1 - SLACK):
                    sizes[number] -= self._num_own_pages(streamed[turn_id], pieces[turn_id])
                    loose.add(turn_id)
        groups = [[each for each in group if each not in loose] for group in groups]
        for turn_id in sorted(loose, key=lambda each: (-self.num_pages(pieces[each]), each)):
            num_pages = self.num_pages(pieces[turn_id])
            number = min(range(len(sizes)), key=sizes.__getitem__, default=-1)
            if number < 0 or sizes[number] + num_pages > self._pages_max:
                number = len(groups)
                groups.append([])
                sizes.append(0)
            groups[number].append(turn_id)
            sizes[number] += num_pages
        self._kept = [group for group in groups if group]

    def _made(
        self,
        resident: Sequence[Slice],
        streamed: Mapping[int, Turn],
        pieces: Mapping[int, list[Slice]],
        filled_before: Mapping[Chunk, int],
        known: dict[tuple[int, ...], _Group],
    ) -> tuple[tuple[Slice, ...], tuple[PageGroup, ...]]:
        """`known`: groups of this iteration that have been made before, by their turns."""
        arranged, made = list(resident), []
        for turn_ids in map(tuple, self._kept):
            group = known.get(turn_ids)
            if group is None:
                group = known[turn_ids] = _Group(self, filled_before)
                for turn_id in turn_ids:
                    group.add(streamed[turn_id], pieces[turn_id])
            made.append(group.closed(len(arranged)))
            arranged += group.slices
        self._sizes = [len(each.host_pages) for each in made]
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

    def _num_own_pages(self, turn: Turn, pieces: Sequence[Slice]) -> int:
        """Of chunks that nobody else holds."""
        stop = self.num_pages(pieces)
        if _is_alone(turn):
            return stop
        own = (branch for branch in self.path_of(turn) if len(branch.holders) == 1)
        return sum(_length(branch, stop) for branch in own)

    def num_pages(self, pieces: Sequence[Slice]) -> int:
        return -(-pieces[-1].stop // self.size)


class _Group:
    """A group while its turns are put into it."""

    def __init__(self, groups: StreamGroups, filled_before: Mapping[Chunk, int]) -> None:
        self._groups, self._filled_before = groups, filled_before
        self._host_pages, self._loaded, self._stored = array("i"), array("i"), array("i")
        self._begins: dict[Branch, int] = {}  # where the pages of a shared branch are
        self.slices: list[Slice] = []  # their page tables are indexes into the pages

    def add(self, turn: Turn, pieces: Sequence[Slice]) -> None:
        groups, first = self._groups, pieces[0]
        is_decode = len(pieces) == 1 and first.stop - first.start == 1
        stop, count = groups.num_pages(pieces), len(turn.chunks)
        if is_decode and stop == count and _is_alone(turn):
            begin = len(self._host_pages)
            self._add(turn.page_table, turn.chunks, True)
            table = groups.indexes[begin : begin + count]
            self.slices.append(_with_table(first, table))
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
        if is_decode:
            self.slices.append(_with_table(first, table))
            return
        for each in pieces:
            self.slices.append(_with_table(each, table[: -(-each.stop // groups.size)]))

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

    def closed(self, first_slice: int) -> PageGroup:
        """The group, its slices beginning there in the iteration."""
        stop_slice = first_slice + len(self.slices)
        return PageGroup(first_slice, stop_slice, self._host_pages, self._loaded, self._stored)


def _with_table(piece: Slice, page_table: array[int]) -> Slice:
    """As `_replace` does, in a third of the time: there is one for each turn that generates."""
    return Slice(*piece[:4], page_table, *piece[5:])


def _is_alone(turn: Turn) -> bool:
    """Nobody else holds its chunks."""
    first, last = turn.chunks[0].branch, turn.chunks[-1].branch
    return first is last and first is not None and len(first.holders) == 1


def _length(branch: Branch, stop: int) -> int:
    """How many of its chunks are among the first `stop` of a context."""
    return max(min(branch.end, stop) - branch.start, 0)
