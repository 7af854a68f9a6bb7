"""A daemon's connection to a real history service whose stream breaks, stands still and comes back."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.errors import (
    AlreadyExists,
    NotFound,
    OwnedElsewhere,
    StoreUnavailable,
    Unavailable,
)
from pensieve.history.connection import PROTOCOL_VERSION, Connection
from pensieve.store import NewConversation, NewTurn, StoredTurnState
from pensieve.store.remote.methods import METHODS
from pensieve.v1 import history_pb2 as pb
from pensieve.v1 import history_pb2_grpc
from tests.history.rig_service import ServiceRig, call, impatient, in_thread, wait_for
from tests.store.talk import reply, user

NEW = NewConversation("c", "fingerprint 1")
FINISH = (reply("hello", 3, 4), "stop", {"output_tokens": 2})


def request(request_id: str = "r") -> NewTurn:
    return NewTurn(request_id, [user("say", 1, 2)], seed=5)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ServiceRig]:
    with ServiceRig(tmp_path) as found:
        yield found


@contextmanager
def store_stopped(rig: ServiceRig) -> Iterator[None]:
    """The thread of the store does nothing meanwhile."""
    gate, stands = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        gate.wait(60.0)

    rig.do(lambda: rig.threads.spawn(rig.threads.in_store("", stand)))
    assert stands.wait(60.0)
    try:
        yield
    finally:
        gate.set()


def test_what_waits_in_line_when_its_stream_breaks_is_carried_out_once(rig: ServiceRig) -> None:
    """It comes again while the first one still waits; a second one would find the name taken."""
    one = rig.connect()
    results: list[Any] = []

    def create() -> None:
        try:
            results.append(call(one, "create_conversation", NEW).conversation_id)
        except AlreadyExists as error:
            results.append(error)

    with store_stopped(rig):
        creating = in_thread(create)
        wait_for(lambda: rig.num_calls() == 1)
        broken = rig.link.num_connections
        rig.do(rig.link.reset)
        wait_for(lambda: rig.reconnected("one", broken))
    creating.join(60)
    assert results == ["c"]
    assert len(rig.events("claimed")) == 1


def test_what_was_refused_once_is_not_carried_out_behind_the_refusal(rig: ServiceRig) -> None:
    """A call comes again while the first one still waits, and between the two it would come to be right.

    Then there would be a turn that its daemon was told it has not.
    """
    owner = Raw(rig)
    one = rig.connect()
    owner.call(1, "create_conversation", NEW)
    failed: list[BaseException] = []

    def begin() -> None:
        try:
            call(one, "begin_turn", "c", request())
        except Exception as error:
            failed.append(error)

    with store_stopped(rig):
        owner.send_call(2, "get_conversation", "c")  # the others wait behind it, and are one group
        wait_for(lambda: rig.num_calls() == 1)
        beginning = in_thread(begin)
        wait_for(lambda: rig.num_calls() == 2)
        owner.send_call(3, "give_up", "c")
        wait_for(lambda: rig.num_calls() == 3)
        broken = rig.link.num_connections
        rig.do(rig.link.reset)
        wait_for(lambda: rig.reconnected("one", broken))
        assert call(one, "reader.get_conversation", "c").revision == 0  # behind what came again
    beginning.join(60)
    owner.end()
    assert isinstance(failed[0], OwnedElsewhere)
    assert call(one, "get_conversation", "c").running_turn_id is None
    assert rig.events("begun") == []


def test_a_call_that_was_given_up_before_it_was_sent_is_never_sent(rig: ServiceRig) -> None:
    one = rig.connect()
    rig.do(rig.link.refuse)
    wait_for(lambda: not rig.replicas()[0].connected)
    with impatient(one), pytest.raises(StoreUnavailable):
        call(one, "create_conversation", NEW)
    rig.do(rig.link.heal)
    wait_for(lambda: rig.replicas()[0].connected)
    with pytest.raises(NotFound):
        call(one, "get_conversation", "c")


ENDS = {"finish_turn": FINISH, "fail_turn": ("NAN_LOGITS",), "interrupt_turn": ()}


def _end_in_vain(rig: ServiceRig, one: Connection, turn: int, end: str, attempt: int) -> None:
    """The service is away for longer than the end of the turn waits; and then it is back."""
    rig.do(rig.link.refuse)
    wait_for(lambda: not rig.replicas()[0].connected)
    with impatient(one), pytest.raises(StoreUnavailable):
        call(one, end, turn, *ENDS[end], attempt=attempt)
    rig.do(rig.link.heal)


@pytest.mark.parametrize("end", ["fail_turn", "interrupt_turn"])
def test_a_turn_whose_end_was_given_up_before_it_was_sent_ends_and_begins_again(
    rig: ServiceRig, end: str
) -> None:
    one = rig.connect()
    call(one, "create_conversation", NEW)
    turn = call(one, "begin_turn", "c", request()).turn.turn_id
    _end_in_vain(rig, one, turn, end, 1)
    again = call(one, "begin_turn", "c", request())
    assert (again.turn.turn_id, again.turn.attempts, again.must_run) == (turn, 2, True)
    assert call(one, "finish_turn", turn, *FINISH, attempt=2) == 1
    assert [each["how"] for each in rig.events("ended")] == [end, "finish_turn"]


def test_a_reply_that_was_given_up_before_it_was_sent_is_there_for_who_repeats_the_request(
    rig: ServiceRig,
) -> None:
    """Who waited for it was told that it failed; the turn is not computed twice."""
    one = rig.connect()
    call(one, "create_conversation", NEW)
    turn = call(one, "begin_turn", "c", request()).turn.turn_id
    _end_in_vain(rig, one, turn, "finish_turn", 1)
    _, stored, _ = call(one, "look_up", "c", "r", 1)
    assert (stored.turn_id, stored.state) == (turn, StoredTurnState.COMPLETED)
    again = call(one, "begin_turn", "c", request())
    assert (again.turn.turn_id, again.turn.attempts, again.must_run) == (turn, 1, False)
    messages = call(one, "messages", "c")
    assert [each.content for each in messages] == ["say", "hello"]
    assert call(one, "begin_turn", "c", request("r-2")).must_run


def test_a_reply_that_was_given_up_is_not_written_into_the_session_that_follows(
    tmp_path: Path,
) -> None:
    """Where the turn has begun again, and is another attempt."""
    with ServiceRig(tmp_path, lease_seconds=0.5) as rig:
        one = rig.connect()
        call(one, "create_conversation", NEW)
        turn = call(one, "begin_turn", "c", request()).turn.turn_id
        rig.do(rig.link.refuse)
        with impatient(one), pytest.raises(StoreUnavailable):
            call(one, "finish_turn", turn, *FINISH, attempt=1)
        wait_for(lambda: not rig.replicas())
        first = one.session
        rig.do(rig.link.heal)
        wait_for(lambda: one.session != first)
        again = call(one, "begin_turn", "c", request())
        assert (again.turn.turn_id, again.turn.attempts, again.must_run) == (turn, 2, True)
        with pytest.raises(Unavailable):
            call(one, "finish_turn", turn, *FINISH, attempt=1)
        assert call(one, "finish_turn", turn, *FINISH, attempt=2) == 1
        ends = [each["how"] for each in rig.events("ended") if "turn_id" in each]
        assert ends == ["finish_turn"]


def test_a_turn_that_was_begun_for_nobody_begins_again_for_who_repeats_it(rig: ServiceRig) -> None:
    """The call was given up, but had been sent; the next one waits until it is known what became of it."""
    one = rig.connect()
    call(one, "create_conversation", NEW)
    begun: list[Any] = []

    def repeat() -> None:
        begun.append(call(one, "begin_turn", "c", request()))

    with store_stopped(rig):
        with impatient(one), pytest.raises(StoreUnavailable):
            call(one, "begin_turn", "c", request())
        repeating = in_thread(repeat)
        wait_for(lambda: one._line)
    repeating.join(60)
    found = begun[0]
    assert (found.must_run, found.turn.attempts) == (True, 2)
    assert [each["how"] for each in rig.events("ended")] == ["interrupt_turn"]
    assert call(one, "finish_turn", found.turn.turn_id, *FINISH, attempt=2) == 1


def test_one_call_that_writes_is_under_way_at_a_time(rig: ServiceRig) -> None:
    one = rig.connect()
    call(one, "create_conversation", NEW)
    with store_stopped(rig):
        first = in_thread(lambda: call(one, "begin_turn", "c", request()))
        wait_for(lambda: rig.num_calls() == 1)
        second = in_thread(lambda: call(one, "changes.set_metadata", "c", {"a": 1}))
        wait_for(lambda: one._line)
        assert call(one, "reader.get_conversation", "c").revision == 0  # reads do not wait
        assert len(one._waiting) == 1
    first.join(60)
    second.join(60)
    assert call(one, "get_conversation", "c").metadata == {"a": 1}


def test_a_session_that_was_lost_fails_its_calls_and_says_so_before_the_next_one_speaks(
    tmp_path: Path,
) -> None:
    with ServiceRig(tmp_path, lease_seconds=0.5) as rig:
        one = rig.connect()
        call(one, "create_conversation", NEW)
        first = one.session
        turn = call(one, "begin_turn", "c", request()).turn.turn_id
        lost: list[int] = []
        one.on_lost = lambda: lost.append(one.session)
        failures: list[BaseException] = []

        def finish() -> None:
            try:
                call(one, "finish_turn", turn, *FINISH, attempt=1)
            except Exception as error:
                failures.append(error)

        rig.do(rig.link.hold)
        finishing = in_thread(finish)
        wait_for(lambda: not rig.replicas())
        rig.do(rig.link.reset)
        rig.do(rig.link.heal)
        finishing.join(60)
        assert isinstance(failures[0], StoreUnavailable)
        wait_for(lambda: one.session != first)
        assert lost == [first]
        with pytest.raises(Unavailable):
            call(one, "finish_turn", turn, *FINISH, attempt=1)
        assert call(one, "get_turn", turn).state is StoredTurnState.INTERRUPTED


def test_a_daemon_whose_stream_breaks_for_a_moment_keeps_what_another_one_wants_to_take(
    tmp_path: Path,
) -> None:
    """Its turn goes on; one that stays away is ended, long before its lease is over."""
    with ServiceRig(tmp_path, lease_seconds=8.0) as rig:
        one, other = rig.connect(), Raw(rig)
        call(one, "create_conversation", NEW)
        turn = call(one, "begin_turn", "c", request()).turn.turn_id
        rig.do(rig.link.refuse)
        wait_for(lambda: not {each.name: each.connected for each in rig.replicas()}["one"])
        assert other.answer(1, "take", "c").failed
        rig.do(rig.link.heal)
        assert call(one, "finish_turn", turn, *FINISH, attempt=1) == 1
        session = one.session
        assert call(one, "begin_turn", "c", request("r-2")).must_run
        rig.do(rig.link.refuse)
        numbers = itertools.count(2)
        wait_for(lambda: not other.answer(next(numbers), "take", "c").failed)
        rig.do(rig.link.heal)
        other.end()
        (ended,) = [each for each in rig.events("ended") if "why" in each]
        assert (ended["session"], ended["why"]) == (session, "another replica could not reach it")
        assert rig.events("claimed")[-1]["session"] == other.opened.session


def test_what_a_daemon_says_of_itself_while_its_stream_is_broken_is_known_when_it_is_back(
    rig: ServiceRig,
) -> None:
    one, other = rig.connect(), Raw(rig)
    call(one, "create_conversation", NEW)
    session = one.session
    rig.do(rig.link.refuse)
    wait_for(lambda: not {each.name: each.connected for each in rig.replicas()}["one"])
    one.announce("host:1", "host:2", "host:3")
    one.drain()
    rig.do(rig.link.heal)
    wait_for(lambda: {each.name: each.connected for each in rig.replicas()}["one"])
    found = next(each for each in rig.replicas() if each.name == "one")
    assert (found.address, found.http_address) == ("host:1", "host:2")
    assert (found.metrics_address, found.session) == ("host:3", session)
    wait_for(lambda: next(each for each in rig.service.presence.all()).is_draining)
    claimed = other.answer(1, "claim", "c")
    assert (claimed.failed, claimed.previous_address) == (False, "host:1")
    other.end()


def test_an_address_that_is_announced_while_a_stream_is_opened_is_known(rig: ServiceRig) -> None:
    one = rig.connect()
    rig.do(rig.link.refuse)
    wait_for(lambda: not rig.replicas()[0].connected)
    one.announce("host:1")
    with store_stopped(rig):
        rig.do(rig.link.heal)
        wait_for(lambda: rig.do(lambda: rig.threads.store_waiting.num_jobs) == 2)
        one.announce("host:2")  # the opening has said the other one, and waits for the store
    wait_for(lambda: rig.replicas()[0].address == "host:2")


def test_a_service_that_stood_still_for_longer_than_the_lease_ends_no_session(
    tmp_path: Path,
) -> None:
    with ServiceRig(tmp_path, lease_seconds=1.0) as rig:
        one, two = rig.connect("one"), rig.connect("two")
        call(one, "create_conversation", NEW)
        turn = call(one, "begin_turn", "c", request()).turn.turn_id
        sessions = one.session, two.session
        rig.stand_still(3.0)
        assert call(one, "finish_turn", turn, *FINISH, attempt=1) == 1
        wait_for(lambda: all(each.connected for each in rig.replicas()))
        assert (one.session, two.session) == sessions
        assert rig.events("ended")[0]["how"] == "finish_turn"


class Raw:
    """A stream of the protocol, without a Connection."""

    def __init__(self, rig: ServiceRig, session: int = 0) -> None:
        self._requests: queue.SimpleQueue[pb.ServeRequest | None] = queue.SimpleQueue()
        stub = history_pb2_grpc.HistoryServiceStub(rig.direct)
        self.stream = stub.Serve(iter(self._requests.get, None), timeout=60)
        opening = pb.OpenSession(version=PROTOCOL_VERSION, replica="raw", session=session)
        self.send(open=opening)
        self.opened = next(self.stream).opened

    def send(self, **given: Any) -> None:
        self._requests.put(pb.ServeRequest(**given))

    def call(self, number: int, name: str, *given: Any) -> None:
        """That succeeds."""
        assert not self.answer(number, name, *given).failed

    def answer(self, number: int, name: str, *given: Any) -> pb.Answer:
        self.send_call(number, name, *given)
        return next(self.stream).answer

    def send_call(self, number: int, name: str, *given: Any) -> None:
        arguments, parts = METHODS[name].write_arguments(given, {})
        self.send(call=pb.Call(number=number, method=name, arguments=arguments, parts=parts))

    def end(self) -> None:
        self._requests.put(None)


def test_a_session_goes_on_with_its_newest_stream_when_the_old_one_ends_late(
    rig: ServiceRig,
) -> None:
    old = Raw(rig)
    new = Raw(rig, old.opened.session)
    assert new.opened.goes_on
    with pytest.raises(grpc.RpcError) as ended:
        next(old.stream)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    old.end()
    new.send(alive=pb.Alive())
    assert next(new.stream).HasField("alive")
    (found,) = rig.replicas()
    assert found.connected
    new.end()
    wait_for(lambda: not rig.replicas()[0].connected)


def test_a_replica_hears_at_once_that_its_session_has_ended(rig: ServiceRig) -> None:
    old = Raw(rig)
    new = Raw(rig)  # the same name, which begins anew
    assert new.opened.session != old.opened.session
    with pytest.raises(grpc.RpcError) as ended:
        next(old.stream)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    for each in (old, new):
        each.end()


def test_of_two_daemons_of_one_name_the_later_one_is_let_in_and_the_other_hears_why(
    tmp_path: Path,
) -> None:
    """And is let in when the later one has left; they do not end each other's sessions for ever."""
    with ServiceRig(tmp_path, lease_seconds=0.5) as rig:
        one = rig.connect("same")
        call(one, "create_conversation", NEW)
        lost: list[int] = []
        one.on_lost = lambda: lost.append(one.session)
        first = one.session
        two = rig.connect("same")
        wait_for(lambda: lost)
        for _ in range(2):
            with pytest.raises(StoreUnavailable) as refused:
                call(one, "get_conversation", "c")
            assert "another daemon has the name 'same' now (same:1)" in str(refused.value)
        assert call(two, "begin_turn", "c", request()).must_run
        assert [each["session"] for each in rig.events("opened")] == [first, two.session]
        assert (one.session, lost) == (first, [first])
        two.leave()
        two.close()
        wait_for(lambda: one.session != first)
        assert call(one, "begin_turn", "c", request()).turn.attempts == 2


