"""Run the attention of an iteration with streamed turns: their slices attend to staging arenas, by groups.

The dense operations see one flat batch.  The attention of a layer has parts.  The first part is the slices of
resident turns, over the device's pages.  Each group (core/iteration.py, `PageGroup`) is a further part, over
the arena with the group's pages of this layer (kv/streamer.py).

    rows      │ resident       │ group 0     │ group 1  │ …
    write_kv  device pages      arena 0       arena 1    …      slots are numbered within a part's pages
    attend    the same pages    arena 0       arena 1    …

A part is a range of the batch, so its index tensors are views of the batch's.  Only its slice offsets are
counted from its own first row.  `paged_rows` is None, so fused layers run only their dense operations and
call this attention.  On a CPU, resident turns use the same functions, so streaming does not change results.
On a GPU, if no turn is streamed, one fused kernel rotates and writes the keys, with rounded cosines.  So
streaming changes results by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pensieve.core.iteration import PageGroup, Slice
from pensieve.kernels import multi_token_attention, write_kv
from pensieve.kernels.attention.input import AttentionInput, PageIndex
from pensieve.kernels.attention.plan import DevicePlan
from pensieve.kernels.layer.protocol import PagedRows
from pensieve.model.attention import AttentionCall
from pensieve.model.batch import Batch
from pensieve.model.graphs import device_plan
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.kv.streamer import Streamer
from pensieve.model.shared_pages import Search


class AttentionPart(NamedTuple):
    """Slices that attend together to the same pages; tensors as in `Batch`."""

    first_row: int
    stop_row: int
    slot_mapping: torch.Tensor  # slots of the part's rows
    page_index: PageIndex  # rows count from the part's first row; page table of the batch
    lengths: Sequence[int]  # lengths of the slices, on the host
    starts: Sequence[int]
    plan: DevicePlan | None = None  # plan of the part's attention


class StreamedPass:
    """Run the attention of one iteration over device pages and staging arenas."""

    paged_rows: PagedRows | None = None
    pages_ready = False

    def __init__(
        self,
        batch: Batch,
        parts: Sequence[AttentionPart],  # of the resident slices, if any, then of each group
        num_groups: int,
        memory: KVMemory,
        wait_layer: Callable[[int], None],
        streamer: Streamer,
        copies: PageMoves | None = None,
    ) -> None:
        self._resident, self._groups = parts[:-num_groups], parts[-num_groups:]
        self._memory = memory
        self._wait_layer = wait_layer
        self._streamer = streamer
        self._copies = copies

    def wait_for_pages(self, layer: int) -> None:
        self._wait_layer(layer)
        if self._copies is not None:
            self._memory.copy_within(layer, self._copies)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer: int = call.module.layer_idx  # type: ignore[assignment]  # the load probe checked 0..n-1
        memory, streamer = self._memory, self._streamer
        self.wait_for_pages(layer)
        kv_scales = memory.kv_scales(layer)
        query = call.query
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)

        def attend_over(part: AttentionPart, *pages: torch.Tensor) -> None:
            rows = slice(part.first_row, part.stop_row)
            key_pages, value_pages = pages
            write_kv(
                call.key[rows],
                call.value[rows],
                part.slot_mapping,
                key_pages,
                value_pages,
                kv_scales,
            )
            inputs = AttentionInput(
                query[rows], key_pages, value_pages, part.page_index, call.kind, kv_scales
            )
            multi_token_attention(inputs, out[rows], part.plan)

        for part in self._resident:
            attend_over(part, memory.key_pages(layer), memory.value_pages(layer))
        first_step = layer * len(self._groups)
        for step, part in enumerate(self._groups, first_step):
            streamer.wait_loaded(step)
            attend_over(part, *streamer.pages(step))
            streamer.attended(step)
        return out


def parts_of(
    batch: Batch,
    slices: Sequence[Slice],
    groups: Sequence[PageGroup],
    memory: KVMemory,
    search_of: Callable[[int], Search],  # 0 for the resident part, i + 1 for group i
) -> list[AttentionPart]:
    """Return the part of the resident slices, if there are any, then a part for each group."""
    stretches = [(group.first_slice, group.stop_slice) for group in groups]
    if stretches[0][0]:
        stretches.insert(0, (0, stretches[0][0]))
    assert [first for first, _ in stretches[1:]] == [stop for _, stop in stretches[:-1]]
    assert stretches[-1][1] == len(slices), "groups must come after all other slices, without a gap"
    index = batch.page_index
    found: list[AttentionPart] = []
    row = 0
    for number, (first, stop) in enumerate(stretches, len(groups) + 1 - len(stretches)):
        lengths = batch.lengths[first:stop]
        stop_row = row + sum(lengths)
        part = AttentionPart(
            row,
            stop_row,
            batch.slot_mapping[row:stop_row],
            PageIndex(
                index.page_table,
                index.slice_offsets[first : stop + 1] - row,
                index.slice_turns[first:stop],
                index.slice_starts[first:stop],
                search_of(number)(slices[first:stop], memory.chunk_tokens),
            ),
            lengths,
            batch.starts[first:stop],
        )
        found.append(part._replace(plan=device_plan(part, memory)))
        row = stop_row
    return found
