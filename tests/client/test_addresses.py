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


def chosen(addresses: Addresses, *tried: str) -> Choice | None:
    return addresses.choose(NAMES, tried)


def test_an_address_that_fails_is_avoided_for_longer_each_time(
    addresses: Addresses, clock: Clock
) -> None:
    pauses = []
    addresses.failed("gpu1:1", "away")
    for _ in range(6):
        assert chosen(addresses) == ("gpu2:1", False)
        pause = addresses.states()[0].seconds_left
        pauses.append(pause)
        clock.now += pause
        assert chosen(addresses) == ("gpu1:1", True)  # one request checks this address
        assert chosen(addresses) == ("gpu2:1", False)  # others do not wait for the check
        addresses.failed("gpu1:1", "still away")
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert addresses.states()[0] == AddressState("gpu1:1", "avoided", 7, 8.0, "still away")
    addresses.works("gpu1:1")
    assert addresses.states()[0] == AddressState("gpu1:1", "works")
    assert chosen(addresses) == ("gpu1:1", False)


def test_a_failure_that_many_calls_see_counts_once(addresses: Addresses, clock: Clock) -> None:
    for _ in range(50):
        addresses.failed("gpu1:1", "away")
    assert addresses.states()[0].num_failures == 1
    clock.now += 1.0
    addresses.failed("gpu1:1", "away")
    assert addresses.states()[0].num_failures == 2


def test_pauses_have_jitter() -> None:
    draws = iter([0.0, 0.5])
    addresses = Addresses(NAMES, Retry(first_seconds=1.0, drawn=lambda: next(draws)), lambda: 0.0)
    addresses.failed("gpu1:1", "away")
    addresses.failed("gpu2:1", "away")
    assert [each.seconds_left for each in addresses.states()] == [0.5, 0.75, 0.0]


def test_a_doubt_is_cleared_by_a_look_and_moves_nothing_meanwhile(addresses: Addresses) -> None:
    addresses.doubt("gpu1:1", "the stream broke")
    assert addresses.states()[0] == AddressState("gpu1:1", "in doubt", error="the stream broke")
    assert [chosen(addresses), chosen(addresses)] == [("gpu1:1", True)] * 2
    addresses.works("gpu1:1")
    assert chosen(addresses) == ("gpu1:1", False)


def test_one_that_is_avoided_is_better_than_none(addresses: Addresses) -> None:
    for name in NAMES:
        addresses.failed(name, "away")
    assert chosen(addresses) == ("gpu1:1", True)
    assert chosen(addresses, "gpu1:1") == ("gpu2:1", True)
    assert chosen(addresses, *NAMES) is None


def test_a_single_address_is_never_looked_at_nor_avoided(clock: Clock) -> None:
    alone = Addresses(["gpu1:1"], RETRY, clock)
    route = Route(alone, "trip")
    for _ in range(3):
        assert route.choose() == ("gpu1:1", False)
        assert not route.goes_on(AWAY)
        assert route.explained(AWAY) is AWAY
    assert alone.states()[0].state == "avoided"  # this state is only displayed


# -- homes --


def test_what_is_learned_of_homes_is_bounded_and_the_oldest_is_forgotten(
    addresses: Addresses,
) -> None:
    keys = [f"talk-{number}" for number in range(HOMES_MAX + 1)]
    other = {key: ranked(key, NAMES)[1] for key in keys}
    for key in keys[:-1]:
        assert addresses.learn(key, other[key])
    assert addresses.order(keys[0])[0] == other[keys[0]]  # a use, so keys[1] is the oldest now
    addresses.learn(keys[-1], other[keys[-1]])
    assert len(addresses._homes) == HOMES_MAX
    assert addresses.order(keys[0]) == [
        other[keys[0]],
        *(name for name in ranked(keys[0], NAMES) if name != other[keys[0]]),
    ]
    assert addresses.order(keys[1]) == ranked(keys[1], NAMES)


def test_a_home_that_the_hash_names_too_takes_no_space(addresses: Addresses) -> None:
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
    assert route.goes_on(AWAY)
    assert addresses.order("trip") == [first, second, third]
    assert route.choose() == (first, False)


def test_an_id_beside_another_is_at_home_where_that_is(addresses: Addresses) -> None:
    second = ranked("trip", NAMES)[1]
    addresses.learn("trip", second)
    drawn = {addresses.id_beside("trip") for _ in range(20)}
    assert len(drawn) == 20
    assert {ranked(each, NAMES)[0] for each in drawn} == {second}


# -- the route of a request --


def test_each_address_is_tried_once_in_a_round(addresses: Addresses) -> None:
    order = ranked("trip", NAMES)
    route = Route(addresses, "trip")
    tried = []
    for number in range(3):
        tried.append(route.choose().name)
        assert route.goes_on(errors.Unavailable(f"away {number}")) is (number < 2)
    assert tried == order
    error = route.explained(errors.Unavailable("away 2"))
    whys = {name: f"away {number}" for number, name in enumerate(order)}
    texts = "; ".join(f"{name}: {whys[name]}" for name in NAMES)
    assert str(error) == f"all 3 addresses failed ({texts})"
    route.begin_round()
    assert route.choose() == (order[0], True)


def test_a_stream_that_broke_stays_where_it_was_until_that_is_known_to_be_gone(
    addresses: Addresses,
) -> None:
    order = ranked("trip", NAMES)
    route = Route(addresses, "trip")
    route.choose()
    assert route.goes_on(AWAY)
    assert route.choose() == (order[1], False)
    route.answered()
    assert not route.goes_on(errors.Unavailable("broken"))  # first the client must pause
    route.begin_round()
    assert route.choose() == (order[1], True)
    route.does_not_serve(AWAY, is_reached=False)
    assert route.choose() == (order[2], False)


def test_the_error_says_that_it_is_worth_waiting_if_one_of_them_loads(
    addresses: Addresses,
) -> None:
    route = Route(addresses, "trip")
    loading = errors.Loading("loading")
    loading.retry_after_seconds = 2.5
    route.choose()
    route.goes_on(loading)
    route.choose()
    route.goes_on(AWAY)
    error = route.explained(AWAY)
    assert type(error) is errors.Loading
    assert error.retry_after_seconds == 2.5


def test_an_answer_that_is_an_error_is_an_answer(addresses: Addresses) -> None:
    route = Route(addresses, "trip")
    name = route.choose().name
    missing = errors.NotFound("missing")
    assert not route.goes_on(missing)
    assert route.explained(missing) is missing
    assert {each.address: each.state for each in addresses.states()}[name] == "works"


# -- homes: every client chooses the same one, and only conversations that must move do --


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
    assert homes == {"gpu1:50051": 10, "gpu2:50051": 16, "gpu3:50051": 14}  # the limit is 20


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
