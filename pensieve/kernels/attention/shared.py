"""Which slices have the same pages at the front of their contexts, so that attention reads those once.

csrc/cpu/multi_token_attention.cpp does; no bit of a result depends on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class SharedPages(NamedTuple):
    """On the host.  A group's slices lie wholly behind its pages, which their page tables begin with."""

    slice_groups: torch.Tensor  # int32 (slices): the group of each; -1: it shares nothing
    group_pages: torch.Tensor  # int32 (groups)
