"""Which slices have the same pages at the front of their contexts, so that attention reads those once.

csrc/cpu/multi_token_attention.cpp does, and no bit of a result depends on it.  On a GPU the plan of the work
does (`tiles`): rows are merged from other parts than without it, so results differ by rounding.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple


class SharedPages(NamedTuple):
    """On the host.  A group's slices lie wholly behind its pages, which their page tables begin with."""

    slice_groups: array[int]  # of 32 bits, by slice: its group; -1: it shares nothing
    group_pages: array[int]  # of 32 bits, by group
