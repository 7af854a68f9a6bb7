"""Calls on a real history: sent again after an answer was lost, grouped with what fails, come too late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import (
    AlreadyExists,
    NotFound,
    PensieveError,
    StaleRevision,
    StoreCorrupt,
    StoreUnavailable,
    Unavailable,
)
from pensieve.store import ConversationStore, NewConversation, NewMessage, NewTurn, StoredTurnState
from pensieve.store.conversation_changes import Pending
from pensieve.store.remote import wire
from pensieve.store.remote.calls import Call, Calls, Outcome
from pensieve.store.remote.methods import METHODS
from pensieve.store.replica_sessions import NOBODY, Session
from pensieve.store.responses import StoredResponse
from tests.store.talk import reply, user


class Rig:
    """A store, and the calls of sessions on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers: dict[int, int] = {}
        self.start()

    def start(self) -> None:
        self.store = ConversationStore.open(self.folder, "a test", keep_running=True)
        self.calls = Calls(self.store)

    def kill(self) -> None:
        """The service dies and begins again; what it had in memory is gone."""
        self.store.close()
        self.start()

    def session(self, replica: str) -> int:
        return self.calls.open_session(Session(NOBODY, replica, f"{replica}:1")).number

    def call(self, session: int, name: str, *given: Any, **named: Any) -> Call:
        """Numbered, and not carried out."""
        self.numbers[session] = self.numbers.get(session, 0) + 1
        written = METHODS[name].write_arguments(given, named)
        return Call(session, self.numbers[session], name, *written)

    def do(self, session: int, name: str, *given: Any, **named: Any) -> Any:
        call = self.call(session, name, *given, **named)
        return value(call, *self.calls.carry_out([call]))

    def again(self, call: Call) -> Outcome:
        (outcome,) = self.calls.carry_out(
            [Call(call.session, call.number, call.method, call.arguments, call.parts, True)]
        )
        return outcome

    def begin(self, session: int, name: str, request_id: str) -> int:
        begun = self.do(session, "begin_turn", name, request(request_id))
        assert begun.must_run
        return int(begun.turn.turn_id)

    def texts(self, name: str) -> list[str]:
        return [each.content for each in self.store.messages(name)]


def value(call: Call, outcome: Outcome) -> Any:
    if outcome.failed:
        raise wire.error_read(outcome.result)
    return METHODS[call.method].read_result(outcome.result, outcome.parts)


def request(request_id: str) -> NewTurn:
    return NewTurn(request_id, [user(f"say {request_id}", 1, 2)], seed=5)


CREATED_AT = 1000.0
FINISH = (reply("hello", 3, 4), "stop", {"output_tokens": 2})


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    found = Rig(tmp_path / "data")
    yield found
    assert found.store.verify() == []
    found.store.close()


def _prepared(rig: Rig) -> tuple[int, int]:
    """A session with conversation c, which has a turn, and one that runs in d; the id of that."""
    session = rig.session("a")
    for name in ("c", "d"):
        new = NewConversation(name, "fingerprint 1", created_at=CREATED_AT)
        rig.do(session, "create_conversation", new)
    rig.do(session, "finish_turn", rig.begin(session, "c", "r-1"), *FINISH)
    return session, rig.begin(session, "d", "r-2")


