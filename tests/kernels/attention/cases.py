"""Attention cases for every implementation and KV format, with the answer that all must give.

The answer is computed here in float64, from the keys and values as the format stores them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from pensieve.kernels.attention.input import (
    AttentionInput,
    AttentionKind,
    PageIndex,
    SharedPages,
)
from pensieve.kernels.kv_format import FP8, INT8, dequantised, quantised

NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
TYPES = list(TOLERANCE)
# A batch with decodes, pieces of prefill, and two slices of one turn.
MIXED = [(0, 0, 1), (1, 0, 33), (2, 31, 1), (3, 32, 8), (3, 60, 5), (4, 500, 70), (5, 63, 1)]
Slice = tuple[int, int, int]  # turn, start, length
Front = tuple[int, list[int]]  # number of shared pages, turns that begin with these pages


def poisoned(
    num_pages: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    kv_format: str = "auto",
    slots: int = 32,
) -> torch.Tensor:
    """Return an arena of unwritten rows: all are NaN."""
    if kv_format == "int8":  # the scale of a row of such bytes is NaN
        return torch.full((num_pages, 2, kv_heads, slots, INT8.row(head_size)), -1).to(torch.int8)
    element = FP8.element if kv_format == "fp8" else dtype
    return torch.full((num_pages, 2, kv_heads, slots, head_size), NAN).to(element)


class Case:
    """Slices of turns whose pages are scattered in an arena. Rows that no turn has written are NaN."""

    def __init__(
        self,
        slices: Sequence[Slice],
        heads: int = 4,
        kv_heads: int = 2,
        head_size: int = 64,
        dtype: torch.dtype = torch.float32,
        kv_format: str = "auto",
        *,
        slots: int = 32,
        seed: int = 0,
        spread: float = 1.0,
        scaling: float | None = None,
        fronts: Sequence[Front] = (),
    ) -> None:
        """`fronts` are pages that turns share. The slices of these turns start after the shared pages."""
        self.slices, self.kv_format, self._slots = slices, kv_format, slots
        self.lengths, self.starts = [n for *_, n in slices], [start for _, start, _ in slices]
        self.heads, self.kv_heads, self._fronts = heads, kv_heads, fronts
        draw = torch.Generator().manual_seed(seed)
        turns = 1 + max(turn for turn, _, _ in slices)
        ends = [
            max((start + n for turn, start, n in slices if turn == each), default=0)
            for each in range(turns)
        ]
        per_turn = max(1, -(-max(ends) // slots))
        self.arena = poisoned(turns * per_turn + 5, kv_heads, head_size, dtype, kv_format, slots)
        self.scales = (
            2.0 ** torch.randint(-5, 3, (2, kv_heads), generator=draw)
            if kv_format == "fp8"
            else None
        )
        order = torch.randperm(len(self.arena), generator=draw)
        self.table = order[: turns * per_turn].view(turns, per_turn)
        first = list(range(turns))  # turn -> the first turn that begins with the same pages
        for pages, sharing in fronts:
            self.table[sharing, :pages] = self.table[sharing[0], :pages]
            for turn in sharing:
                first[turn] = sharing[0]
        shared = {turn: pages * slots for pages, sharing in fronts for turn in sharing[1:]}
        for turn, end in enumerate(ends):
            begin = shared.get(turn, 0)
            rows = torch.randn((2, end - begin, kv_heads, head_size), generator=draw) * spread
            if kv_format == "int8":  # make rows of very different sizes
                rows *= torch.rand((2, end - begin, kv_heads, 1), generator=draw) + 0.5
            self.write(turn, begin, rows.to(dtype))
        buffer = torch.full((heads, sum(self.lengths) + 2, head_size + 8), NAN, dtype=dtype)
        self.query = buffer[:, 1:-1, 8:].transpose(0, 1)  # strided, like the queries of models
        self.query.copy_(torch.randn(self.query.shape, generator=draw))
        self.kind = AttentionKind.plain(head_size) if scaling is None else AttentionKind(scaling)
        self.page_index = PageIndex(
            self.table.int(),
            torch.tensor([0, *self.lengths]).cumsum(0).int(),
            torch.tensor([turn for turn, _, _ in slices], dtype=torch.int32),
            torch.tensor(self.starts, dtype=torch.int32),
        )
        self.out = torch.full(self.query.shape, NAN, dtype=dtype)
        self._tolerance = TOLERANCE[dtype] * max(spread, 1.0) * (1.5 if kv_format == "int8" else 1)

    @property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.arena.unbind(1)
        return keys, values

    @property
    def inputs(self) -> AttentionInput:
        return AttentionInput(self.query, *self.pages, self.page_index, self.kind, self.scales)

    @property
    def shared(self) -> SharedPages:
        """The fronts in the form that implementations take."""
        groups = {turn: group for group, (_, turns) in enumerate(self._fronts) for turn in turns}
        return SharedPages(
            array("i", [groups.get(turn, -1) for turn, _, _ in self.slices]),
            array("i", [pages for pages, _ in self._fronts]),
        )

    def write(self, turn: int, begin: int, rows: torch.Tensor) -> None:
        """Store rows (2, tokens, kv_heads, head_size) at the turn's positions, starting at `begin`."""
        positions = torch.arange(begin, begin + rows.shape[1])
        pages, slots = self.table[turn, positions // self._slots], positions % self._slots
        if self.scales is not None:
            rows = (rows.float() / self.scales[:, None, :, None]).to(self.arena.dtype)
        elif self.kv_format == "int8":
            rows = quantised(rows)
        self.arena[pages, :, :, slots] = rows.transpose(0, 1)

    def read(self, turn: int, end: int) -> torch.Tensor:
        """Return the rows of the turn's first `end` tokens, rounded by the KV format. Shape as in `write`."""
        positions = torch.arange(end)
        pages, slots = self.table[turn, positions // self._slots], positions % self._slots
        stored = self.arena[pages, :, :, slots].transpose(0, 1)
        if self.kv_format == "int8":
            return dequantised(stored)
        return stored.float() * (1.0 if self.scales is None else self.scales[:, None, :, None])

    def poison(self, turn: int, position: int, side: int, value: float = NAN) -> None:
        """Replace a number in the first head of the key (side 0) or value (side 1) at a position."""
        rows = self.read(turn, position + 1)[:, position:].clone()
        rows[side, 0, 0, 5] = value
        self.write(turn, position, rows.to(self.query.dtype))

    def answer(self) -> torch.Tensor:
        found = []
        queries = self.query.double().split(self.lengths)
        for (turn, start, length), query in zip(self.slices, queries, strict=True):
            keys, values = self.read(turn, start + length).double().unbind()
            grouped = query.unflatten(1, (self.kv_heads, -1))
            scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * self.kind.scaling
            places = torch.arange(start + length)
            is_future = places > places[start:, None]
            weights = scores.masked_fill(is_future, -float("inf")).softmax(-1)
            found.append(torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2))
        return torch.cat(found)

    def check(self) -> None:
        """Check that `out` equals the answer within the rounding of its type."""
        assert not self.out.isnan().any()
        assert float((self.out.double() - self.answer()).abs().max()) <= self._tolerance
