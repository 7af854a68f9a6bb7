"""A request_id that was already answered gets the stored turn: the same tokens, parts and logprobs."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.api.grpc import translate
from pensieve.builtin import MODEL_PATH
from pensieve.conversations import turn_ends, turns
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.conversations.live_turn import LiveTurn, packed_logprobs, replayed, stream_of
from pensieve.conversations.logprobs import PackedLogprobs, pack
from pensieve.core.iteration import Logprob, SampledToken
from pensieve.errors import StoreCorrupt
from pensieve.sampling import Sampling
from pensieve.store import records
from pensieve.text import Part, PartMarker, Tokenizer
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import ECHO, DaemonRig, wait_for
from tests.store.talk import stored_turn

ENGINE = (sys.executable, "-m", "pensieve.launch.engine_process")


class Parts(PartMarker):
    """Mark each token as text, thinking or tool call, depending on its id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, [])

    def push(self, token_id: int) -> Part:
        return (Part.TEXT, Part.THINKING, Part.TOOL_CALL)[token_id % 3]


def streamed(live: LiveTurn) -> list[dict[str, Any]]:
    """Return the deltas that a reader gets, each within one part."""
    return [
        {
            "text": each.text,
            "token_ids": list(each.token_ids),
            "kind": each.kind,
            "logprobs": [
                (one.logprob, [(top.token_id, top.logprob) for top in one.alternatives])
                for one in each.logprobs
            ],
        }
        for each in translate.deltas(live.reply.span(0, live.num_tokens))
    ]


@pytest.mark.parametrize(
    "token_ids", [[1, 4, 7, 3, 0, 6, 9], [3, 6], [1], [2, 0, 1, 3], [5, 5, 5, 0]]
)
@pytest.mark.parametrize("with_logprobs", [True, False])
def test_deltas_of_a_replay_equal_the_streamed_deltas(
    token_ids: list[int], with_logprobs: bool
) -> None:
    live = LiveTurn(1, "c", 0, 3, marker=Parts(Tokenizer.load(MODEL_PATH)))
    for position, token_id in enumerate(token_ids):
        top = (Logprob(token_id, -0.125), Logprob(9, -1 / 3)) if with_logprobs else ()
        text = ["ä", "", "xyz\n"][position % 3]
        logprob = -0.125 if with_logprobs else None
        live.take(SampledToken(1, token_id, text, False, logprob, top))
    stored = json.loads(json.dumps(stream_of(live)))
    turn = ended_turn()
    packed = packed_logprobs(live) if with_logprobs else b""
    assert "logprobs" not in stored
    reply = records.NewMessage("assistant", live.text, token_ids, "", stored, packed)
    again = replayed(turn, reply)
    assert streamed(again) == streamed(live)
    assert again.text == live.text


def ended_turn() -> records.StoredTurn:
    return stored_turn(
        1,
        state=records.StoredTurnState.COMPLETED,
        finish_reason="stop",
        revision=1,
        finished_at=1.0,
    )


