"""With pipeline stages, one iteration per stage is in flight. Turns are divided into micro-batches."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from pensieve.core.cost import IterationCost
from pensieve.core.iteration import Iteration, Outcome
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.engine.journal import replay
from pensieve.engine.messages import EngineMessage
from tests.engine.rig import SCHEDULER, Rig, submit, traffic
from tests.fakes import reply_to
from tests.scale import SCALE


def staged(config: SchedulerConfig, stages: int) -> SchedulerConfig:
    return replace(config, stages=stages)


class Watch:
    """An observer that records the turns of each iteration.

    It also checks that no slice is planned before its last token has been sampled.
    """

    def __init__(self) -> None:
        self.turns: list[list[int]] = []
        self.most_launched = self._num_launched = 0

    def received(self, message: EngineMessage, now: float) -> None:
        return

    def planned(self, iteration: Iteration | None, now: float) -> None:
        if iteration is not None:
            assert not any(each.awaits_token for each in iteration.slices)
            if iteration.slices:
                self.turns.append([each.attempt_id for each in iteration.slices])
            self._num_launched += 1
            self.most_launched = max(self.most_launched, self._num_launched)

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        self._num_launched -= 1

    def published(self, events: object) -> None:
        return


def rig_with_watch(
    stages: int, config: SchedulerConfig = SCHEDULER, **options: object
) -> tuple[Rig, Watch]:
    rig = Rig(depth=stages, scheduler=staged(config, stages), **options)  # type: ignore[arg-type]
    watch = Watch()
    rig.engine.observe(watch)
    return rig, watch


def test_generating_turns_are_divided_among_the_iterations_in_flight() -> None:
    rig, watch = rig_with_watch(2, stops=False)
    for attempt_id in range(1, 5):
        rig.mailbox.put(submit(attempt_id, f"c{attempt_id}", [], [attempt_id], reply=6))
    rig.run()
    assert watch.turns[0] == [1, 2, 3, 4]  # their prompts
    halves = [tuple(each) for each in watch.turns[3:-3]]
    assert set(halves) == {(1, 2), (3, 4)}
    assert all(one != other for one, other in pairwise(halves))
    assert watch.most_launched == 2
    for attempt_id in range(1, 5):
        assert rig.sink.reply_of(attempt_id) == reply_to([attempt_id], 7, stops=False)


def test_a_single_turn_waits_for_its_own_token() -> None:
    rig, watch = rig_with_watch(3, stops=False)
    rig.mailbox.put(submit(1, "a", [], [1, 2], reply=5))
    rig.run()
    assert watch.turns == [[1]] * 5
    assert watch.most_launched == 1
    assert rig.scheduler.counters.idle_tokens == 0


def test_the_pieces_of_a_prompt_follow_each_other_without_waiting() -> None:
    rig, watch = rig_with_watch(3, stops=False)
    rig.mailbox.put(submit(1, "a", [], list(range(40)), reply=1))
    rig.run()
    assert watch.turns == [[1], [1], [1]]  # 16, 16 and 8 tokens
    assert watch.most_launched == 3


def test_micro_batches_are_balanced_by_time_and_not_by_number_of_turns() -> None:
    """If reading keys takes most of the time, one long context costs as much as many short contexts."""
    by_keys = IterationCost(0.0, 1.0, 0.0, 1.0, 0.0)
    rig, watch = rig_with_watch(
        2, replace(SCHEDULER, cost=by_keys, batch_tokens_max=32), stops=False
    )
    rig.mailbox.put(submit(1, "long", [], list(range(24)), reply=9))
    for attempt_id in range(2, 5):
        rig.mailbox.put(submit(attempt_id, f"c{attempt_id}", [], [attempt_id], reply=9))
    rig.run()
    decoding = {tuple(each) for each in watch.turns[2:6]}
    assert decoding == {(1,), (2, 3, 4)}


def test_limits_apply_to_all_iterations_between_two_tokens_of_a_turn() -> None:
    """With two stages, two iterations fit between two tokens. So prompts may add half as much to each."""
    cost = IterationCost(0.001, 0.0, 0.0, 0.0, 0.0)
    sizes = {}
    for stages in (1, 2):
        config = replace(SCHEDULER, cost=cost, batch_tokens_max=512, prompt_seconds_max=0.064)
        rig, _ = rig_with_watch(stages, config, stops=False)
        sizes[stages] = rig.scheduler.time_budget._added_max
    assert sizes == {1: 0.064, 2: 0.032}


@pytest.mark.parametrize("stages", [2, 3])
def test_every_reply_is_correct_with_a_pipeline(stages: int) -> None:
    """Run turns, cancels, forks, rewinds, deletions and evictions. Every commit is audited."""
    total: Counter[str] = Counter()
    for seed in range(40 * SCALE):
        rig, watch = rig_with_watch(stages, seed=seed, failing=0.01 if seed % 2 else 0.0)
        try:
            traffic(rig, seed, 60, reply_max=30)
        except BaseException as error:
            error.add_note(f"seed {seed} with {stages} stages")
            raise
        assert rig.auditor.num_commits == rig.scheduler.counters.iterations
        assert not rig.scheduler.num_turns
        assert rig.executor.outstanding == []
        total.update(vars(rig.scheduler.counters))
        total.update(vars(rig.scheduler.cache.counters))
        total["deepest"] = max(total["deepest"], watch.most_launched)
    wanted = {"suspensions", "resumptions", "failed", "swapped_in", "dropped", "copied_on_write"}
    never = sorted(each for each in wanted if not total[each])
    assert not never, f"never happened: {never} in {dict(total)}"
    assert total["deepest"] == stages


def test_a_journal_of_stages_replays_to_the_same_iterations() -> None:
    lines = io.StringIO()
    rig, _ = rig_with_watch(3, seed=1, journal=lines, failing=0.02)
    traffic(rig, 1, 60)
    lines.seek(0)
    assert replay(lines) == rig.scheduler.counters.iterations > 60


def test_no_turn_is_streamed_through_stages() -> None:
    with pytest.raises(ValueError, match="turns cannot be streamed"):
        SchedulerConfig(stages=2, stream="on")
    with pytest.raises(ValueError, match="stages must be at least 1"):
        SchedulerConfig(stages=0)
