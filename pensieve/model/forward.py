"""Computes an iteration's logits: builds the batch, runs the model, splits what does not fit the memory.

The batch is built on the model's device.  On a GPU the attention's work is planned here, once for all layers,
and an iteration that only decodes, while no swap-in is outstanding, runs as a captured graph (graphs.py).

When memory does not suffice for a batch it is computed in two halves, one after the other, and each of
them again if need be, so no turn fails for lack of memory.  The results are the same: a slice needs only what
slices before it compute (core.iteration), page copies come before everything, and repeating them, or a part
of a layer's writes, writes the same values again.  A single token that does not fit ends the engine.  So does
any batch where several ranks compute together, since the other ranks would not halve theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pensieve.core.iteration import Iteration, Slice
from pensieve.errors import DeviceError
from pensieve.kernels.attention.plan import Work
from pensieve.model.attention import FlatModel, PagedPass
from pensieve.model.batch import Batch, SampledIds
from pensieve.model.graphs import DecodeGraphs, plan_of
from pensieve.model.kv.copier import Copier
from pensieve.model.kv.copier_cpu import CpuCopier
from pensieve.model.kv.copier_cuda import CudaCopier
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.shared_pages import SharedSearch
from pensieve.model.transfer import upload

OUT_OF_MEMORY = (
    "can't allocate memory",  # torch's allocator on a CPU
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class Computed(NamedTuple):
    """Rows of logits, the turn and position of each, and the token that each was computed from."""

    logits: torch.Tensor  # float32 (rows, vocab)
    newest_ids: torch.Tensor  # int64 (rows): the tokens that the rows were computed from
    turn_ids: tuple[int, ...]
    positions: tuple[int, ...]  # where a sampled token will stand


def copier_for(memory: KVMemory) -> Copier:
    return CpuCopier(memory) if memory.device_arena.device.type == "cpu" else CudaCopier(memory)


class Forward:
    """One model over one KV memory."""

    def __init__(
        self,
        flat: FlatModel,
        memory: KVMemory,
        copier: Copier,
        *,
        halves: bool = True,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._flat = flat
        self._memory = memory
        self._copier = copier
        self._halves = halves
        self._graphs = graphs
        self._device = memory.device_arena.device
        self._search = SharedSearch()

    @property
    def rows_padded(self) -> int:
        """Computed for nothing since the start, as a captured graph has more rows than there were turns."""
        return self._graphs.rows_padded if self._graphs is not None else 0

    def run(
        self,
        slices: Sequence[Slice],
        copies: PageMoves | None = None,
        sampled: SampledIds | None = None,
    ) -> Computed:
        """Compute slices; there must be at least one."""
        try:
            return self._once(slices, copies, sampled)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            num_tokens = sum(piece.stop - piece.start for piece in slices)
            if num_tokens == 1 or not self._halves:
                raise DeviceError(f"out of memory in a batch of {num_tokens} tokens") from error
        # Outside of the handler, whose traceback would keep the failed half's tensors.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        first, second = halves(slices, num_tokens // 2)
        before = self.run(first, copies, sampled)
        before = before._replace(
            logits=before.logits.clone()
        )  # a graph's are overwritten by the next
        return _concatenated(before, self.run(second, None, sampled))

    def page_copies(self, iteration: Iteration) -> PageMoves | None:
        """The iteration's page copies, as the device needs them; None if there are none."""
        if not iteration.copies:
            return None
        return self._memory.prepared(PageMoves.from_copies(iteration.copies))

    def copy_pages(self, copies: PageMoves) -> None:
        """Do the page copies of an iteration without slices."""
        for layer in range(self._memory.shape.num_layers):
            self._copier.wait_layer(layer)
            self._memory.copy_within(layer, copies)

    def _once(
        self, slices: Sequence[Slice], copies: PageMoves | None, sampled: SampledIds | None
    ) -> Computed:
        batch = Batch.from_slices(
            slices, self._memory.chunk_tokens, self._device, sampled, self._search
        )
        graphs = self._graphs
        if graphs is not None and copies is None and graphs.takes(batch, self._copier.arriving):
            logits = graphs.logits(batch)
        else:
            shape = self._memory.shape
            work: Work | None = None
            if (plan := plan_of(batch, self._memory)) is not None:
                work = Work.of(plan, shape.num_kv_heads, shape.head_size, self._device, upload)
            copier = self._copier
            forward_pass = PagedPass(
                *(batch, self._memory, copier.wait_layer, copies, work), arriving=copier.arriving
            )
            logits = self._flat.logits(
                batch.input_ids, batch.positions, batch.logit_rows, forward_pass
            ).float()
        newest_ids = batch.input_ids.index_select(0, batch.logit_rows)
        return Computed(logits, newest_ids, batch.logit_turn_ids, batch.logit_positions)


def halves(slices: Sequence[Slice], num_first: int) -> tuple[list[Slice], list[Slice]]:
    """Slices of the first `num_first` tokens, and slices of the others."""
    first: list[Slice] = []
    second: list[Slice] = []
    left = num_first
    for piece in slices:
        length = piece.stop - piece.start
        if length <= left:
            first.append(piece)
        elif left == 0:
            second.append(piece)
        else:
            before, after = piece.split(piece.start + left)
            first.append(before)
            second.append(after)
        left = max(left - length, 0)
    return first, second


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        sign in str(error) for sign in OUT_OF_MEMORY
    )


def _concatenated(first: Computed, second: Computed) -> Computed:
    return Computed(
        torch.cat((first.logits, second.logits)),
        torch.cat((first.newest_ids, second.newest_ids)),
        first.turn_ids + second.turn_ids,
        first.positions + second.positions,
    )
