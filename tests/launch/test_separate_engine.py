"""An engine that computes the prompts of an iteration in one pass, and its decodes in a second pass."""

from __future__ import annotations

from array import array
from collections import deque

from pensieve.core.iteration import (
    Iteration,
    Outcome,
    SampledToken,
    Slice,
    SwapIn,
    TurnFailure,
    TurnStart,
)
from pensieve.launch.separate_engine import SeparatePhases
from pensieve.sampling import Sampling
from tests.core.world import Shape, World

EMPTY = array("I")


class Recording:
    """Records its work. A copy is finished when its iteration is collected."""

    depth = 1

    def __init__(self) -> None:
        self.passes: list[list[tuple[int, int, int]]] = []
        self._launched: deque[Iteration] = deque()

    def launch(self, iteration: Iteration) -> None:
        assert not self._launched
        self._launched.append(iteration)
        self.passes.append([(each.attempt_id, each.start, each.stop) for each in iteration.slices])

    def collect(self) -> Outcome:
        iteration = self._launched.popleft()
        samples = [
            SampledToken(each.attempt_id, 7) for each in iteration.slices if each.attempt_id != 3
        ]
        failures = [
            TurnFailure(3, "NAN_LOGITS", "") for each in iteration.slices if each.attempt_id == 3
        ]
        copies = (each.copy_id for each in iteration.swap_ins)
        return Outcome(tuple(samples), tuple(copies), tuple(failures))


def started(turn_id: int, prompt_tokens: int) -> TurnStart:
    return TurnStart(turn_id, array("I", range(prompt_tokens)), Sampling())


def piece(turn_id: int, start: int, stop: int) -> Slice:
    return Slice(turn_id, start, stop, EMPTY, array("i"), True)


def test_the_pass_of_prompts_runs_before_the_pass_of_decodes() -> None:
    executor = Recording()
    separate = SeparatePhases(executor)
    separate.launch(Iteration(1, (piece(1, 0, 4),), started=(started(1, 4),)))
    separate.collect()
    both = Iteration(
        2,
        (piece(1, 4, 5), piece(2, 0, 6), piece(3, 0, 1)),
        swap_ins=(SwapIn(9, 0, 0, 1),),
        started=(started(2, 6), started(3, 1)),
    )
    separate.launch(both)
    outcome = separate.collect()
    assert executor.passes == [[(1, 0, 4)], [(2, 0, 6), (3, 0, 1)], [(1, 4, 5)]]
    assert [each.attempt_id for each in outcome.samples] == [2, 1]
    assert [each.attempt_id for each in outcome.failures] == [3]
    assert outcome.finished_copies == (9,)


def test_an_iteration_with_only_prompts_or_decodes_is_one_pass() -> None:
    executor = Recording()
    separate = SeparatePhases(executor)
    separate.launch(
        Iteration(1, (piece(1, 0, 4), piece(2, 0, 4)), started=(started(1, 4), started(2, 4)))
    )
    separate.collect()
    separate.launch(Iteration(2, (piece(1, 4, 5), piece(2, 4, 5))))
    separate.collect()
    separate.launch(Iteration(3, (), swap_ins=(SwapIn(1, 0, 0, 1),), ended=(1, 2)))
    assert separate.collect().finished_copies == (1,)
    assert [len(each) for each in executor.passes] == [2, 2, 0]


def test_replies_equal_those_of_one_pass_under_sharing_and_eviction() -> None:
    """Every slice finds the KV that it attends to, after forks, suspensions and swaps."""
    for seed in range(20):
        world = World(seed, Shape(restless=seed % 2 == 0, batch_tokens_max=40))
        ledger = world.executor
        world.executor = SeparatePhases(ledger)  # type: ignore[assignment]
        for _ in range(60):
            world.act()
            world.step()
        world.run_until_idle()
        assert world.num_replies > 5
