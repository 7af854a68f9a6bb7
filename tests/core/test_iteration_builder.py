"""The predicted work of a builder equals the work of its slices, and a piece may be cut to whole tiles."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.core.cost import Work, work_of
from pensieve.core.iteration_builder import IterationBuilder
from pensieve.core.time_budget import TimeBudget
from tests.core.world import ScriptedWorld


def test_the_predicted_work_of_an_iteration_equals_the_work_of_its_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned, seen = TimeBudget.planned, list[Work]()

    def compare(self: TimeBudget, builder: IterationBuilder, now: float) -> None:
        assert builder.work == work_of((piece.start, piece.stop) for piece in builder.slices)
        seen.append(builder.work)
        planned(self, builder, now)

    monkeypatch.setattr(TimeBudget, "planned", compare)
    world = ScriptedWorld(400, 0, batch_tokens_max=64, token_seconds=0.001, prompt_seconds_max=0.05)
    world.ask("one", 4, 30)
    world.ask("other", 1, 30)
    world.next()
    world.next()
    world.ask("reader", 150, 4)
    for _ in range(20):
        world.next()
    assert seen[0] == Work(5, 11, 5, 1)
    assert Work(2, 7, 7, 2) in seen  # both turns generate
    assert any(work.tokens > 16 and work.decodes == 2 for work in seen)  # decodes and a piece


def test_a_piece_of_a_prompt_is_cut_so_that_the_iteration_has_whole_tiles() -> None:
    """Two turns generate and a prompt of 150 tokens follows; 100 tokens are allowed, and a tile has 32."""
    world = ScriptedWorld(400, 0, batch_tokens_max=100, token_seconds=0.001, tile_tokens=32)
    world.ask("one", 4, 30)
    world.ask("other", 1, 30)
    world.next()
    world.ask("reader", 150, 4)
    seen = []
    for _ in range(3):
        seen.append(sum(piece.num_tokens for piece in world.next().slices))
    assert seen == [96, 2 + 150 - 94, 3]


def test_a_piece_is_not_cut_to_tiles_if_the_iteration_mostly_waits() -> None:
    """An iteration takes 10 seconds whatever it computes."""
    slow: dict[str, Any] = {"iteration_seconds": 10.0, "token_seconds": 0.001}
    world = ScriptedWorld(400, 0, batch_tokens_max=100, tile_tokens=32, **slow)
    world.ask("reader", 150, 4)
    assert sum(piece.num_tokens for piece in world.next().slices) == 100
