"""The pages of one tier: which are empty."""

from __future__ import annotations


class PagePool:
    """Hands out page numbers, last freed first (its rows are the warmest), and refuses double frees."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._empty = list(range(num_pages - 1, -1, -1))
        self._taken = bytearray(num_pages)

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    def take(self) -> int | None:
        if not self._empty:
            return None
        page = self._empty.pop()
        self._taken[page] = 1
        return page

    def give_back(self, page: int) -> None:
        assert self._taken[page], f"page {page} is freed twice"
        self._taken[page] = 0
        self._empty.append(page)

    def check(self, used_pages: list[int]) -> None:
        """`used_pages` are all pages that somebody holds, each once."""
        assert len(set(used_pages)) == len(used_pages), "a page has two holders"
        assert sorted(used_pages) == [i for i, taken in enumerate(self._taken) if taken], (
            "the pool and its users disagree on which pages are taken"
        )
        assert len(self._empty) + len(used_pages) == self.num_pages, "a page leaked"
