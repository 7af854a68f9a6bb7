"""Metrics report how far the latency objectives are met.

The tests set the iteration times, so that the figures can be checked by hand.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.core.cost import IterationCost
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.engine.journal import Replay
from pensieve.engine.messages import CancelTurn, GetStats
from pensieve.engine.metrics import ERRORS_KEPT
from tests.engine.rig import ENGINE, SCHEDULER, Rig, submit

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"
EVEN = IterationCost(0.0, 0.1, 0.0, 0.0, 0.0)  # predicts the same time for every iteration


def rig_with(
    tbt: float = 0.0, ttft: float = 0.0, cost: IterationCost | None = None, depth: int = 1
) -> Rig:
    scheduler = SchedulerConfig(16, 8, tbt_seconds=tbt, cost=cost or SCHEDULER.cost)
    return Rig(
        stops=False, depth=depth, scheduler=scheduler, config=replace(ENGINE, ttft_seconds=ttft)
    )


def figures(rig: Rig) -> dict[str, float]:
    rig.mailbox.put(GetStats(99))
    rig.engine._deliver(rig.mailbox.drain())
    found: dict[str, float] = rig.sink.events[-1].figures  # type: ignore[union-attr]
    return found


def run_two_replies(rig: Rig) -> None:
    """Run two turns. Gaps: 0.1, 0.1, 0.1, 0.2 s, then 1.0 s for both. First tokens: after 0.5 and 0.2 s."""
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3, 4], reply=6))
    rig.take(0.5, 0.1, 0.1, 0.1)
    rig.mailbox.put(submit(2, "b", [], [5, 6, 7, 8], reply=2))
    rig.take(0.2, 1.0)
    assert not rig.scheduler.num_turns


def test_token_gaps_and_first_tokens_are_compared_with_their_objectives() -> None:
    rig = rig_with(tbt=0.25, ttft=0.3)
    run_two_replies(rig)
    found = figures(rig)
    assert (found["tbt_count"], found["ttft_count"]) == (6, 2)
    assert found["tbt_attained"] == pytest.approx(4 / 6)
    assert found["ttft_attained"] == 0.5
    assert (found["tbt_objective_seconds"], found["ttft_objective_seconds"]) == (0.25, 0.3)
    assert found["tbt_p50_seconds"] == pytest.approx(0.1, rel=0.02)
    assert found["tbt_p99_seconds"] == pytest.approx(1.0, rel=0.02)
    assert found["ttft_p50_seconds"] == pytest.approx(0.2, rel=0.02)
    assert found["ttft_p99_seconds"] == pytest.approx(0.5, rel=0.02)


def test_without_objectives_times_are_reported_but_no_attainment() -> None:
    rig = rig_with()
    run_two_replies(rig)
    found = figures(rig)
    assert found["tbt_p99_seconds"] == pytest.approx(1.0, rel=0.02)
    assert not {"tbt_attained", "ttft_attained", "tbt_objective_seconds"} & found.keys()


@pytest.mark.parametrize(("tbt", "stalls"), [(0.0, 2), (0.25, 2), (1.5, 0)])
def test_a_gap_far_above_the_median_is_a_stall_unless_the_objective_allows_it(
    tbt: float, stalls: int
) -> None:
    rig = rig_with(tbt)
    run_two_replies(rig)
    assert figures(rig)["stalls"] == stalls


def test_an_ended_turn_leaves_no_recorded_times() -> None:
    rig = rig_with()
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3, 4], reply=6))
    rig.mailbox.put(submit(2, "b", [], [1] * 48))  # exceeds the context
    rig.take(0.5, 0.1)
    rig.mailbox.put(submit(3, "c", [], [5, 6, 7]))
    rig.mailbox.put(CancelTurn(3, 0))
    rig.mailbox.put(CancelTurn(1, 0))
    rig.run()
    times = rig.engine.turn_times
    assert not times._received_at
    assert not times._token_at
    assert not times._planned
    assert figures(rig)["ttft_count"] == 1


def test_a_token_gap_during_a_suspension_and_the_suspension_are_counted() -> None:
    """The device has no room for both turns until their ends, so one turn is suspended."""
    rig = rig_with()
    for number, name in ((1, "a"), (2, "b")):
        rig.mailbox.put(submit(number, name, [], [number] * 12, reply=24))
    suspended_since: dict[int, float] = {}
    times: list[float] = []
    rig.executor.seconds = 0.1
    for _ in range(200):
        at = rig.clock.now()
        if not rig.engine.step():
            break
        suspended = {turn.attempt_id for turn in rig.scheduler.suspended}
        times += [at - suspended_since.pop(each) for each in suspended_since.keys() - suspended]
        suspended_since |= dict.fromkeys(suspended - suspended_since.keys(), at)
    found = figures(rig)
    assert found["suspensions"] == found["resumptions"] == found["suspended_count"] == len(times)
    assert len(times) >= 1
    times.sort()
    assert found["suspended_p50_seconds"] == pytest.approx(times[(len(times) - 1) // 2], rel=0.02)
    assert found["suspended_p99_seconds"] == pytest.approx(times[-1], rel=0.02)
    assert found["tbt_p99_seconds"] >= 0.98 * times[-1]
    assert not rig.engine.turn_times._suspended_at


# -- predictions --


@pytest.mark.parametrize("tbt", [0.0, 9.0])
def test_predictions_are_compared_with_measured_iteration_times(tbt: float) -> None:
    """Errors: 0, 0, 0, then 0.4 s instead of the predicted 0.2 s, then the reverse, then 0 again."""
    rig = rig_with(tbt, cost=EVEN)
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3, 4], reply=20))
    rig.take(0.2, 0.2)
    assert figures(rig)["iterations_predicted"] == 0, (
        "no prediction existed before these iterations"
    )
    rig.take(0.2, 0.2, 0.2, 0.4, 0.2, 0.2)
    found = figures(rig)
    assert found["iterations_predicted"] == 6
    assert found["iteration_error_p50"] == pytest.approx(0.0, abs=1e-9)
    assert found["iteration_error_p90"] == pytest.approx(1.0)


def test_a_prompt_piece_is_predicted_beside_generating_turns() -> None:
    """Iterations take 10 ms, plus 1 ms per token. Predictions are half of that, until they are corrected."""
    rig = rig_with(cost=IterationCost(0.0005, 0.0, 0.0, 0.0, 0.005))
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3, 4], reply=30))
    rig.take(0.014, 0.011, 0.011)
    for number in range(2, 6):
        rig.mailbox.put(submit(number, f"c{number}", [], [5] * 6, reply=1))
        rig.take(0.017, 0.011)
    found = figures(rig)
    assert found["iterations_predicted"] >= 8
    assert found["iteration_error_p50"] < 0.01
    rig.mailbox.put(submit(9, "d", [], [5] * 6, reply=1))
    rig.executor.seconds = 0.017
    rig.engine._deliver(rig.mailbox.drain())
    planned = rig.scheduler.plan(rig.clock.now())
    assert planned is not None
    assert planned.predicted_seconds == pytest.approx(0.017, rel=0.05)


def test_an_iteration_planned_ahead_is_timed_from_the_end_of_the_previous_one() -> None:
    rig = rig_with(cost=EVEN, depth=2)
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3, 4], reply=12))
    while rig.engine.step():
        rig.executor.seconds = 0.2
    found = figures(rig)
    assert found["iterations_predicted"] >= 8
    assert found["iteration_error_p90"] == pytest.approx(0.0, abs=1e-9)
    assert found["tbt_p50_seconds"] == pytest.approx(0.2, rel=0.02)


def test_prediction_errors_cover_only_the_latest_iterations() -> None:
    rig = rig_with(cost=EVEN)
    for number in range(40):
        rig.mailbox.put(submit(number + 1, f"c{number}", [], [1, 2, 3], reply=30))
        rig.take(*(0.1,) * 30)
    assert figures(rig)["iterations_predicted"] == ERRORS_KEPT


def test_a_journal_records_the_predictions() -> None:
    lines = io.StringIO()
    scheduler = replace(SCHEDULER, cost=EVEN)
    rig = Rig(0, lines, stops=False, scheduler=scheduler)
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3, 4], reply=6))
    rig.take(0.2, 0.2, 0.2, 0.3, 0.2, 0.2)
    recorded = [json.loads(line) for line in lines.getvalue().splitlines()]
    predicted = [entry.get("predicted") for entry in recorded if entry.get("iteration")]
    assert predicted == [None, None, 0.2, 0.2, pytest.approx(0.3), 0.2]
    lines.seek(0)
    replayed = [each.iteration.predicted_seconds for each in Replay(lines)]
    assert replayed == pytest.approx([each or 0.0 for each in predicted])


# -- work --


def test_token_budget_used_counts_the_tokens_of_iterations() -> None:
    rig = rig_with()
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3, 4], reply=4))
    rig.take(0.1, 0.1, 0.1, 0.1)
    assert figures(rig)["token_budget_used"] == pytest.approx((4 + 1 + 1 + 1) / (4 * 16))


def test_tokens_are_counted_per_share_regardless_of_weight() -> None:
    rig = rig_with()
    for number, share, weight in ((1, "a", 1.0), (2, "b", 4.0), (3, "", 1.0), (4, "b", 4.0)):
        turn = submit(number, f"{share}/c{number}", [], [1, 2, 3], reply=5)
        rig.mailbox.put(replace(turn, share=share, weight=weight))
    rig.run()
    found = figures(rig)
    of_shares = {name: num for name, num in found.items() if name.startswith("tenant_tokens.")}
    assert of_shares == {"tenant_tokens.a": 8, "tenant_tokens.b": 16, "tenant_tokens.": 8}


def test_idle_share_is_the_wasted_part_of_all_computed_rows() -> None:
    rig = rig_with()
    rig.engine.metrics.more = lambda: {"rows_padded": 3.0}
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3, 4], reply=4))
    rig.take(0.1, 0.1, 0.1, 0.1)
    found = figures(rig)
    assert (found["tokens_computed"], found["tokens_idle"]) == (7, 0)
    assert found["idle_share"] == pytest.approx(3 / 10)


def test_every_figure_is_in_the_docs() -> None:
    table = (
        PAGE.read_text().split("<!-- figures of the engine:")[1].split("<!-- end of the figures")[0]
    )
    named = set(re.findall(r"`([a-z0-9_.A-Z]+)`", table))
    rig = rig_with(tbt=1.0, ttft=1.0)
    found = figures(rig)
    assert set(rig.engine.turn_times.figures(0.0)) <= named
    figures_of_work = {"rows_padded", "idle_share", "preemptions"}
    assert figures_of_work <= named & found.keys()
    assert {each for each in named if "." not in each and each not in found} <= {"--tbt", "--ttft"}
