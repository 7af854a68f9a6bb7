"""Replaying a journal gives the same iterations, whichever engine wrote it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest

from pensieve.core.iteration import Iteration, Outcome
from pensieve.core.policies.registry import POLICIES
from pensieve.engine.journal import (
    VERSION,
    JournalError,
    NotAJournal,
    Replay,
    hash_of,
    replay,
)
from pensieve.engine.messages import EngineEvent, EngineMessage
from pensieve.sim.cost import CostModel
from pensieve.sim.executor import ModelledExecutor
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import WORKLOAD_PRESETS, drawn
from tests.conversations.rig import Crowd, started, write_model
from tests.sim.recorded import A100, journal_of, simulated
from tests.text.families import QWEN_2_5


class Hashes:
    """Records what an engine planned, beside its journal."""

    def __init__(self) -> None:
        self.planned_ones: list[str] = []

    def received(self, message: EngineMessage, now: float) -> None:
        return

    def planned(self, iteration: Iteration | None, now: float) -> None:
        if iteration is not None:
            self.planned_ones.append(hash_of(iteration))

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        return

    def published(self, events: Sequence[EngineEvent]) -> None:
        return


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_daemon_did_is_planned_again(policy: str, tmp_path: Path) -> None:
    """Both tiers are too small. With forks, cuts, cancels and suspensions, every iteration is the same."""
    model, journal, hashes = write_model(tmp_path / "model", QWEN_2_5), tmp_path / "j", Hashes()
    with started(model, tmp_path / "data", journal=str(journal), policy=policy) as runtime:
        runtime.engine.observe(hashes)
        crowd = Crowd(runtime, 7, 8)
        crowd.run(60)
        crowd.rush()
        crowd.run(40)
        scheduler = runtime.engine.scheduler
        happened = {**vars(scheduler.counters), **vars(scheduler.cache.counters)}
    wanted = (
        "suspensions",
        "resumptions",
        "swapped_in",
        "swapped_out",
        "dropped",
        "recomputed_tokens",
    )
    assert not [each for each in wanted if not happened[each]]
    assert crowd.num_cancels
    assert crowd.num_forks
    assert crowd.num_rewinds
    again = Replay(journal.read_text().splitlines())
    assert [hash_of(each.iteration) for each in again] == hashes.planned_ones
    assert again.num_agreed == len(hashes.planned_ones) == happened["iterations"]
    assert again.model["layers"] == 2


# -- journals of simulations --


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_simulated_is_planned_again(policy: str, tmp_path: Path) -> None:
    arrivals = drawn(WORKLOAD_PRESETS["sharegpt"], 0.5, 60.0, 3, reaction_seconds=10.0)
    one = simulated(tmp_path / "j", arrivals, policy=policy, device_tokens=6400, host_tokens=3200)
    assert one.scheduler.counters.recomputed_tokens > 0
    with (tmp_path / "j").open() as lines:
        assert replay(lines) == one.scheduler.counters.iterations > 1000


def test_engines_that_were_started_again_append(tmp_path: Path) -> None:
    path, arrivals = tmp_path / "j", [Arrival("a", 0.0, 100, 5), Arrival("a", None, 10, 3)]
    counts = [simulated(path, arrivals).scheduler.counters.iterations]
    with path.open("a") as file:
        file.write('{"plan":12.5,"itera')  # as if the process was killed
    counts.append(simulated(path, arrivals).scheduler.counters.iterations)
    again = Replay(path.read_text().splitlines())
    assert len(list(again)) == again.num_agreed == sum(counts)
    assert again.num_engines == 2
    assert len(again.cut_off) == 1


def test_a_line_that_a_crash_cut_off_is_left_out_and_reported(tmp_path: Path) -> None:
    lines = journal_of(tmp_path)
    whole = replay(lines)
    for length in range(1, len(lines[-2])):
        again = Replay([*lines[:-2], lines[-2][:length]])
        list(again)
        assert again.cut_off == [len(lines) - 1], lines[-2][:length]
        assert again.num_agreed in (whole - 1, whole)


def test_an_engine_that_was_killed_at_its_first_line_loses_nothing_of_the_next(
    tmp_path: Path,
) -> None:
    lines = journal_of(tmp_path)
    again = Replay([lines[0][:40], *lines])
    assert len(list(again)) == replay(lines)
    assert (again.num_engines, again.cut_off) == (1, [1])
    with pytest.raises(NotAJournal):
        replay([lines[0][:40]])
    with pytest.raises(NotAJournal):
        replay([lines[0][:40], *lines[1:]])


@pytest.mark.parametrize(
    ("line", "before", "after", "problem"),
    [
        (
            2,
            '"tokens":400',
            '"tokens":404',
            "line 4: the replay plans iteration 1: turn 1 [0, 101)",
        ),
        (2, '"attempt_id":1', '"attempt_id":"x', "line 2: is damaged"),
        (2, '"SubmitTurn"', '"Mailbox"', "line 2: cannot be replayed"),
        (2, '"tokens":400', '"tokens":-1', "line 2: cannot be replayed"),
        (5, '"copies":[]', '"copies":[3]', "line 5: cannot be replayed"),
        (5, '"samples":', '"sample":', "line 5: cannot be replayed"),
        (1, '"chunk_tokens":32', '"chunk_tokens":0', "line 1: cannot be replayed"),
        (
            1,
            f'"version":{VERSION}',
            '"version":9',
            f"line 1: a journal of version 9; this program reads {VERSION}",
        ),
        (1, f'{{"version":{VERSION},', "{", "line 1: not a journal"),
        (1, f'{{"version":{VERSION},', "", "line 1: not a journal"),
    ],
)
def test_a_journal_that_was_changed_is_refused_by_its_line(
    line: int, before: str, after: str, problem: str, tmp_path: Path
) -> None:
    lines = journal_of(tmp_path)
    assert before in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(before, after, 1)
    with pytest.raises(JournalError) as raised:
        replay(lines)
    assert str(raised.value).startswith(problem)
    assert raised.value.line == int(problem.split(":")[0].split()[1])
    assert isinstance(raised.value, NotAJournal) == ("journal" in problem)


def test_an_iteration_takes_from_the_end_of_the_one_before(tmp_path: Path) -> None:
    """An iteration that is launched early waits for the previous iteration. The wait must not count."""

    class Ahead(ModelledExecutor):
        depth = 2

        def __init__(self, cost: CostModel, clock: object) -> None:
            super().__init__(cost, clock)  # type: ignore[arg-type]
            self.waiting: deque[Iteration] = deque()

        def launch(self, iteration: Iteration) -> None:
            self.waiting.append(iteration)

        def collect(self) -> Outcome:
            super().launch(self.waiting.popleft())  # starts when the previous iteration has ended
            return super().collect()

    path = tmp_path / "j"
    one = simulated(path, [Arrival("a", 0.0, 3000, 40), Arrival("b", 0.0, 900, 40)], executor=Ahead)
    replayed = list(Replay(path.read_text().splitlines()))
    assert len(replayed) == one.scheduler.counters.iterations
    for iteration, begun, ended, _ in replayed:
        spans = [(each.start, each.stop) for each in iteration.slices]
        assert ended - begun == pytest.approx(A100.iteration_seconds(spans))
