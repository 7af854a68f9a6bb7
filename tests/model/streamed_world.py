"""A `World` in which some turns are streamed: their pages are on the host, and are loaded in groups."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from pensieve.core.iteration import Iteration, Outcome, PageGroup
from pensieve.core.turn import Turn
from pensieve.model.loader import LoadedModel
from tests.model.world import World, poison, slice_of, start_of

Piece = tuple[Turn, int, int, bool]  # turn, start, stop, needs_token


class Streaming(World):
    """Draws host pages at random, and records in `filled` how many slots of each page are valid."""

    def begin_streaming(self) -> None:
        self.free_host = list(range(self.memory.host_pages))
        random.Random(len(self.free_host)).shuffle(self.free_host)
        self.streamed: set[int] = set()  # ids of the streamed turns
        self.filled: dict[int, int] = {}  # host page -> number of valid slots at its start

    def streamed_turn(self, num_prompt_tokens: int, **rest: Any) -> Turn:
        self.streamed.add(len(self.turns))
        return self.turn(num_prompt_tokens, **rest)

    def extend_pages(self, turn: Turn, num_tokens: int) -> None:
        pool = self.free_host if turn.attempt_id in self.streamed else self.free_pages
        while len(turn.page_table) * self.memory.chunk_tokens < num_tokens:
            turn.page_table.append(pool.pop())

    def share(self, turn: Turn, other: Turn, num_chunks: int) -> None:
        """Let `turn` use the first pages of `other`."""
        turn.page_table[:num_chunks] = other.page_table[:num_chunks]

    def drop(self, turn: Turn, chunk: int) -> Piece:
        """Lose the KV of a chunk, and return the slice that recomputes it."""
        size = self.memory.chunk_tokens
        if turn.attempt_id in self.streamed:
            old, new = turn.page_table[chunk], self.free_host.pop()
            self.filled.pop(old, None)
            poison(self.memory.host_arena[:, old])
            turn.page_table[chunk] = new
        else:
            self.replace_page(turn, chunk)
        return turn, chunk * size, (chunk + 1) * size, False

    def step_groups(
        self, resident: Sequence[Piece], *groups: Sequence[Piece], **movements: Any
    ) -> Outcome:
        """Run one iteration: slices of resident turns, then of streamed turns, group by group."""
        self.launch_groups(resident, *groups, **movements)
        return self.collect()

    def launch_groups(
        self, resident: Sequence[Piece], *groups: Sequence[Piece], **movements: Any
    ) -> None:
        pieces = [*resident, *(piece for group in groups for piece in group)]
        for turn, _, stop, _ in pieces:
            self.extend_pages(turn, stop)
        slices = [self.slice(*piece) for piece in resident]
        made = []
        for group in groups:
            one, indexed = self._group(group, len(slices))
            made.append(one)
            slices += indexed
        turns = {piece[0].attempt_id: piece[0] for piece in pieces}
        started = tuple(start_of(turn) for key, turn in turns.items() if key not in self._started)
        self._started.update(turns)
        iteration = Iteration(
            self._index, tuple(slices), **movements, started=started, groups=tuple(made)
        )
        self._index += 1
        self.executor.launch(iteration)

    def _group(self, pieces: Sequence[Piece], first: int) -> tuple[PageGroup, list[Any]]:
        size = self.memory.chunk_tokens
        pages = list({page: 0 for piece in pieces for page in piece[0].page_table})
        if not self.memory.in_place:  # in place, page tables must be ascending
            self.rng.shuffle(pages)
        place = {page: index for index, page in enumerate(pages)}
        stored = dict.fromkeys(pages, 0)
        slices = []
        for turn, start, stop, needs_token in pieces:
            for position in range(start, stop):
                page = turn.page_table[position // size]
                stored[page] = max(stored[page], position % size + 1)
            piece = slice_of(turn, start, stop, needs_token, size)
            table = array("i", [place[page] for page in piece.page_table])
            slices.append(piece._replace(page_table=table))
        loaded = [self.filled.get(page, 0) for page in pages]
        for page, slots in stored.items():
            if slots:
                self.filled[page] = max(self.filled.get(page, 0), slots)
        group = PageGroup(
            first,
            first + len(pieces),
            array("i", pages),
            array("i", loaded),
            array("i", stored.values()),
        )
        fits = self.memory.in_place or len(pages) <= self.memory.staging_pages
        assert fits, "more pages than an arena has"
        return group, slices

    def pages_of(self, turn: Turn, num_tokens: int) -> torch.Tensor:
        """Return the turn's keys and values: (layers, 2, kv_heads, tokens, row)."""
        on_host = turn.attempt_id in self.streamed
        arena = self.memory.host_arena if on_host else self.memory.device_arena
        pages = arena[:, list(turn.page_table)].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
        return pages[:, :, :, :num_tokens]


class StreamedWorld(Streaming):
    """Uses pages of 32 tokens for the compiled attention, whose results do not depend on the batch."""

    def __init__(self, model: LoadedModel, **rest: Any) -> None:
        super().__init__(model, **{"host_pages": 96, "chunk_tokens": 32, **rest})
        self.begin_streaming()
