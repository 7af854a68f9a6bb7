"""Several daemons on one store: whose a conversation is, what is carried out once, what is in one commit."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pensieve.errors import (
    InvalidArgument,
    NotFound,
    OwnedElsewhere,
    StoreUnavailable,
    TurnRunning,
    Unavailable,
)
from pensieve.store import ConversationStore, NewMessage
from pensieve.store.records import NewConversation, NewTurn, StoredTurnState
from pensieve.store.remote import remote_store, wire
from pensieve.store.remote.calls import Call
from tests.store.faulty import FaultyDriver
from tests.store.remote_session import SharedHistory, answer_of, caller_of, method
from tests.store.talk import begin, create, reply, say, user

Open = Callable[..., ConversationStore]
FULL, IO_ERROR = 13, 10


@pytest.fixture
def shared(open_store: Open) -> Iterator[SharedHistory]:
    history = SharedHistory(open_store(keep_running=True))
    yield history
    history.close()


def turn_request(text: str, request_id: str = "r1") -> NewTurn:
    return NewTurn(request_id, [NewMessage("user", text, (1,))])


# -- whose --


def test_who_writes_first_owns_it_and_the_other_one_is_told_where(shared: SharedHistory) -> None:
    a, b = shared.replica("a"), shared.replica("b")
    create(a, "tea")
    say(a, "tea", "r1", user("hi", 1), reply("hello", 2))
    with pytest.raises(OwnedElsewhere) as elsewhere:
        b.begin_turn("tea", turn_request("more", "r2"))
    assert (elsewhere.value.replica, elsewhere.value.address) == ("a", "a:1")
    with pytest.raises(OwnedElsewhere):
        b.rewind_conversation("tea", 0)
    with pytest.raises(OwnedElsewhere):
        b.delete_conversation("tea")
    assert list(b.log("tea")) == [1, 2]  # anybody reads
    assert a.get_conversation("tea").revision == 1
    assert shared.stale == []


def test_a_session_that_ended_leaves_its_conversations_and_its_turns(shared: SharedHistory) -> None:
    a, b = shared.replica("a"), shared.replica("b")
    create(a, "tea")
    running = begin(a, "tea", "r1", "hi", 1)
    with pytest.raises(OwnedElsewhere):
        b.begin_turn("tea", turn_request("other", "r2"))
    shared.calls.end_session(caller_of(a).session)
    assert b.get_turn(running).state is StoredTurnState.INTERRUPTED
    assert say(b, "tea", "r2", user("other", 3), reply("yes", 4)) == 1
    with pytest.raises(StoreUnavailable):  # whatever it still wants to write
        a.finish_turn(running, reply("late", 9), "stop", {})
    assert list(b.log("tea")) == [3, 4]


def test_a_replica_that_comes_back_has_another_session_and_forgets_what_others_wrote_to(
    shared: SharedHistory,
) -> None:
    a, b = shared.replica("a"), shared.replica("b")
    for name in ("tea", "cup", "pot"):
        create(a, name)
    caller = caller_of(a)
    shared.calls.end_session(caller.session)
    say(b, "tea", "r1", user("hi", 1), reply("hello", 2))
    again = shared.replica("a")
    caller.session = caller_of(again).session  # the same daemon, whose engine still has all three
    with pytest.raises(OwnedElsewhere):
        a.claim("tea")
    shared.calls.end_session(caller_of(b).session)
    a.claim("tea")
    a.claim("cup")
    a.claim("cup")
    assert shared.stale == [("a", "", "tea"), ("a", "", "cup")]


def test_an_epoch_is_never_given_out_twice(shared: SharedHistory) -> None:
    a, b = shared.replica("a"), shared.replica("b")
    owners = shared.store.replica_sessions
    epochs = []
    for name in ("tea", "cup"):
        create(a, name)
        epochs.append(owners.owner(name))
    for _ in range(3):
        b.take("tea")
        epochs.append(owners.owner("tea"))
        a.take("tea")
        epochs.append(owners.owner("tea"))
    a.delete_conversation("tea")
    create(b, "tea")
    epochs.append(owners.owner("tea"))
    numbers = [each.epoch for each in epochs if each is not None]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 9


def test_it_is_taken_only_where_no_turn_runs(shared: SharedHistory) -> None:
    a, b = shared.replica("a"), shared.replica("b")
    create(a, "tea")
    running = begin(a, "tea", "r1", "hi", 1)
    with pytest.raises(OwnedElsewhere):
        b.take("tea")
    a.finish_turn(running, reply("hello", 2), "stop", {})
    b.take("tea")
    assert b.came_from == {("", "tea"): "a:1"}  # which may have its KV
    with pytest.raises(OwnedElsewhere):
        a.begin_turn("tea", turn_request("more", "r2"))


def test_whence_a_conversation_came_is_remembered_for_its_next_turn_and_of_no_other_epoch(
    shared: SharedHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = shared.replica("a"), shared.replica("b")
    for name in ("tea", "cup", "pot"):
        create(a, name)
    b.take("tea")
    b.take("cup")
    b.claim("tea")  # is of the same epoch
    assert b.came_from == {("", "tea"): "a:1", ("", "cup"): "a:1"}
    b.delete_conversation("cup")
    assert b.came_from == {("", "tea"): "a:1"}
    a.take("tea")
    monkeypatch.setattr(shared.calls, "_is_connected", lambda session: False)
    shared.calls.end_session(caller_of(a).session)
    b.claim("tea")  # who had it has left
    assert b.came_from == {}
    monkeypatch.undo()
    monkeypatch.setattr(remote_store, "CAME_FROM_MAX", 2)
    again = shared.replica("a")
    for name in ("one", "two", "three"):
        create(again, name)
        b.take(name)
    assert b.came_from == {("", "two"): "a:1", ("", "three"): "a:1"}


def test_a_conversation_that_is_given_up_is_the_next_ones(shared: SharedHistory) -> None:
    a, b = shared.replica("a"), shared.replica("b")
    create(a, "tea")
    create(a, "cup")
    a.give_up("tea")
    b.give_up("cup")  # is not its
    say(b, "tea", "r1", user("hi", 1), reply("hello", 2))
    assert b.came_from == {("", "tea"): "a:1"}
    with pytest.raises(OwnedElsewhere):
        b.claim("cup")


def test_a_fork_is_of_who_made_it_and_knows_whether_the_source_is(shared: SharedHistory) -> None:
    a, b = shared.replica("a"), shared.replica("b")
    create(a, "tea")
    say(a, "tea", "r1", user("hi", 1), reply("hello", 2))
    b.fork_conversation("tea", 1, "cup")
    with pytest.raises(OwnedElsewhere):
        a.claim("cup")
    assert shared.stale == []
    b.take("tea")
    say(b, "tea", "r2", user("more", 3), reply("yes", 4))
    a.fork_conversation("tea", 1, "pot")  # of what its engine has, which is not all there was
    assert shared.stale == [("a", "", "tea")]


def test_a_turn_is_ended_by_the_owner_of_its_conversation_alone(shared: SharedHistory) -> None:
    a, b = shared.replica("a"), shared.replica("b")
    create(a, "tea")
    running = begin(a, "tea", "r1", "hi", 1)
    with pytest.raises(Unavailable):
        b.finish_turn(running, reply("mine", 9), "stop", {})
    with pytest.raises(Unavailable):
        b.fail_turn(running, "NAN_LOGITS")
    b.interrupt_turn(running)  # is told how the turn stands, which goes on
    assert a.get_turn(running).state is StoredTurnState.RUNNING
    assert a.finish_turn(running, reply("hello", 2), "stop", {}) == 1


def test_a_declared_prefix_is_everybodys_until_it_is_another_one(shared: SharedHistory) -> None:
    from pensieve.store.records import NewPrefix

    a, b = shared.replica("a"), shared.replica("b")
    head = [NewMessage("system", "Be brief.", (1, 2))]
    a.prefixes.declare(NewPrefix("rules", "fp", head))
    under = NewConversation("tea", "fp", prefix_id="rules")
    assert b.prefixes.num_shared_tokens(b.prefixes.begin(under)) == 2
    a.delete_conversation("prefix:rules")
    a.prefixes.declare(NewPrefix("rules", "fp", [NewMessage("system", "Be kind.", (3, 4))]))
    assert shared.stale == []
    again = b.prefixes.begin(NewConversation("cup", "fp", prefix_id="rules"))
    assert b.prefixes.num_shared_tokens(again) == 2
    assert shared.stale == [("b", "", "prefix:rules")]


# -- once --


CALLS: dict[str, tuple[Any, ...]] = {
    "create_conversation": (NewConversation("new", "fp"),),
    "fork_conversation": ("tea", 1, "fork"),
    "rewind_conversation": ("tea", 0),
    "begin_turn": ("tea", turn_request("more", "r2")),
    "replace_log": ("tea", "other", [[7], [8, 9]]),
    "changes.set_metadata": ("tea", {"name": "Tea"}),
    "delete_conversation": ("tea",),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("has_memory", [True, False], ids=["answered", "killed"])
def test_what_comes_again_is_carried_out_once(
    shared: SharedHistory, name: str, has_memory: bool
) -> None:
    """Also where the service was killed between the commit and the answer."""
    a = shared.replica("a")
    create(a, "tea")
    say(a, "tea", "r1", user("hi", 1), reply("hello", 2))
    caller, called = caller_of(a), method(name)
    call = caller.request(called, CALLS[name], {})
    (outcome,) = caller.calls.carry_out([call])
    first = answer_of(called, outcome).value
    revision = _revision(shared, "tea")
    if not has_memory:
        caller.calls._answered.clear()
    again = Call(call.session, call.number, call.method, call.arguments, call.parts, True)
    (outcome,) = caller.calls.carry_out([again])
    second = answer_of(called, outcome).value
    if name == "begin_turn":
        assert second.must_run
        assert second.turn == first.turn
    elif first is not None:
        assert second == first
    assert _revision(shared, "tea") == revision
    assert shared.store.verify() == []


def _revision(shared: SharedHistory, name: str) -> int | None:
    try:
        return shared.store.get_conversation(name).revision
    except NotFound:
        return None


def test_a_call_that_failed_may_be_carried_out_when_it_comes_again(shared: SharedHistory) -> None:
    a = shared.replica("a")
    caller, called = caller_of(a), method("rewind_conversation")
    call = caller.request(called, ("tea", 0), {})
    with pytest.raises(NotFound):
        answer_of(called, caller.calls.carry_out([call])[0])
    create(a, "tea")  # its number is higher
    again = Call(call.session, call.number, call.method, call.arguments, call.parts, True)
    (outcome,) = caller.calls.carry_out([again])
    assert answer_of(called, outcome).value.revision == 0  # as one that was carried out before
    assert shared.store.get_conversation("tea").revision == 0


# -- many in one commit --


def test_calls_of_several_replicas_are_one_commit(shared: SharedHistory) -> None:
    replicas = [shared.replica(name) for name in "abc"]
    callers = [caller_of(each) for each in replicas]
    made = [
        caller.request(method("create_conversation"), (NewConversation(name, "fp"),), {})
        for name, caller in zip("xyz", callers, strict=True)
    ]
    taken = callers[0].request(method("create_conversation"), (NewConversation("z", "fp"),), {})
    before = shared.store.figures.num_commits
    outcomes = shared.calls.carry_out([*made, taken])
    assert shared.store.figures.num_commits == before + 1
    assert [each.failed for each in outcomes] == [False, False, False, True]
    assert shared.store.num_conversations() == 3


def test_what_fails_in_a_group_takes_nothing_with_it(shared: SharedHistory) -> None:
    a, b = shared.replica("a"), shared.replica("b")
    create(a, "tea")
    begun = method("begin_turn")
    calls = [
        caller_of(a).request(begun, ("tea", turn_request("one")), {}),
        caller_of(b).request(begun, ("tea", turn_request("two", "r2")), {}),
        caller_of(b).request(method("create_conversation"), (NewConversation("cup", "fp"),), {}),
        caller_of(a).request(begun, ("tea", turn_request("three", "r3")), {}),
    ]
    first, second, third, fourth = shared.calls.carry_out(calls)
    assert answer_of(begun, first).value.must_run
    for outcome, error in ((second, OwnedElsewhere), (fourth, TurnRunning)):
        with pytest.raises(error):
            answer_of(begun, outcome)
    assert not third.failed
    assert shared.store.verify() == []


@pytest.mark.sqlite
@pytest.mark.parametrize("code", [FULL, IO_ERROR])
@pytest.mark.parametrize("after", [False, True], ids=["refused", "committed"])
def test_a_group_whose_disk_fails_is_carried_out_one_by_one(
    open_store: Open, driver: Any, code: int, after: bool
) -> None:
    """Each statement of the group fails once in turn, before or after it has done its work."""
    countdown = 0
    while True:
        countdown += 1
        faults = FaultyDriver(driver, code, after, lasting=False)
        store = open_store(driver=faults, keep_running=True)
        history = SharedHistory(store)
        replicas = [history.replica(f"{name}{countdown}") for name in "abc"]
        names = [f"{each.replica}" for each in replicas]
        for name, replica in zip(names, replicas, strict=True):
            create(replica, name)
        ended = begin(replicas[2], names[2], "r0", "hi", 1)
        begun, finish = method("begin_turn"), method("finish_turn")
        calls = [
            caller_of(replicas[0]).request(begun, (names[0], turn_request("one")), {}),
            caller_of(replicas[1]).request(begun, (names[1], turn_request("two")), {}),
            caller_of(replicas[2]).request(finish, (ended, reply("yes", 2), "stop", {}), {}),
        ]
        faults.arm(countdown)
        outcomes = history.calls.carry_out(calls)
        fired = faults.fired
        faults.heal()
        turns = []
        for name, outcome in zip(names[:2], outcomes[:2], strict=True):
            stored = store.find_turn(name, "r1")
            if outcome.failed:  # then nobody computes it, whatever the disk has
                assert stored is None or stored.state is StoredTurnState.INTERRUPTED
            else:
                assert stored is not None
                assert stored.state is StoredTurnState.RUNNING
                turns.append(stored.turn_id)
        if not outcomes[2].failed:
            assert list(store.log(names[2])) == [1, 2]
        for turn, replica in zip(
            turns,
            [r for r, o in zip(replicas, outcomes, strict=False) if not o.failed],
            strict=False,
        ):
            assert replica.finish_turn(turn, reply("done", 3), "stop", {}) == 1
        assert store.verify() == []
        history.close()
        if not fired:
            break
    assert countdown > 20


# -- values that travel --


def test_values_travel_as_they_are() -> None:
    message = NewMessage(
        "user", "hé\ud800", array("I", [1, 2**32 - 1]), "c1", {"a": [None, 1.5]}, b"\0x"
    )
    text, parts = wire.written([message], list[NewMessage])
    assert text.isascii()
    assert wire.read(text, parts, list[NewMessage]) == [message]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[1]", int),
        ("true", int),
        ('"1"', int),
        ("null", str),
        ("3", bytes),
        ("-1", bytes),
        ("[]", NewMessage),
        ('["user"]', NewMessage),
        ("{", int),
        ("[" * 100_000, list[int]),
        ('{"a": 1}', list[str]),
    ],
)
def test_what_is_not_of_its_type_is_not_read(text: str, kind: Any) -> None:
    with pytest.raises(wire.Unreadable):
        wire.read(text, [b""], kind)


def test_calls_that_make_no_sense_are_refused(shared: SharedHistory) -> None:
    caller = caller_of(shared.replica("a"))
    refused = [
        Call(caller.session, 1, "close", "{}"),
        Call(caller.session, 2, "__class__", "{}"),
        Call(caller.session, 3, "begin_turn", "{}"),
        Call(caller.session, 4, "begin_turn", '{"conversation_id": 1, "request": 2}'),
        Call(caller.session, 5, "rewind_conversation", '{"conversation_id": "x", "more": 1}'),
        Call(caller.session, 6, "reader.response", "{}"),
    ]
    for outcome in shared.calls.carry_out(refused):
        assert isinstance(wire.error_read(outcome.result), InvalidArgument)
    assert shared.store.num_conversations() == 0


def test_an_error_of_no_class_of_ours_is_not_read() -> None:
    for text in ('["SystemExit", "x", {}]', '["Path", "/", {}]', "[]", '["NotFound"]'):
        with pytest.raises(wire.Unreadable):
            wire.error_read(text)
    read = wire.error_read(wire.error_written(OwnedElsewhere("tea", "a", "host:1")))
    assert isinstance(read, OwnedElsewhere)
    assert (read.address, str(read)) == ("host:1", "conversation 'tea' is served by a at host:1")


def test_pending_messages_are_compared_as_they_are_stored(shared: SharedHistory) -> None:
    from pensieve.store.conversation_changes import Pending

    a = shared.replica("a")
    create(a, "tea")
    wanted = Pending((NewMessage("user", "wait", []),))  # no tokens, written in another way
    changed = a.changes.change_pending("tea", lambda found: wanted)
    assert [each.content for each in changed.after.messages] == ["wait"]
    assert a.get_conversation("tea").revision == 0


def test_one_that_drains_lets_go_of_what_is_idle(shared: SharedHistory) -> None:
    a, b = shared.replica("a"), shared.replica("b")
    create(a, "tea")
    create(a, "cup")
    running = begin(a, "cup", "r1", "hi", 1)
    a.drain()
    b.claim("tea")
    with pytest.raises(OwnedElsewhere):
        b.claim("cup")
    a.finish_turn(running, reply("hello", 2), "stop", {})
    b.claim("cup")
    assert b.came_from == {("", "tea"): "a:1", ("", "cup"): "a:1"}


def test_what_was_given_up_and_taken_by_none_is_as_it_was(shared: SharedHistory) -> None:
    a = shared.replica("a")
    create(a, "tea")
    running = begin(a, "tea", "r1", "hi", 1)
    a.give_up("tea")  # a turn of it runs
    a.finish_turn(running, reply("hello", 2), "stop", {})
    before = shared.store.replica_sessions.owner("tea")
    a.give_up("tea")
    a.claim("tea")
    assert shared.store.replica_sessions.owner("tea") == before
    assert shared.stale == []  # so its KV is right


def test_a_history_that_was_put_back_gives_out_no_epoch_of_before(shared: SharedHistory) -> None:
    owners = shared.store.replica_sessions
    owners.begin_epochs()
    create(shared.replica("a"), "tea")
    first = owners.owner("tea")
    assert first is not None
    with shared.store._writer.writing() as conn:  # as a backup from before it has it
        conn.execute("UPDATE epochs SET last = 0")
    owners.begin_epochs()
    create(shared.replica("b"), "cup")
    second = owners.owner("cup")
    assert second is not None
    assert second.epoch > first.epoch


def test_a_turn_whose_end_is_about_to_be_committed_is_not_read_as_interrupted(
    open_store: Open,
) -> None:
    """Who reads meanwhile sees the rows as they were, in which it runs."""
    store = open_store(keep_running=True)
    create(store, "tea")
    turn = begin(store, "tea", "r1", "hi", 1)
    with ThreadPoolExecutor(1) as reads:
        reader = reads.submit(store.reader).result()

        def read() -> tuple[bool, StoredTurnState | None]:
            conversation = reads.submit(reader.get_conversation, "tea").result()
            found = reads.submit(reader.find_turn, "tea", str(turn), "").result()
            return conversation.running_turn_id == turn, found.state if found else None

        try:
            with store.group():
                store.finish_turn(turn, reply("hello", 2), "stop", {})
                assert read() == (True, StoredTurnState.RUNNING)
            assert read() == (False, StoredTurnState.COMPLETED)
            again = begin(store, "tea", "r2", "hi", 1)

            def failing() -> None:
                with store.group():
                    store.interrupt_turn(again)
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                failing()
            store.replica_sessions.abandon([again])
            turn = again
            assert read() == (False, StoredTurnState.INTERRUPTED)
        finally:
            reads.submit(reader.close).result()
