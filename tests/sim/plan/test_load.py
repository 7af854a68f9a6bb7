"""Loads of any rate, from habits or from a trace."""

from __future__ import annotations

from collections import Counter

import pytest

from pensieve.sim.plan.load import Recorded
from pensieve.sim.plan.routing import (
    with_times,
)
from pensieve.sim.trace import Arrival
from tests.sim.plan.world import CHAT, LOAD


def test_a_load_that_has_gone_on_for_long() -> None:
    """Every conversation is in progress that would be, and as many turns come at first as later."""
    arrivals = list(with_times(LOAD.arrivals(30.0), LOAD.seconds_per_token))
    free_until, counts, ends = LOAD.window(30.0)
    assert free_until < counts < ends
    assert ends - counts == 30.0
    times = [arrival.at or 0.0 for arrival in arrivals]
    assert times == sorted(times)
    width = (ends - free_until) / 3
    turns = Counter(int((at - free_until) // width) for at in times if free_until <= at < ends)
    assert turns[0] == pytest.approx(turns[2], rel=0.06)
    assert turns[0] == pytest.approx(30.0 * 5.0 * width, rel=0.1)
    in_progress = [arrival for arrival in arrivals if (arrival.at or 0.0) < free_until]
    assert all(arrival.output_tokens == 1 for arrival in in_progress)
    left = (CHAT.turns_mean - 1) / CHAT.turns_mean  # none is in progress before its first turn
    assert len(in_progress) == pytest.approx(left * LOAD.conversations_at_once(30.0), rel=0.1)
    assert len({arrival.conversation for arrival in in_progress}) == len(in_progress)


def test_a_trace_is_thinned_or_runs_several_times() -> None:
    arrivals = [
        Arrival(f"c{number}", 100.0 + number + 40.0 * turn, 100, 10)
        for turn in range(3)
        for number in range(200)
    ]
    arrivals.sort(key=lambda arrival: arrival.at or 0.0)
    trace = Recorded(arrivals)
    assert trace.rate == pytest.approx(200 / 279)
    assert trace.typical == (3.0, 100, 10)
    assert trace.window(1.0) == (0.0, 139.5, 279.0)
    assert Recorded(arrivals, 20.0).window(1e-3) == (0.0, 20.0, 40.0)
    assert [v.at for v in trace.arrivals(trace.rate)] == [(v.at or 0.0) - 100.0 for v in arrivals]
    half = list(trace.arrivals(trace.rate / 2))
    assert len({v.conversation for v in half}) == pytest.approx(100, rel=0.2)
    assert {v.conversation for v in trace.arrivals(trace.rate / 4)} < {v.conversation for v in half}
    assert all(count == 3 for count in Counter(v.conversation for v in half).values())
    more = list(trace.arrivals(2.5 * trace.rate))
    assert len(more) == 2 * len(arrivals) + len(half)
    assert [v.at for v in more] == sorted(v.at for v in more if v.at is not None)
    pauses = {
        name: [v.at or 0.0 for v in more if v.conversation == name] for name in ("c7", "c7+1")
    }
    assert pauses["c7"] == [7.0, 47.0, 87.0]
    assert pauses["c7+1"][2] - pauses["c7+1"][0] == pytest.approx(80.0)
    assert "2.50 copies" in trace.description(2.5 * trace.rate)
    with pytest.raises(ValueError, match="two times"):
        Recorded(arrivals[:1])


def test_copies_of_a_fork_are_forks_of_copies() -> None:
    arrivals = [
        Arrival("a", 0.0, 9, 9),
        Arrival("b", 50.0, 9, 9, 0.0, 18, "a"),
        Arrival("b", None, 9, 9, 1.0),
    ]
    trace = Recorded(arrivals)
    found = {(v.conversation, v.fork_of) for v in trace.arrivals(2 * trace.rate)}
    assert found == {("a", ""), ("b", ""), ("b", "a"), ("a+1", ""), ("b+1", "a+1"), ("b+1", "")}