CALLS: dict[str, Any] = {
    "create_conversation": lambda turn: (NewConversation("new", "fingerprint 1"),),
    "begin_turn": lambda turn: ("c", request("r-3")),
    "finish_turn": lambda turn: (turn, *FINISH),
    "fail_turn": lambda turn: (turn, "NAN_LOGITS"),
    "interrupt_turn": lambda turn: (turn, 1),
    "rewind_conversation": lambda turn: ("c", 0),
    "fork_conversation": lambda turn: ("c", 1, "fork"),
    "delete_conversation": lambda turn: ("c",),
    "replace_log": lambda turn: ("c", "fingerprint 2", [[7], [8]]),
    "replace_pending": lambda turn: ("c", Pending(), Pending((NewMessage("user", "before"),))),
    "changes.delete_last": lambda turn: ("c", 1, CREATED_AT, ()),
    "changes.set_metadata": lambda turn: ("c", {"a": 1}),
    "claim": lambda turn: ("c",),
    "take": lambda turn: ("c",),
}


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_answer_was_lost_is_answered_the_same_and_done_once(
    rig: Rig, name: str, killed: bool
) -> None:
    session, turn = _prepared(rig)
    call = rig.call(session, name, *CALLS[name](turn))
    (first,) = rig.calls.carry_out([call])
    before = _all_of(rig)
    if killed:
        rig.kill()
    again = rig.again(call)
    assert not again.failed
    assert value(call, again) == value(call, first)
    assert again.turn_id == first.turn_id
    assert (again.epoch, again.source_epoch) == (first.epoch, first.source_epoch) or (
        name == "delete_conversation"  # whose epoch is gone with it
    )
    assert again.claimed is None
    assert _all_of(rig) == before


def _all_of(rig: Rig) -> Any:
    found = rig.store.list_conversations().conversations
    return [(each, rig.store.messages(each.conversation_id)) for each in found]


def test_a_call_that_failed_is_carried_out_when_it_comes_again(rig: Rig) -> None:
    session, turn = _prepared(rig)
    call = rig.call(session, "begin_turn", "d", request("r-3"))
    (outcome,) = rig.calls.carry_out([call])
    assert "already runs" in outcome.result
    rig.kill()
    rig.store.replica_sessions.restore([turn])
    other = rig.call(session, "interrupt_turn", turn)
    rig.calls.carry_out([other])
    stale = rig.call(session, "rewind_conversation", "c", 9)
    (outcome,) = rig.calls.carry_out([stale])
    with pytest.raises(PensieveError):
        value(stale, rig.again(stale))


# -- many in one commit --


def _planted(rig: Rig, monkeypatch: pytest.MonkeyPatch, *, came_about: bool, times: int) -> None:
    """The next commits of groups fail: before anything is on the disk, or behind it."""
    group, left = rig.store.group, [times]

    @contextlib.contextmanager
    def failing() -> Iterator[None]:
        fails = left[0] > 0
        left[0] -= 1
        with group():
            yield
            if fails and not came_about:
                raise StoreUnavailable("the disk is full")
        if fails:
            raise StoreUnavailable("an error at COMMIT")

    monkeypatch.setattr(rig.store, "group", failing)


def _two_that_run(rig: Rig) -> list[tuple[int, int]]:
    """Sessions, and a turn that each runs."""
    found = []
    for replica in ("a", "b", "c"):
        session = rig.session(replica)
        rig.do(session, "create_conversation", NewConversation(replica, "fingerprint 1"))
        found.append((session, rig.begin(session, replica, f"r-{replica}")))
    return found


@pytest.mark.parametrize("came_about", [False, True])
def test_ends_of_several_replicas_survive_a_commit_that_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, came_about: bool
) -> None:
    running = _two_that_run(rig)
    calls = [rig.call(session, "finish_turn", turn, *FINISH) for session, turn in running]
    _planted(rig, monkeypatch, came_about=came_about, times=1)
    outcomes = rig.calls.carry_out(calls)
    assert [value(*each) for each in zip(calls, outcomes, strict=True)] == [1, 1, 1]
    for replica in ("a", "b", "c"):
        assert rig.texts(replica) == [f"say r-{replica}", "hello"]


