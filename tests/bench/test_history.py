"""`pensieve bench history`: turns that one history carries for several daemons."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from pensieve.bench import history
from pensieve.bench.report import Report
from pensieve.errors import Unavailable
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.records import NewMessage, TurnRequest


@pytest.mark.timeout(120)
def test_turns_are_counted_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history.run((0, 3), 0.5, tmp_path, Report(as_json=True))
    said = capsys.readouterr()
    alone, shared = json.loads(said.out)["rows"]
    assert (alone["replicas"], shared["replicas"]) == (0, 3)
    for row in (alone, shared):
        assert row["turns"] > 0
        assert row["turns_per_second"] == row["turns"] / 0.5
        assert 0 < row["turn_p50_seconds"] <= row["turn_p99_seconds"]
    assert "the store alone: " in said.err
    assert "3 replicas: " in said.err
    assert list(tmp_path.iterdir()) == []  # nothing is left


def test_a_turn_that_another_one_wrote_is_noticed(tmp_path: Path) -> None:
    with ConversationStore.open(tmp_path, "a test") as store:
        talker = history.Talker(store, "t")
        talker.check()
        request = TurnRequest("r", [NewMessage("user", "hi", [1])])
        turn = store.begin_turn("t-3", request).turn
        store.finish_turn(turn.turn_id, NewMessage("assistant", "ho", [2]), "stop", {})
        with pytest.raises(Unavailable, match="t-3 is at revision 1, and had replies up to 0"):
            talker.check()


def test_a_talker_that_fails_makes_no_figure(tmp_path: Path) -> None:
    with ConversationStore.open(tmp_path, "a test") as store:
        talker = history.Talker(store, "t")
        turn = store.begin_turn("t-0", TurnRequest("r0", [NewMessage("user", "hi", [1])])).turn
        store.finish_turn(turn.turn_id, NewMessage("assistant", "ho", [2]), "stop", {})
        (failure,) = history._talk([talker], 0.0, time.monotonic() + 0.2)
        assert "t-0 has had r0 before" in failure


@pytest.mark.parametrize("answers", [[], ["the disk is full"]], ids=["killed", "failed"])
def test_a_process_of_replicas_that_ends_without_figures_is_an_error(answers: list[str]) -> None:
    context = multiprocessing.get_context("forkserver")
    queue = context.SimpleQueue()
    process = context.Process(target=os._exit, args=(9,))
    process.start()
    for each in answers:
        queue.put(each)
    with pytest.raises(Unavailable, match="full" if answers else "ended without an answer"):
        history._answer(queue, [process])
    process.join()
