"""A journal replays to the same iterations, whichever engine wrote it; costs are fitted to it."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve import __version__
from pensieve.cli.main import main
from pensieve.core.cache import CacheConfig
from pensieve.core.iteration import Iteration, Outcome
from pensieve.core.policies.registry import POLICIES, policy_named
from pensieve.core.scheduler import SchedulerConfig
from pensieve.engine.journal import (
    Journal,
    JournalError,
    NotAJournal,
    Replay,
    hash_of,
    opened,
    replay,
)
from pensieve.engine.messages import Event, Message
from pensieve.sim import cost_file
from pensieve.sim.cost import HARDWARE, MODELS, CostModel
from pensieve.sim.executor import ModelledExecutor
from pensieve.sim.fit import assumed_for, fitted
from pensieve.sim.observed import Observations, expected_seconds
from pensieve.sim.simulator import Simulator
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import HABITS, drawn
from tests.service.rig import Crowd, started, write_model
from tests.text.families import QWEN_2_5

A100 = CostModel.of(MODELS["llama3-8b"], HARDWARE["a100-80gb"])
SLOWER = replace(  # three times, but for its link
    A100,
    **{
        name: 3 * seconds
        for name, seconds in vars(A100).items()
        if "seconds" in name and "link" not in name
    },
)


class Hashes:
    """What an engine planned, beside its journal."""

    def __init__(self) -> None:
        self.planned_ones: list[str] = []

    def received(self, message: Message, now: float) -> None:
        return

    def planned(self, iteration: Iteration | None, now: float) -> None:
        if iteration is not None:
            self.planned_ones.append(hash_of(iteration))

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        return

    def published(self, events: Sequence[Event]) -> None:
        return


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_daemon_did_is_planned_again(policy: str, tmp_path: Path) -> None:
    """Both tiers too small; forks, cuts, cancels, suspensions: the same iterations, one by one."""
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


def simulated(
    path: Path,
    arrivals: Iterable[Arrival],
    cost: CostModel = A100,
    policy: str = "value",
    *,
    device_tokens: int = 12_800,
    host_tokens: int = 25_600,
    budget: int = 512,
    executor: type[ModelledExecutor] | None = None,
) -> Simulator:
    """A run whose engine writes a journal."""
    recompute = A100.recompute(32)
    cache = CacheConfig(device_tokens // 32, host_tokens // 32)
    scheduler = SchedulerConfig(budget, 64)
    one = Simulator(cost, policy_named(policy, recompute, 32), cache, scheduler)
    if executor is not None:
        one.engine.executor = executor(cost, one.clock)
    with opened(path) as file:
        one.engine.observe(Journal(file, one.config, cache, scheduler, policy, recompute))
        one.run(arrivals)
    return one


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_simulated_is_planned_again(policy: str, tmp_path: Path) -> None:
    arrivals = drawn(HABITS["sharegpt"], 0.5, 60.0, 3, reaction_seconds=10.0)
    one = simulated(tmp_path / "j", arrivals, policy=policy, device_tokens=6400, host_tokens=3200)
    assert one.scheduler.counters.recomputed_tokens > 0
    with (tmp_path / "j").open() as lines:
        assert replay(lines) == one.scheduler.counters.iterations > 1000


def test_engines_that_were_started_again_append(tmp_path: Path) -> None:
    path, arrivals = tmp_path / "j", [Arrival("a", 0.0, 100, 5), Arrival("a", None, 10, 3)]
    counts = [simulated(path, arrivals).scheduler.counters.iterations]
    with path.open("a") as file:
        file.write('{"plan":12.5,"itera')  # killed
    counts.append(simulated(path, arrivals).scheduler.counters.iterations)
    again = Replay(path.read_text().splitlines())
    assert len(list(again)) == again.num_agreed == sum(counts)
    assert again.num_engines == 2
    assert len(again.cut_off) == 1


def journal_of(tmp_path: Path) -> list[str]:
    simulated(tmp_path / "j", [Arrival("a", 0.0, 100, 5), Arrival("b", 0.0, 700, 5)])
    return (tmp_path / "j").read_text().splitlines()


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
        (2, '"turn_id":1', '"turn_id":"x', "line 2: is damaged"),
        (2, '"SubmitTurn"', '"Mailbox"', "line 2: cannot be replayed"),
        (2, '"tokens":400', '"tokens":-1', "line 2: cannot be replayed"),
        (5, '"copies":[]', '"copies":[3]', "line 5: cannot be replayed"),
        (5, '"samples":', '"sample":', "line 5: cannot be replayed"),
        (1, '"chunk_tokens":32', '"chunk_tokens":0', "line 1: cannot be replayed"),
        (1, '"version":2', '"version":9', "line 1: a journal of version 9; this reads 2"),
        (1, '{"version":2,', "{", "line 1: not a journal"),
        (1, '{"version":2,', "", "line 1: not a journal"),
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
    """One launched ahead waits for the one before: from its own plan on it would look twice as long."""

    class Ahead(ModelledExecutor):
        depth = 2

        def __init__(self, cost: CostModel, clock: object) -> None:
            super().__init__(cost, clock)  # type: ignore[arg-type]
            self.waiting: deque[Iteration] = deque()

        def launch(self, iteration: Iteration) -> None:
            self.waiting.append(iteration)

        def collect(self) -> Outcome:
            super().launch(self.waiting.popleft())  # it begins when the one before has ended
            return super().collect()

    path = tmp_path / "j"
    one = simulated(path, [Arrival("a", 0.0, 3000, 40), Arrival("b", 0.0, 900, 40)], executor=Ahead)
    replayed = list(Replay(path.read_text().splitlines()))
    assert len(replayed) == one.scheduler.counters.iterations
    for iteration, begun, ended, _ in replayed:
        spans = [(each.start, each.stop) for each in iteration.slices]
        assert ended - begun == pytest.approx(A100.iteration_seconds(spans))


# -- costs --


class Noisy(CostModel):
    """A machine whose iterations differ by a few percent, and now and then by a lot."""

    draw = random.Random(0)

    def pass_seconds(self, tokens: int, pairs: int, keys: int) -> float:
        pause = 5.0 if self.draw.random() < 0.02 else 1.0
        return (
            super().pass_seconds(tokens, pairs, keys) * pause * math.exp(self.draw.gauss(0, 0.03))
        )


def seen_in(path: Path) -> Observations:
    seen = Observations()
    for replayed in Replay(path.read_text().splitlines()):
        seen.add(replayed)
    return seen


def test_a_fit_finds_what_the_machine_costs(tmp_path: Path) -> None:
    """From another model on another machine as a guess, 3 % of noise and 2 % of pauses."""
    arrivals = [
        Arrival(
            arrival.conversation,
            arrival.at,
            arrival.input_tokens,
            arrival.output_tokens,
            arrival.after,
        )
        for arrival in drawn(HABITS["agents"], 0.4, 15.0, 3)
    ]
    simulated(tmp_path / "j", arrivals, Noisy(**vars(A100)), device_tokens=200_000, budget=2048)
    seen = seen_in(tmp_path / "j")
    fit = fitted(seen, CostModel.of(MODELS["qwen2-7b"], HARDWARE["h200"]), "a test")
    assert fit.cost.dense_seconds_per_token == pytest.approx(A100.dense_seconds_per_token, rel=0.03)
    assert fit.cost.attention_seconds_per_pair == pytest.approx(
        A100.attention_seconds_per_pair, rel=0.04
    )
    assert fit.cost.attention_seconds_per_key == pytest.approx(
        A100.attention_seconds_per_key, rel=0.04
    )
    constant = fit.cost.dense_seconds_min + fit.cost.overhead_seconds
    assert constant == pytest.approx(A100.dense_seconds_min + A100.overhead_seconds, rel=0.03)
    errors = {each.kind: each for each in fit.errors}
    assert errors["all"].seen == sum(errors[kind].seen for kind in list(errors)[:3])
    assert errors["all"].median is not None
    assert errors["all"].median < 0.03
    for kind in ("decode only", "with prompts"):
        assert errors[kind].held_out > 50
        assert (errors[kind].p90 or 1.0) < 0.08


def test_the_link_is_found_where_copies_are_waited_for(tmp_path: Path) -> None:
    slow = CostModel(**{**vars(A100), "link_bytes_per_second": 3e9})
    arrivals = [
        Arrival(f"c{turn % 12}", 10.0 * turn, 300, 20) for turn in range(240)
    ]  # more than the device holds
    simulated(tmp_path / "j", arrivals, slow, device_tokens=16_000, host_tokens=200_000)
    fit = fitted(seen_in(tmp_path / "j"), A100, "a test")
    assert fit.cost.link_bytes_per_second == pytest.approx(3e9, rel=0.05)
    assert "link_bytes_per_second" in fit.found


def test_what_was_not_observed_is_noted_and_keeps_its_proportion(tmp_path: Path) -> None:
    """One conversation at a time, short prompts: nothing is bound by computing, nothing is copied."""
    arrivals = [Arrival(f"c{i}", 100.0 * i, 20, 200) for i in range(20)]
    simulated(tmp_path / "j", arrivals, SLOWER)
    fit = fitted(seen_in(tmp_path / "j"), A100, "a test")
    assert fit.found == ("dense_seconds_min", "attention_seconds_per_key")
    notes = {note.split(":")[0]: note for note in fit.assumed}
    assert set(notes) == {
        "dense_seconds_per_token",
        "attention_seconds_per_pair",
        "overhead_seconds",
        "link_bytes_per_second",
    }
    assert "no batch of up to 20 tokens took longer" in notes["dense_seconds_per_token"]
    constant = SLOWER.dense_seconds_min + SLOWER.overhead_seconds
    assert fit.cost.dense_seconds_min == pytest.approx(constant, rel=0.01)
    assert fit.cost.dense_seconds_per_token == pytest.approx(
        SLOWER.dense_seconds_per_token, rel=0.1
    )
    assert fit.cost.attention_seconds_per_pair == pytest.approx(
        SLOWER.attention_seconds_per_pair, rel=0.1
    )
    assert fit.cost.link_bytes_per_second == A100.link_bytes_per_second


def test_too_little_is_no_fit(tmp_path: Path) -> None:
    journal_of(tmp_path)
    with pytest.raises(ValueError, match="at least 40 are needed"):
        fitted(seen_in(tmp_path / "j"), A100, "a test")


def test_a_long_journal_leaves_a_bounded_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pensieve.sim.observed.KEPT_MAX", 50)
    simulated(tmp_path / "j", [Arrival("a", 0.0, 10, 500)])
    seen = seen_in(tmp_path / "j")
    assert seen.counts["decode only"] == 499
    kept = seen.kept["decode only"]
    assert 25 <= len(kept) <= 50
    assert [row.keys - kept[0].keys for row in kept] == [16 * i for i in range(len(kept))]
    assert expected_seconds(A100, kept[0]) == pytest.approx(kept[0].seconds)


def test_a_guess_from_what_the_journal_names() -> None:
    named = {
        "name": "m",
        "parameters": 8_030_000_000,
        "layers": 32,
        "heads": 32,
        "head_size": 128,
        "weight_bytes": 16_060_000_000,
        "kv_bytes_per_token": 131_072,
    }
    found = assumed_for(named, HARDWARE["a100-80gb"])
    assert found is not None
    assert vars(found) == {**vars(A100), "source": found.source}
    assert assumed_for({**named, "layers": "x"}, HARDWARE["cpu"]) is None
    assert assumed_for({}, HARDWARE["cpu"]) is None


# -- files --


def test_costs_survive_their_file(tmp_path: Path) -> None:
    simulated(tmp_path / "j", [Arrival(f"c{i}", 10.0 * i, 600 * i, 20) for i in range(1, 9)])
    fit = fitted(seen_in(tmp_path / "j"), A100, "a test")
    assert cost_file.read(cost_file.written(fit)) == fit.cost


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "is of version 2"),
        ({"cost": [1]}, "is not a file that"),
        ({"cost.layers": 1.5}, "cost.layers is a whole number"),
        ({"cost.layers": None}, "cost.layers is a number"),
        ({"cost.overhead_seconds": -1}, "cost.overhead_seconds is a number of at least 0, not -1"),
        ({"cost.overhead_seconds": math.inf}, "cost.overhead_seconds is a number of at least 0"),
        ({"cost.dense_seconds_per_token": 0}, "cost.dense_seconds_per_token is above 0"),
        ({"cost.link_bytes_per_second": 0}, "cost.link_bytes_per_second is above 0"),
        ({"cost.speed": 3}, "cost.speed is unknown"),
        ({"source": 3}, "source is a text"),
    ],
)
def test_a_wrong_file_of_costs_is_refused(change: dict[str, object], problem: str) -> None:
    names = (*cost_file.SECONDS, *cost_file.COUNTS, "link_bytes_per_second")
    given = {
        "version": 1,
        "source": "a test",
        "cost": {name: getattr(A100, name) for name in names},
    }
    assert cost_file.read(json.dumps(given)) == CostModel(**{**vars(A100), "source": "a test"})
    for key, value in change.items():
        inner = given["cost"] if key.startswith("cost.") else given
        assert isinstance(inner, dict)
        inner[key.removeprefix("cost.")] = value
    with pytest.raises(ValueError, match=problem):
        cost_file.read(json.dumps(given))


# -- the command --


def test_the_command_records_replays_and_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, costs = str(tmp_path / "j"), str(tmp_path / "costs.json")
    command = [
        "simulate",
        "--workload",
        "sharegpt",
        "--rate",
        "0.3",
        "--seconds",
        "30",
        "--reaction",
        "5",
    ]
    assert main([*command, "--policy", "lru,return", "--record", journal, "--json"]) == 0
    iterations = sum(row["iterations"] for row in json.loads(capsys.readouterr().out)["rows"])
    assert main(["simulate", "--journal", journal, "--fit", costs]) == 0
    out = capsys.readouterr().out
    assert (
        f"{iterations:,} iterations, by 2 engines, all planned again as they were recorded" in out
    )
    assert "held out   median      P90" in out
    assert main([*command, "--cost", costs, "--policy", "lru", "--json"]) == 0
    assert f"fitted to {iterations:,} iterations" in json.loads(capsys.readouterr().out)["assumed"]
    assert main(["simulate", "--journal", journal, "--fit", costs, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["iterations"] == iterations
    assert result["fit"]["errors"][-1]["kind"] == "all"

    lines = Path(journal).read_text().splitlines()
    Path(journal).write_text("\n".join(lines[:-1]) + '\n{"pl')
    assert main(["simulate", "--journal", journal]) == 0
    assert f"line {len(lines)} was cut off when its engine was killed" in capsys.readouterr().out
    Path(journal).write_text("\n".join(lines).replace('"tokens":', '"tokens":1', 1))
    assert main(["simulate", "--journal", journal]) == 1
    out = capsys.readouterr().out
    assert "the replay plans" in out
    assert "may well plan otherwise" not in out
    Path(journal).write_text(
        Path(journal).read_text().replace(f'"written_by":"{__version__}"', '"written_by":"0.0.1"')
    )
    assert main(["simulate", "--journal", journal]) == 1
    assert "pensieve 0.0.1 wrote it" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal_of(tmp_path)
    short, other, empty = str(tmp_path / "j"), tmp_path / "other", tmp_path / "empty"
    other.write_text("{}\n")
    empty.write_text("")
    for wrong, text in (
        (["--journal", str(tmp_path / "none")], "cannot read"),
        (["--journal", str(other)], "line 1: not a journal"),
        (["--journal", str(empty)], "is empty: not a journal"),
        (["--journal", short, "--workload", "agents"], "name no trace"),
        (["--journal", short, "--fit", str(tmp_path / "x")], "at least 40 are needed"),
        (["--workload", "agents", "--fit", "x"], "what is fitted is a --journal"),
        (["--workload", "agents", "--cost", str(other)], "is not a file that"),
        (["--workload", "agents", "--cost", str(tmp_path / "none")], "cannot read"),
        (["--workload", "agents", "--record", str(tmp_path)], "cannot write"),
    ):
        assert main(["simulate", *wrong]) in (2, 3), wrong
        assert text in capsys.readouterr().err
