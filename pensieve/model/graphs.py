"""Capture decode iterations as CUDA graphs: one launch for all layers.

At batch sizes 1 to 64, a layer of an 8 B model takes about 100 microseconds.  A transformers layer makes
about 20 kernel launches, which would limit the speed if Python launched them one by one.  So a graph is
captured for each of a few batch sizes (`buckets`), and replayed for every iteration that only decodes.

A graph reads tensors at fixed addresses: token ids, positions, slots, page tables, and the work list of the
attention.  Before a replay, the iteration's values are copied into the first rows of these tensors.  The copy
is on the same stream, so the previous replay has already read the old values.  The other rows are padding.
Padding rows are at position 0 of a page that no turn has (`KVMemory.spare_page`), no work item covers them,
and nothing reads their logits.

The work list has a fixed length, so the number of items must be bounded.  It is bounded if the attention is
planned with the fewest waves (kernels/attention/plan.py explains this and the other terms).  The work list is
one tensor with three parts: merges, items, and the rows of packs.  In a decode, a turn has one token, which
is one tile of the attention.  So a turn has at most one merge and is in at most one pack.  Empty entries fill
the rest of each part.

All graphs share one tensor of logits, which are valid until the next replay.

A model cannot be captured if its code reads values from the device, like some routers of experts.  It then
runs without graphs, and the reason is reported.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch

from pensieve.errors import one_line
from pensieve.kernels.attention import cuda
from pensieve.kernels.attention.input import PageIndex
from pensieve.kernels.attention.plan import ITEM, MERGE, DevicePlan, Plan
from pensieve.model.attention import FlatModel, PagedPass
from pensieve.model.batch import Batch
from pensieve.model.kv.memory import KVMemory
from pensieve.model.transfer import upload

ROWS_MAX = 256  # rows of the largest graph: one row per turn
Replay = Callable[[], Any]


class Capture(Protocol):
    """Capture computations that always read and write the same tensors."""

    def warm(self, compute: Callable[[], None]) -> None:
        """Run the computation once as a test; raise RuntimeError if it cannot be captured."""

    def record(self, compute: Callable[[], None]) -> Replay: ...


def buckets(turns_max: int) -> list[int]:
    """Return the batch sizes to capture graphs for; larger batches decode without a graph."""
    largest = min(turns_max, ROWS_MAX)
    steps = {1, 2, 4, *range(8, 64, 8), *range(64, ROWS_MAX, 32), largest}
    return sorted(size for size in steps if size <= largest)


class PlannedSlices(Protocol):
    """Slices that attend together: a batch or a part of a batch."""

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def starts(self) -> Sequence[int]: ...

    @property
    def page_index(self) -> PageIndex: ...


def device_plan(slices: PlannedSlices, memory: KVMemory) -> DevicePlan | None:
    """Return the attention's plan on the device, or None if torch attends."""
    shape, device = memory.shape, memory.device_arena.device
    if (plan := plan_of(slices, memory)) is None:
        return None
    return DevicePlan.of(plan, shape.num_kv_heads, shape.head_size, device, upload)


def plan_of(batch: PlannedSlices, memory: KVMemory, waves_more: int | None = None) -> Plan | None:
    """Return the attention's plan for slices, or None if torch attends."""
    shape, device = memory.shape, memory.device_arena.device
    if not attends(memory):
        return None
    return cuda.plan(
        batch.lengths,
        batch.starts,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_size,
        cuda.blocks_at_once(device, shape.head_size, memory.format.element),
        waves_more,
        batch.page_index.shared,
    )


def attends(memory: KVMemory) -> bool:
    """Whether the CUDA kernels, not torch, attend over this memory."""
    shape = memory.shape
    return memory.device_arena.device.type == "cuda" and cuda.takes(
        shape.dtype, memory.chunk_tokens, shape.head_size, stored=memory.format.element
    )


class _Bucket(NamedTuple):
    batch: Batch  # keeps the tensors alive: a captured kernel only has their addresses
    replay: Replay


