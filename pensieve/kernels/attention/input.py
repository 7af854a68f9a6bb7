"""Define the input of an attention kernel: a layer's queries, pages of keys and values, and attention kind.

    model ── AttentionKind ──┐
    batch ── PageIndex ──────┼─> AttentionInput ──> paged ──> cpu, cuda or reference
    layer ── queries, pages ─┘

The code between a model's layer and a kernel only passes these values on.  CONTRIBUTING.md ("A kind of
attention") lists the changes for a new field of `AttentionKind`.
"""

from __future__ import annotations

from array import array
from collections.abc import Container
from typing import NamedTuple

import torch


class AttentionKind(NamedTuple):
    """How a layer's queries weigh keys; the same in every iteration.

    A field that is added later has the default None, for layers that do not use it.  A kernel names the
    fields that it supports (`KIND_FIELDS`).  The reference computes layers that need other fields.  Kinds are
    compared with `==`, so a field must not be a bare tensor.
    """

    scaling: float  # factor of the scores

    @classmethod
    def plain(cls, head_size: int) -> AttentionKind:
        return cls(head_size**-0.5)

    def needs_only(self, fields: Container[str]) -> bool:
        """Whether all other fields are None."""
        for name, value in zip(self._fields, self, strict=True):
            if value is not None and name not in fields:
                return False
        return True


class SharedPages(NamedTuple):
    """Groups of slices that begin with the same pages, which attention reads once.  Arrays are on the host.

    All rows of a group's slices come after the group's pages.  On a CPU, sharing does not change results.  On
    a GPU, sharing changes how a row's result is summed, so results differ by rounding.
    """

    slice_groups: array[int]  # int32 (slices): the slice's group; -1: it shares nothing
    group_pages: array[int]  # int32 (groups): how many pages the group shares


class PageIndex(NamedTuple):
    """The pages that each slice of an iteration attends to; the same for all layers."""

    page_table: torch.Tensor  # int32 (turns, pages_max): entry i is the page of chunk i
    slice_offsets: torch.Tensor  # int32 (slices+1): slice s is rows [offsets[s], offsets[s+1])
    slice_turns: torch.Tensor  # int32 (slices): row of the page table
    slice_starts: torch.Tensor  # int32 (slices): position of the slice's first token
    shared: SharedPages | None = None


class AttentionInput(NamedTuple):
    """All data that one layer's attention reads.

    The context of a slice has start + length tokens.  All of it is already in the pages, including the
    slice's own tokens.
    """

    query: torch.Tensor  # (tokens, heads, head_size)
    key_pages: torch.Tensor  # (pages, kv_heads, slots, row): `kv_format` defines a row
    value_pages: torch.Tensor  # (pages, kv_heads, slots, row)
    page_index: PageIndex
    kind: AttentionKind
    kv_scales: torch.Tensor | None = None  # float32 (2, kv_heads), of fp8 pages
