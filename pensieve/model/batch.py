"""Turn an iteration into tensors: its tokens in one row, and where each token's keys and values are stored.

A piece of a prefill, a recomputed gap and a decode are treated alike.  Each is a slice: consecutive rows with
absolute positions, a start position, and the page table of the slice's turn.

    input_ids, positions, slot_mapping   one entry per token, slices one after another
    page_index                           the pages that each slice attends to (`kernels.attention.input`);
                                         slices of one turn share a row of the page table, padding is page 0
    logit_rows                           last rows of the slices that need a token
    logit_attempt_ids, logit_positions      each such row's turn, and the position of the token to be sampled
    lengths, starts                      length and first position of each slice, as numbers on the host

On the host these are arrays of numbers.  One copy moves all of them to the device.

The last token of a slice may still be unknown to the host: the previous iteration samples it on the device
(`SampledIds`).  The device copies this token into the batch.  If sampling that token failed, token 0 is used
instead and the slice's result is discarded.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pensieve.core.iteration import Slice
from pensieve.kernels.attention.input import PageIndex
from pensieve.model.shared_pages import Search, shared_pages
from pensieve.model.transfer import upload


class SampledIds(NamedTuple):
    """Tokens sampled by an iteration that is not yet collected."""

    ids: torch.Tensor  # int64 (rows), on the device; -1: a row that failed
    rows: Mapping[int, int]  # attempt_id -> row


@dataclass(frozen=True, slots=True)
class Batch:
    input_ids: torch.Tensor  # int64 (tokens)
    positions: torch.Tensor  # int64 (tokens)
    slot_mapping: torch.Tensor  # int64 (tokens): page * slots + slot
    page_index: PageIndex
    logit_rows: torch.Tensor  # int64 (rows)
    logit_attempt_ids: tuple[int, ...]
    logit_positions: tuple[int, ...]
    lengths: Sequence[int]  # lengths of the slices, on the host
    starts: Sequence[int]

    @classmethod
    def from_slices(
        cls,
        slices: Sequence[Slice],
        chunk_tokens: int,
        device: str | torch.device = "cpu",
        sampled: SampledIds | None = None,
        search: Search = shared_pages,
    ) -> Batch:
        """Return the tensors of at least one slice; `search` finds the pages that the slices share."""
        device = torch.device(device)
        token_ids, positions, slots, logit_rows = (array("q") for _ in range(4))
        entries, sampled_rows = array("q"), array("q")  # indices into token_ids and into `sampled`
        offsets, slice_turns = array("i", [0]), array("i")
        starts = array("i", [piece.start for piece in slices])
        tables: list[array[int]] = []  # by turn: the longest page table among its slices
        turn_rows: dict[int, int] = {}  # attempt_id -> row of the page table
        logit_attempt_ids: list[int] = []
        logit_positions: list[int] = []
        for piece in slices:
            attempt_id, start, stop, pages = (
                piece.attempt_id,
                piece.start,
                piece.stop,
                piece.page_table,
            )
            # Through an iterator, because an array can be extended only by an array of the same type.
            token_ids.extend(iter(piece.token_ids))
            positions.extend(range(start, stop))
            if piece.awaits_token:
                assert sampled is not None, "a slice awaits a token that no iteration samples"
                entries.append(len(token_ids))
                sampled_rows.append(sampled.rows[attempt_id])
                token_ids.append(0)
            while start < stop:  # page by page
                chunk, slot = divmod(start, chunk_tokens)
                count = min(stop - start, chunk_tokens - slot)
                first = pages[chunk] * chunk_tokens + slot
                slots.extend(range(first, first + count))
                start += count
            offsets.append(len(positions))
            row = turn_rows.setdefault(attempt_id, len(tables))
            if row == len(tables):
                tables.append(pages)
            elif len(pages) > len(tables[row]):
                tables[row] = pages
            slice_turns.append(row)
            if piece.needs_token:
                logit_rows.append(len(positions) - 1)
                logit_attempt_ids.append(attempt_id)
                logit_positions.append(stop)
        assert len(token_ids) == len(positions), "a slice lacks token ids"
        pages_max = max(map(len, tables))
        page_table = array("i")
        for pages in tables:
            page_table.extend(pages)
            page_table.frombytes(bytes(4 * (pages_max - len(pages))))
        rows = (token_ids, positions, slots, logit_rows, entries, sampled_rows)
        columns = staged((*rows, offsets, slice_turns, starts, page_table), device)
        input_ids = columns[0]
        if entries:
            assert sampled is not None
            known = sampled.ids.index_select(0, columns[5]).clamp_(min=0)
            input_ids.index_copy_(0, columns[4], known)
        shared = search(slices, chunk_tokens) if device.type in ("cpu", "cuda") else None
        return cls(
            input_ids=input_ids,
            positions=columns[1],
            slot_mapping=columns[2],
            page_index=PageIndex(
                columns[9].view(len(tables), pages_max), columns[6], columns[7], columns[8], shared
            ),
            logit_rows=columns[3],
            logit_attempt_ids=tuple(logit_attempt_ids),
            logit_positions=tuple(logit_positions),
            lengths=[piece.stop - piece.start for piece in slices],
            starts=starts.tolist(),
        )


def staged(columns: Sequence[array[int]], device: torch.device) -> list[torch.Tensor]:
    """Return every column as a tensor on the device, with one copy; int64 columns must come first."""
    joined = bytearray().join(column.tobytes() for column in columns)
    uploaded = upload(torch.frombuffer(joined, dtype=torch.uint8), device)
    pieces = torch.split(uploaded, [len(column) * column.itemsize for column in columns])
    return [
        piece.view(torch.int64 if column.itemsize == 8 else torch.int32)
        for piece, column in zip(pieces, columns, strict=True)
    ]
