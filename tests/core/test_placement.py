"""Where conversations are at home: bounded, the same everywhere, and moved only where they must be."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.core.placement import Loads, Placement, point_of, points_of

NAMES = tuple(f"replica-{index}" for index in range(20))
KEYS = tuple(f"conversation {number}" for number in range(4000))

# What every process, release and machine must answer alike: a router that differs splits conversations.
POINT_OF_KEY = 404153043874431696
POINTS_OF_REPLICA = [15180946810039103635, 4387140996602400500]
HOMES = ["replica-17", "replica-10", "replica-15", "replica-15", "replica-16", "replica-0"]


def filled(placement: Placement, keys: tuple[str, ...]) -> tuple[dict[str, str], Loads]:
    homes: dict[str, str] = {}
    loads = Loads()
    for key in keys:
        homes[key] = placement.home(key, loads)
        loads.add(homes[key])
    return homes, loads


def test_points_and_homes_are_these() -> None:
    assert point_of("conversation 1") == POINT_OF_KEY
    assert points_of("replica-0")[:2] == POINTS_OF_REPLICA
    assert len(points_of("replica-0", 13)) == 13
    assert [Placement(NAMES).home(key) for key in KEYS[:6]] == HOMES


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_gives_the_same_answer(seed: str) -> None:
    program = (
        "from pensieve.core.placement import Placement\n"
        "placement = Placement({f'replica-{i}' for i in range(20)})\n"
        "print(*(placement.home(f'conversation {i}') for i in range(6)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == HOMES


def test_the_order_in_which_replicas_came_does_not_matter() -> None:
    there = Placement(NAMES)
    here = Placement(reversed(NAMES[5:]))
    here.add(*NAMES[:5])
    here.add("guest")
    here.remove("guest", "never seen")
    assert [here.home(key) for key in KEYS] == [there.home(key) for key in KEYS]
    assert sorted(here.serving) == sorted(there.serving)


def test_a_replica_that_comes_takes_its_share_and_one_that_goes_leaves_only_its_own() -> None:
    placement = Placement(NAMES)
    before = {key: placement.home(key) for key in KEYS}
    placement.add("late")
    after = {key: placement.home(key) for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {"late"}
    assert len(moved) == pytest.approx(len(KEYS) / 21, rel=0.35)
    placement.remove("late")
    assert {key: placement.home(key) for key in KEYS} == before
    placement.drain("replica-3")
    assert placement.draining == ("replica-3",)
    gone = {key: placement.home(key) for key in KEYS}
    assert {key for key in KEYS if gone[key] != before[key]} == {
        key for key in KEYS if before[key] == "replica-3"
    }
    assert len({gone[key] for key in KEYS if before[key] == "replica-3"}) > 10  # spread over others


def test_plain_hashing_is_uneven_and_the_bound_ends_that() -> None:
    placement = Placement(NAMES)
    plain = Counter(placement.home(key) for key in KEYS)
    assert max(plain.values()) > 1.13 * len(KEYS) / len(NAMES)
    tight = Placement(NAMES, bound=1.05)
    _, loads = filled(tight, KEYS)
    assert max(loads.of(name) for name in NAMES) <= math.ceil(1.05 * len(KEYS) / len(NAMES))
    assert loads.total == len(KEYS)


@settings(max_examples=60)
@given(
    names=st.sets(st.text(min_size=1, max_size=6), min_size=1, max_size=12),
    steps=st.lists(st.tuples(st.text(max_size=8), st.booleans()), max_size=120),
    bound=st.sampled_from([1.0, 1.1, 1.25, 2.0]),
)
def test_no_placement_ever_exceeds_the_bound(
    names: set[str], steps: list[tuple[str, bool]], bound: float
) -> None:
    """Conversations come, by key or behind a parent, and go; each one that comes finds room."""
    placement = Placement(names, bound=bound, keep_bound=bound, points=8)
    loads, placed = Loads(), list[str]()
    for number, (key, follows) in enumerate(steps):
        parent = placed[number % len(placed)] if placed and follows else ""
        home = placement.home(key, loads, parent=parent)
        assert loads.of(home) + 1 <= math.ceil(bound * (loads.total + 1) / len(names))
        loads.add(home)
        placed.append(home)
        if number % 5 == 4:
            loads.add(placed.pop(number % len(placed)), -1)


@settings(max_examples=40)
@given(
    names=st.sets(st.text(min_size=1, max_size=6), min_size=3, max_size=10),
    keys=st.sets(st.text(max_size=8), min_size=1, max_size=60),
    chosen=st.integers(0, 100),
)
def test_owners_keep_their_conversations_when_others_come_and_go(
    names: set[str], keys: set[str], chosen: int
) -> None:
    placement = Placement(names, keep_bound=1000.0, points=8)
    homes, loads = filled(placement, tuple(sorted(keys)))
    goes = sorted(names)[chosen % len(names)]
    placement.add("\x00 new")
    placement.drain(goes)
    for key, owner in homes.items():
        home = placement.home(key, loads, owner=owner)
        assert (home != owner) == (owner == goes)
        assert home in placement.serving


def test_an_owner_far_over_the_mean_gives_away_and_one_just_full_does_not() -> None:
    placement = Placement(("a", "b", "c", "d"))
    assert placement.most(Loads({"a": 10, "b": 10, "c": 10, "d": 9})) == 13
    full = Loads({"a": 15, "b": 9, "c": 8, "d": 8})
    assert placement.home("x", full, owner="a") == "a"
    over = Loads({"a": 17, "b": 8, "c": 8, "d": 7})
    assert placement.home("x", over, owner="a") != "a"
    assert placement.home("x", owner="a") == "a"


def test_a_fork_follows_its_parent_until_that_is_full_or_drains() -> None:
    placement = Placement(("a", "b", "c", "d"))
    apart = next(key for key in KEYS if placement.home(key) == "b")
    assert placement.home(apart, Loads(), parent="a") == "a"
    assert placement.home(apart, Loads({"a": 2, "b": 1, "c": 1, "d": 1}), parent="a") == "b"
    assert placement.home(apart, parent="gone") == "b"
    fuller = Loads({"a": 11, "b": 9, "c": 10, "d": 10})
    for more, home in ((0.0, "b"), (1.25, "a")):
        tight = Placement(("a", "b", "c", "d"), bound=1.05, parent_bound=more)
        assert tight.home(apart, fuller, parent="a") == home
        assert tight.home(apart, fuller) == "b"
    placement.drain("a")
    assert placement.home(apart, Loads(), parent="a") == "b"
    placement.add("a")
    assert placement.home(apart, Loads(), parent="a") == "a"


def test_what_the_gone_and_the_draining_have_counts_for_the_mean() -> None:
    placement = Placement(("a", "b"))
    loads = Loads({"a": 10, "b": 10})
    placement.drain("a")
    assert placement.most(loads) == 27  # of 21 on one replica
    loads.forget("a")
    assert (loads.total, placement.most(loads)) == (10, 14)


def test_without_a_replica_that_serves_there_is_no_home() -> None:
    placement = Placement(("a",))
    placement.drain("a")
    with pytest.raises(LookupError, match="no replica serves"):
        placement.home("x")
    placement.remove("a")
    assert (placement.serving, placement.draining) == ((), ())
