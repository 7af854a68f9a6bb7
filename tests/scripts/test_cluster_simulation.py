"""A cluster under one clock: who moves when replicas fail, drain, restart and join, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import InvalidArgument
from pensieve.sim import cost_file
from scripts.measurements.cluster import Cluster, Links, Setting, main
from scripts.measurements.cluster_events import Happening, Kind, parse, phases
from scripts.measurements.cluster_replicas import Talk
from scripts.measurements.machine_options import Machine
from tests.scripts.made_up import CHAT, COST

TALK = Talk(CHAT, 4.0, seed=3)


def cluster(events: str = "", talk: Talk = TALK, **more: Any) -> Cluster:
    values: dict[str, Any] = {
        "replicas": 8,
        "simulated": 0,
        "seconds": 60.0,
        "lease_seconds": 2.0,
        "drain_seconds": 15.0,
        "restart_seconds": 5.0,
        "active_seconds": 60.0,
    }
    machine = Machine(COST, 64_000, 64_000)
    return Cluster(Setting(machine, talk, parse(events), **{**values, **more}))


def test_without_events_nobody_moves() -> None:
    quiet = cluster(talk=replace(TALK, forks=0.0))
    tally = quiet.run()
    assert tally.causes == {}
    (phase,) = tally.phases
    assert phase.turns == 1171
    assert phase.recomputed == 0


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    events = "10:fail:1,30:join:2"
    more: dict[str, Any] = {"simulated": 1, "seconds": 40.0}
    runs = [cluster(events, **more).run() for _ in range(2)]
    rows = [tally.phases for tally in runs]
    assert rows[0] == rows[1]
    other = cluster(events, talk=replace(TALK, seed=4), **more).run()
    assert other.phases != rows[0]


def test_a_replica_that_fails_loses_its_conversations_and_no_other_moves() -> None:
    failing = cluster("20:fail:1", talk=replace(TALK, forks=0.0), keep_bound=100.0)
    tally = failing.run()
    (cause,) = tally.causes.values()
    assert (cause.name, cause.replicas) == ("fail 1 at 20 s", 1)
    assert cause.owned > cause.moved > 0  # some do not come back
    assert cause.handed_over == 0
    assert cause.recomputed_tokens > 100 * cause.moved
    assert len(failing.placement.serving) == 7
    gone = [each for each in failing.replicas.values() if each.gone]
    assert [each.running for each in gone] == [{}]


def test_turns_of_a_failed_replica_wait_for_the_lease_and_are_run_again() -> None:
    more = {"replicas": 4, "simulated": 4, "lease_seconds": 5.0, "seconds": 40.0}
    tally = cluster("20:fail:50%", replace(TALK, rate=2.0), **more).run()
    before, after = tally.phases
    cause = tally.causes["fail 50 % at 20 s"]
    assert (cause.replicas, cause.running > 0) == (2, True)
    late = after.first_tokens_moved
    assert late.count > 0
    assert late.quantile(0.99) is not None
    assert 1.0 < late.quantile(0.99) < 20.0  # type: ignore[operator]
    assert before.first_tokens.quantile(0.5) < 1.0  # type: ignore[operator]
    assert after.history_recomputed > before.history_recomputed


def test_who_drains_hands_over_and_who_restarts_comes_back_empty() -> None:
    draining = cluster("20:restart:2", link_bytes_per_second=1e12)
    tally = draining.run()
    cause = tally.causes["restart 2 at 20 s"]
    assert 0 < cause.handed_over <= cause.moved
    assert cause.handed_over_bytes % (32 * 400_000) == 0  # whole chunks
    assert len(draining.placement.serving) == 8
    back = [each for each in draining.replicas.values() if each.incarnation]
    assert [each.incarnation for each in back] == [1, 1]
    assert all(each.returned_from == "restart 2 at 20 s" for each in back)


def test_kv_is_computed_again_where_the_link_is_slower() -> None:
    slow, none = (cluster("20:drain:2", link_bytes_per_second=rate).run() for rate in (1e6, 0.0))
    for tally in (slow, none):
        cause = tally.causes["drain 2 at 20 s"]
        assert (cause.handed_over, cause.moved > 0) == (0, True)
        assert cause.recomputed_tokens > 0


def test_replicas_that_join_move_nobody_who_is_at_home() -> None:
    joining = cluster("20:join:2", talk=replace(TALK, forks=0.0), keep_bound=100.0)
    tally = joining.run()
    assert tally.causes["join 2 at 20 s"].moved == 0
    assert sum(tally.causes[name].moved for name in tally.causes) == 0
    assert joining.loads.of("replica-9") > 0
    assert tally.phases[1].replicas == 10


def test_new_conversations_go_nowhere_above_the_bound() -> None:
    talk = replace(TALK, rate=16.0, forks=0.1)
    bounded = cluster(talk=talk, replicas=20, bound=1.1, seconds=20.0)
    (phase,) = bounded.run().phases
    # Others go meanwhile, and the mean with them: so a little more than the bound.
    assert sum(phase.load_ratios) / len(phase.load_ratios) < 1.1 * 1.08


def test_forks_begin_with_their_parents_kv_where_that_has_room() -> None:
    talk = replace(TALK, rate=1.5, forks=0.5)
    forking = cluster(talk=talk, replicas=3, simulated=3, seconds=30.0)
    tally = forking.run()
    apart = tally.causes["fork apart from its parent"].moved if tally.causes else 0
    assert apart < 0.3 * tally.phases[0].turns / 10
    assert tally.phases[0].history_tokens > 0
    assert tally.phases[0].history_recomputed < 0.05 * tally.phases[0].history_tokens


def test_a_sample_agrees_with_all_of_them() -> None:
    """Loads and moves are of all replicas; first tokens of the sample lie where those of all do."""
    talk, more = replace(TALK, rate=2.0), {"replicas": 4, "seconds": 35.0}
    every, some = (cluster("15:fail:1", talk, simulated=k, **more).run() for k in (4, 2))
    for all_of_them, sampled in zip(every.phases, some.phases, strict=True):
        assert sampled.turns == pytest.approx(all_of_them.turns, rel=0.05)
        assert sampled.first_tokens.count < 0.7 * all_of_them.first_tokens.count
        medians = [each.first_tokens.quantile(0.5) for each in (sampled, all_of_them)]
        assert medians[0] == pytest.approx(medians[1], rel=0.25)
    causes = [tally.causes["fail 1 at 15 s"] for tally in (every, some)]
    assert causes[1].moved == pytest.approx(causes[0].moved, rel=0.15)


def test_the_last_replica_stays() -> None:
    alone = cluster("5:fail:2,10:drain:1", replicas=2, seconds=20.0)
    tally = alone.run()
    assert len(alone.placement.serving) == 1
    assert [cause.replicas for cause in tally.causes.values() if cause.at] == [1, 0]


def test_the_command_simulates_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(cost_file.text_of(COST, {}))
    small = [
        "--replicas",
        "6",
        "--simulated",
        "1",
        "--seconds",
        "30",
        "--reaction",
        "5",
        "--rate",
        "0.1",
    ]
    main([*small, "--cost", str(costs), "--events", "10:fail:1,20:join:1", "--lease", "1"])
    out = capsys.readouterr().out
    assert [line.split()[:4] for line in out.splitlines()[3:6]] == [
        ["before", "6", *out.splitlines()[3].split()[2:4]],
        ["after", "fail", "1", "5"],
        ["after", "join", "1", "6"],
    ]
    assert "fail 1 at 10 s" in out
    with pytest.raises(InvalidArgument, match="5:melt:1"):
        main([*small, "--events", "5:melt:1"])


# -- what happens, and when --


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
    assert phases(parse("60:fail:1,60:join:1,90:drain:1"), 100.0) == [
        ("before", 0.0, 60.0),
        ("after fail 1, join 1", 60.0, 90.0),
        ("after drain 1", 90.0, 100.0),
    ]
    assert phases(parse("0:fail:1"), 10.0) == [("after fail 1", 0.0, 10.0)]


def test_a_link_carries_one_hand_over_at_a_time_in_each_direction() -> None:
    links = Links(100.0)
    links.reserve("a", "b", 11.5)
    assert links.ends("c", "d", 100.0, 10.0) == 11.0  # of other hosts
    assert links.ends("a", "c", 100.0, 10.0) == 12.5  # a still sends
    assert links.ends("d", "b", 50.0, 10.0) == 12.0  # b still receives
    assert links.ends("b", "a", 100.0, 10.0) == 11.0  # the other direction of both
