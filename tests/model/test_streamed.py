"""Streamed turns give what resident ones give, to the last bit, and leave the same keys and values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from pensieve.core.sampling import Sampling
from pensieve.model.loader import LoadedModel
from tests.model.streamed_world import Piece, StreamedWorld

Loaded = Callable[[str], LoadedModel]
SIZE = 32  # tokens of a page
LOGPROBS = Sampling(ignore_eos=True, logprobs=4)


class Twins:
    """Two worlds with the same turns: in one of them all are resident."""

    def __init__(self, model: LoadedModel, staging_pages: int, seed: int = 0, **rest: Any) -> None:
        self.streamed = StreamedWorld(model, staging_pages=staging_pages, seed=seed, **rest)
        self.resident = StreamedWorld(model, staging_pages=0, seed=seed, **rest)
        self.num_tokens: dict[int, int] = {}  # computed, of each turn

    def turns(self, lengths: list[int], num_resident: int = 0) -> list[int]:
        """Turns with prompts of these lengths, the first ones resident in both worlds."""
        made = []
        draw = random.Random(sum(lengths))
        for index, length in enumerate(lengths):
            tokens = [draw.randrange(3, 100) for _ in range(length)]
            make = self.streamed.turn if index < num_resident else self.streamed.streamed_turn
            turn = make(0, tokens=tokens, sampling=LOGPROBS)
            self.resident.turn(0, tokens=tokens, sampling=LOGPROBS)
            made.append(turn.turn_id)
        return made

    def step(
        self, resident: list[tuple[int, int, int]], *groups: list[tuple[int, int, int]]
    ) -> None:
        """Slices (turn, start, stop); the last position of what is known of a turn is sampled."""

        def pieces(world: StreamedWorld, slices: list[tuple[int, int, int]]) -> list[Piece]:
            return [
                (turn := world.turns[index], start, stop, stop == len(turn.tokens))
                for index, start, stop in slices
            ]

        together = [each for part in (resident, *groups) for each in part]
        expected = self.resident.step(*pieces(self.resident, together))
        got = self.streamed.step_groups(
            pieces(self.streamed, resident), *(pieces(self.streamed, each) for each in groups)
        )
        assert got.samples == expected.samples
        for index, _, stop in together:
            self.num_tokens[index] = max(self.num_tokens.get(index, 0), stop)

    def decodes(self, *turns: int) -> list[tuple[int, int, int]]:
        lengths = [len(self.streamed.turns[each].tokens) for each in turns]
        return [(each, n - 1, n) for each, n in zip(turns, lengths, strict=True)]

    def drop(self, turn: int, chunk: int) -> tuple[int, int, int]:
        for world in (self.streamed, self.resident):
            piece = world.drop(world.turns[turn], chunk)
        return turn, piece[1], piece[2]

    def check_pages(self) -> None:
        for index, count in self.num_tokens.items():
            one, other = (
                world.pages_of(world.turns[index], count)
                for world in (self.streamed, self.resident)
            )
            assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8)), index

    def close(self) -> None:
        for world in (self.streamed, self.resident):
            world.executor.close()


def prefills(twins: Twins, turns: list[int]) -> list[tuple[int, int, int]]:
    return [(each, 0, len(twins.streamed.turns[each].tokens)) for each in turns]


def test_prefill_and_decodes_in_one_group_of_one(loaded: Loaded) -> None:
    twins = Twins(loaded("llama-gqa"), 5)
    (turn,) = twins.turns([70])
    twins.step([], [(turn, 0, 40)])
    twins.step([], [(turn, 40, 70)])
    for _ in range(30):
        twins.step([], twins.decodes(turn))
    twins.check_pages()
    twins.close()


def test_many_groups_beside_resident_turns(loaded: Loaded) -> None:
    """More groups than arenas, of one turn and of several, whose prefills and decodes are mixed."""
    twins = Twins(loaded("llama-gqa"), 8)
    a, b, c, d, e, f, g = twins.turns([50, 33, 64, 20, 90, 31, 65], num_resident=2)
    twins.step(prefills(twins, [a, b]), prefills(twins, [c, d]), [(e, 0, 40)])
    for _ in range(4):
        twins.step(
            twins.decodes(a, b),
            twins.decodes(c),
            [*twins.decodes(d), (e, 40, 60)],
            [(f, 0, 31)] if f not in twins.num_tokens else twins.decodes(f),
            prefills(twins, [g]) if g not in twins.num_tokens else twins.decodes(g),
        )
        twins.step([], twins.decodes(g), twins.decodes(f), twins.decodes(c, d))
    twins.check_pages()
    twins.close()
