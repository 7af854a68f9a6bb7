"""The daemon's gRPC API, with the echo engine, which needs no model."""

from __future__ import annotations

import os
import signal
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pensieve.builtin import MODEL_PATH
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.launch.echo_engine import digest, next_token
from pensieve.text import Tokenizer
from pensieve.v1 import admin_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import (
    ECHO,
    DaemonRig,
    details,
    read_turn,
    send_signal,
    wait_for,
)

TOKENIZER = Tokenizer.load(MODEL_PATH)
END_ID = 2
LONG = pb.Sampling(max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonRig]:
    with DaemonRig(tmp_path_factory.mktemp("daemon") / "data") as rig:
        yield rig


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[DaemonRig]:
    """A daemon with iterations of 5 ms, so that tests can act on running turns."""
    with DaemonRig(tmp_path / "data", program=(*ECHO, "--seconds=0.005")) as rig:
        yield rig


def wrong_tokens(rig: DaemonRig, conversation_id: str) -> int:
    """Return the number of sampled tokens that do not follow from the history before them."""
    log = array("I")
    wrong = 0
    for message in rig.messages(conversation_id):
        assert message.first_token == len(log)
        for token_id in message.token_ids:
            if message.finish_reason:
                wrong += token_id != next_token(digest(log), TOKENIZER.vocab_size, END_ID)
            log.append(token_id)
    return wrong


def test_a_turn_streams_started_deltas_and_completed(rig: DaemonRig) -> None:
    got = rig.ask("stream", "Good morning.", sampling=pb.Sampling(max_tokens=9, ignore_eos=True))
    assert got.sequences == list(range(1, len(got.sequences) + 1))
    assert (got.started.revision, got.started.attempt, got.started.replayed) == (0, 1, False)
    assert got.completed.finish_reason == pb.FINISH_REASON_LENGTH
    assert got.completed.revision == 1
    assert len(got.token_ids) == 9
    user, reply = rig.messages("stream")
    assert (user.role, user.content) == (pb.ROLE_USER, "Good morning.")
    assert (reply.role, reply.content) == (pb.ROLE_ASSISTANT, got.text)
    assert list(reply.token_ids) == got.token_ids


def test_usage_tells_where_the_tokens_of_a_turn_came_from(rig: DaemonRig) -> None:
    rig.ask("cost", "one", sampling=pb.Sampling(max_tokens=3, ignore_eos=True))
    before = sum(message.num_tokens for message in rig.messages("cost"))
    usage = rig.ask("cost", "two").completed.usage
    assert usage.device_tokens == before - 1
    assert usage.prompt_tokens == usage.new_tokens + usage.device_tokens
    assert (usage.host_tokens, usage.recomputed_tokens, usage.recompute_reason) == (0, 0, 0)
    assert 0 <= usage.queue_seconds <= usage.first_token_seconds <= usage.total_seconds


def test_the_same_request_id_replays_and_computes_nothing(rig: DaemonRig) -> None:
    first = rig.ask("replay", "hello", request_id="r1")
    iterations = rig.admin.GetStats(admin_pb2.GetStatsRequest()).stats.iterations
    again = rig.ask("replay", "hello", request_id="r1")
    assert again.started.replayed
    assert (again.text, again.token_ids) == (first.text, first.token_ids)
    assert again.completed == first.completed
    assert rig.admin.GetStats(admin_pb2.GetStatsRequest()).stats.iterations == iterations
    with pytest.raises(grpc.RpcError) as error:
        rig.ask("replay", "something else", request_id="r1")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(error.value)["BadRequest"].field_violations[0].field == "request_id"


def test_the_same_request_id_attaches_to_the_running_turn(slow: DaemonRig) -> None:
    first = slow.send("attach", "hello", request_id="r1", sampling=LONG)
    for _ in range(20):
        next(first)
    second = slow.send("attach", "hello", request_id="r1", sampling=LONG)
    started = next(second)
    assert started.sequence == 1
    assert not started.started.replayed
    slow.stub.CancelTurn(pb.CancelTurnRequest(conversation_id="attach"))
    one, other = read_turn(first), read_turn(second)
    assert one.completed == other.completed
    assert len(other.token_ids) >= len(one.token_ids) + 19
    assert other.token_ids == list(slow.messages("attach")[1].token_ids)


