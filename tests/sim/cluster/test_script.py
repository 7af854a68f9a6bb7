"""What happens to replicas, as text and as phases; links; and the arithmetic of the history."""

from __future__ import annotations

import pytest

from pensieve.sim.cluster.limits import history_rows, region_row
from pensieve.sim.cluster.network import Links
from pensieve.sim.cluster.script import Happening, Kind, parse, phases


def test_a_script_is_read_in_the_order_of_its_times() -> None:
    assert parse("90:join:10%, 60:fail:1,") == (
        Happening(60.0, Kind.FAIL, 1.0),
        Happening(90.0, Kind.JOIN, 0.1),
    )
    assert parse("") == ()
    assert [str(each) for each in parse("0:fail:2.5%,1:drain:3")] == ["fail 2.5 %", "drain 3"]


@pytest.mark.parametrize(
    "text", ["60:fail", "60:melt:1", "60:fail:0", "-1:fail:1", "5:fail:1.5", "5:fail:120%", "x"]
)
def test_what_is_no_happening_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse(f"1:fail:1,{text}")


def test_a_share_is_of_those_that_serve_and_one_always_stays() -> None:
    assert Happening(0, Kind.FAIL, 0.05).replicas(1000) == 50
    assert Happening(0, Kind.FAIL, 0.05).replicas(4) == 1
    assert Happening(0, Kind.DRAIN, 9).replicas(3) == 2
    assert Happening(0, Kind.JOIN, 9).replicas(3) == 9


def test_phases_lie_between_happenings() -> None:
    script = parse("60:fail:1,60:join:1,90:drain:1")
    assert phases(script, 100.0) == [
        ("before", 0.0, 60.0),
        ("after fail 1, join 1", 60.0, 90.0),
        ("after drain 1", 90.0, 100.0),
    ]
    assert phases((), 10.0) == [("before", 0.0, 10.0)]
    assert phases(parse("0:fail:1"), 10.0) == [("after fail 1", 0.0, 10.0)]


def test_a_link_carries_one_hand_over_at_a_time_in_each_direction() -> None:
    links = Links(100.0)
    assert links.reserve("a", "b", 150.0, 10.0) == 11.5
    assert links.ends("c", "d", 100.0, 10.0) == 11.0  # of other hosts
    assert links.reserve("a", "c", 100.0, 10.0) == 12.5  # a still sends
    assert links.reserve("d", "b", 50.0, 10.0) == 12.0  # b still receives
    assert links.ends("b", "a", 100.0, 10.0) == 11.0  # the other direction of both
    assert (links.count, links.num_bytes) == (3, 300.0)
    assert links.peak_bits_per_second() == 800.0


def test_a_peak_is_that_of_a_second() -> None:
    links = Links(1000.0)
    links.reserve("a", "b", 100.0, 0.95)  # half of it in each of two seconds
    assert links.peak_bits_per_second() == pytest.approx(400.0)
    assert Links(1.0).peak_bits_per_second() == 0.0


def test_how_far_one_history_goes() -> None:
    rows = history_rows(2800.0, 3300.0, 1000, [2080.0, 140.0])
    assert [(row["replicas"], row["shards"], row["shards_at_peak"]) for row in rows] == [
        (742, 2, 2),
        (50, 20, 24),
    ]
    assert history_rows(0.0, 0.0, 10, [100.0])[0]["replicas"] is None


def test_what_a_region_away_costs() -> None:
    assert region_row(0.07) == {
        "round_trip_seconds": 0.07,
        "first_token_seconds": pytest.approx(0.14),
        "first_token_moved_seconds": pytest.approx(0.21),
        "completed_seconds": 0.07,
    }