@pytest.mark.parametrize("came_about", [False, True])
def test_beginnings_and_ends_of_one_group_survive_a_commit_that_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, came_about: bool
) -> None:
    (a, turn_a), (b, turn_b), (c, turn_c) = _two_that_run(rig)
    rig.do(a, "create_conversation", NewConversation("another", "fingerprint 1"))
    calls = [
        rig.call(b, "finish_turn", turn_b, *FINISH),
        rig.call(a, "begin_turn", "another", request("r-new")),
        rig.call(c, "finish_turn", turn_c, *FINISH),
    ]
    _planted(rig, monkeypatch, came_about=came_about, times=1)
    outcomes = rig.calls.carry_out(calls)
    assert not any(each.failed for each in outcomes)
    begun = value(calls[1], outcomes[1])
    assert begun.must_run
    assert begun.turn.state is StoredTurnState.RUNNING
    assert rig.store.get_turn(begun.turn.turn_id).state is StoredTurnState.RUNNING
    assert rig.do(a, "finish_turn", begun.turn.turn_id, *FINISH) == 1
    assert rig.store.get_turn(turn_a).state is StoredTurnState.RUNNING
    assert rig.do(a, "finish_turn", turn_a, *FINISH) == 1


def test_an_end_that_cannot_be_written_leaves_a_turn_that_may_begin_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, turn), _, _ = _two_that_run(rig)
    _planted(rig, monkeypatch, came_about=False, times=1)
    call = rig.call(a, "finish_turn", turn, *FINISH)
    (outcome,) = rig.calls.carry_out([call])
    assert isinstance(wire.error_read(outcome.result), StoreUnavailable)
    assert (outcome.turn_id, outcome.num_running) == (turn, -1)
    begun = rig.do(a, "begin_turn", "a", request("r-a"))
    assert (begun.must_run, begun.turn.attempts) == (True, 2)


