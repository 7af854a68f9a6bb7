"""Kernels for attention over paged keys and values, and for decoder layers.

    multi_token_attention   every slice of an iteration attends to its turn's whole context
    write_kv                writes keys and values of the iteration's tokens to their slots
    copy_pages              copies pages between arenas, or inside an arena
    layer/                  the parts of a decoder layer around its attention: products, norms, rotation

`attention.input` defines the input object of a layer's attention.  Each attention kernel has a Python
function (`attention.paged`).  The function checks shapes (`shapes`) and calls the implementation for the
tensors' device:

    attention.cpu         csrc/cpu through ctypes, loaded by `cpu_library`
    attention.cuda        csrc/cuda, compiled by `nvrtc`, launched by `cuda_launch`; `attention.plan` plans an
                          iteration's work
    attention.reference   torch: runs anywhere, takes inputs that the others do not support, and is the
                          reference of their tests

An attention kernel has the same name in Python and in csrc.

Layout.  A layer's arena is (pages, 2, kv_heads, slots, row), keys then values.  So a page of a layer is one
contiguous run, and so are the keys (or values) of one head in the page.  `key_pages` and `value_pages` are
views of the arena, (pages, kv_heads, slots, row).  `kv_format` defines a row.  A slot that was never written
may hold anything, including NaN: no kernel lets it reach a result.
"""

from __future__ import annotations

from pensieve.kernels.attention.paged import copy_pages, multi_token_attention, write_kv
from pensieve.kernels.shapes import PAGE_SLOTS

__all__ = ["PAGE_SLOTS", "copy_pages", "multi_token_attention", "write_kv"]
