"""Turns an iteration into tensors: its tokens in one row, and where each token's keys and values lie.

A piece of a prefill, a recomputed hole and a decode are treated alike: each slice is some consecutive rows
with absolute positions, a start, and the page table of the turn that it attends to.

    input_ids, positions, slot_mapping   one entry per token, slices one after another
    slice_offsets                        slice s is rows [offsets[s], offsets[s+1])
    slice_turns                          the row of slice s in page_table (slices of one turn share a row)
    slice_starts                         the position of slice s's first token
    page_table                           a row per turn; entry i is the page of chunk i; padding is page 0
    logit_rows                           last rows of the slices that need a token
    logit_turn_ids, logit_positions      each such row's turn, and the position of the token to be sampled
    lengths, starts                      of the slices, as numbers on the host

The last token of a slice may be one that the iteration before samples and that only the device
knows (`SampledIds`).  It is copied into the batch there.  Where that row failed, token 0 takes its place,
and the slice's result is thrown away.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pensieve.core.iteration import Slice
from pensieve.model.transfer import indices, upload


class SampledIds(NamedTuple):
    """Tokens sampled by an iteration that is not collected yet."""

    ids: torch.Tensor  # int64 (rows), on the device; -1: a row that failed
    rows: Mapping[int, int]  # turn_id -> row


@dataclass(frozen=True, slots=True)
class Batch:
    input_ids: torch.Tensor  # int64 (tokens)
    positions: torch.Tensor  # int64 (tokens)
    slot_mapping: torch.Tensor  # int64 (tokens): page * slots + slot
    page_table: torch.Tensor  # int32 (turns, pages_max)
    slice_offsets: torch.Tensor  # int32 (slices+1)
    slice_turns: torch.Tensor  # int32 (slices)
    slice_starts: torch.Tensor  # int32 (slices)
    logit_rows: torch.Tensor  # int64 (rows)
    logit_turn_ids: tuple[int, ...]
    logit_positions: tuple[int, ...]
    lengths: Sequence[int]  # of the slices, for the host
    starts: Sequence[int]

    @classmethod
    def from_slices(
        cls,
        slices: Sequence[Slice],
        chunk_tokens: int,
        device: str | torch.device = "cpu",
        sampled: SampledIds | None = None,
    ) -> Batch:
        """The tensors of an iteration's slices; there must be at least one."""
        device = torch.device(device)
        token_ids = array("I")
        awaited: list[tuple[int, int]] = []  # entry of token_ids, row of sampled
        positions: list[int] = []
        slots: list[int] = []
        offsets = [0]
        tables: list[array[int]] = []  # of the turns: the longest that a slice of it brings
        turn_rows: dict[int, int] = {}  # turn_id -> row of the page table
        slice_turns: list[int] = []
        logit_rows: list[int] = []
        logit_turn_ids: list[int] = []
        logit_positions: list[int] = []
        for piece in slices:
            turn_id, start, stop, pages = piece.turn_id, piece.start, piece.stop, piece.page_table
            token_ids.extend(piece.token_ids)
            positions.extend(range(start, stop))
            if piece.awaits_token:
                assert sampled is not None, "a slice awaits a token that no iteration samples"
                awaited.append((len(token_ids), sampled.rows[turn_id]))
                token_ids.append(0)
            slots.extend(
                pages[position // chunk_tokens] * chunk_tokens + position % chunk_tokens
                for position in range(start, stop)
            )
            offsets.append(len(positions))
            row = turn_rows.setdefault(turn_id, len(tables))
            if row == len(tables):
                tables.append(pages)
            elif len(pages) > len(tables[row]):
                tables[row] = pages
            slice_turns.append(row)
            if piece.needs_token:
                logit_rows.append(len(positions) - 1)
                logit_turn_ids.append(turn_id)
                logit_positions.append(stop)
        assert len(token_ids) == len(positions), "a slice lacks token ids"
        table = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
        for row, pages in enumerate(tables):
            table[row, : len(pages)] = torch.frombuffer(pages, dtype=torch.int32)
        starts = [piece.start for piece in slices]
        input_ids = upload(torch.frombuffer(token_ids, dtype=torch.int32).to(torch.int64), device)
        if awaited:
            assert sampled is not None
            entries, rows = zip(*awaited, strict=True)
            known = sampled.ids.index_select(0, indices(rows, device)).clamp_(min=0)
            input_ids.index_copy_(0, indices(entries, device), known)
        return cls(
            input_ids=input_ids,
            positions=indices(positions, device),
            slot_mapping=indices(slots, device),
            page_table=upload(table, device),
            slice_offsets=upload(torch.tensor(offsets, dtype=torch.int32), device),
            slice_turns=upload(torch.tensor(slice_turns, dtype=torch.int32), device),
            slice_starts=upload(torch.tensor(starts, dtype=torch.int32), device),
            logit_rows=indices(logit_rows, device),
            logit_turn_ids=tuple(logit_turn_ids),
            logit_positions=tuple(logit_positions),
            lengths=[piece.stop - piece.start for piece in slices],
            starts=starts,
        )