def test_an_end_that_failed_before_it_was_known_whose_turn_it_is_is_an_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon has forgotten the turn by then; nobody would ever end it."""
    session, turn = _prepared(rig)
    look, failing = rig.store.replica_sessions.turn, [True, True]

    def fail(turn_id: int) -> Any:
        if failing:
            failing.pop()
            raise StoreUnavailable("the disk cannot be read")
        return look(turn_id)

    monkeypatch.setattr(rig.store.replica_sessions, "turn", fail)
    call = rig.call(session, "interrupt_turn", turn, 1)
    (outcome,) = rig.calls.carry_out([call])
    assert outcome.failed
    refused = rig.call(session, "begin_turn", "d", request("r-9"))
    (outcome,) = rig.calls.carry_out([refused])
    assert "already runs" in outcome.result  # what can be known was not known yet
    begun = rig.do(session, "begin_turn", "d", request("r-2"))
    assert (begun.must_run, begun.turn.attempts) == (True, 2)


# -- too late --


def test_the_end_of_an_attempt_does_not_end_the_next_one(rig: Rig) -> None:
    """A daemon loses its session, gets the conversation back, and then finishes what it began before."""
    first = rig.session("a")
    rig.do(first, "create_conversation", NewConversation("c", "fingerprint 1"))
    turn = rig.begin(first, "c", "r")
    second = rig.session("a")
    begun = rig.do(second, "begin_turn", "c", request("r"))
    assert (begun.turn.turn_id, begun.turn.attempts, begun.must_run) == (turn, 2, True)
    with pytest.raises(Unavailable):
        rig.do(second, "finish_turn", turn, *FINISH, attempt=1)
    with pytest.raises(Unavailable):
        rig.do(second, "fail_turn", turn, "NAN_LOGITS", 1)
    assert rig.do(second, "interrupt_turn", turn, 1).state is StoredTurnState.RUNNING
    assert rig.do(second, "finish_turn", turn, *FINISH, attempt=2) == 1
    assert rig.texts("c") == ["say r", "hello"]


def test_a_store_refuses_the_end_of_an_attempt_that_is_over(rig: Rig) -> None:
    """The same without sessions."""
    store = rig.store
    store.create_conversation(NewConversation("c", "fingerprint 1"))
    turn = store.begin_turn("c", request("r")).turn.turn_id
    store.interrupt_turn(turn, 1)
    assert store.begin_turn("c", request("r")).turn.attempts == 2
    with pytest.raises(NotFound):
        store.finish_turn(turn, *FINISH, attempt=1)
    with pytest.raises(NotFound):
        store.interrupt_turn(turn, 1)
    assert store.get_turn(turn).state is StoredTurnState.RUNNING
    assert store.finish_turn(turn, *FINISH, attempt=2) == 1


@pytest.mark.parametrize("claimed_by", ["nobody", "another", "itself"])
def test_who_lost_its_session_is_told_to_repeat_what_it_finishes(rig: Rig, claimed_by: str) -> None:
    first = rig.session("a")
    rig.do(first, "create_conversation", NewConversation("c", "fingerprint 1"))
    turn = rig.begin(first, "c", "r")
    late = rig.call(first, "finish_turn", turn, *FINISH)
    second = rig.session("a")
    if claimed_by != "nobody":
        rig.do(second if claimed_by == "itself" else rig.session("b"), "claim", "c")
    (outcome,) = rig.calls.carry_out([late])
    assert isinstance(wire.error_read(outcome.result), StoreUnavailable)
    with pytest.raises(Unavailable) as refused:
        rig.do(second, "finish_turn", turn, *FINISH, attempt=1)
    assert type(refused.value) is Unavailable
    assert rig.texts("c") == []


def test_who_finishes_a_deleted_conversation_hears_that_it_is_gone(rig: Rig) -> None:
    session = rig.session("a")
    rig.do(session, "create_conversation", NewConversation("c", "fingerprint 1"))
    turn = rig.begin(session, "c", "r")
    rig.do(session, "interrupt_turn", turn)
    rig.do(session, "delete_conversation", "c")
    with pytest.raises(NotFound):
        rig.do(session, "finish_turn", turn, *FINISH, attempt=1)


def test_a_call_of_a_session_that_ended_in_the_same_group_is_refused(rig: Rig) -> None:
    away, taker = rig.session("a"), rig.session("b")
    rig.do(away, "create_conversation", NewConversation("c", "fingerprint 1"))
    turn = rig.begin(away, "c", "r")
    rig.calls = Calls(rig.store, lambda session: session != away)
    calls: Sequence[Call] = [
        rig.call(taker, "take", "c"),
        rig.call(away, "finish_turn", turn, *FINISH),
        rig.call(taker, "begin_turn", "c", request("r")),
    ]
    outcomes = rig.calls.carry_out(calls)
    assert [each.failed for each in outcomes] == [False, True, False]
    assert outcomes[0].ended_sessions == (away,)
    assert value(calls[2], outcomes[2]).turn.attempts == 2


def test_a_session_that_ended_in_a_group_that_failed_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, taker = rig.session("a"), rig.session("b")
    rig.do(away, "create_conversation", NewConversation("c", "fingerprint 1"))
    turn = rig.begin(away, "c", "r")
    rig.calls = Calls(rig.store, lambda session: session != away)
    _planted(rig, monkeypatch, came_about=False, times=2)
    take = rig.call(taker, "take", "c")
    (outcome,) = rig.calls.carry_out([take])
    assert outcome.failed
    rig.calls.carry_out([rig.call(taker, "claim", "nothing")])
    assert rig.store.get_turn(turn).state is StoredTurnState.RUNNING
    assert rig.do(away, "finish_turn", turn, *FINISH) == 1


def test_names_that_are_taken_and_revisions_that_are_not_there_stay_errors_when_said_again(
    rig: Rig,
) -> None:
    session, _ = _prepared(rig)
    for call, kind in (
        (rig.call(session, "create_conversation", NewConversation("c", "f")), AlreadyExists),
        (rig.call(session, "begin_turn", "c", _expecting(7)), StaleRevision),
    ):
        rig.calls.carry_out([call])
        with pytest.raises(kind):
            value(call, rig.again(call))


def _expecting(revision: int) -> NewTurn:
    return NewTurn("r-9", [user("say", 1)], seed=5, expected_revision=revision)


def test_a_session_that_may_have_ended_in_a_commit_that_failed_writes_no_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit came about, and its error said otherwise."""
    away, taker = rig.session("a"), rig.session("b")
    for name in ("c", "d"):
        rig.do(away, "create_conversation", NewConversation(name, "fingerprint 1"))
    gone = {away}
    rig.calls = Calls(rig.store, lambda session: session not in gone)
    _planted(rig, monkeypatch, came_about=True, times=1)
    calls = [rig.call(taker, "take", "c"), rig.call(rig.session("x"), "claim", "nothing")]
    outcomes = rig.calls.carry_out(calls)
    assert not outcomes[0].failed
    assert outcomes[0].ended_sessions == (away,)  # so its replica hears of it
    gone.clear()
    with pytest.raises(StoreUnavailable):
        rig.do(away, "begin_turn", "d", request("r"))
    assert rig.do(taker, "begin_turn", "d", request("r")).must_run