def test_a_second_turn_is_refused_and_the_error_names_the_running_turn(slow: DaemonRig) -> None:
    running = slow.send("busy", "hello", sampling=LONG)
    turn_id = next(running).started.turn_id
    with pytest.raises(grpc.RpcError) as error:
        slow.ask("busy", "me too")
    assert error.value.code() is grpc.StatusCode.ABORTED
    info = details(error.value)["ErrorInfo"]
    assert (info.reason, info.domain) == ("TURN_RUNNING", "pensieve")
    assert dict(info.metadata) == {"conversation_id": "busy", "turn_id": turn_id}
    with pytest.raises(grpc.RpcError) as error:
        slow.stub.RewindConversation(pb.RewindConversationRequest(conversation_id="busy"))
    assert error.value.code() is grpc.StatusCode.ABORTED
    fork = slow.stub.ForkConversation(
        pb.ForkConversationRequest(conversation_id="busy", new_conversation_id="busy-fork")
    )
    assert fork.conversation.num_messages == 0  # only committed messages are copied, here none
    running.cancel()


def test_a_cancelled_turn_keeps_the_delivered_tokens(slow: DaemonRig) -> None:
    running = slow.send("cancel", "hello", sampling=LONG)
    turn_id = next(running).started.turn_id
    for _ in range(10):
        next(running)
    wrong = slow.stub.CancelTurn(pb.CancelTurnRequest(conversation_id="cancel", turn_id="77"))
    assert not wrong.was_running
    answer = slow.stub.CancelTurn(pb.CancelTurnRequest(conversation_id="cancel", turn_id=turn_id))
    assert answer.was_running
    rest = read_turn(running)
    assert rest.completed.finish_reason == pb.FINISH_REASON_CANCELLED
    reply = slow.messages("cancel")[1]
    assert list(reply.token_ids)[-len(rest.token_ids) :] == rest.token_ids or not rest.token_ids
    assert slow.ask("cancel", "go on").completed.revision == 2
    assert wrong_tokens(slow, "cancel") == 0


def test_a_disconnect_longer_than_the_grace_period_leaves_no_trace(slow: DaemonRig) -> None:
    running = slow.send("gone", "hello", sampling=LONG)
    next(running)
    running.cancel()
    wait_for(lambda: not slow.num_live)
    assert slow.messages("gone") == []
    stats = slow.admin.GetStats(admin_pb2.GetStatsRequest()).stats
    assert stats.turns_running == 0
    assert slow.ask("gone", "hello again").completed.revision == 1
    assert wrong_tokens(slow, "gone") == 0


def test_a_client_that_reconnects_within_the_grace_period_loses_nothing(tmp_path: Path) -> None:
    config = DaemonConfig(grace_seconds=30)
    with DaemonRig(tmp_path / "data", config=config, program=(*ECHO, "--seconds=0.005")) as rig:
        sampling = pb.Sampling(max_tokens=60, ignore_eos=True)
        running = rig.send("back", "hello", request_id="r1", sampling=sampling)
        for _ in range(5):
            next(running)
        running.cancel()
        got = rig.ask("back", "hello", request_id="r1", sampling=sampling)
        assert got.started.attempt == 1
        assert len(got.token_ids) == 60
        assert wrong_tokens(rig, "back") == 0


def test_an_interrupted_turn_runs_again_under_its_request_id(slow: DaemonRig) -> None:
    sampling = pb.Sampling(max_tokens=200, ignore_eos=True)
    running = slow.send("again", "hello", request_id="r1", sampling=sampling)
    next(running)
    running.cancel()
    wait_for(lambda: not slow.num_live)
    got = slow.ask("again", "hello", request_id="r1", sampling=sampling)
    assert (got.started.attempt, len(got.token_ids)) == (2, 200)
    assert wrong_tokens(slow, "again") == 0


