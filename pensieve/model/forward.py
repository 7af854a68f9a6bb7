"""Compute an iteration's logits: build the batch, run the model, and split a batch that exceeds the memory.

The batch is built on the model's device.  On a GPU the attention's work is planned here, once for all layers.
An iteration that only decodes, while no swap-in is outstanding, runs as a captured graph (graphs.py).  In
other iterations, only the work between one attention and the next runs as captured graphs
(piecewise_graphs.py).  An iteration with streamed turns uses another pass (streamed_pass.py) and no graph.

A batch that runs out of memory is computed in two halves, one after the other, and each half is halved again
if necessary.  So no turn fails for lack of memory.  The split does not change results, for three reasons.  A
slice needs only results of earlier slices (core.iteration).  Page copies come first.  A page copy or a write
of KV that is repeated writes the same values.

If a batch with streamed turns runs out of memory, the resident turns and each group of streamed turns
(core.iteration, `PageGroup`) are first computed separately.  A group that still does not fit is computed in
two halves.  The second half loads what the first half has stored.

The engine ends if a single token does not fit.  With several ranks, the engine ends on any batch that does
not fit, because the other ranks would not halve their batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from pensieve.core.iteration import Iteration, PageGroup, Slice
from pensieve.errors import DeviceError
from pensieve.model.attention import FlatModel, PagedPass
from pensieve.model.batch import Batch, SampledIds
from pensieve.model.fuse.whole_model import FusedModel
from pensieve.model.graphs import DecodeGraphs, device_plan
from pensieve.model.kv.copier import Copier
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.kv.streamer import in_host_pages, streamer_for
from pensieve.model.shared_pages import SharedSearch
from pensieve.model.streamed_pass import StreamedPass, parts_of

OUT_OF_MEMORY = (
    "can't allocate memory",  # torch's allocator on a CPU
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class Computed(NamedTuple):
    """Logits, and for each row its turn, its position and the token it was computed from."""

    logits: torch.Tensor  # float32 (rows, vocab)
    newest_ids: torch.Tensor  # int64 (rows): the tokens that the rows were computed from
    attempt_ids: tuple[int, ...]
    positions: tuple[int, ...]  # position of the token that is sampled from the row


class Forward:
    """Run one model over one KV memory."""

    def __init__(
        self,
        flat: FlatModel,
        memory: KVMemory,
        copier: Copier,
        *,
        may_halve: bool = True,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._flat = flat
        self._memory = memory
        self._copier = copier
        self._may_halve = may_halve
        self._graphs = graphs
        self._device = memory.device_arena.device
        self._search = SharedSearch()
        self._searches: list[SharedSearch] = []  # one for each group, by its index
        self._streamer = streamer_for(memory)

    @property
    def rows_padded(self) -> int:
        """Padding rows that captured graphs have computed since the start."""
        whole = self._flat.whole
        piecewise = whole.graphs if isinstance(whole, FusedModel) else None
        return sum(each.rows_padded for each in (self._graphs, piecewise) if each is not None)

    def run(
        self,
        slices: Sequence[Slice],
        copies: PageMoves | None = None,
        sampled: SampledIds | None = None,
        groups: Sequence[PageGroup] = (),
    ) -> Computed:
        """Compute at least one slice."""
        try:
            return self._run_unsplit(slices, copies, sampled, groups)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            num_tokens = sum(piece.stop - piece.start for piece in slices)
            if num_tokens == 1 or not self._may_halve:
                raise DeviceError(f"out of memory in a batch of {num_tokens} tokens") from error
        # Retry outside of the exception handler: the traceback keeps the failed batch's tensors alive.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        computed: list[Computed] = []
        for some_slices, some_groups in smaller_runs(slices, groups):
            each = self.run(some_slices, copies, sampled, some_groups)
            # The next graph overwrites this graph's logits.
            computed.append(each._replace(logits=each.logits.clone()))
            copies = None
        return _concatenated(computed)

    def wait_stored(self) -> None:
        """Wait until the host can read what groups of all earlier iterations have stored."""
        if self._streamer is not None:
            self._streamer.wait_stored()

    def close(self) -> None:
        if self._streamer is not None:
            self._streamer.close()

    def page_copies(self, iteration: Iteration) -> PageMoves | None:
        """Return the iteration's page copies, prepared for the device, or None if there are none."""
        if not iteration.copies:
            return None
        return self._memory.prepared(PageMoves.from_copies(iteration.copies))

    def copy_pages(self, copies: PageMoves) -> None:
        """Do the page copies of an iteration without slices."""
        for layer in range(self._memory.shape.num_layers):
            self._copier.wait_layer(layer)
            self._memory.copy_within(layer, copies)

    def _run_unsplit(
        self,
        slices: Sequence[Slice],
        copies: PageMoves | None,
        sampled: SampledIds | None,
        groups: Sequence[PageGroup],
    ) -> Computed:
        chunk_tokens, graphs = self._memory.chunk_tokens, self._graphs
        if groups and self._memory.in_place:
            slices = in_host_pages(slices, groups)
        # With groups, `_run_streamed` searches each part separately.
        search = self._search if not groups else nothing_shared
        batch = Batch.from_slices(slices, chunk_tokens, self._device, sampled, search)
        if groups:
            logits = self._run_streamed(batch, slices, copies, groups)
        elif (
            graphs is not None
            and copies is None
            and graphs.takes(batch, self._copier.swap_ins_outstanding)
        ):
            logits = graphs.logits(batch)
        else:
            copier, plan = self._copier, device_plan(batch, self._memory)
            forward_pass = PagedPass(
                *(batch, self._memory, copier.wait_layer, copies, plan),
                swap_ins_outstanding=copier.swap_ins_outstanding,
            )
            logits = self._flat.logits(
                batch.input_ids, batch.positions, batch.logit_rows, forward_pass
            ).float()
        newest_ids = batch.input_ids.index_select(0, batch.logit_rows)
        return Computed(logits, newest_ids, batch.logit_attempt_ids, batch.logit_positions)

    def _run_streamed(
        self,
        batch: Batch,
        slices: Sequence[Slice],
        copies: PageMoves | None,
        groups: Sequence[PageGroup],
    ) -> torch.Tensor:
        streamer, memory = self._streamer, self._memory
        assert streamer is not None, "there are no staging arenas"
        streamer.begin(groups)
        try:
            self._searches += [SharedSearch() for _ in groups[len(self._searches) :]]
            searches = (self._search, *self._searches)
            parts = parts_of(batch, slices, groups, memory, searches.__getitem__)
            forward_pass = StreamedPass(
                *(batch, parts, len(groups), memory, self._copier.wait_layer, streamer, copies)
            )
            logits = self._flat.logits(
                batch.input_ids, batch.positions, batch.logit_rows, forward_pass
            ).float()
            streamer.end()
        except BaseException:
            streamer.abandon()
            raise
        return logits


