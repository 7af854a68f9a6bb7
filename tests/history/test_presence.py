"""Which replicas are there, and who has more than its share."""

from __future__ import annotations

import asyncio

import pytest

from pensieve.history.presence import Presence, Present
from pensieve.store.replica_sessions import Session


class Clock:
    now = 0.0


def presence() -> tuple[Presence, Clock]:
    clock = Clock()
    return Presence(10.0, lambda: clock.now), clock


def connected(there: Presence, number: int) -> Present:
    """A session with a stream."""

    async def connect() -> Present:
        found = there.connect(Session(number, f"r{number}"), asyncio.Queue())
        found.task = None
        return found

    return asyncio.run(connect())


def test_one_that_is_silent_for_its_lease_is_overdue() -> None:
    there, clock = presence()
    one, two = connected(there, 1), connected(there, 2)
    clock.now = 9.0
    there.heard(two)
    clock.now = 11.0
    assert there.overdue() == [one]
    there.remove(1)
    assert there.overdue() == []
    assert not there.is_connected(1)
    assert there.is_connected(2)


def test_sessions_of_before_have_a_whole_lease_to_come_back() -> None:
    there, clock = presence()
    clock.now = 100.0
    there.begin([Session(7, "r7")], {7: [3]})
    assert not there.is_connected(7)
    clock.now = 109.0
    assert there.overdue() == []
    clock.now = 110.5
    assert [each.session.number for each in there.overdue()] == [7]


def test_a_stream_that_ends_late_does_not_take_the_new_one_away() -> None:
    there, _ = presence()
    one = connected(there, 1)
    old = one.outgoing
    assert old is not None
    assert connected(there, 1) is one
    there.away(one, old)
    assert there.is_connected(1)
    assert one.outgoing is not None
    there.away(one, one.outgoing)
    assert not there.is_connected(1)


def test_one_whose_stream_broke_a_moment_ago_may_be_back() -> None:
    """2.5 s of a lease of 10, since its stream broke and not since it said something."""
    there, clock = presence()
    one = connected(there, 1)
    clock.now = 5.0
    assert one.outgoing is not None
    there.away(one, one.outgoing)
    clock.now = 7.4
    assert not there.is_connected(1)
    assert there.may_be_back(1)
    clock.now = 7.6
    assert not there.may_be_back(1)
    connected(there, 1)
    assert there.may_be_back(1)
    there.remove(1)
    assert not there.may_be_back(1)
    assert [Presence(lease, lambda: 0.0).break_seconds for lease in (2.0, 60.0)] == [0.5, 3.0]


def test_sessions_of_before_may_be_back_for_a_moment_after_the_service_has_begun() -> None:
    there, clock = presence()
    clock.now = 100.0
    there.begin([Session(7, "r7")], {})
    clock.now = 102.4
    assert there.may_be_back(7)
    assert not there.may_be_back(8)
    clock.now = 102.6
    assert not there.may_be_back(7)


def test_time_that_the_service_was_away_counts_for_nobody_and_is_given_to_nobody_twice() -> None:
    there, clock = presence()
    early, late, away = (connected(there, number) for number in (1, 2, 3))
    assert away.outgoing is not None
    there.away(away, away.outgoing)
    clock.now = 3601.0
    there.heard(late)  # what it said meanwhile is read before the service looks at the clock
    there.excuse(3600.0)
    assert there.overdue() == []
    assert there.may_be_back(3)
    clock.now = 3610.5
    assert there.overdue() == [early, away]
    clock.now = 3611.5
    assert there.overdue() == [early, late, away]


@pytest.mark.parametrize(("counts", "given_up"), [((100, 0), 30), ((60, 60), 0), ((20, 0), 0)])
def test_who_has_too_much_gives_up_what_was_used_least(
    counts: tuple[int, int], given_up: int
) -> None:
    there, clock = presence()
    for number, count in enumerate(counts, 1):
        replica = connected(there, number)
        for conversation in range(count):
            clock.now += 0.01
            replica.used("", f"c{number}-{conversation}", clock.now)
    over = there.over_share()
    assert sum(len(names) for _, names in over) == given_up
    if over:
        ((replica, names),) = over
        assert names[0] == ("", "c1-0")
        assert replica.num_recent(clock.now) - given_up == 70  # 1.25 x 50, and 8


def test_what_is_not_used_any_more_does_not_count() -> None:
    there, clock = presence()
    one, _ = connected(there, 1), connected(there, 2)
    for conversation in range(100):
        one.used("", f"c{conversation}", clock.now)
    clock.now = 700.0
    assert there.over_share() == []
    assert one.num_recent(clock.now) == 0


def test_one_that_drains_and_one_that_is_alone_give_nothing_up() -> None:
    there, clock = presence()
    one = connected(there, 1)
    for conversation in range(100):
        one.used("", f"c{conversation}", clock.now)
    assert there.over_share() == []
    connected(there, 2)
    one.is_draining = True
    assert there.over_share() == []
