"""How a client tracks its addresses, on a clock that the test controls."""

from __future__ import annotations

from collections import Counter

import pytest

from pensieve import errors
from pensieve.client import AddressState, Retry
from pensieve.client.addresses import HOMES_MAX, Addresses, Choice, Route, ranked, score

THREE = ("gpu1:50051", "gpu2:50051", "gpu3:50051")
KEYS = [f"conversation-{number}" for number in range(2000)]
NAMES = ("gpu1:1", "gpu2:1", "gpu3:1")
RETRY = Retry(first_seconds=1.0, most_seconds=8.0, drawn=lambda: 1.0)  # without jitter
AWAY = errors.Unavailable("away")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def addresses(clock: Clock) -> Addresses:
    return Addresses(NAMES, RETRY, clock)


def choose(addresses: Addresses, *tried: str) -> Choice | None:
    return addresses.choose(NAMES, tried)


def test_an_address_is_avoided_for_longer_after_each_failure(
    addresses: Addresses, clock: Clock
) -> None:
    pauses = []
    addresses.note_failed("gpu1:1", "away")
    for _ in range(6):
        assert choose(addresses) == ("gpu2:1", False)
        pause = addresses.states()[0].seconds_left
        pauses.append(pause)
        clock.now += pause
        assert choose(addresses) == ("gpu1:1", True)  # one request checks this address
        assert choose(addresses) == ("gpu2:1", False)  # others do not wait for the check
        addresses.note_failed("gpu1:1", "still away")
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert addresses.states()[0] == AddressState("gpu1:1", "avoided", 7, 8.0, "still away")
    addresses.note_works("gpu1:1")
    assert addresses.states()[0] == AddressState("gpu1:1", "works")
    assert choose(addresses) == ("gpu1:1", False)


def test_simultaneous_failures_of_many_calls_count_once(addresses: Addresses, clock: Clock) -> None:
    for _ in range(50):
        addresses.note_failed("gpu1:1", "away")
    assert addresses.states()[0].num_failures == 1
    clock.now += 1.0
    addresses.note_failed("gpu1:1", "away")
    assert addresses.states()[0].num_failures == 2


def test_pauses_have_jitter() -> None:
    draws = iter([0.0, 0.5])
    addresses = Addresses(NAMES, Retry(first_seconds=1.0, drawn=lambda: next(draws)), lambda: 0.0)
    addresses.note_failed("gpu1:1", "away")
    addresses.note_failed("gpu2:1", "away")
    assert [each.seconds_left for each in addresses.states()] == [0.5, 0.75, 0.0]


def test_an_address_in_doubt_is_checked_first_but_stays_chosen(addresses: Addresses) -> None:
    addresses.note_doubt("gpu1:1", "the stream broke")
    assert addresses.states()[0] == AddressState("gpu1:1", "in doubt", error="the stream broke")
    assert [choose(addresses), choose(addresses)] == [("gpu1:1", True)] * 2
    addresses.note_works("gpu1:1")
    assert choose(addresses) == ("gpu1:1", False)


def test_an_avoided_address_is_used_if_all_are_avoided(addresses: Addresses) -> None:
    for name in NAMES:
        addresses.note_failed(name, "away")
    assert choose(addresses) == ("gpu1:1", True)
    assert choose(addresses, "gpu1:1") == ("gpu2:1", True)
    assert choose(addresses, *NAMES) is None


def test_a_single_address_is_never_checked_or_avoided(clock: Clock) -> None:
    alone = Addresses(["gpu1:1"], RETRY, clock)
    route = Route(alone, "trip")
    for _ in range(3):
        assert route.choose() == ("gpu1:1", False)
        assert not route.try_next_address(AWAY)
        assert route.explained(AWAY) is AWAY
    assert alone.states()[0].state == "avoided"  # this state is only displayed


# -- homes --


def test_learned_homes_are_bounded_and_the_least_recently_used_is_forgotten(
    addresses: Addresses,
) -> None:
    keys = [f"talk-{number}" for number in range(HOMES_MAX + 1)]
    other = {key: ranked(key, NAMES)[1] for key in keys}
    for key in keys[:-1]:
        assert addresses.learn(key, other[key])
    assert addresses.order(keys[0])[0] == other[keys[0]]  # this use makes keys[1] the oldest
    addresses.learn(keys[-1], other[keys[-1]])
    assert len(addresses._homes) == HOMES_MAX
    assert addresses.order(keys[0]) == [
        other[keys[0]],
        *(name for name in ranked(keys[0], NAMES) if name != other[keys[0]]),
    ]
    assert addresses.order(keys[1]) == ranked(keys[1], NAMES)


def test_a_learned_home_equal_to_the_hashed_home_is_not_stored(addresses: Addresses) -> None:
    first, second, _ = ranked("trip", NAMES)
    assert addresses.learn("trip", second)
    assert addresses.order("trip")[0] == second
    assert addresses.learn("trip", first)
    assert addresses.order("trip")[0] == first
    assert not addresses._homes
    assert not addresses.learn("trip", "elsewhere:1")
    assert addresses.order("trip")[0] == first