def nothing_shared(slices: Sequence[Slice], chunk_tokens: int) -> None:
    """Act as a `Search` that finds no shared pages."""


def smaller_runs(
    slices: Sequence[Slice], groups: Sequence[PageGroup]
) -> Iterator[tuple[Sequence[Slice], Sequence[PageGroup]]]:
    """Split a run into runs that need less memory: resident slices and each group alone, or halves."""
    num_resident = groups[0].first_slice if groups else len(slices)
    if len(groups) > 1 or (groups and num_resident):
        if num_resident:
            yield slices[:num_resident], ()
        for each in groups:
            count = each.stop_slice - each.first_slice
            alone = each._replace(first_slice=0, stop_slice=count)
            yield slices[each.first_slice : each.stop_slice], (alone,)
        return
    num_tokens = sum(piece.stop - piece.start for piece in slices)
    first, second = halves(slices, num_tokens // 2)
    if not groups:
        yield first, ()
        yield second, ()
        return
    (group,) = groups
    # The second half loads what the first half stores.  It also loads the slots that it will write itself,
    # which may hold anything until then.
    loaded = array("i", map(max, group.loaded_slots, group.stored_slots))
    yield first, (group._replace(stop_slice=len(first)),)
    yield second, (group._replace(stop_slice=len(second), loaded_slots=loaded),)


def halves(slices: Sequence[Slice], num_first: int) -> tuple[list[Slice], list[Slice]]:
    """Return slices of the first `num_first` tokens, and slices of the other tokens."""
    first: list[Slice] = []
    second: list[Slice] = []
    tokens_left = num_first
    for piece in slices:
        length = piece.stop - piece.start
        if length <= tokens_left:
            first.append(piece)
        elif tokens_left == 0:
            second.append(piece)
        else:
            before, after = piece.split(piece.start + tokens_left)
            first.append(before)
            second.append(after)
        tokens_left = max(tokens_left - length, 0)
    return first, second


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        sign in str(error) for sign in OUT_OF_MEMORY
    )


def _concatenated(computed: Sequence[Computed]) -> Computed:
    return Computed(
        torch.cat([each.logits for each in computed]),
        torch.cat([each.newest_ids for each in computed]),
        tuple(chain.from_iterable(each.attempt_ids for each in computed)),
        tuple(chain.from_iterable(each.positions for each in computed)),
    )
