"""The highest rate of a replica within its limits, the gain of host memory, and how many replicas to use."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from pensieve.bench.capacity_search import RATE_MOST, Impossible, Row, Slo, capacity
from pensieve.errors import InvalidArgument
from scripts.measurements import machines
from scripts.measurements.machines import HostMemory, budget_within, host_memories, recommended
from tests.scripts.made_up import CHAT, COST, LOAD, SLO, SMALL, trial


def row_of(tbt: float, ttft: float = 0.0) -> Row:
    return {"tbt_p99": tbt, "ttft_p50": ttft, "queue_p50": None}


@pytest.mark.parametrize("limit", [0.003, 0.9, 17.0, 400.0])
@pytest.mark.parametrize("guess", [0.01, 1.0, 50.0])
def test_the_highest_rate_is_found_from_any_guess(limit: float, guess: float) -> None:
    tried: list[float] = []

    def one(rate: float) -> Row:
        tried.append(rate)
        return row_of(rate / limit)

    rate, row = capacity(one, Slo(1.0, 1.0), guess)
    assert limit / 1.04 <= rate <= limit
    assert row == row_of(rate / limit)
    assert len(tried) < 25


def test_the_search_ends_if_every_rate_or_no_rate_is_within_the_limits() -> None:
    assert capacity(lambda rate: row_of(0.0), Slo(1.0, 1.0), 1e9) == (RATE_MOST, row_of(0.0))
    with pytest.raises(Impossible, match="exceeds a limit: median time to first token 2 s"):
        capacity(lambda rate: row_of(0.0, 2.0), Slo(1.0, 1.0), 1.0)


def test_turns_longer_than_the_device_tier_make_a_load_impossible() -> None:
    long = replace(LOAD, preset=replace(CHAT, input_tokens=400.0))
    with pytest.raises(
        Impossible, match=r"% of the turns are longer .* device tier of 2,000 tokens"
    ):
        host_memories(replace(SMALL, device_tokens=2000), long, SLO, 0, print)


def test_a_lone_turn_that_is_too_slow_is_refused_before_anything_is_simulated() -> None:
    with pytest.raises(Impossible, match=r"a token takes 10.5 ms even without other turns"):
        SMALL.check(Slo(0.01, 1.0), 40)
    with pytest.raises(Impossible, match=r"first token after 4,000 new ones takes 0\.8"):
        SMALL.check(Slo(0.1, 0.3), 4000)
    SMALL.check(SLO, 40)


def test_an_iteration_of_prompts_fits_between_two_tokens() -> None:
    assert budget_within(COST, Slo(10.0, 1.0), 2048, 64) == 2048
    assert budget_within(COST, Slo(0.08, 1.0), 2048, 64) == 256
    assert budget_within(COST, Slo(0.012, 1.0), 2048, 64) == 64


def test_host_memory_grows_while_it_raises_the_rate() -> None:
    lines: list[str] = []
    tried = host_memories(SMALL, LOAD, SLO, 30_000, lines.append)
    assert [each.host_tokens for each in tried] == [0, 8000, 16_000, 30_000][: len(tried)]
    assert all(more.rate > 0.96 * less.rate for less, more in pairwise(tried))
    assert tried[-1].rate > 1.1 * tried[0].rate
    assert tried[0].row["host_share"] == 0.0 < tried[-1].row["host_share"]
    assert any("passed" in line for line in lines)
    rate = tried[0].rate
    assert not SLO.violations(trial(rate))
    assert SLO.violations(trial(1.3 * rate))
    assert trial(rate)["turns_per_second"] == pytest.approx(rate * 5.0, rel=0.3)
    rates = {0: 1.0, 10: 1.95, 20: 2.0, 40: 2.02}
    assert recommended([HostMemory(*each, {}) for each in rates.items()]).host_tokens == 10


def test_a_load_starts_with_conversations_in_progress() -> None:
    """Conversations are already in progress at the start, so that the turn rate is steady."""
    arrivals = list(LOAD.arrivals(30.0))
    free_until, count_from, end = LOAD.window
    assert free_until < count_from < end
    assert end - count_from == 30.0
    logs = [each for each in arrivals if each.at is not None and each.at < free_until]
    assert all(each.output_tokens == 1 for each in logs)
    left = (CHAT.turns_mean - 1) / CHAT.turns_mean  # leave out turns that begin a conversation
    assert len(logs) == pytest.approx(left * 30.0 * LOAD.mean_seconds, rel=0.1)
    assert len({each.conversation for each in logs}) == len(logs)
    ends_of: dict[str, float] = {}
    turns: Counter[int] = Counter()
    width = (end - free_until) / 3
    for each in arrivals:
        begin = each.at
        if begin is None:
            begin = ends_of[each.conversation] + each.after
        ends_of[each.conversation] = begin + LOAD.seconds_per_token * each.output_tokens
        turns[int((begin - free_until) // width)] += begin >= free_until
    assert turns[0] == pytest.approx(turns[2], rel=0.06)
    assert turns[0] == pytest.approx(30.0 * 5.0 * width, rel=0.1)


def test_the_command_says_how_many_machines(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--reaction", "2", "--seconds", "3", "--host-tokens", "0", "--device-tokens", "20k"]
    machines.main([*small, "--rate", "900"])
    assert "replicas" in capsys.readouterr().out
    with pytest.raises(InvalidArgument, match="no load is low enough"):
        machines.main([*small, "--tbt-p99", "0.001"])
