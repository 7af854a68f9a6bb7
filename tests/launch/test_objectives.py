"""An objective that cannot be met is refused at the start. The refusal names the smallest possible one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from pensieve.core.cost import IterationCost
from pensieve.core.iteration import Iteration, Outcome
from pensieve.core.iteration_builder import TOKENS_MIN
from pensieve.errors import ConfigError
from pensieve.launch.objectives import (
    CONTEXT,
    ESTIMATED,
    MEASURED,
    NUM_RUNS,
    Pages,
    SmallestTbt,
    check,
    smallest_tbt,
)
from pensieve.sampling import Sampling
from pensieve.sim.executor import VirtualClock
from tests.conversations.rig import ask, started, write_model
from tests.conversations.rig_daemon import ServeProcess
from tests.text.families import QWEN_2_5

COST = IterationCost(0.001, 0.002, 1e-6, 1e-5, 0.0001)
PAGES = Pages(4, 32)


class Timed:
    """An executor whose iterations take given times."""

    depth = 1

    def __init__(self, *seconds: float) -> None:
        self.clock = VirtualClock()
        self.launched: list[Iteration] = []
        self._seconds = deque(seconds)

    def launch(self, iteration: Iteration) -> None:
        self.launched.append(iteration)

    def collect(self) -> Outcome:
        self.clock.advance(self._seconds.popleft())
        return Outcome()


def smallest(executor: Timed, source: str = ESTIMATED, pages: Pages = PAGES) -> SmallestTbt | None:
    return smallest_tbt(COST, source, executor, pages, executor.clock.now)


def test_costs_that_were_measured_say_what_the_smallest_iteration_takes() -> None:
    executor = Timed()
    found = smallest(executor, "by cost.json")
    assert found is not None
    tokens, keys = 1 + TOKENS_MIN, CONTEXT + 1 + TOKENS_MIN
    assert found.seconds == pytest.approx(tokens * 0.001 + keys * 1e-5 + 0.0001)
    assert (found.source, executor.launched) == ("by cost.json", [])


def test_without_them_it_is_measured_and_the_quickest_counts() -> None:
    """The first measurement also has to fill a context and load code."""
    executor = Timed(9.0, 0.3, 0.2, 0.7, 0.25, 9.0)
    found = smallest(executor)
    assert found is not None
    assert tuple(found) == (pytest.approx(0.2), MEASURED)
    measured = executor.launched[1:-1]
    assert len(measured) == NUM_RUNS
    for number, iteration in enumerate(measured):
        (decode, prompt) = iteration.slices
        assert (decode.start, decode.num_tokens) == (CONTEXT + number, 1)
        assert (prompt.start, prompt.num_tokens) == (0, TOKENS_MIN)
        assert decode.needs_token, "else a GPU would not be waited for"
        assert len(decode.page_table) == -(-decode.stop // PAGES.chunk_tokens)
    pages = [set(each.page_table) for each in measured[-1].slices]
    assert not pages[0] & pages[1]
    assert max(pages[0] | pages[1]) < PAGES.num_pages
    begun = [start.attempt_id for start in executor.launched[0].started]
    assert list(executor.launched[-1].ended) == begun, "the executor forgets both"


def test_a_device_tier_that_is_too_small_is_not_measured() -> None:
    assert smallest(Timed(), pages=Pages(2, 32)) is None


@pytest.mark.parametrize(
    ("seconds", "named"), [(0.0523, "0.053"), (0.05, "0.051"), (1.98, "2.1"), (0.00012, "0.00013")]
)
def test_what_is_infeasible_is_refused_with_the_smallest_that_is_not(
    seconds: float, named: str
) -> None:
    limit = SmallestTbt(seconds, MEASURED)
    with pytest.raises(ConfigError, match=rf"smallest feasible objective is --tbt {named}$"):
        check(seconds / 2, limit)
    check(float(named), limit)
    check(seconds, limit)
    check(0.0, limit)


def test_a_model_that_was_measured_replies_as_before(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN_2_5)
    texts = []
    for tbt in ("0", "60"):
        with started(model, tmp_path / f"data{tbt}", tbt=tbt) as runtime:
            runtime.conversations.create("c")
            short = Sampling(max_tokens=40)
            turns = [ask(runtime, "c", text, sampling=short) for text in ("Oslo", "rain today")]
            texts.append([each.text for each in turns])
    assert texts[0] == texts[1]


def test_a_daemon_refuses_an_infeasible_objective_and_starts_with_the_suggested_one(
    tmp_path: Path,
) -> None:
    arguments = ("--data", str(tmp_path / "data"))
    ran = subprocess.run(
        [*(sys.executable, "-m", "pensieve", "serve", "--tbt", "0.01"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PENSIEVE_ENGINE": "echo:0.05"},
    )
    assert ran.returncode == ConfigError.exit_code, ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert "--tbt 0.01 cannot be met" in last
    found = re.search(r"smallest feasible objective is --tbt ([0-9.]+)", last)
    assert found is not None
    named = float(found[1])
    assert named >= 0.051
    assert "ready grpc" not in ran.stderr
    process = ServeProcess(tmp_path / "data", "--tbt", str(max(2 * named, 1.0)), engine="echo:0.05")
    process.start()
    assert process.stop() == 0