class DecodeGraphs:
    """Run decode iterations of one model over one KV memory as graphs."""

    def __init__(
        self,
        flat: FlatModel,
        memory: KVMemory,
        turns_max: int,
        capture: Capture | None = None,
    ) -> None:
        shape, device = memory.shape, memory.device_arena.device
        self._flat = flat
        self._memory = memory
        self._capture = capture or CudaCapture(device)
        self._graphs: dict[int, _Bucket] = {}
        self._sizes = buckets(turns_max)
        self.failure = ""  # why nothing could be captured
        self.rows_padded = 0  # padding rows computed since the start
        rows, pages_max = self._sizes[-1], -(-shape.context_max // memory.chunk_tokens)
        pages_max = min(pages_max, memory.device_pages)

        def zeros(*sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self._input_ids = zeros(rows)
        self._positions = zeros(rows)
        self._slots = zeros(rows)
        self._page_table = zeros(rows, pages_max, dtype=torch.int32)
        self._starts = zeros(rows, dtype=torch.int32)
        self._numbers = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(rows, device=device)
        self._logits = torch.empty(rows, shape.vocab_size, device=device)
        self._spare_slot = memory.spare_page * memory.chunk_tokens
        self._pad(0, rows)
        self._plan: DevicePlan | None = None
        if attends(memory):
            group, heads = shape.num_heads // shape.num_kv_heads, shape.num_kv_heads
            at_once = cuda.blocks_at_once(device, shape.head_size, memory.format.element)
            self._group, self._extra_items = group, at_once.narrow // heads + 1
            self._lists = zeros(sum(self._sizes_of_lists(rows)), dtype=torch.int32)
            # Rows of partial results: each row of the batch has an item for its own context, and each further
            # item may be a pack of the largest size.
            rows_of_pack = min(rows * group, cuda.tiling(shape.head_size).wide)
            part_rows = rows * group + self._extra_items * rows_of_pack
            self._plan = DevicePlan(
                *self._lists_of(rows),
                group,
                torch.empty(part_rows, heads, shape.head_size, device=device),
                torch.empty(part_rows, heads, device=device),
            )

    def capture(self) -> None:
        """Capture all graphs, the largest first: smaller graphs reuse its memory."""
        group = self._memory.shape.num_heads // self._memory.shape.num_kv_heads
        if group > cuda.tiling(self._memory.shape.head_size).narrow_max:
            self.failure = f"the graphs' work lists do not support groups of {group} heads"
            return
        shape, device = self._memory.shape, self._input_ids.device
        if device.type == "cuda" and self._plan is None:
            self.failure = f"attention runs in torch ({shape.dtype}, heads of {shape.head_size})"
            return
        try:
            for size in reversed(self._sizes):
                batch = self._batch(size)

                def compute(batch: Batch = batch, size: int = size) -> None:
                    forward_pass = PagedPass(
                        batch, self._memory, lambda layer: None, None, self._plan_for(size)
                    )
                    logits = self._flat.logits(
                        batch.input_ids, batch.positions, batch.logit_rows, forward_pass
                    )
                    self._logits[:size].copy_(logits)

                self._capture.warm(compute)
                self._graphs[size] = _Bucket(batch, self._capture.record(compute))
        except RuntimeError as error:
            self._graphs.clear()
            self.failure = one_line(error)

    def takes(self, batch: Batch, swap_ins_outstanding: bool) -> bool:
        """Whether a graph can run the batch: small enough, only decodes, and no swap-in outstanding."""
        return (
            bool(self._graphs)
            and not swap_ins_outstanding
            and len(batch.lengths) <= self._sizes[-1]
            and len(batch.logit_attempt_ids)
            == len(batch.lengths)
            == len(batch.page_index.page_table)
            and all(length == 1 for length in batch.lengths)
        )

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return float32 (rows, vocab), valid until the next call."""
        rows = len(batch.lengths)
        size = next(size for size in self._sizes if size >= rows)
        self._input_ids[:rows].copy_(batch.input_ids)
        self._positions[:rows].copy_(batch.positions)
        self._slots[:rows].copy_(batch.slot_mapping)
        self._starts[:rows].copy_(batch.page_index.slice_starts)
        page_table = batch.page_index.page_table
        self._page_table[:rows, : page_table.shape[1]].copy_(page_table)
        self._pad(rows, size)
        self.rows_padded += size - rows
        if self._plan is not None:
            planned = plan_of(batch, self._memory, waves_more=0)
            assert planned is not None
            self._write_plan(planned, size)
        self._graphs[size].replay()
        return self._logits[:rows]

    def _pad(self, first: int, last: int) -> None:
        """Turn rows `first` to `last` into padding."""
        self._positions[first:last].zero_()
        self._slots[first:last].fill_(self._spare_slot)
        self._starts[first:last].zero_()
        self._page_table[first:last, 0].fill_(self._memory.spare_page)

    def _batch(self, size: int) -> Batch:
        return Batch(
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slots[:size],
            page_index=PageIndex(
                self._page_table[:size],
                self._numbers[: size + 1],
                self._numbers[:size],
                self._starts[:size],
            ),
            logit_rows=self._rows[:size],
            logit_attempt_ids=(),
            logit_positions=(),
            lengths=[1] * size,
            starts=[0] * size,
        )

    def _plan_for(self, size: int) -> DevicePlan | None:
        """Return the work list as a graph of `size` rows reads it."""
        if self._plan is None:
            return None
        items, wide_items, merges, pack_rows = self._lists_of(size)
        return self._plan._replace(
            items=items, wide_items=wide_items, merges=merges, pack_rows=pack_rows
        )

    def _sizes_of_lists(self, size: int) -> tuple[int, int, int]:
        """Return the largest lengths of merges, items and pack rows that a plan for `size` rows needs."""
        return size * MERGE, (size + self._extra_items) * ITEM, size * self._group

    def _lists_of(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return items, wide items (always empty), merges, and rows of packs."""
        sizes = self._sizes_of_lists(size)
        merges, items, pack_rows = torch.split(self._lists[: sum(sizes)], list(sizes))
        return items.view(-1, ITEM), items[:0].view(-1, ITEM), merges.view(-1, MERGE), pack_rows

    def _write_plan(self, plan: Plan, size: int) -> None:
        """Write all lists to their places with one copy, padded with empty records."""
        assert self._plan is not None
        assert not plan.wide_items, "a graph's rows are narrow tiles"
        assert plan.num_part_rows <= len(self._plan.part_sums)
        numbers, end = array("i"), 0
        lists: tuple[Sequence[Sequence[int]], ...] = (plan.merges, plan.items, (plan.pack_rows,))
        for records, length_max in zip(lists, self._sizes_of_lists(size), strict=True):
            end += length_max
            numbers.extend(chain.from_iterable(records))
            assert len(numbers) <= end, (len(plan.merges), len(plan.items), size)
            numbers.frombytes(bytes(4 * (end - len(numbers))))
        table = torch.frombuffer(numbers, dtype=torch.int32)
        self._lists[:end].copy_(upload(table, self._lists.device))


class CudaCapture:
    """Capture computations on a GPU, all in one memory pool and on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, compute: Callable[[], None]) -> None:
        """Load lazily loaded libraries, then check that the computation does not wait for the device.

        A failed capture would make its stream and its pool unusable, so this check comes first.
        """
        with self._on_stream():
            compute()
            torch.cuda.synchronize(self._device)
            before = torch.cuda.get_sync_debug_mode()
            with warnings.catch_warnings():  # torch warns that this mode is a prototype
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            try:
                compute()
            finally:
                torch.cuda.set_sync_debug_mode(before)
            torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # frees this stream's memory; captured graphs use their own pool

    def record(self, compute: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with self._on_stream():
            # Not `torch.cuda.graph`, which empties torch's cache each time.
            graph.capture_begin(pool=self._pool)
            try:
                compute()
            finally:
                graph.capture_end()
        return graph.replay

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
