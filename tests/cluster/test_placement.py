"""Homes of conversations: the same for every router, bounded, and moved only where a replica went away."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pensieve.cluster.placement import home, ranked

NAMES = ("ada", "bob", "cleo")


def placed(num_keys: int, names: tuple[str, ...]) -> dict[str, str]:
    loads = Counter(dict.fromkeys(names, 0))
    found = {}
    for index in range(num_keys):
        found[f"c-{index}"] = home(f"c-{index}", loads)
        loads[found[f"c-{index}"]] += 1
    return found


def test_a_key_has_the_same_home_wherever_it_is_computed() -> None:
    assert home("trip-42", dict.fromkeys(NAMES, 0)) == "ada"
    assert home("trip-42", dict.fromkeys(reversed(NAMES), 0)) == "ada"
    assert ranked("trip-42", NAMES) == ["ada", "bob", "cleo"]


def test_no_replica_has_more_than_a_quarter_above_the_mean() -> None:
    for num_keys in (1, 7, 100, 1000):
        counts = Counter(placed(num_keys, NAMES).values())
        assert max(counts.values()) <= math.ceil(1.25 * num_keys / 3)


def test_a_replica_that_goes_away_moves_its_own_keys_alone() -> None:
    for key in (f"c-{index}" for index in range(500)):
        before = ranked(key, NAMES)
        after = ranked(key, ("ada", "bob"))
        assert after == [name for name in before if name != "cleo"]


def test_a_full_home_passes_its_new_keys_to_their_second_choice() -> None:
    assert home("trip-42", {"ada": 5, "bob": 5, "cleo": 5}) == "ada"
    assert home("trip-42", {"ada": 10, "bob": 2, "cleo": 0}) == "bob"


@given(
    st.dictionaries(st.text(min_size=1), st.integers(0, 1000), min_size=1, max_size=8), st.text()
)
def test_there_is_a_home_whatever_the_loads_are(loads: dict[str, int], key: str) -> None:
    name = home(key, loads)
    assert loads[name] + 1 <= math.ceil(1.25 * (sum(loads.values()) + 1) / len(loads))
