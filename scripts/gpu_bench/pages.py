"""Inputs of attention over scattered pages, the right result, and torch's fused attention."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right

from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS as PAGE
from pensieve.kernels import multi_token_attention
from pensieve.kernels.attention import cuda, reference
from pensieve.kernels.attention.input import (
    AttentionInput,
    AttentionKind,
    PageIndex,
    SharedPages,
)
from pensieve.kernels.attention.plan import DevicePlan
from pensieve.kernels.kv_format import FP8
from scripts.gpu_bench.harness import check


@dataclass
class Paged:
    """The inputs of a kernel for some slices."""

    query: torch.Tensor
    arena: torch.Tensor
    page_index: PageIndex
    plan: DevicePlan | None
    out: torch.Tensor
    kv_scales: torch.Tensor | None = None  # of pages in fp8

    @classmethod
    def of(
        cls,
        device: torch.device,
        slices: list[tuple[int, int]],  # (start, length), each of its own turn
        heads: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        seed: int = 0,
        *,
        fp8: bool = False,
        front: int = 0,
        shared: bool = True,
    ) -> Paged:
        """Make slices that begin with the same `front` pages, which are read once if `shared`."""
        draw = torch.Generator(device=device).manual_seed(seed)
        ends = [start + length for start, length in slices]
        per_turn = -(-max(ends) // PAGE)
        num_pages = len(slices) * per_turn + 1
        wide = torch.randn((num_pages, 2, kv_heads, PAGE, head_size), generator=draw, device=device)
        kv_scales = None
        if fp8:
            exponents = torch.randint(-5, 1, (2, kv_heads), generator=draw, device=device)
            kv_scales = torch.exp2(exponents.float())
            wide /= kv_scales[:, :, None, None]
        stored = FP8.element if fp8 else dtype
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
        table = order[: len(slices) * per_turn].view(len(slices), per_turn).int()
        table[:, :front] = table[0, :front]
        for index, end in enumerate(ends):  # slots that were never written hold NaN
            if end % PAGE:
                wide[int(table[index, end // PAGE]), :, :, end % PAGE :] = float("nan")
        lengths = [length for _, length in slices]
        tokens = sum(lengths)
        query = torch.randn((tokens, heads, head_size), generator=draw, device=device).to(dtype)

        def column(numbers: list[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        fronts = None
        if front and shared:
            fronts = SharedPages(array("i", [0] * len(slices)), array("i", [front]))
        device_plan = None
        if device.type == "cuda" and cuda.takes(dtype, PAGE, head_size, stored=stored):
            starts = [start for start, _ in slices]
            blocks = cuda.blocks_at_once(device, head_size, stored)
            plan = cuda.plan(lengths, starts, heads, kv_heads, head_size, blocks, shared=fronts)
            device_plan = DevicePlan.of(plan, kv_heads, head_size, device)
        return cls(
            query,
            wide.to(stored),
            PageIndex(
                table.to(device),
                torch.tensor([0, *lengths]).cumsum(0).int().to(device),
                column(list(range(len(slices)))),
                column([start for start, _ in slices]),
                fronts,
            ),
            device_plan,
            torch.full_like(query, float("nan")),
            kv_scales,
        )

    def run(self) -> torch.Tensor:
        multi_token_attention(self.inputs(), self.out, self.plan)
        return self.out

    def inputs(self) -> AttentionInput:
        return AttentionInput(
            *(self.query, self.arena[:, 0], self.arena[:, 1]),
            self.page_index,
            AttentionKind.plain(self.query.shape[2]),
            self.kv_scales,
        )

    def right(self) -> torch.Tensor:
        out = torch.empty(self.query.shape, device=self.query.device)
        wide = self.wide()
        inputs = self.inputs()._replace(
            query=self.query.float(), key_pages=wide[:, 0], value_pages=wide[:, 1], kv_scales=None
        )
        reference.multi_token_attention(inputs, out)
        return out

    def wide(self) -> torch.Tensor:
        """Return the contents of the pages in float32."""
        if self.kv_scales is None:
            return self.arena.float()
        return self.arena.float() * self.kv_scales[:, :, None, None]

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous keys and values, (batch, kv_heads, context, D), for slices of one length."""
        table, offsets, _, starts, _ = self.page_index
        context = int(starts[0]) + int(offsets[1])
        arena = self.arena if self.kv_scales is None else self.wide().to(self.query.dtype)
        gathered = arena[table.long()]  # (batch, pages, 2, kv_heads, 32, D)
        batch, pages, _, kv_heads, _, head_size = gathered.shape
        whole = gathered.permute(2, 0, 3, 1, 4, 5).reshape(
            2, batch, kv_heads, pages * PAGE, head_size
        )[:, :, :, :context]
        return whole[0].contiguous(), whole[1].contiguous()


Mask = Tensor | CausalBias | None
Attend = Callable[[], Tensor]


def baselines(
    query: Tensor,  # (batch, queries, heads, D): the last rows of the context
    keys: Tensor,  # (batch, kv_heads, context, D)
    values: Tensor,
) -> dict[str, Attend]:
    """Return the ways to call torch's attention by name; `usable` says which of them work here."""
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
        if queries == context > 1:  # an explicit mask is slower than the kernel's own causal mode
            ways[f"{name}, causal"] = partial(grouped, backend, 0, batch, None, True)
    return ways


def _try(run: Attend, is_cuda: bool) -> Tensor:
    """Call `run` twice without torch's warnings about unsuitable kernels; raise if it synchronizes."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        answer = run().clone()
        if not is_cuda:
            return answer
        try:
            torch.cuda.set_sync_debug_mode("error")  # a call that synchronizes cannot be captured
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return answer


def usable(
    ways: dict[str, Attend], right: Tensor, report: Callable[[str], None]
) -> dict[str, Attend]:
    """Return the ways that work here and give the right result; report the ways with a wrong result."""
    found = {}
    for name, run in ways.items():
        try:
            answer = _try(run, right.is_cuda).reshape(right.shape)
        except Exception:  # no such kernel for these shapes
            continue
        try:
            check(f"torch ({name})", answer, right)
        except PensieveError as error:
            report(f"skipped: {error}")
            continue
        found[name] = run
    if not found:
        raise PensieveError("none of torch's fused kernels supports this shape")
    return found