def test_a_learned_home_that_fails_is_forgotten(addresses: Addresses) -> None:
    first, second, third = ranked("trip", NAMES)
    addresses.learn("trip", third)
    route = Route(addresses, "trip")
    assert route.choose() == (third, False)
    assert route.try_next_address(AWAY)
    assert addresses.order("trip") == [first, second, third]
    assert route.choose() == (first, False)


def test_id_with_same_home_returns_an_id_with_the_same_home(addresses: Addresses) -> None:
    second = ranked("trip", NAMES)[1]
    addresses.learn("trip", second)
    drawn = {addresses.id_with_same_home("trip") for _ in range(20)}
    assert len(drawn) == 20
    assert {ranked(each, NAMES)[0] for each in drawn} == {second}


# -- the route of a request --


def test_a_round_tries_each_address_once(addresses: Addresses) -> None:
    order = ranked("trip", NAMES)
    route = Route(addresses, "trip")
    tried = []
    for number in range(3):
        tried.append(route.choose().name)
        assert route.try_next_address(errors.Unavailable(f"away {number}")) is (number < 2)
    assert tried == order
    error = route.explained(errors.Unavailable("away 2"))
    whys = {name: f"away {number}" for number, name in enumerate(order)}
    texts = "; ".join(f"{name}: {whys[name]}" for name in NAMES)
    assert str(error) == f"all 3 addresses failed ({texts})"
    route.begin_round()
    assert route.choose() == (order[0], True)


def test_a_broken_stream_keeps_its_address_until_that_address_fails_again(
    addresses: Addresses,
) -> None:
    order = ranked("trip", NAMES)
    route = Route(addresses, "trip")
    route.choose()
    assert route.try_next_address(AWAY)
    assert route.choose() == (order[1], False)
    route.answered()
    assert not route.try_next_address(errors.Unavailable("broken"))  # first the client must pause
    route.begin_round()
    assert route.choose() == (order[1], True)
    route.note_not_serving(AWAY, is_reached=False)
    assert route.choose() == (order[2], False)


def test_the_error_is_loading_if_one_of_the_addresses_is_loading(
    addresses: Addresses,
) -> None:
    route = Route(addresses, "trip")
    loading = errors.Loading("loading")
    loading.retry_after_seconds = 2.5
    route.choose()
    route.try_next_address(loading)
    route.choose()
    route.try_next_address(AWAY)
    error = route.explained(AWAY)
    assert type(error) is errors.Loading
    assert error.retry_after_seconds == 2.5


def test_an_address_that_answers_with_an_error_works(addresses: Addresses) -> None:
    route = Route(addresses, "trip")
    name = route.choose().name
    missing = errors.NotFound("missing")
    assert not route.try_next_address(missing)
    assert route.explained(missing) is missing
    assert {each.address: each.state for each in addresses.states()}[name] == "works"


# -- homes: every client chooses the same home, and only conversations that must move are moved --


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
def test_the_ranking_of_a_conversation_is_independent_of_the_listed_order(
    key: str, names: list[str]
) -> None:
    for rotated in (THREE, THREE[1:] + THREE[:1], THREE[::-1]):
        assert ranked(key, rotated) == names


def test_forty_conversations_are_spread_over_three_daemons() -> None:
    homes = Counter(ranked(key, THREE)[0] for key in KEYS[:40])
    assert homes == {"gpu1:50051": 10, "gpu2:50051": 16, "gpu3:50051": 14}  # the limit is 20


def test_many_conversations_are_spread_evenly() -> None:
    for num_names in (2, 3, 10):
        names = [f"10.0.0.{number}:50051" for number in range(num_names)]
        homes = Counter(ranked(key, names)[0] for key in KEYS)
        mean = len(KEYS) / num_names
        assert all(0.8 * mean < homes[name] < 1.2 * mean for name in names)


def test_removing_an_address_moves_only_its_conversations_each_to_its_next_address() -> None:
    for gone in THREE:
        remaining = [name for name in THREE if name != gone]
        for key in KEYS:
            before = ranked(key, THREE)
            assert ranked(key, remaining) == [name for name in before if name != gone]


def test_an_added_address_takes_an_equal_share_from_each_address() -> None:
    taken: Counter[str] = Counter()
    for key in KEYS:
        before, after = ranked(key, THREE), ranked(key, (*THREE, "gpu4:50051"))
        assert [name for name in after if name != "gpu4:50051"] == before
        if after[0] == "gpu4:50051":
            taken[before[0]] += 1
    assert 0.8 * 500 < taken.total() < 1.2 * 500
    assert all(0.7 * 167 < taken[name] < 1.3 * 167 for name in THREE)
