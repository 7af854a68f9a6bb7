"""The three operations on paged keys and values; everything else is plain torch.

    multi_token_attention   every slice of an iteration attends to its turn's whole context
    write_kv                the keys and values of the iteration's tokens go to their slots
    copy_pages              pages move between arenas, or inside one

One Python function per kernel (`paged`) checks shapes as algebra (`shapes`) and calls the
implementation for the tensors' device: `cpu` (csrc/cpu through ctypes) or `cuda` (csrc/cuda, compiled by
`nvrtc`, what each block does planned by `work`).  The torch implementation (`reference`) runs anywhere, does
what the others are not for, and is what they are tested against.

Layout.  A layer's arena is (pages, 2, kv_heads, slots, head_size), keys then values, so one page of
one layer is one contiguous run and so is the tile of one head.  `key_pages` and `value_pages` are
its two views (pages, kv_heads, slots, head_size).  Slots that nobody wrote may hold anything, NaN
included: no kernel lets them reach a result.
"""

from __future__ import annotations

from pensieve.kernels.attention.paged import copy_pages, multi_token_attention, write_kv

__all__ = ["copy_pages", "multi_token_attention", "write_kv"]
