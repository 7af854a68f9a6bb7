"""Planning one iteration ahead: what is launched, collected, wasted and failed, in which order."""

from __future__ import annotations

from collections import Counter

import pytest

from pensieve.core.iteration import Iteration, Outcome
from pensieve.engine.messages import (
    EvictConversation,
    GetStats,
)
from pensieve.errors import DeviceError
from tests.engine.rig import Rig, submit, traffic
from tests.fakes import reply_to
from tests.scale import SCALE


def test_the_next_iteration_is_launched_before_the_current_one_is_collected() -> None:
    calls: list[str] = []
    rig = Rig(depth=2, stops=False)
    launch, collect = rig.executor.launch, rig.executor.collect

    def record_launch(iteration: Iteration) -> None:
        calls.append(f"launch {iteration.index}")
        launch(iteration)

    def record_collect() -> Outcome:
        calls.append("collect")
        return collect()

    rig.executor.launch = record_launch  # type: ignore[method-assign]
    rig.executor.collect = record_collect  # type: ignore[method-assign]
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3], reply=3))
    steps = []
    while rig.engine.step():
        steps.append(" ".join(calls))
        calls.clear()
    assert steps == ["launch 1", "launch 2 collect", "launch 3 collect", "collect"]
    assert calls == []
    assert rig.sink.reply_of(1) == reply_to([1, 2, 3], 6, stops=False)
    assert rig.scheduler.counters.idle_tokens == 0  # an end by length is known in advance


def test_planning_ahead_wastes_one_token_when_a_turn_stops() -> None:
    prompt = next([n] for n in range(99) if len(reply_to([n], 30)) == 4)
    for depth, idle in ((1, 0), (2, 1)):
        rig = Rig(depth=depth)
        rig.mailbox.put(submit(1, "a", [], prompt, reply=29))
        rig.mailbox.put(GetStats(1))
        rig.run()
        assert rig.sink.reply_of(1) == reply_to(prompt, 30)
        assert rig.scheduler.counters.idle_tokens == idle
        assert rig.engine.metrics.figures(1.0)["tokens_idle"] == idle
        assert rig.scheduler.counters.tokens == 1 + 3 + idle


def test_an_iteration_that_waits_for_a_copy_is_collected_when_one_has_finished() -> None:
    """Nothing can be computed until a copy finishes. A turn that arrives meanwhile is launched first."""
    rig = Rig(depth=2, stops=False)
    rig.executor.late = 1.0
    rig.mailbox.put(submit(1, "a", [], list(range(20)), reply=2))
    rig.run()
    rig.mailbox.put(EvictConversation("a", to_host=True))
    rig.engine.step()
    assert len(rig.executor.outstanding) == 6  # only swap-outs: not collected yet
    rig.mailbox.put(submit(2, "b", [], [1, 2], reply=2))
    rig.engine.step()
    assert len(rig.executor.outstanding) == 5
    assert rig.sink.reply_of(2) == []
    rig.run()
    assert rig.executor.outstanding == []
    assert rig.sink.reply_of(2) == reply_to([1, 2], 4, stops=False)


def test_an_executor_failure_while_planning_ahead_ends_every_turn() -> None:
    rig = Rig(depth=2)
    launch = rig.executor.launch

    def launch_or_fail(iteration: Iteration) -> None:
        if iteration.index == 3:
            raise DeviceError("the device is gone")
        launch(iteration)

    rig.executor.launch = launch_or_fail  # type: ignore[method-assign]
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3], reply=9))
    rig.mailbox.put(submit(2, "b", [], [1, 2, 3], reply=9))
    with pytest.raises(DeviceError):
        rig.engine.run()
    assert {end.failure for end in rig.sink.ends().values()} == {"ENGINE_FAILED"}
    assert set(rig.sink.ends()) == {1, 2}


@pytest.mark.parametrize("depth", [1, 2])
def test_every_reply_is_correct_at_any_planning_depth(depth: int) -> None:
    """Run turns, cancels, forks, rewinds, deletions and evictions. Every commit is audited."""
    total: Counter[str] = Counter()
    for seed in range(40 * SCALE):
        rig = Rig(seed, depth=depth, failing=0.01 if seed % 2 else 0.0)
        try:
            traffic(rig, seed, 60, reply_max=30)
        except BaseException as error:
            error.add_note(f"seed {seed} at depth {depth}")
            raise
        assert rig.auditor.num_commits == rig.scheduler.counters.iterations
        assert not rig.scheduler.num_turns
        assert rig.executor.outstanding == []
        total.update(vars(rig.scheduler.counters))
        total.update(vars(rig.scheduler.cache.counters))
        total["ahead"] += rig.auditor.num_ahead
    wanted = {"suspensions", "resumptions", "failed", "swapped_in", "dropped", "copied_on_write"}
    never = sorted(each for each in wanted if not total[each])
    assert not never, f"never happened: {never} in {dict(total)}"
    assert (total["ahead"] > 0) == (total["idle_tokens"] > 0) == (depth == 2), dict(total)
