"""Cancelling a turn: which tokens are kept, and what the client and other readers get."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import (
    ECHO,
    DaemonRig,
    blocked_store,
    details,
    read_turn,
    stopped_engine,
    wait_for,
)
from tests.conversations.test_daemon import wrong_tokens

LONG = pb.Sampling(max_tokens=90_000, ignore_eos=True)
SHORT = pb.Sampling(max_tokens=5, ignore_eos=True)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DaemonRig]:
    """A daemon with a grace period so long that no turn is given up."""
    config = DaemonConfig(grace_seconds=3600)
    with DaemonRig(tmp_path / "data", config=config, program=(*ECHO, "--seconds=0.005")) as rig:
        yield rig


def begin(rig: DaemonRig, name: str, num_tokens: int, request_id: str = "r") -> Any:
    """Begin a turn and read at least `num_tokens` tokens."""
    stream = rig.send(name, "hello", request_id=request_id, sampling=LONG)
    read = 0
    while read < num_tokens:
        read += len(next(stream).delta.token_ids)
    return stream


def cancel(rig: DaemonRig, name: str, **fields: Any) -> tuple[bool, int]:
    answer = rig.stub.CancelTurn(pb.CancelTurnRequest(conversation_id=name, **fields))
    return answer.was_running, answer.finish_reason


def test_a_cancellation_keeps_exactly_the_requested_number_of_tokens(rig: DaemonRig) -> None:
    stream = begin(rig, "c", 10)
    stream.cancel()
    kept = cancel(rig, "c", request_id="r", keep_tokens=3)
    assert kept == (True, pb.FINISH_REASON_CANCELLED)
    assert rig.num_live == 0
    reply = rig.messages("c")[1]
    assert (len(reply.token_ids), reply.finish_reason) == (3, pb.FINISH_REASON_CANCELLED)
    assert rig.ask("c", "go on", sampling=SHORT).completed.revision == 2
    assert wrong_tokens(rig, "c") == 0


def test_the_usage_of_a_cancelled_turn_counts_only_the_kept_tokens(rig: DaemonRig) -> None:
    stream = begin(rig, "c", 10)

    async def look() -> Any:
        return rig.daemon.conversations.turns.of_conversation("c")

    live = rig.call(look())
    cancel(rig, "c", request_id="r", keep_tokens=3)
    with contextlib.suppress(grpc.RpcError):  # the stream had delivered more tokens
        list(stream)
    again = rig.ask("c", "hello", request_id="r", sampling=LONG)
    assert (len(again.token_ids), again.completed.usage.output_tokens) == (3, 3)
    assert live.figures["output_tokens"] == 3
    assert live.num_charged_tokens >= live.prompt_tokens + 10, "all computed tokens are charged"


def test_keep_tokens_beyond_the_reply_keeps_the_whole_reply(rig: DaemonRig) -> None:
    begin(rig, "c", 2).cancel()
    assert cancel(rig, "c", keep_tokens=100_000)[0]
    assert 2 <= len(rig.messages("c")[1].token_ids) < 90_000
    assert rig.ask("c", "go on", sampling=SHORT).completed.revision == 2
    assert wrong_tokens(rig, "c") == 0


def test_keep_tokens_zero_removes_the_turn_and_its_request_can_run_again(rig: DaemonRig) -> None:
    begin(rig, "c", 4).cancel()
    assert cancel(rig, "c", request_id="r", keep_tokens=0) == (True, 0)
    assert rig.messages("c") == []
    assert rig.ask("c", "another", sampling=SHORT).completed.revision == 1
    again = rig.send("c", "hello", request_id="r", sampling=LONG)
    assert next(again).started.attempt == 2
    again.cancel()
    assert cancel(rig, "c", request_id="r", keep_tokens=0) == (True, 0)
    assert len(rig.messages("c")) == 2
    assert wrong_tokens(rig, "c") == 0


def test_a_cancellation_of_another_attempt_keeps_nothing(rig: DaemonRig) -> None:
    begin(rig, "c", 4).cancel()
    assert cancel(rig, "c", keep_tokens=4, attempt=2) == (True, 0)
    assert rig.messages("c") == []


def test_cancelling_an_ended_turn_changes_nothing_and_returns_its_finish_reason(
    rig: DaemonRig,
) -> None:
    turn_id = rig.ask("c", "hello", request_id="r", sampling=SHORT).started.turn_id
    begin(rig, "d", 2).cancel()
    cancel(rig, "d", request_id="r", keep_tokens=2)
    for _ in range(2):
        for by in ({"request_id": "r"}, {"turn_id": turn_id}):
            assert cancel(rig, "c", keep_tokens=0, **by) == (False, pb.FINISH_REASON_LENGTH)
        assert cancel(rig, "d", request_id="r", keep_tokens=0) == (
            False,
            pb.FINISH_REASON_CANCELLED,
        )
    assert len(rig.messages("c")[1].token_ids) == 5
    assert cancel(rig, "c", request_id="unknown") == (False, 0)
    assert cancel(rig, "d", turn_id=turn_id) == (False, 0)  # the turn is in another conversation
    assert cancel(rig, "c") == (False, 0)
    with pytest.raises(grpc.RpcError) as error:
        cancel(rig, "nowhere", request_id="r")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_turn_cancelled_before_it_begins_ends_once_it_has_begun(rig: DaemonRig) -> None:
    rig.ask("c", "before", sampling=SHORT)
    with ThreadPoolExecutor(1) as pool:
        with blocked_store(rig):
            stream = rig.send("c", "hello", request_id="r", sampling=LONG)
            wait_for(lambda: rig.daemon.conversations.arriving.num_turns)
            stream.cancel()
            ended = pool.submit(cancel, rig, "c", request_id="r", keep_tokens=0)
        assert ended.result() == (True, 0)
    assert rig.num_live == 0
    assert len(rig.messages("c")) == 2


def test_a_cancellation_waits_for_an_end_that_is_being_stored(rig: DaemonRig) -> None:
    with ThreadPoolExecutor(1) as pool:
        with contextlib.ExitStack() as blocking:
            with stopped_engine(rig):  # the turn must not end before the store is blocked
                stream = rig.send("c", "hello", request_id="r", sampling=SHORT)
                next(stream)
                blocking.enter_context(blocked_store(rig))
            num_lanes = rig.daemon.store.num_lanes
            wait_for(lambda: rig.daemon.threads.store_waiting.num_jobs == num_lanes + 1)
            ended = pool.submit(cancel, rig, "c", request_id="r", keep_tokens=0)
            followers = rig.daemon.conversations.followers._followers
            wait_for(lambda: sum(map(len, followers.values())) == 2)  # the stream, the cancellation
            assert not ended.done()
        assert ended.result() == (True, pb.FINISH_REASON_LENGTH)
    assert read_turn(stream).completed.finish_reason == pb.FINISH_REASON_LENGTH
    assert len(rig.messages("c")) == 2


def test_a_reader_that_received_more_than_was_kept_gets_turn_interrupted(rig: DaemonRig) -> None:
    stream = begin(rig, "c", 10)
    assert cancel(rig, "c", keep_tokens=3) == (True, pb.FINISH_REASON_CANCELLED)
    with pytest.raises(grpc.RpcError) as error:
        read_turn(stream)
    assert error.value.code() is grpc.StatusCode.ABORTED
    assert details(error.value)["ErrorInfo"].reason == "TURN_INTERRUPTED"
    replay = rig.ask("c", "hello", request_id="r", sampling=LONG)
    assert (len(replay.token_ids), replay.started.replayed) == (3, True)


def test_other_readers_get_turn_interrupted_if_nothing_is_kept(rig: DaemonRig) -> None:
    stream = begin(rig, "c", 3)
    assert cancel(rig, "c", keep_tokens=0) == (True, 0)
    with pytest.raises(grpc.RpcError) as error:
        read_turn(stream)
    assert details(error.value)["ErrorInfo"].reason == "TURN_INTERRUPTED"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"turn_id": "1", "request_id": "r"}, "request_id"),
        ({"keep_tokens": -1}, "keep_tokens"),
        ({"attempt": -1}, "attempt"),
    ],
)
def test_an_invalid_cancellation_is_refused_with_its_field_name(
    rig: DaemonRig, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        cancel(rig, "c", **fields)
    assert details(error.value)["BadRequest"].field_violations[0].field == name
