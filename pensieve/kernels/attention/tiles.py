"""Divide an iteration's rows into tiles, and combine tiles that read the same pages into packs.

Each KV head serves `group` query heads.  A *row* is one query token with one of these heads, so a slice of n
tokens has n · group rows.  A *tile* is a run of rows of one slice, and reads the context up to its last
token.  A slice of at most `narrow_max` rows is one narrow tile.  A longer slice is cut into wide tiles of
`wide` rows.  The remaining rows are a narrow tile if they are at most `narrow_max`.

If slices begin with the same pages (`SharedPages`), each of their tiles would read those pages again:

    slice 0   ████████████████ 00          pack   ████████████████      rows of 0, 1 and 2
    slice 1   ████████████████ 1111                                00   and each slice's own pages
    slice 2   ████████████████ 2                                   1111
                                                                   2

A *pack* has the rows of several such tiles, one tile after another.  All of these rows come after the shared
pages.  So every row of a pack sees the same keys, and the kernel handles a pack like a tile.  A table
(`PackedTiles.rows`) says where a pack's rows are in the batch.  Each member's own tile then begins after the
shared pages.  A tile is in at most one pack, and never split.  A pack has no more rows than a tile may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from pensieve.kernels.attention.input import SharedPages
from pensieve.kernels.shapes import PAGE_SLOTS


class Tiling(NamedTuple):
    """The row counts of a kernel's tiles."""

    narrow_max: int  # the most rows of a narrow tile
    wide: int

    def page_cost(self, num_rows: int) -> int:
        """Return the relative cost of reading a page for a tile of `num_rows` rows.

        This cost applies if one launch computes narrow and wide tiles.
        """
        return 1 if num_rows <= self.narrow_max else 2


class Tile(NamedTuple):
    slice_index: int  # for a pack: the slice of its first member
    row_begin: int
    num_rows: int
    key_begin: int  # a multiple of the page size
    key_end: int
    pack_row: int = -1  # where a pack's rows begin in the table

    @property
    def num_pages(self) -> int:
        return -(-self.key_end // PAGE_SLOTS) - self.key_begin // PAGE_SLOTS


class Pack(NamedTuple):
    members: tuple[int, ...]  # indices of tiles
    num_rows: int
    num_pages: int


class PackedTiles(NamedTuple):
    """Tiles, and packs of some of them."""

    tiles: list[Tile]  # in their order; members begin after their pack's pages
    packs: list[Tile]
    rows: list[int]  # rows of all packs: token · group + number of the query head in its group
    places: dict[int, tuple[int, int]]  # by member: its pack, and its first row there


def tiles_of(slice_index: int, length: int, start: int, group: int, tiling: Tiling) -> list[Tile]:
    rows, begin = length * group, 0
    tiles = []
    while begin < rows:
        rows_left = rows - begin
        num_rows = rows_left if rows_left <= tiling.narrow_max else min(rows_left, tiling.wide)
        key_end = start + (begin + num_rows - 1) // group + 1
        tiles.append(Tile(slice_index, begin, num_rows, 0, key_end))
        begin += num_rows
    return tiles


def packs_of(tiles: Sequence[Tile], shared: SharedPages, tiling: Tiling) -> list[Pack]:
    """Cut the tiles of each group of slices, in order, into packs.

    Return the packs with at least two members.
    """
    by_group: dict[int, list[int]] = {}
    for index, tile in enumerate(tiles):
        if (group := shared.slice_groups[tile.slice_index]) >= 0:
            by_group.setdefault(group, []).append(index)
    packs: list[Pack] = []
    for group, indices in by_group.items():
        rows_left = sum(tiles[index].num_rows for index in indices)
        members: list[int] = []
        num_rows = rows_max = 0
        for index in indices:
            tile_rows = tiles[index].num_rows
            if num_rows + tile_rows > rows_max:
                packs.append(Pack(tuple(members), num_rows, shared.group_pages[group]))
                members, num_rows = [], 0
                rows_max = tiling.narrow_max if rows_left <= tiling.narrow_max else tiling.wide
            members.append(index)
            num_rows += tile_rows
            rows_left -= tile_rows
        packs.append(Pack(tuple(members), num_rows, shared.group_pages[group]))
    return [pack for pack in packs if len(pack.members) > 1]


def packed(
    tiles: Sequence[Tile], packs: Sequence[Pack], lengths: Sequence[int], group: int
) -> PackedTiles:
    """Combine tiles into these packs; `lengths` are the lengths of the slices."""
    made = PackedTiles(list(tiles), [], [], {})
    first_tokens = [0, *accumulate(lengths)]
    for index, pack in enumerate(packs):
        first, key_end = len(made.rows), pack.num_pages * PAGE_SLOTS
        for member in pack.members:
            tile = tiles[member]
            made.tiles[member] = Tile(*tile[:3], key_end, tile.key_end)
            made.places[member] = (index, len(made.rows) - first)
            row = first_tokens[tile.slice_index] * group + tile.row_begin
            made.rows.extend(range(row, row + tile.num_rows))
        leader = tiles[pack.members[0]].slice_index
        made.packs.append(Tile(leader, 0, pack.num_rows, 0, key_end, first))
    return made
