"""Profiling a machine with known costs finds these costs. Held-out measurements are not used for the fit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.bench.profile import Profile, measure_profile, objectives, plot, unmeasured_cost
from pensieve.bench.profile_driver import COPIED_PAGES, ROUNDS, Driver, measure_points
from pensieve.bench.profile_points import (
    CHUNKS,
    DECODES,
    MIXES,
    PROMPTS,
    IterationLimits,
    ProfilePoint,
    points_of,
)
from pensieve.core.iteration import Iteration, Outcome, SampledToken
from pensieve.errors import ModelError
from pensieve.sim.cost import CostModel
from pensieve.sim.fit_points import fit_points

LIMITS = IterationLimits(turns=64, tokens=512, context=4096, pages=4096, chunk_tokens=32)
KNOWN_COSTS = CostModel(
    *(0.0, 0.0, 1e-9, 2e-9, 0.0, 8, 1000, 1e6, "known costs"),
    dense_points=((2, 0.0004), (32, 0.0006), (512, 0.007)),
    decode_points=((0, 0.0), (1, 0.0001), (64, 0.001)),
)
PAGE_SECONDS = 0.00003


class KnownCostMachine:
    """An executor that advances its clock by known costs, and checks its input."""

    depth = 1

    def __init__(self, costs: CostModel, noise: float = 0.0) -> None:
        self.now = 0.0
        self._costs, self._noise, self._draw = costs, noise, random.Random(1)
        self._logs: dict[int, int] = {}
        self._outcome = Outcome()
        self.spans: list[tuple[tuple[int, int], ...]] = []
        self.filled = set[int]()

    def launch(self, iteration: Iteration) -> None:
        for start in iteration.started:
            self._logs[start.attempt_id] = len(start.context)
        pages = [page for piece in iteration.slices for page in piece.page_table]
        assert len(pages) == len(set(pages)), "two slices share a page"
        turns = [piece.attempt_id for piece in iteration.slices]
        assert len(turns) == len(set(turns)), "a turn has two slices"
        for piece in iteration.slices:
            assert len(piece.token_ids) == piece.num_tokens
            assert len(piece.page_table) * 32 >= piece.stop
            assert self._logs[piece.attempt_id] >= piece.stop
        if self.spans:
            assert self.filled.issuperset(pages), "a page was never written"
        for copy in iteration.copies:
            assert copy.source_page in self.filled
            self.filled.add(copy.target_page)
        self.filled.update(pages)
        spans = tuple((piece.start, piece.stop) for piece in iteration.slices)
        self.spans.append(spans)
        moves = max(len(iteration.swap_ins), len(iteration.swap_outs))
        pause = 6.0 if self._noise and self._draw.random() < 0.02 else 1.0
        noise = pause * max(1 + self._draw.gauss(0, self._noise), 0.5)
        self.now += noise * self._costs.iteration_seconds(spans) + moves * PAGE_SECONDS
        samples = [
            SampledToken(piece.attempt_id, 7) for piece in iteration.slices if piece.needs_token
        ]
        came, went = iteration.swap_ins, iteration.swap_outs
        moved = (*(each.copy_id for each in came), *(each.copy_id for each in went))
        self._outcome = Outcome(tuple(samples), moved)

    def collect(self) -> Outcome:
        return self._outcome


def profile_of(
    machine: KnownCostMachine, limits: IterationLimits = LIMITS, quick: bool = False
) -> Profile:
    points = points_of(limits, quick)
    driver = Driver(machine, limits, 1000, points, lambda: machine.now)
    return measure_profile(
        driver, points, limits, unmeasured_cost(8, 1000, "a machine"), 1000, quick
    )


def test_profiling_recovers_known_costs() -> None:
    found = profile_of(KnownCostMachine(KNOWN_COSTS, noise=0.03))
    every = found.errors[-1]
    assert every.kind == "all"
    assert every.held_out == 36
    assert every.median is not None
    assert every.median < 0.05
    assert every.p90 is not None
    assert every.p90 < 0.12
    assert found.left_out == 0
    assert 0.05 < found.spread < 0.5
    for turns, context in ((1, 64), (8, 1000), (32, 4096)):
        expected = KNOWN_COSTS.decode_seconds(turns, context)
        assert found.cost.decode_seconds(turns, context) == pytest.approx(expected, rel=0.05)
    told = objectives(found.cost, LIMITS)
    assert told["strict_seconds"] == 5 * told["iteration_seconds"]
    assert told["relaxed_seconds"] == pytest.approx(
        25 * KNOWN_COSTS.decode_seconds(32, 4096), rel=0.05
    )
    assert found.copies is not None
    assert found.copies.pages == COPIED_PAGES
    assert found.cost.copy_seconds(32) == pytest.approx(PAGE_SECONDS)
    assert found.copies.beside == pytest.approx(
        found.copies.alone + COPIED_PAGES * PAGE_SECONDS, rel=0.2
    )
    assert found.cost.chunk_costs is not None
    tokens, chunks = found.cost.chunk_costs
    assert tokens == 32
    assert chunks.measured
    added_by_context = KNOWN_COSTS.iteration_seconds(
        [(2048, 2080)]
    ) - KNOWN_COSTS.iteration_seconds([(32, 64)])
    assert chunks.chunk_seconds(2048) - chunks.chunk_seconds(32) == pytest.approx(
        added_by_context, rel=0.5
    )


def test_held_out_points_do_not_affect_the_fit() -> None:
    """A machine is ten times slower only for held-out points. The fit is the same, but errors are large."""
    points = points_of(LIMITS, quick=True)
    unseen = {point.spans for point in points if point.held_out}
    assert len(unseen) == 12
    assert not unseen & {point.spans for point in points if not point.held_out}

    class Slower(CostModel):
        def iteration_seconds(self, spans: object) -> float:
            seconds = super().iteration_seconds(spans)  # type: ignore[arg-type]
            return 10 * seconds if spans in unseen else seconds

    found = profile_of(KnownCostMachine(Slower(**vars(KNOWN_COSTS))), quick=True)
    same = profile_of(KnownCostMachine(KNOWN_COSTS), quick=True)
    for turns, context in ((1, 64), (16, 1000), (64, 4096)):
        expected = same.cost.decode_seconds(turns, context)
        assert found.cost.decode_seconds(turns, context) == pytest.approx(expected)
    assert found.errors[-1].median == pytest.approx(0.9, abs=0.01)
    assert same.errors[-1].median is not None
    assert same.errors[-1].median < 0.03


def test_profile_points_cover_every_kind_and_respect_the_limits() -> None:
    points = points_of(LIMITS, quick=False)
    assert {point.kind for point in points} == {DECODES, PROMPTS, MIXES, CHUNKS}
    assert max(point.work.decodes for point in points) == 64
    assert {point.kind for point in points if point.held_out} == {DECODES, PROMPTS, MIXES}
    mixed = [point for point in points if point.held_out and point.kind == MIXES]
    assert all(len(set(point.spans)) > 1 for point in mixed if len(point.spans) > 3)
    small = replace(LIMITS, turns=3, tokens=24, context=128, pages=6, chunk_tokens=8)
    few = points_of(small, quick=False)
    assert few
    assert all(small.allows(point) for point in few)
    for point in few:
        assert sum(-(-stop // 8) for _, stop in point.spans) <= 6


def test_a_machine_with_small_limits_can_be_profiled() -> None:
    small = replace(LIMITS, turns=2, context=256, pages=16)
    found = profile_of(KnownCostMachine(KNOWN_COSTS), small, quick=True)
    assert found.errors[-1].held_out > 3
    with pytest.raises(ModelError, match="larger --device-cache"):
        profile_of(
            KnownCostMachine(KNOWN_COSTS), replace(LIMITS, turns=1, tokens=1, pages=2), quick=True
        )


def test_the_slowest_points_are_left_out_when_time_is_short() -> None:
    slow = KnownCostMachine(KNOWN_COSTS)
    points = [
        ProfilePoint(DECODES, ((63, 64),)),
        ProfilePoint(PROMPTS, ((0, 512),)),
        ProfilePoint(PROMPTS, ((0, 16),)),
    ]
    driver = Driver(slow, LIMITS, 1000, points, lambda: slow.now)
    found = measure_points(driver, points, 0.0001, ROUNDS, clock=lambda: slow.now)
    assert [each.point for each in found] == [points[0]]
    assert found[0].seconds == pytest.approx(KNOWN_COSTS.iteration_seconds([(63, 64)]))
    assert found[0].times >= ROUNDS[0]
    assert found[0].spread == pytest.approx(0.0, abs=1e-9)


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = profile_of(KnownCostMachine(KNOWN_COSTS), quick=True)
    plot(found, tmp_path / "profile.png", ["a machine"])
    assert (tmp_path / "profile.png").stat().st_size > 1000


def test_a_fit_needs_points_of_more_than_one_kind() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit_points([ProfilePoint(DECODES, ((0, 1),)).observed(0.1)], KNOWN_COSTS)