def test_an_end_that_comes_again_does_not_end_the_next_owners_attempt(rig: Rig) -> None:
    for name, given in (("interrupt_turn", (1,)), ("fail_turn", ("NAN_LOGITS", 1))):
        a, b = rig.session("a"), rig.session("b")
        rig.do(a, "create_conversation", NewConversation(name, "fingerprint 1"))
        turn = rig.begin(a, name, "r")
        late = rig.call(a, name, turn, *given)
        rig.calls.carry_out([late])
        rig.kill()
        rig.store.replica_sessions.give_up(name, a)
        assert rig.do(b, "begin_turn", name, request("r")).turn.attempts == 2
        assert not rig.again(late).failed
        assert rig.store.get_turn(turn).state is StoredTurnState.RUNNING
        assert rig.do(b, "finish_turn", turn, *FINISH, attempt=2) == 1


def test_a_call_that_was_said_to_have_failed_is_not_carried_out_when_it_comes_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replica may have sent it again before it heard that."""
    a = rig.session("a")
    rig.do(a, "create_conversation", NewConversation("c", "fingerprint 1"))
    _planted(rig, monkeypatch, came_about=False, times=1)
    call = rig.call(a, "begin_turn", "c", request("r"))
    (outcome,) = rig.calls.carry_out([call])
    assert outcome.failed
    again = rig.again(call)
    assert (again.failed, again.result) == (True, outcome.result)
    assert rig.store.find_turn("c", "r") is None


def test_an_owner_whose_session_has_ended_claims_nothing(rig: Rig) -> None:
    a = rig.session("a")
    rig.do(a, "create_conversation", NewConversation("c", "fingerprint 1"))
    rig.store.replica_sessions.end_session(a)
    with pytest.raises(Unavailable, match="ended this session"):
        rig.store.replica_sessions.claim("c", a)


def test_a_turn_that_cannot_be_read_does_not_end_the_service(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, turn = _prepared(rig)

    def fail(turn_id: int) -> Any:
        raise StoreCorrupt("page 7 of the history")

    monkeypatch.setattr(rig.store.replica_sessions, "turn", fail)
    for _ in range(3):
        (outcome,) = rig.calls.carry_out([rig.call(session, "interrupt_turn", turn, 1)])
        assert outcome.failed
    (outcome,) = rig.calls.carry_out([rig.call(session, "changes.set_metadata", "c", {"a": 1})])
    assert not outcome.failed
    monkeypatch.undo()
    begun = rig.do(session, "begin_turn", "d", request("r-2"))
    assert (begun.must_run, begun.turn.attempts) == (True, 2)


def test_a_deletion_of_a_response_that_comes_again_is_answered(rig: Rig) -> None:
    session, _ = _prepared(rig)
    for name in ("resp-1", "resp-2"):
        rig.do(session, "responses.save", StoredResponse(name, "c", {"x": 1}, is_ours=True))
    call = rig.call(session, "responses.delete", "resp-1")
    assert value(call, *rig.calls.carry_out([call])).conversation_id == ""
    rig.kill()
    assert value(call, rig.again(call)).conversation_id == ""


def test_what_was_answered_to_sessions_that_ended_is_forgotten(rig: Rig) -> None:
    for number in range(5):
        session = rig.session("a")  # each ends the one before
        rig.do(session, "create_conversation", NewConversation(f"c{number}", "fingerprint 1"))
        rig.calls.drain(session)
    rig.session("a")
    assert rig.calls.num_remembered == 0
