"""Where a conversation is at home: the same for every client, and only what must move does."""

from __future__ import annotations

from collections import Counter

import pytest

from pensieve.client.rendezvous import ranked, score

THREE = ("gpu1:50051", "gpu2:50051", "gpu3:50051")
KEYS = [f"conversation-{number}" for number in range(2000)]


@pytest.mark.parametrize(
    ("name", "key", "number"),
    [
        # printf 'gpu1:50051\ntrip-42' | sha256sum begins with 2085940ecba5219e
        ("gpu1:50051", "trip-42", 0x2085940ECBA5219E),
        ("gpu2:50051", "trip-42", 8720959612069270644),
        ("gpu3:50051", "trip-42", 15545323591670259599),
        ("[::1]:50051", "trip-42", 2376365180364187865),
    ],
)
def test_a_score_is_the_same_in_every_language_and_version(
    name: str, key: str, number: int
) -> None:
    assert score(key, name) == number


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("trip-42", [THREE[2], THREE[1], THREE[0]]),
        ("a", [THREE[1], THREE[0], THREE[2]]),
        ("0" * 128, [THREE[2], THREE[0], THREE[1]]),
    ],
)
def test_the_order_of_a_conversation_does_not_depend_on_how_the_addresses_are_listed(
    key: str, names: list[str]
) -> None:
    for rotated in (THREE, THREE[1:] + THREE[:1], THREE[::-1]):
        assert ranked(key, rotated) == names


def test_forty_conversations_are_spread_over_three_daemons() -> None:
    homes = Counter(ranked(key, THREE)[0] for key in KEYS[:40])
    assert homes == {"gpu1:50051": 10, "gpu2:50051": 16, "gpu3:50051": 14}  # 20 is 1.5 x the mean


def test_many_conversations_are_spread_evenly() -> None:
    for num_names in (2, 3, 10):
        names = [f"10.0.0.{number}:50051" for number in range(num_names)]
        homes = Counter(ranked(key, names)[0] for key in KEYS)
        mean = len(KEYS) / num_names
        assert all(0.8 * mean < homes[name] < 1.2 * mean for name in names)


def test_an_address_that_leaves_moves_its_conversations_alone_each_to_its_next() -> None:
    for gone in THREE:
        left = [name for name in THREE if name != gone]
        for key in KEYS:
            before = ranked(key, THREE)
            assert ranked(key, left) == [name for name in before if name != gone]


def test_an_address_that_is_added_takes_its_share_from_all_alike() -> None:
    taken: Counter[str] = Counter()
    for key in KEYS:
        before, after = ranked(key, THREE), ranked(key, (*THREE, "gpu4:50051"))
        assert [name for name in after if name != "gpu4:50051"] == before
        if after[0] == "gpu4:50051":
            taken[before[0]] += 1
    assert 0.8 * 500 < taken.total() < 1.2 * 500
    assert all(0.7 * 167 < taken[name] < 1.3 * 167 for name in THREE)
