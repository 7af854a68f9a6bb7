"""Find the slices of an iteration that begin with the same pages, so that attention reads those pages once.

Turns that generate usually share the same pages in the next iteration, so `SharedSearch` keeps its result.
The result stays valid while the slices belong to the same turns and each slice's context begins with the
pages of its group.  Checking that takes a tenth of a search's time.  Every SEARCH_EVERY iterations a new
search looks for more shared pages.  Sharing changes results only by rounding.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from pensieve.core.iteration import Slice
from pensieve.core.prefix_groups import prefix_groups
from pensieve.kernels.attention.input import SharedPages

SHARED_MIN = 5  # pages; sharing fewer gains little
SEARCH_EVERY = 32
Search = Callable[[Sequence[Slice], int], SharedPages | None]


def shared_pages(slices: Sequence[Slice], chunk_tokens: int) -> SharedPages | None:
    """Return groups that minimise the pages read (core/prefix_groups.py), or None if nothing is shared."""
    by_page: dict[int, list[int]] = {}
    for index, piece in enumerate(slices):
        if piece.start >= SHARED_MIN * chunk_tokens:
            by_page.setdefault(piece.page_table[0], []).append(index)
    slice_groups, group_pages = array("i", [-1]) * len(slices), array("i")
    for indices in by_page.values():
        if len(indices) == 1:
            continue
        before = [slices[i].page_table[: slices[i].start // chunk_tokens] for i in indices]
        for group in prefix_groups(before):
            if group.prefix_tokens >= SHARED_MIN:
                for member in group.members:
                    slice_groups[indices[member]] = len(group_pages)
                group_pages.append(group.prefix_tokens)
    if not group_pages:
        return None
    return SharedPages(slice_groups, group_pages)


class SharedSearch:
    """Search one iteration after another, and reuse the last result while it is valid."""

    def __init__(self) -> None:
        self._turn_ids: list[int] = []
        self._found: SharedPages | None = None
        self._fronts: list[array[int]] = []  # the pages of each group
        self._age = 0

    def __call__(self, slices: Sequence[Slice], chunk_tokens: int) -> SharedPages | None:
        attempt_ids = [piece.attempt_id for piece in slices]
        self._age += 1
        is_known = self._age < SEARCH_EVERY and attempt_ids == self._turn_ids
        if is_known and self._holds(slices, chunk_tokens):
            return self._found
        found = self._found = shared_pages(slices, chunk_tokens)
        self._turn_ids, self._age = attempt_ids, 0
        self._fronts = []
        for group, num_pages in enumerate(found.group_pages if found is not None else ()):
            assert found is not None
            first = slices[found.slice_groups.index(group)]
            self._fronts.append(first.page_table[:num_pages])
        return found

    def _holds(self, slices: Sequence[Slice], chunk_tokens: int) -> bool:
        """Whether each slice's context still begins with its group's pages, and the slice is after them."""
        if self._found is None:
            return True
        for piece, group in zip(slices, self._found.slice_groups, strict=True):
            if group < 0:
                continue
            front = self._fronts[group]
            if piece.start < len(front) * chunk_tokens or piece.page_table[: len(front)] != front:
                return False
        return True