def test_a_retry_gets_the_same_logprobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs are packed in a thread that delays no turn. The history does not include them."""
    packed_in = []

    def packed(live: LiveTurn) -> bytes:
        packed_in.append(threading.current_thread().name)
        return packed_logprobs(live)

    monkeypatch.setattr(turn_ends, "packed_logprobs", packed)
    written = {"device_cache": "600t", "host_cache": "200t"}
    fields: dict[str, Any] = {
        "request_id": "r1",
        "sampling": pb.Sampling(max_tokens=6, logprobs=2, ignore_eos=True),
    }
    with DaemonRig(tmp_path / "data", program=ENGINE, written=written) as rig:
        first, again = ([*rig.send("c", "Hello there.", **fields)] for _ in range(2))
        assert again[0].started.replayed
        told = [
            [
                one
                for event in events
                if event.HasField("delta")
                for one in zip(event.delta.token_ids, map(str, event.delta.logprobs), strict=True)
            ]
            for events in (first, again)
        ]
        assert len(told[0]) == 6
        assert told[0] == told[1]
        texts = ["".join(event.delta.text for event in events) for events in (first, again)]
        assert texts[0] == texts[1]
        store = rig.daemon.store
        stored = rig.call(rig.daemon.threads.in_store("", store.messages, "c"))
    assert [each.extra for each in stored] == [{}, {}]
    assert len(packed_in) == 1
    assert packed_in[0].startswith("text")


def test_a_retry_gets_the_same_parts_of_the_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PartMarker", lambda tokenizer, prompt_end: Parts(tokenizer))
    with DaemonRig(tmp_path / "data") as rig:
        first, again = (
            [
                (event.delta.kind, token_id)
                for event in rig.send("c", "Think first.", request_id="r1")
                for token_id in event.delta.token_ids
            ]
            for _ in range(2)
        )
    assert len({kind for kind, _ in first}) > 1
    assert again == first


def test_a_turn_fails_if_its_conversation_is_deleted_while_logprobs_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new conversation of the same name is not affected. The old turn finds its conversation gone."""
    is_packing, may_go_on = threading.Event(), threading.Event()

    def packed(live: LiveTurn) -> bytes:
        is_packing.set()
        assert may_go_on.wait(60)
        return packed_logprobs(live)

    monkeypatch.setattr(turn_ends, "packed_logprobs", packed)
    written = {"device_cache": "600t", "host_cache": "200t"}
    with DaemonRig(tmp_path / "data", program=ENGINE, written=written) as rig:
        call = rig.send("c", "Hello.", sampling=pb.Sampling(max_tokens=3, logprobs=2))
        wait_for(is_packing.is_set, 60)
        rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id="c"))
        rig.stub.CreateConversation(pb.CreateConversationRequest(conversation_id="c"))
        may_go_on.set()
        with pytest.raises(grpc.RpcError) as error:
            list(call)
        assert error.value.code() is grpc.StatusCode.ABORTED
        assert rig.messages("c") == []
        assert rig.call(rig.daemon.check()) == []
        rig.ask("c", "Hello.", sampling=pb.Sampling(max_tokens=3, logprobs=2))
        assert len(rig.messages("c")) == 2
        assert rig.call(rig.daemon.check()) == []


def test_packed_logprobs_are_exact_and_damaged_ones_are_refused() -> None:
    top = (Logprob(2**32 - 1, -1 / 3), Logprob(6, float("-inf")))
    rows = [(-0.5, top), (-1e-300, ()), (0.0, top[:1])]
    packed = PackedLogprobs(pack(rows))
    assert [packed[number] for number in range(len(packed))] == rows
    for broken in (pack(rows) + b"x", pack(rows)[:-1]):
        with pytest.raises(StoreCorrupt):
            PackedLogprobs(broken)


def test_a_retry_after_a_change_of_defaults_is_the_same_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields that a client leaves open are not part of its request."""
    with DaemonRig(tmp_path / "data", program=ECHO) as rig:
        fields: dict[str, Any] = {"request_id": "r1", "sampling": pb.Sampling(top_k=3)}
        first = rig.ask("c", "hello", **fields)
        other = Sampling(temperature=0.25, max_tokens=77)
        monkeypatch.setattr(Daemon, "defaults", property(lambda daemon: other))
        again = rig.ask("c", "hello", **fields)
        assert again.started.replayed
        assert again.token_ids == first.token_ids
        with pytest.raises(grpc.RpcError) as error:
            rig.ask("c", "hello", request_id="r1", sampling=pb.Sampling(top_k=4))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_request_id_is_forgotten_after_its_retention_time(tmp_path: Path) -> None:
    """The request then starts a new turn. A request id within its time is still replayed."""
    short = {"sampling": pb.Sampling(max_tokens=4, ignore_eos=True)}
    with DaemonRig(tmp_path / "data") as rig:
        rig.ask("tea", "hello", request_id="r1", **short)
        assert rig.ask("tea", "hello", request_id="r1", **short).started.replayed
    config = DaemonConfig(grace_seconds=0.2, request_keep_seconds=0.2)
    with DaemonRig(tmp_path / "data", config=config) as rig:
        store = rig.daemon.store
        wait_for(
            lambda: rig.call(rig.daemon.threads.in_store("", store.find_turn, "tea", "r1")) is None
        )
        assert len(rig.messages("tea")) == 2
    config = DaemonConfig(grace_seconds=0.2, request_keep_seconds=3600.0)
    with DaemonRig(tmp_path / "data", config=config) as rig:
        again = rig.ask("tea", "hello", request_id="r1", **short)
        assert not again.started.replayed
        assert again.completed.revision == 2
        assert rig.ask("tea", "hello", request_id="r1", **short).started.replayed
