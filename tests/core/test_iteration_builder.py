"""The predicted work of a builder equals the predicted work of its slices."""

from __future__ import annotations

import pytest

from pensieve.core.cost import Work, work_of
from pensieve.core.iteration_builder import IterationBuilder
from pensieve.core.time_budget import TimeBudget
from tests.core.world import Stage


def test_the_work_of_an_iteration_is_that_of_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, seen = TimeBudget.planned, list[Work]()

    def compared(self: TimeBudget, builder: IterationBuilder, now: float) -> None:
        assert builder.work == work_of((piece.start, piece.stop) for piece in builder.slices)
        seen.append(builder.work)
        planned(self, builder, now)

    monkeypatch.setattr(TimeBudget, "planned", compared)
    world = Stage(400, 0, batch_tokens_max=64, token_seconds=0.001, prompt_seconds_max=0.05)
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