def test_after_an_engine_kill_a_retry_recomputes_the_history(slow: DaemonRig) -> None:
    slow.ask("killed", "one", sampling=pb.Sampling(max_tokens=40, ignore_eos=True))
    sampling = pb.Sampling(max_tokens=300, ignore_eos=True)
    running = slow.send("killed", "two", request_id="r2", sampling=sampling)
    send_signal(slow.daemon.engine.pid, signal.SIGSTOP)  # so that the reply cannot end
    next(running)
    send_signal(slow.daemon.engine.pid, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as error:
        read_turn(running)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert details(error.value)["RetryInfo"].retry_delay.ToMilliseconds() == 200
    wait_for(lambda: slow.daemon.serving)
    got = slow.ask("killed", "two", request_id="r2", sampling=sampling)
    assert got.started.attempt == 2
    usage = got.completed.usage
    assert usage.recomputed_tokens > 40
    assert usage.recompute_reason == pb.RECOMPUTE_REASON_ENGINE_RESTARTED
    assert wrong_tokens(slow, "killed") == 0
    assert slow.admin.GetStats(admin_pb2.GetStatsRequest()).stats.engine_restarts == 1


def test_forked_and_rewound_conversations_continue_from_their_revision(rig: DaemonRig) -> None:
    for text in ("one", "two", "three"):
        rig.ask("trunk", text, sampling=pb.Sampling(max_tokens=20, ignore_eos=True))
    rig.stub.ForkConversation(
        pb.ForkConversationRequest(
            conversation_id="trunk", at_revision=2, new_conversation_id="branch"
        )
    )
    rewound = rig.stub.RewindConversation(
        pb.RewindConversationRequest(conversation_id="trunk", to_revision=1)
    )
    assert (rewound.conversation.revision, rewound.conversation.num_messages) == (4, 2)
    usage = rig.ask("branch", "and then?").completed.usage
    assert usage.recomputed_tokens == 0
    assert usage.device_tokens > 50
    rig.ask("trunk", "else?")
    assert wrong_tokens(rig, "branch") == wrong_tokens(rig, "trunk") == 0
    assert [m.content for m in rig.messages("branch")][:4:2] == ["one", "two"]


def test_deleting_ends_the_turn_and_forgets_the_conversation(slow: DaemonRig) -> None:
    running = slow.send("secret", "hello", sampling=LONG)
    next(running)
    slow.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id="secret"))
    with pytest.raises(grpc.RpcError) as error:
        read_turn(running)
    assert details(error.value)["ErrorInfo"].reason == "TURN_INTERRUPTED"
    with pytest.raises(grpc.RpcError) as error:
        slow.stub.GetConversation(pb.GetConversationRequest(conversation_id="secret"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert slow.ask("secret", "who am I?").completed.revision == 1
    assert wrong_tokens(slow, "secret") == 0


def test_a_warm_restores_evicted_kv(rig: DaemonRig) -> None:
    rig.ask("warm", "hello", sampling=pb.Sampling(max_tokens=100, ignore_eos=True))
    evicted = rig.admin.EvictConversation(
        admin_pb2.EvictConversationRequest(conversation_id="warm")
    )
    assert evicted.chunks_dropped == 4
    told = rig.admin.ExplainConversation(
        admin_pb2.ExplainConversationRequest(conversation_id="warm")
    )
    assert [event.text for event in told.events] == ["4 chunks, 0 to 3, dropped on request"]
    rig.stub.WarmConversation(pb.WarmConversationRequest(conversation_id="warm"))
    stats = admin_pb2.GetStatsRequest()  # wait: the next message would interrupt the warm turn
    wait_for(lambda: rig.admin.GetStats(stats).stats.more["turns_warmed"] == 1)
    usage = rig.ask("warm", "there you are").completed.usage
    assert (usage.recomputed_tokens, usage.device_tokens > 100) == (0, True)


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"expected_revision": 7}, "FAILED_PRECONDITION", "STALE_REVISION"),
        ({"create_if_missing": False}, "NOT_FOUND", "NOT_FOUND"),
        (
            {"sampling": pb.Sampling(temperature=float("nan"))},
            "INVALID_ARGUMENT",
            "INVALID_ARGUMENT",
        ),
        ({"sampling": pb.Sampling(top_p=0.0)}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ({"sampling": pb.Sampling(stop=["x"] * 17)}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (
            {"sampling": pb.Sampling(logit_bias={10**6: 1.0})},
            "INVALID_ARGUMENT",
            "INVALID_ARGUMENT",
        ),
        ({"sampling": pb.Sampling(logprobs=21)}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (
            {"hints": pb.Hints(expected_return_seconds=-1)},
            "INVALID_ARGUMENT",
            "INVALID_ARGUMENT",
        ),
        ({"priority": 9}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ({"request_id": "with a space"}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
    ],
)
def test_invalid_requests_are_refused_with_a_reason(
    rig: DaemonRig, fields: dict[str, object], code: str, reason: str
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        rig.ask(f"refused-{reason}", "hello", **fields)
    assert error.value.code().name == code
    assert details(error.value)["ErrorInfo"].reason == reason


def test_an_invalid_conversation_id_is_not_found(rig: DaemonRig) -> None:
    for bad in ("../../etc/passwd", "a b", "a/b", "ü", "x" * 129, "a\x00b"):
        with pytest.raises(grpc.RpcError) as error:
            rig.stub.GetConversation(pb.GetConversationRequest(conversation_id=bad))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_message_that_cannot_fit_does_not_change_the_conversation(rig: DaemonRig) -> None:
    rig.ask("full", "hello")
    for text, code in (("x " * 150_000, "OUT_OF_RANGE"), ("x" * 3_000_000, "INVALID_ARGUMENT")):
        with pytest.raises(grpc.RpcError) as error:
            rig.ask("full", text)
        assert error.value.code().name == code
    assert len(rig.messages("full")) == 2
    assert rig.ask("full", "still there?").completed.revision == 2


def test_conversations_and_messages_are_listed_in_pages(rig: DaemonRig) -> None:
    for number in range(7):
        rig.stub.CreateConversation(
            pb.CreateConversationRequest(
                conversation_id=f"page-{number}", system_prompt="Be brief."
            )
        )
    found: list[str] = []
    token = ""
    while len(found) < 7:
        page = rig.stub.ListConversations(
            pb.ListConversationsRequest(page_size=3, page_token=token)
        )
        found += [each.conversation_id for each in page.conversations]
        token = page.next_page_token
    assert found[:7] == [f"page-{number}" for number in (6, 5, 4, 3, 2, 1, 0)]
    with pytest.raises(grpc.RpcError) as error:
        rig.stub.CreateConversation(pb.CreateConversationRequest(conversation_id="page-1"))
    assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
    for _ in range(3):
        rig.ask("page-1", "hi", sampling=pb.Sampling(max_tokens=2))
    first = rig.stub.ListMessages(pb.ListMessagesRequest(conversation_id="page-1", page_size=4))
    rest = rig.stub.ListMessages(
        pb.ListMessagesRequest(conversation_id="page-1", page_token=first.next_page_token)
    )
    assert [m.index for m in (*first.messages, *rest.messages)] == list(range(7))
    assert first.messages[0].role == pb.ROLE_SYSTEM
    assert rest.next_page_token == ""


def test_concurrent_first_messages_create_one_conversation(rig: DaemonRig) -> None:
    outcomes: list[object] = []

    def talk(number: int) -> None:
        try:
            outcomes.append(rig.ask("race", "hello", request_id=f"r{number}").completed.revision)
        except grpc.RpcError as error:
            outcomes.append(error.code())

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    revisions = sorted(each for each in outcomes if isinstance(each, int))
    assert revisions == list(range(1, len(revisions) + 1))
    assert revisions
    assert {each for each in outcomes if not isinstance(each, int)} <= {grpc.StatusCode.ABORTED}
    assert wrong_tokens(rig, "race") == 0


def test_too_many_turns_are_refused_with_a_retry_time(tmp_path: Path) -> None:
    config = DaemonConfig(live_turns_max=2, grace_seconds=0.1)
    with DaemonRig(tmp_path / "data", config=config, program=(*ECHO, "--seconds=0.005")) as rig:
        running = [rig.send(f"c{i}", "hello", sampling=LONG) for i in range(2)]
        for each in running:
            next(each)
        with pytest.raises(grpc.RpcError) as error:
            rig.ask("c3", "me too")
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error.value)["RetryInfo"].retry_delay.ToSeconds() == 1
        for each in running:
            each.cancel()
        wait_for(lambda: not rig.num_live)
        assert rig.ask("c3", "now?").completed.revision == 1


def test_draining_refuses_new_turns_and_finishes_running_turns(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data", program=(*ECHO, "--seconds=0.005")) as rig:
        running = rig.send("c", "hello", sampling=pb.Sampling(max_tokens=100, ignore_eos=True))
        next(running)
        done = threading.Thread(target=lambda: rig.call(rig.daemon.drain(30)))
        done.start()
        wait_for(lambda: rig.daemon.draining)
        with pytest.raises(grpc.RpcError) as error:
            rig.ask("other", "hello")
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len(read_turn(running).token_ids) == 100
        done.join()


def test_the_health_service_follows_the_standard_protocol(tmp_path: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with DaemonRig(tmp_path / "data") as rig:
        health = health_pb2_grpc.HealthStub(rig.channel)
        for service in ("", "pensieve.v1.ConversationService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as error:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        os.kill(rig.daemon.engine.pid or 0, signal.SIGKILL)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


def test_errors_can_be_read_with_the_grpc_status_library(rig: DaemonRig) -> None:
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    with pytest.raises(grpc.RpcError) as error:
        rig.ask("standard", "hello", expected_revision=3)
    status = rpc_status.from_call(error.value)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, dict(info.metadata)) == (
        "STALE_REVISION",
        {"expected": "3", "actual": "0"},
    )


def test_reflection_lists_the_services(rig: DaemonRig) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"pensieve.v1.ConversationService", "pensieve.v1.AdminService"} <= names


def test_the_admin_calls_show_the_cache(rig: DaemonRig) -> None:
    rig.ask("large", "How large?", sampling=pb.Sampling(max_tokens=400, ignore_eos=True))
    (largest,) = rig.admin.ListCachedConversations(
        admin_pb2.ListCachedConversationsRequest(limit=1)
    ).conversations
    assert largest.conversation_id == "large"
    assert largest.device_tokens > 400
    runs = rig.admin.ExplainConversation(
        admin_pb2.ExplainConversationRequest(conversation_id="large")
    ).runs
    assert [(run.first_chunk, run.place, run.num_holders) for run in runs] == [(0, "device", 1)]
    least = rig.admin.ListCachedConversations(
        admin_pb2.ListCachedConversationsRequest(
            order=admin_pb2.ListCachedConversationsRequest.ORDER_LEAST_VALUABLE, limit=5
        )
    ).conversations
    values = [each.retention_value for each in least]
    assert values == sorted(values)
    assert rig.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).problems == []
    watch = rig.admin.WatchStats(admin_pb2.WatchStatsRequest(interval_seconds=0.1))
    first, second = next(watch).stats, next(watch).stats
    watch.cancel()
    assert second.daemon_seconds > first.daemon_seconds
    assert first.conversations_stored == second.conversations_stored > 5


def test_hints_decide_how_long_a_conversation_counts_as_idle(rig: DaemonRig) -> None:
    rig.ask("bye", "so long", hints=pb.Hints(last_turn=True))
    rig.ask("later", "in a minute", hints=pb.Hints(expected_return_seconds=60))
    cached = rig.admin.ListCachedConversations(
        admin_pb2.ListCachedConversationsRequest(limit=1000)
    ).conversations
    idle = {each.conversation_id: each.idle_seconds for each in cached}
    assert idle["bye"] > 86_000
    assert 60 <= idle["later"] < 86_000
