"""Plant a violation of each rule of the nemesis checker: the checker must find it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pensieve.builtin import MODEL_PATH
from pensieve.launch.echo_engine import digest, next_token
from pensieve.text import Tokenizer
from tests.cluster.checker import Stored, wrong_owners, wrong_tokens, wrong_turns
from tests.cluster.faults import DATABASE, MAY_BE_LONG, SERVER_LINK_FAULTS, schedule
from tests.cluster.talkers import Spoken

Event = dict[str, Any]
SPOKEN = [
    Spoken("r-0", "one", 1.0, 2.0, [], [], "first", 1),
    Spoken("r-1", "two", 3.0, 4.0, [], ["Unavailable: away"], "second", 2),
    Spoken("r-2", "three", 5.0),  # never acknowledged
]
STORED = [
    *(Stored("user", "one", 1), Stored("assistant", "first", 1)),
    *(Stored("user", "two", 2), Stored("assistant", "second", 2)),
]
THIRD = [Stored("user", "three", 3), Stored("assistant", "third", 3)]


def test_a_history_with_exactly_the_acknowledged_turns_passes() -> None:
    assert wrong_turns("c", SPOKEN, STORED) == []


def test_a_history_may_contain_an_unacknowledged_turn() -> None:
    assert wrong_turns("c", SPOKEN, [*STORED, *THIRD]) == []


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (STORED[:2], "'two' was acknowledged, and is lost"),
        (
            [*STORED, Stored("user", "two", 3), Stored("assistant", "second", 3)],
            "'two' is there 2 times",
        ),
        (
            [*STORED[2:], *STORED[:2]],
            "the turns are not in the order in which they were sent",
        ),
        (
            [*STORED[:3], Stored("assistant", "another", 2)],
            "'two' lacks the acknowledged reply or revision",
        ),
        (
            [*STORED, Stored("user", "four", 3), Stored("assistant", "fourth", 3)],
            "'four' was never sent",
        ),
        ([*STORED, THIRD[0], Stored("assistant", "third", 4)], "the revisions are [1, 2, 4]"),
        ([*STORED[:2], STORED[1], STORED[3]], "the roles are"),
        (STORED[:3], "the roles are"),
    ],
)
def test_a_lost_duplicated_or_changed_turn_is_found(stored: list[Stored], problem: str) -> None:
    assert any(problem in each for each in wrong_turns("c", SPOKEN, stored))


def test_a_revision_shared_by_two_turns_is_found() -> None:
    twice = [*STORED, Stored("user", "three", 2), Stored("assistant", "third", 2)]
    assert wrong_turns("c", SPOKEN, twice) == ["c: the revisions are [1, 2, 2]"]


def test_a_second_error_of_one_turn_is_found() -> None:
    spoken = [replace(SPOKEN[0], visible=["Unavailable: a", "Unavailable: b"]), *SPOKEN[1:]]
    (problem,) = wrong_turns("c", spoken, STORED)
    assert "cost 2 errors" in problem


def test_a_token_that_does_not_follow_from_its_history_is_found() -> None:
    size = Tokenizer.load(MODEL_PATH).vocab_size
    prompt = [5, 6, 7]
    first = next_token(digest(_array(prompt)), size, 2)
    assert wrong_tokens("c", [(False, prompt), (True, [first])], size) == []
    (problem,) = wrong_tokens("c", [(False, prompt), (True, [first + 1])], size)
    assert "message 1 does not follow from the history before it" in problem


def _array(values: Sequence[int]) -> Any:
    from array import array

    return array("I", values)


# -- the owner log --


def opened(session: int, replica: str) -> Event:
    return {"event": "opened", "session": session, "replica": replica}


def closed(session: int) -> Event:
    return {"event": "closed", "session": session, "replica": "any"}


def claimed(session: int, epoch: int, previous: int = 0, key: bytes = b"c") -> Event:
    row = {"event": "claimed", "session": session, "key": key, "epoch": epoch}
    return {**row, "previous": previous}


def begun(session: int, epoch: int, turn_id: int, key: bytes = b"c") -> Event:
    row = {"event": "begun", "session": session, "key": key, "epoch": epoch}
    return {**row, "turn_id": turn_id, "how": "running"}


def ended(session: int, epoch: int, turn_id: int, how: str = "completed") -> Event:
    row = {"event": "ended", "session": session, "key": b"c", "epoch": epoch}
    return {**row, "turn_id": turn_id, "how": how}


A, B = 1, 2
STOPPED = "interrupted"
OPEN = [opened(A, "a"), opened(B, "b")]
TURN = [claimed(A, 3), begun(A, 3, 10), ended(A, 3, 10)]


@pytest.mark.parametrize(
    "more",
    [
        [],
        [claimed(B, 4, A), begun(B, 4, 11), ended(B, 4, 11)],
        [begun(A, 3, 11), ended(A, 3, 11, STOPPED), claimed(B, 4, A), begun(B, 4, 11)],
        [begun(A, 3, 11), ended(A, 3, 11, "failed"), begun(A, 3, 11), ended(A, 3, 11)],
        [closed(A), opened(5, "a"), claimed(5, 6, A), begun(5, 6, 11)],
        [claimed(B, 4, 0, b"another"), begun(B, 4, 11, b"another"), begun(A, 3, 12)],
        [claimed(B, 4)],  # the conversation was deleted and created again
    ],
)
def test_an_owner_log_with_one_owner_at_a_time_passes(more: list[Event]) -> None:
    assert wrong_owners([*OPEN, *TURN, *more]) == []


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ([claimed(B, 3, A)], "the epoch is another claim's"),
        ([claimed(B, 3, 0, b"another")], "the epoch is another claim's"),
        ([claimed(B, 2, A)], "an epoch 3 came before"),
        ([begun(A, 3, 11), claimed(B, 4, A)], "turn 11 runs"),
        ([claimed(B, 4, 7)], "session 1 had it"),
        ([begun(B, 3, 11)], "session 1 has it, in epoch 3"),
        ([begun(A, 4, 11)], "session 1 has it, in epoch 3"),
        ([begun(A, 3, 11), begun(A, 3, 12)], "turn 11 runs"),
        ([begun(A, 3, 10)], "it has its reply"),
        ([begun(A, 3, 11), ended(B, 3, 11)], "it was begun as"),
        ([begun(A, 3, 11), ended(A, 4, 11, "failed")], "it was begun as"),
        ([ended(A, 3, 10)], "it does not run"),
        ([closed(A), claimed(A, 4, A)], "its session has ended or never began"),
        ([closed(A), begun(A, 3, 11)], "its session has ended or never began"),
        ([claimed(9, 10, A)], "its session has ended or never began"),
        ([closed(A), opened(A, "a")], "there was a session of this number"),
        ([opened(5, "a")], "its replica has another session"),
    ],
)
def test_simultaneous_owners_and_late_writers_are_found(more: list[Event], problem: str) -> None:
    problems = wrong_owners([*OPEN, *TURN, *more])
    assert any(problem in each for each in problems), problems


# -- the schedule --


@pytest.mark.parametrize("has_server", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_depends_only_on_its_seed_and_has_one_long_fault_at_a_time(
    seed: int, has_server: bool
) -> None:
    draw: Callable[[], Any] = lambda: schedule(seed, 180.0, 5.0, 3, 10.0, has_server)  # noqa: E731
    faults = draw()
    assert faults == draw()
    assert 30 <= len(faults) <= 36
    assert all(-1 <= each.target < 3 for each in faults)
    assert any(each.target == DATABASE for each in faults)
    assert has_server or not [each for each in faults if each.kind in SERVER_LINK_FAULTS]
    long = [each for each in faults if each.seconds > 10.0]
    assert all(each.kind in MAY_BE_LONG for each in long)
    ends = [each.at + each.seconds for each in long]
    assert all(end <= after.at for end, after in zip(ends, long[1:], strict=False))