def test_a_daemon_that_did_not_hear_of_its_new_session_gets_another_one(rig: ServiceRig) -> None:
    """The stream breaks before it has the number; nobody else has its name."""
    first = Raw(rig)
    session = first.opened.session
    first.send(leave=pb.Leave())
    wait_for(lambda: not rig.replicas())
    streams = [Raw(rig, session) for _ in range(3)]
    numbers = [each.opened.session for each in streams]
    assert numbers == sorted({session, *numbers})[1:]
    assert not any(each.opened.goes_on for each in streams)
    with pytest.raises(grpc.RpcError) as refused:
        Raw(rig, numbers[0])
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    for each in (first, *streams):
        each.end()


def test_a_session_of_before_the_service_began_shuts_nobody_out(tmp_path: Path) -> None:
    """It is not known then what it followed, and it may be the daemon's own."""
    with ServiceRig(tmp_path) as rig:
        old = Raw(rig)
        new = Raw(rig)
        assert new.opened.session > old.opened.session
    with ServiceRig(tmp_path) as rig:
        again = Raw(rig, old.opened.session)
        assert again.opened.session > new.opened.session
        again.end()


def test_turns_are_counted_right_when_the_service_begins_anew(tmp_path: Path) -> None:
    with ServiceRig(tmp_path) as rig:
        one = rig.connect()
        call(one, "create_conversation", NEW)
        call(one, "begin_turn", "c", request())
        assert rig.replicas()[0].num_running == 1
    with ServiceRig(tmp_path) as rig:
        assert [each.num_running for each in rig.replicas()] == [1]
