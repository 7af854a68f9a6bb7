"""Kernels for attention over paged keys and values, and for decoder layers.

    multi_token_attention   every slice of an iteration attends to its turn's whole context
    write_kv                the keys and values of the iteration's tokens go to their slots
    copy_pages              pages move between arenas, or inside one
    layer/                  what a decoder layer does around its attention: products, norms, rotation

`attention.input` has the one value that a layer's attention reads.  One Python function per attention kernel
(`attention.paged`) checks shapes as algebra (`shapes`) and calls the implementation for the tensors' device:

    attention.cpu         csrc/cpu through ctypes, loaded by `cpu_library`
    attention.cuda        csrc/cuda, compiled by `nvrtc`, launched by `cuda_launch`; an iteration's work is
                          planned by `attention.plan`
    attention.reference   torch: runs anywhere, does what the others do not take, and is what they are
                          tested against

An attention kernel has the same name in Python and in csrc.

Layout.  A layer's arena is (pages, 2, kv_heads, slots, row), keys then values, so one page of
one layer is one contiguous run and so is the tile of one head.  `key_pages` and `value_pages` are
its two views (pages, kv_heads, slots, row); `kv_format` says what a row is.  A slot that was never written
may hold anything, NaN included: no kernel lets it reach a result.
"""

from __future__ import annotations

from pensieve.kernels.attention.paged import copy_pages, multi_token_attention, write_kv
from pensieve.kernels.shapes import PAGE_SLOTS

__all__ = ["PAGE_SLOTS", "copy_pages", "multi_token_attention", "write_kv"]
