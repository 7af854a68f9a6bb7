"""Torch's fused attention on contiguous keys and values, in every way that it offers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right

from pensieve.bench.gpu_harness import check
from pensieve.errors import PensieveError

Mask = Tensor | CausalBias | None
Attend = Callable[[], Tensor]


def baselines(
    query: Tensor,  # (batch, queries, heads, D): the last rows of the context
    keys: Tensor,  # (batch, kv_heads, context, D)
    values: Tensor,
) -> dict[str, Attend]:
    """By name, what may be called; not all of it works with each torch and shape: see `usable`."""
    batch, queries, heads, head_size = query.shape
    kv_heads, context = keys.shape[1:3]
    rows = query.transpose(1, 2)  # (batch, heads, queries, D)
    bias = causal_lower_right(queries, context)
    visible = torch.arange(context)[None] <= torch.arange(context - queries, context)[:, None]
    mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf")).to(query)
    group = heads // kv_heads
    folded_query = (
        query.view(batch, queries, kv_heads, group, head_size)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch, kv_heads, group * queries, head_size)
    )
    folded_mask = mask.repeat(group, 1)

    def grouped(
        backend: SDPBackend, first: int, last: int, attn_mask: Mask, is_causal: bool = False
    ) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                rows[first:last],
                keys[first:last],
                values[first:last],
                attn_mask=attn_mask,
                is_causal=is_causal,
                enable_gqa=group > 1,
            ).transpose(1, 2)

    def folded(backend: SDPBackend, first: int, last: int) -> Tensor:
        with sdpa_kernel(backend):
            attended = F.scaled_dot_product_attention(
                folded_query[first:last],
                keys[first:last],
                values[first:last],
                attn_mask=folded_mask if queries > 1 else None,
            )
        unfolded = attended.view(last - first, kv_heads, group, queries, head_size)
        return unfolded.permute(0, 3, 1, 2, 4).reshape(last - first, queries, heads, head_size)

    def loop(backend: SDPBackend, attn_mask: Mask) -> Tensor:
        return torch.cat([grouped(backend, i, i + 1, attn_mask) for i in range(batch)])

    ways: dict[str, Attend] = {}
    kinds: dict[str, tuple[SDPBackend, Mask]] = {
        "flash": (SDPBackend.FLASH_ATTENTION, bias),
        "cudnn": (SDPBackend.CUDNN_ATTENTION, mask if queries > 1 else None),
    }
    if query.device.type == "cpu":
        kinds = {"fused": (SDPBackend.FLASH_ATTENTION, mask)}
    for name, (backend, attn_mask) in kinds.items():
        ways[f"{name}, batch"] = partial(grouped, backend, 0, batch, attn_mask)
        if batch > 1:
            ways[f"{name}, loop"] = partial(loop, backend, attn_mask)
        if group > 1:
            ways[f"{name}, folded"] = partial(folded, backend, 0, batch)
        if (
            queries == context > 1
        ):  # a mask of numbers costs more than causality that a kernel knows of
            ways[f"{name}, causal"] = partial(grouped, backend, 0, batch, None, True)
    return ways


def usable(
    ways: dict[str, Attend], right: Tensor, report: Callable[[str], None]
) -> dict[str, Attend]:
    """Those that this torch can do here, and does right; what it does wrong is reported and left out."""
    found = {}
    for name, run in ways.items():
        try:
            answer = run().reshape(right.shape).clone()
            if right.is_cuda:
                torch.cuda.set_sync_debug_mode("error")  # what waits cannot be captured
                run()
        except Exception:  # no such kernel for these shapes
            continue
        finally:
            if right.is_cuda:
                torch.cuda.set_sync_debug_mode("default")
        try:
            check(f"torch ({name})", answer, right)
        except PensieveError as error:
            report(f"left out: {error}")
            continue
        found[name] = run
    if not found:
        raise PensieveError("none of torch's fused kernels takes this shape")
    return found
