"""Capture the work between a model's attentions as CUDA graphs, for iterations that contain prompts.

An iteration that only decodes is one graph (graphs.py).  With prompts, the attention's work depends on the
mixture of slices, so the attention is launched without a graph.  The work between two layers' attentions is a
graph, called a piece.  Without pieces a layer takes about ten kernel launches.  These launches take the host
longer than the device takes to compute hundreds of tokens.

    piece 0                 norm, queries, keys, values, rotation and pages of layer 0
    attention of layer 0
    piece 1                 the rest of layer 0; norm, queries, ... of layer 1
    …
    attention of the last layer, and the rest of that layer for the rows whose logits are wanted

Pieces are captured for some numbers of tokens (`token_sizes`), and an iteration uses the next larger size.
The remaining rows are padding: their keys and values go to a page that no turn has (`KVMemory.spare_page`).
All pieces share their memory.  The first piece reads `residual`.  Each later piece reads `attended` and the
result of the previous piece.  A piece writes `rotated`, which the attention reads.

A piece writes to its layer's pages, so these pages must have arrived before the piece is launched.
"""

from __future__ import annotations

from functools import partial

import torch

from pensieve.errors import one_line
from pensieve.kernels.attention.input import PageIndex
from pensieve.kernels.layer.cuda import CudaLayer, CudaPagedRows
from pensieve.model.attention import FlatModel, ForwardPass
from pensieve.model.fuse.whole_model import FusedModel, Rotation
from pensieve.model.graphs import Capture, CudaCapture, Replay, attends
from pensieve.model.kv.memory import KVMemory

TOKENS_MAX = 1024  # largest piece: beyond this size the device takes longer than the host


def token_sizes(tokens_max: int) -> list[int]:
    """Return the numbers of tokens to capture pieces for, in steps that keep padding small."""
    largest = min(tokens_max, TOKENS_MAX)
    steps = {1, 2, 4, 8, 16, *range(32, 256, 32), *range(256, TOKENS_MAX + 1, 64), largest}
    return sorted(size for size in steps if size <= largest)


class PiecewiseGraphs:
    """The pieces of one model over one KV memory."""

    def __init__(
        self, model: FusedModel, memory: KVMemory, tokens_max: int, capture: Capture | None = None
    ) -> None:
        device = memory.device_arena.device
        self._model = model
        self._memory = memory
        self._capture = capture or CudaCapture(device)
        self._layers: list[CudaLayer] = []
        self._pieces: dict[int, list[Replay]] = {}  # by number of tokens
        self._sizes = token_sizes(tokens_max)
        self.failure = ""  # why nothing could be captured
        self.rows_padded = 0  # padding rows computed since the start
        self._spare_slot = memory.spare_page * memory.chunk_tokens
        rows = self._sizes[-1]
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = zeros + self._spare_slot
        self._residual, rotation = model.embed(zeros, zeros)
        self._rotation: Rotation | None = None
        if rotation is not None:
            dtype = memory.shape.dtype
            cosines, sines = (each[0].to(dtype).contiguous() for each in rotation)
            self._rotation = cosines, sines
        heads = (rows, memory.shape.num_heads, memory.shape.head_size)
        self._rotated = torch.zeros(heads, dtype=self._residual.dtype, device=device)
        self._attended = torch.zeros_like(self._rotated)

    def capture(self) -> None:
        """Capture all pieces, the largest first: smaller pieces reuse its memory."""
        if self._rotation is None or not attends(self._memory):
            self.failure = "attention, or its rotation, runs in torch"
            return
        for layer in self._model.layers:
            if not isinstance(layer.dense, CudaLayer):
                self.failure = f"layer {layer.layer_idx} does not run in GPU kernels"
                return
            self._layers.append(layer.dense)
        try:
            for size in reversed(self._sizes):
                self._pieces[size] = self._capture_size(size, *self._rotation)
        except RuntimeError as error:
            self._pieces.clear()
            self.failure = one_line(error)

    def _capture_size(self, size: int, cosines: torch.Tensor, sines: torch.Tensor) -> list[Replay]:
        zeros = torch.zeros(2, dtype=torch.int32, device=cosines.device)
        paged_rows = CudaPagedRows(
            self._memory.device_arena,
            self._slots[:size],
            PageIndex(zeros[None], zeros, zeros[:1], zeros[:1]),  # only the attention reads it
            None,
            self._memory.shape.dtype,
            self._memory.kv_scales,
        )
        paged_rows.rotation = (cosines[:size], sines[:size])
        rotated, attended = self._rotated[:size], self._attended[:size]
        last = len(self._layers) - 1
        residual = self._residual[:size]  # residual of the current piece

        def compute(index: int) -> None:
            nonlocal residual
            if index == 0:
                residual = self._residual[:size]
            else:
                residual = self._layers[index - 1].after_attention(residual, attended)
            self._layers[index].write_rows(residual, paged_rows, rotated)
            # `run` reads the last residual after all pieces. Later pieces may reuse a piece's own memory.
            if index == last > 0:
                residual = self._residual[:size].copy_(residual)

        def first_two() -> None:  # launches every kernel of the pieces, except one copy
            for index in range(min(2, len(self._layers))):
                compute(index)

        self._capture.warm(first_two)
        return [self._capture.record(partial(compute, index)) for index in range(len(self._layers))]

    def takes(self, num_tokens: int, forward_pass: ForwardPass) -> bool:
        paged_rows = forward_pass.paged_rows
        return (
            bool(self._pieces)
            and num_tokens <= self._sizes[-1]
            and isinstance(paged_rows, CudaPagedRows)
            and paged_rows.arena is self._memory.device_arena  # the pieces write to it
        )

    def run(
        self,
        hidden: torch.Tensor,
        rotation: Rotation | None,
        kept: torch.Tensor,
        forward_pass: ForwardPass,
    ) -> torch.Tensor:
        """Return the last layer's residual of the kept rows."""
        paged_rows = forward_pass.paged_rows
        assert isinstance(paged_rows, CudaPagedRows)
        assert self._rotation is not None
        num_tokens = len(hidden)
        size = next(size for size in self._sizes if size >= num_tokens)
        paged_rows.rotate_by(rotation)
        self._residual[:num_tokens].copy_(hidden)
        for own, given in zip(self._rotation, paged_rows.rotation, strict=True):
            own[:num_tokens].copy_(given)
        self._slots[:num_tokens].copy_(paged_rows.slot_mapping)
        if size > num_tokens:
            self._slots[num_tokens:size].fill_(self._spare_slot)
        self.rows_padded += size - num_tokens
        rotated, attended = self._rotated[:num_tokens], self._attended[:num_tokens]
        for index, (layer, replay) in enumerate(zip(self._layers, self._pieces[size], strict=True)):
            forward_pass.wait_for_pages(index)
            replay()
            layer.attend(rotated, paged_rows, attended)
        residual = self._residual.index_select(0, kept)
        return self._layers[-1].after_attention(residual, attended.index_select(0, kept))


def capture_pieces(flat: FlatModel, memory: KVMemory, tokens_max: int) -> str:
    """Let the model run in pieces from now on; return why it cannot, or an empty string.

    Call this after the decode graphs are captured: they do not use pieces.
    """
    if not isinstance(flat.whole, FusedModel):
        return "the model's own code runs between its layers"
    pieces = PiecewiseGraphs(flat.whole, memory, tokens_max)
    pieces.capture()
    if not pieces.failure:
        flat.whole.graphs = pieces
    return pieces.failure
