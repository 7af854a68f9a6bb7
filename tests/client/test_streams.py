"""Turns over failing connections: each is stored once, shown once and cancelled once."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pensieve import errors
from pensieve.client import Client, Delta, Restarted, Retry
from pensieve.client.turn_progress import ReplyAccumulator
from pensieve.v1 import conversation_pb2 as pb
from tests.client.scripted import Mishap, Refusal, ScriptedServer

SAFETY_SECONDS = 60.0  # used up only if a test fails


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def client(server: ScriptedServer, slept: list[float]) -> Iterator[Client]:
    retry = Retry(retries=3, first_seconds=1.0, most_seconds=8.0, drawn=lambda: 1.0)
    with Client(server.address, retry=retry, sleep=slept.append) as client:
        yield client


def test_deltas_of_a_stream_add_up_to_the_reply(client: Client, server: ScriptedServer) -> None:
    turn = client.conversation("c").send("where shall we go", temperature=0, logprobs=1)
    deltas = list(turn)
    assert "".join(map(str, deltas)) == turn.reply.text == "where shall we go "
    first = deltas[0]
    assert isinstance(first, Delta)
    assert (first.text, first.token_ids, first.kind) == ("where ", (5,), "text")
    assert (first.logprobs[0].logprob, first.logprobs[0].alternatives) == (-0.5, ((7, -1.5),))
    reply = turn.reply
    assert (reply.token_ids, reply.finish_reason, reply.revision) == ((5, 5, 2, 2), "stop", 1)
    assert (reply.usage.output_tokens, reply.request_id) == (4, turn.request_id)
    assert server.requests("SendMessage")[0].create_if_missing


def test_send_sends_nothing_before_the_turn_is_read(client: Client, server: ScriptedServer) -> None:
    client.conversation("c").send("hello")
    assert client.conversation().conversation_id != client.conversation().conversation_id
    assert server.calls == []


# -- connections that break --


def test_a_broken_stream_continues_where_it_stopped(
    client: Client, server: ScriptedServer, slept: list[float]
) -> None:
    server.mishaps.extend([Mishap(after=2), Mishap(after=3)])
    turn = client.conversation("c").send("a b c d")
    assert [str(each) for each in turn] == ["a ", "b ", "c ", "d "]
    sent = server.requests("SendMessage")
    assert len({request.request_id for request in sent}) == 1
    assert len(sent) == 3
    assert sent[0] == sent[2]
    assert slept == [1.0, 1.0]  # each try got further, so pauses do not grow
    assert turn.reply.text == "a b c d "


def test_a_lost_turn_restarts_and_yields_restarted(client: Client, server: ScriptedServer) -> None:
    server.mishaps.append(Mishap(after=2, lost=True))
    talk = client.conversation("c")
    events = list(talk.send("a b c"))
    assert [str(each) for each in events] == ["a ", "b ", "", "A ", "B ", "C "]
    assert events[2] == Restarted(2)
    server.mishaps.append(Mishap(after=2, lost=True))
    assert talk.ask("d e f").text == "D E F "


def test_a_turn_that_finished_without_a_reader_is_replayed_from_the_history(
    client: Client, server: ScriptedServer
) -> None:
    talk = client.conversation("c")
    first = talk.ask("a b c", request_id="r")
    again = talk.ask("a b c", request_id="r")
    assert (again.text, again.replayed, first.replayed) == (first.text, True, False)
    assert [each.text for each in talk.messages()] == ["a b c", "a b c"]


def test_a_stream_that_ends_without_completed_is_retried(
    client: Client, server: ScriptedServer
) -> None:
    server.mishaps.append(Mishap(after=1, refusal=None))
    assert client.conversation("c").ask("a b").text == "a b "


@pytest.mark.parametrize("code", ["UNAVAILABLE", "CANCELLED"])
def test_a_turn_continues_after_any_connection_error(
    client: Client, server: ScriptedServer, code: str
) -> None:
    server.mishaps.append(Mishap(after=1, refusal=Refusal(code)))
    assert client.conversation("c").ask("a b").text == "a b "


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("a", "x", "c"), "different reply"),
        (("a", "bb", "c"), "different reply"),
        (("a",), "shorter"),
    ],
)
def test_a_different_reply_after_attaching_is_a_server_fault(
    client: Client, server: ScriptedServer, words: tuple[str, ...], problem: str
) -> None:
    server.mishaps.extend([Mishap(after=2), Mishap(after=99, words=words)])
    turn = client.conversation("c").send("a b c")
    with pytest.raises(errors.ServerFault, match=problem):
        list(turn)
    with pytest.raises(errors.ServerFault, match=problem):  # raised again on later use
        _ = turn.reply


def test_the_same_text_from_different_tokens_is_a_server_fault() -> None:
    def delta(*token_ids: int) -> pb.SendMessageResponse:
        return pb.SendMessageResponse(delta=pb.TurnDelta(text="ab", token_ids=token_ids))

    started = pb.SendMessageResponse(started=pb.TurnStarted(turn_id="1", attempt=1))
    progress = ReplyAccumulator()
    for response in (started, delta(1, 2), started):
        progress.take(response)
    with pytest.raises(errors.ServerFault, match="different reply"):
        progress.take(delta(1, 3))


# -- how often, and how long --


def test_pauses_between_retries_grow_and_retries_are_limited(
    client: Client, server: ScriptedServer, slept: list[float]
) -> None:
    server.mishaps.extend([Mishap()] * 9)
    turn = client.conversation("c").send("a")
    with pytest.raises(errors.Unavailable, match="because"):
        list(turn)
    assert slept == [1.0, 2.0, 4.0]
    assert len(server.calls) == 4
    with pytest.raises(errors.Unavailable, match="because"):
        _ = turn.reply
    assert len(server.calls) == 4  # no retry: the same failure is raised again


def test_the_client_waits_as_long_as_the_server_asks(
    client: Client, server: ScriptedServer, slept: list[float]
) -> None:
    full = Refusal("RESOURCE_EXHAUSTED", "QUEUE_FULL", retry_seconds=5.5)
    server.mishaps.extend([Mishap(refusal=full), Mishap(refusal=full)])
    assert client.conversation("c").ask("a").text == "a "
    assert slept == [5.5, 5.5]


def test_queue_full_without_a_retry_time_is_not_retried(
    client: Client, server: ScriptedServer, slept: list[float]
) -> None:
    server.mishaps.append(Mishap(refusal=Refusal("RESOURCE_EXHAUSTED", "QUEUE_FULL")))
    with pytest.raises(errors.QueueFull):
        client.conversation("c").ask("a")
    assert (slept, len(server.calls)) == ([], 1)


def test_no_pause_exceeds_the_timeout(
    client: Client, server: ScriptedServer, slept: list[float]
) -> None:
    server.mishaps.append(Mishap(refusal=Refusal("UNAVAILABLE", "UNAVAILABLE", retry_seconds=60)))
    with pytest.raises(errors.Unavailable) as away:
        client.conversation("c").ask("a", timeout=30)
    assert away.value.retry_after_seconds == 60
    assert slept == []


def test_a_turn_is_given_up_if_no_attempt_gets_further(
    client: Client, server: ScriptedServer
) -> None:
    server.mishaps.extend([Mishap(after=2, lost=True)] * 50)
    events: list[Any] = []
    with pytest.raises(errors.Unavailable):
        events.extend(client.conversation("c").send("a b c"))
    assert len(server.calls) == 4  # three retries, because no attempt got further than the first


def test_a_turn_that_gets_further_at_each_attempt_is_not_given_up(
    client: Client, server: ScriptedServer
) -> None:
    server.mishaps.extend([Mishap(after=place) for place in range(1, 8)])
    assert client.conversation("c").ask("a b c d e f g h").text == "a b c d e f g h "
    assert len(server.calls) == 8


def test_a_deadline_error_names_the_timeout(client: Client, server: ScriptedServer) -> None:
    server.mishaps.append(Mishap(after=1, stalls=True))
    received: list[Any] = []
    with pytest.raises(errors.DeadlineExceeded, match=r"0\.05 s"):
        received.extend(client.conversation("c").send("a b", timeout=0.05))
    server.mishaps.append(Mishap(stalls=True))
    with (
        Client(server.address, timeout=0.04) as hasty,
        pytest.raises(errors.DeadlineExceeded, match=r"0\.04 s"),
    ):
        hasty.conversation("d").ask("a")


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_an_invalid_timeout_is_refused(client: Client, timeout: float) -> None:
    with pytest.raises(errors.InvalidArgument, match="timeout"):
        client.conversation("c").send("a", timeout=timeout)


# -- ends --


def test_cancelling_keeps_what_was_generated(client: Client, server: ScriptedServer) -> None:
    server.mishaps.append(Mishap(after=2, stalls=True))
    talk = client.conversation("c")
    turn = talk.send("a b c")
    for delta in turn:
        if str(delta) == "b ":
            assert turn.cancel()
    assert (turn.reply.text, turn.reply.finish_reason) == ("a b ", "cancelled")
    assert [message.text for message in talk.messages()] == ["a b c", "a b"]
    assert server.requests("CancelTurn")[0].turn_id == turn.turn_id == "1"
    assert not talk.cancel()


def test_another_thread_may_cancel_a_turn(client: Client, server: ScriptedServer) -> None:
    stalled = threading.Event()
    server.mishaps.append(Mishap(after=1, stalls=True, on_stall=stalled.set))
    turn = client.conversation("c").send("a b c")

    def cancel() -> None:
        assert stalled.wait(SAFETY_SECONDS)
        turn.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    assert turn.reply.finish_reason == "cancelled"
    thread.join()


def test_a_turn_cancelled_before_it_starts_ends_at_its_start(
    client: Client, server: ScriptedServer
) -> None:
    server.mishaps.append(Mishap(after=0, stalls=True))
    turn = client.conversation("c").send("a b c")
    assert turn.cancel()
    assert server.calls == []  # the turn has no id yet, and a cancel without id could hit another
    assert (turn.reply.text, turn.reply.finish_reason) == ("", "cancelled")
    assert [request.turn_id for request in server.requests("CancelTurn")] == ["1"]


def test_a_cancel_is_repeated_for_the_next_attempt(client: Client, server: ScriptedServer) -> None:
    server.mishaps.extend([Mishap(after=0, lost=True), Mishap(after=0, stalls=True)])
    turn = client.conversation("c").send("a b c")
    turn.cancel()
    server.refusals.append(Refusal("UNAVAILABLE"))  # fails the first CancelTurn; it is retried
    assert turn.reply.finish_reason == "cancelled"


def test_leaving_a_for_loop_abandons_the_turn(client: Client, server: ScriptedServer) -> None:
    server.mishaps.append(Mishap(after=1, stalls=True))
    for _ in client.conversation("c").send("a b c", request_id="left"):
        break
    assert server.abandoned.get(timeout=SAFETY_SECONDS) == "left"


def test_a_turn_continues_after_a_break_while_a_reference_to_it_exists(
    client: Client, server: ScriptedServer
) -> None:
    server.mishaps.append(Mishap(after=2, stalls=True))
    turn = client.conversation("c").send("a b c", request_id="held")
    for delta in turn:
        assert str(delta) == "a "
        break
    assert str(next(turn)) == "b "
    turn.close()
    assert server.abandoned.get(timeout=SAFETY_SECONDS) == "held"
    assert list(turn) == []
    with pytest.raises(errors.TurnInterrupted, match="stopped"):
        _ = turn.reply


def test_the_end_of_a_with_block_closes_the_turn(client: Client, server: ScriptedServer) -> None:
    server.mishaps.append(Mishap(after=1, stalls=True))
    with client.conversation("c").send("a b c", request_id="with") as turn:
        next(turn)
    assert server.abandoned.get(timeout=SAFETY_SECONDS) == "with"


def test_closing_a_completed_turn_keeps_its_reply(client: Client) -> None:
    with client.conversation("c").send("a b") as turn:
        list(turn)
    assert turn.reply.text == "a b "


def test_a_thread_started_by_the_sigint_handler_can_cancel_the_turn(
    client: Client, server: ScriptedServer
) -> None:
    main = threading.main_thread().ident
    assert main is not None
    server.mishaps.append(
        Mishap(after=2, stalls=True, on_stall=lambda: signal.pthread_kill(main, signal.SIGINT))
    )
    turn = client.conversation("c").send("a b c")
    before = signal.signal(signal.SIGINT, lambda *_: threading.Thread(target=turn.cancel).start())
    try:
        assert [str(delta) for delta in turn] == ["a ", "b "]
    finally:
        signal.signal(signal.SIGINT, before)
    assert turn.reply.finish_reason == "cancelled"


def test_an_exception_between_two_tries_ends_the_turn(server: ScriptedServer) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    server.mishaps.append(Mishap(after=1))
    with Client(server.address, sleep=interrupt) as client:
        turn = client.conversation("c").send("a b")
        assert str(next(turn)) == "a "
        with pytest.raises(KeyboardInterrupt):
            next(turn)
        (ended,) = server.requests("CancelTurn")
        assert (ended.keep_tokens, ended.attempt) == (1, 1)
        assert list(turn) == []
        with pytest.raises(errors.TurnInterrupted, match="the delivered part"):
            _ = turn.reply


def test_an_exception_while_waiting_for_a_delta_ends_the_turn(
    client: Client, server: ScriptedServer
) -> None:
    main = threading.main_thread().ident
    assert main is not None

    first_shown, interrupted = threading.Event(), threading.Event()

    def press() -> None:  # when the main thread waits for a word, outside gRPC's locks
        assert first_shown.wait(SAFETY_SECONDS)
        while not interrupted.is_set():  # Python loses a signal that arrives in a callback
            while sys._current_frames()[main].f_code is not threading.Condition.wait.__code__:
                time.sleep(0.001)
            signal.pthread_kill(main, signal.SIGINT)
            interrupted.wait(SAFETY_SECONDS / 5)

    server.mishaps.append(Mishap(after=1, stalls=True, on_stall=press))
    turn = client.conversation("c").send("a b", request_id="r")
    assert str(next(turn)) == "a "
    first_shown.set()
    with pytest.raises(KeyboardInterrupt):
        next(turn)
    interrupted.set()
    assert server.abandoned.get(timeout=SAFETY_SECONDS) == "r"
    (ended,) = server.requests("CancelTurn")
    assert (ended.request_id, ended.keep_tokens, ended.attempt) == ("r", 1, 1)
    assert client.conversation("c").ask("c d").text == "c d "


def test_a_reply_that_is_complete_at_the_timeout_is_read_to_its_end(
    client: Client, server: ScriptedServer
) -> None:
    """On a timeout, the caller would send the message again, and the history would have it twice."""
    late = Refusal("DEADLINE_EXCEEDED")
    for ask in (True, False):
        talk = client.conversation(f"c{ask}")
        server.mishaps.append(Mishap(after=1, refusal=late))
        server.before_cancel = lambda talk=talk: server.complete(talk.conversation_id)
        reply = talk.ask("a b c") if ask else talk.send("a b c").reply
        assert (reply.text, reply.finish_reason, reply.replayed) == ("a b c ", "stop", True)
        assert len(list(talk.messages())) == 2


def test_the_timeout_error_says_if_the_whole_reply_is_in_the_history(
    client: Client, server: ScriptedServer
) -> None:
    late = Refusal("DEADLINE_EXCEEDED")
    server.mishaps.extend([Mishap(after=1, refusal=late), Mishap(refusal=late)])
    server.before_cancel = lambda: server.complete("c")
    with pytest.raises(errors.DeadlineExceeded, match="its whole reply is in the history"):
        client.conversation("c").ask("a b c")


def test_closing_the_client_ends_running_turns(server: ScriptedServer) -> None:
    slept: list[float] = []
    client = Client(server.address, sleep=slept.append)
    stalled = threading.Event()
    server.mishaps.append(Mishap(after=1, stalls=True, on_stall=stalled.set))

    def close() -> None:
        assert stalled.wait(SAFETY_SECONDS)
        while not client._connection._reading:  # wait for the client, which may be behind
            time.sleep(0.001)
        client.close()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(errors.InvalidArgument, match="client: is closed"):
        client.conversation("c").ask("a b")
    thread.join()
    with pytest.raises(errors.InvalidArgument, match="client: is closed"):
        client.conversation("c").get()
    assert server.names() == ["SendMessage", "CancelTurn"]


# -- many at once --


def test_threads_that_share_a_client_get_only_their_own_replies(
    client: Client, server: ScriptedServer
) -> None:
    server.mishaps.extend([Mishap(after=1)] * 8)
    replies: dict[int, str] = {}

    def talk(number: int) -> None:
        replies[number] = client.conversation(f"c{number}").ask(f"{number} is my number").text

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {number: f"{number} is my number " for number in range(16)}


def test_a_second_turn_raises_turn_running_and_is_not_retried(
    client: Client, server: ScriptedServer, slept: list[float]
) -> None:
    server.mishaps.append(Mishap(after=1, stalls=True))
    talk = client.conversation("c")
    with talk.send("a b") as first:
        next(first)
        with pytest.raises(errors.TurnRunning) as running:
            talk.ask("me too")
    assert (running.value.conversation_id, running.value.turn_id) == ("c", first.turn_id)
    assert (slept, server.names()) == ([], ["SendMessage", "SendMessage", "CancelTurn"])


def test_unknown_fields_and_values_of_a_newer_server_are_tolerated(
    client: Client, server: ScriptedServer
) -> None:
    server.odd = True
    turn = client.conversation("c").send("a b")
    deltas = [each for each in turn if isinstance(each, Delta)]
    assert [each.kind for each in deltas] == ["unknown", "unknown"]
    assert (turn.reply.text, turn.reply.finish_reason) == ("a b ", "unknown")
