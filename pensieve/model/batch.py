"""An iteration as tensors: one flat run of tokens, and where each token's keys and values live.

Nothing distinguishes a piece of prefill, a repaired hole and a decode: each slice is a run of rows
with absolute positions, one turn whose page table it attends through, and a start.

    input_ids, positions, slot_mapping   one entry per token, slices one after another
    slice_offsets                        slice s is rows [offsets[s], offsets[s+1])
    slice_turns                          its row of the page table (a turn with several slices: once)
    slice_starts                         the position of its first token
    page_table                           entry i of a row is the page of chunk i; padding is page 0
    logit_rows                           last rows of the slices that need a token
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pensieve.core.iteration import Slice
from pensieve.core.turn import Turn


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
    logit_turns: tuple[Turn, ...]  # the turn of each logit row

    @classmethod
    def from_slices(
        cls,
        slices: Sequence[Slice],
        chunk_tokens: int,
        device: str | torch.device = "cpu",
    ) -> Batch:
        """The tensors of an iteration's slices; there must be at least one."""
        token_ids = array("I")
        positions: list[int] = []
        slots: list[int] = []
        offsets = [0]
        turns: list[Turn] = []
        turn_rows: dict[int, int] = {}  # id(turn) -> row of the page table
        slice_turns: list[int] = []
        logit_rows: list[int] = []
        logit_turns: list[Turn] = []
        pages_max = 1
        for turn, start, stop, needs_token in slices:
            token_ids.extend(turn.tokens[start:stop])
            positions.extend(range(start, stop))
            pages = turn.page_table
            slots.extend(
                pages[position // chunk_tokens] * chunk_tokens + position % chunk_tokens
                for position in range(start, stop)
            )
            offsets.append(len(positions))
            row = turn_rows.setdefault(id(turn), len(turns))
            if row == len(turns):
                turns.append(turn)
            slice_turns.append(row)
            pages_max = max(pages_max, -(-stop // chunk_tokens))
            if needs_token:
                logit_rows.append(len(positions) - 1)
                logit_turns.append(turn)
        assert len(token_ids) == len(positions), "a slice reaches beyond its turn's tokens"
        table = torch.zeros(len(turns), pages_max, dtype=torch.int32)
        for row, turn in enumerate(turns):
            pages = turn.page_table[:pages_max]
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        starts = [piece.start for piece in slices]
        return cls(
            input_ids=torch.frombuffer(token_ids, dtype=torch.int32).to(device, torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            page_table=table.to(device),
            slice_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
            slice_turns=torch.tensor(slice_turns, dtype=torch.int32, device=device),
            slice_starts=torch.tensor(starts, dtype=torch.int32, device=device),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
            logit_turns=tuple(logit_turns),
        )
