"""The log line of each turn that has ended."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from pensieve.client import Client
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import ECHO, DaemonRig, ServeProcess, wait_for

SECRET = "the quick brown secret"
ENDLESS = pb.Sampling(max_tokens=50_000, ignore_eos=True)


def turns(log: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [each for each in entries if each["message"] == "turn ended"]


def test_each_turn_is_logged_with_ids_tokens_by_source_and_times(tmp_path: Path) -> None:
    process = ServeProcess(tmp_path / "data", "--log-format", "json")
    with Client(process.start()) as client:
        talk = client.conversation("trip")
        replies = [talk.ask(f"{SECRET} {number}", max_tokens=9) for number in range(3)]
        talk.ask("again", request_id="same", max_tokens=3)
        talk.ask("again", request_id="same", max_tokens=3)  # replayed, so it is not a turn
    assert process.stop() == 0
    log = process.log.read_text()
    lines = turns(log)
    assert [each["level"] for each in lines] == ["info"] * 4
    for line, reply in zip(lines, replies, strict=False):
        assert (line["conversation_id"], line["turn_id"]) == ("trip", reply.turn_id)
        assert line["finish"] == reply.finish_reason
        for name in ("new", "device", "host", "recomputed", "output"):
            assert line[f"{name}_tokens"] == getattr(reply.usage, f"{name}_tokens"), name
        for name in ("queue_seconds", "first_token_seconds", "total_seconds"):
            assert line[name] == pytest.approx(getattr(reply.usage, name), abs=0.001)
        assert reply.text not in log
    assert "secret" not in log


def test_the_text_format_logs_one_value_for_each_name(tmp_path: Path) -> None:
    process = ServeProcess(tmp_path / "data", "--log-format", "text")
    with Client(process.start()) as client:
        client.conversation("trip").ask(SECRET, max_tokens=3, ignore_eos=True)
    assert process.stop() == 0
    (line,) = (line for line in process.log.read_text().splitlines() if "turn ended" in line)
    assert re.search(
        r" INFO turn ended turn_id=1 conversation_id=trip finish=length new_tokens=\d+ device_tokens=0 "
        r"host_tokens=0 recomputed_tokens=0 output_tokens=3 queue_seconds=[\d.]+ "
        r"first_token_seconds=[\d.]+ total_seconds=[\d.]+$",
        line,
    )


def test_a_failed_or_abandoned_turn_is_logged_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pensieve")
    with DaemonRig(tmp_path / "data", program=(*ECHO, "--seconds=0.005")) as rig:
        left = rig.send("left", "hello", sampling=ENDLESS)
        next(left)
        left.cancel()
        cancelled = rig.send("cancelled", "hello", sampling=ENDLESS)
        while next(cancelled).WhichOneof("event") != "delta":
            pass
        rig.stub.CancelTurn(pb.CancelTurnRequest(conversation_id="cancelled"))
        list(cancelled)
        deleted = rig.send("deleted", "hello", sampling=ENDLESS)
        next(deleted)
        rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id="deleted"))
        wait_for(lambda: not rig.num_live)
    ended = [each for each in caplog.records if each.getMessage() == "turn ended"]
    found = {each.conversation_id: each.figures for each in ended}  # type: ignore[attr-defined]
    assert len(ended) == 3
    assert (found["left"]["finish"], found["left"]["reason"]) == ("cancelled", "TURN_INTERRUPTED")
    assert (found["deleted"]["finish"], found["deleted"]["reason"]) == (
        "cancelled",
        "TURN_INTERRUPTED",
    )
    assert found["cancelled"]["finish"] == "cancelled"
    assert "reason" not in found["cancelled"]
    assert found["left"]["total_seconds"] > 0
