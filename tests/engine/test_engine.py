"""The engine over the ledger: messages in, events out, and nothing else."""

from __future__ import annotations

import threading

import pytest

from pensieve.core.iteration import Iteration, SampledToken
from pensieve.core.turn import FinishReason
from pensieve.engine.mailbox import Outbox
from pensieve.engine.messages import (
    Answer,
    CheckIntegrity,
    EvictConversation,
    GetStats,
    SubmitTurn,
    TurnAdmitted,
    TurnEnded,
)
from pensieve.errors import DeviceError, Unavailable
from tests.engine.rig import Rig, packed, submit
from tests.fakes import reply_to


def test_a_turn_streams_its_tokens_and_then_ends() -> None:
    rig = Rig()
    rig.mailbox.put(submit(1, "a", [], [5, 6, 7], reply=3))
    rig.run()
    expected = reply_to([5, 6, 7], 6)
    assert rig.sink.reply_of(1) == expected
    end = rig.sink.ends()[1]
    assert end.usage.output_tokens == len(expected)
    assert (end.usage.new_tokens, end.usage.prompt_tokens) == (3, 3)
    assert isinstance(rig.sink.events[-1], TurnEnded)


def test_a_second_turn_computes_only_its_new_tokens() -> None:
    rig = Rig()
    rig.mailbox.put(submit(1, "a", [], [5, 6, 7], reply=3))
    rig.run()
    log = [5, 6, 7, *rig.sink.reply_of(1)]
    rig.mailbox.put(submit(2, "a", log, [9, 9], reply=3))
    rig.run()
    usage = rig.sink.ends()[2].usage
    assert usage.device_tokens == len(log) - 1  # all but the last sampled token
    assert usage.new_tokens == 3
    assert usage.recomputed_tokens == 0


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_eviction_right_after_the_end_is_not_lost(depth: int, to_host: bool) -> None:
    """At depth 2, a turn that stops by itself still has a slice in flight, which holds its pages."""
    rig = Rig(depth=depth)
    rig.mailbox.put(submit(1, "a", [], [5, 6, 7], reply=400))  # stops long before the limit
    while 1 not in rig.sink.ends():
        assert rig.engine.step()
        rig.clock.advance(0.05)
    assert rig.sink.ends()[1].finish is FinishReason.STOP
    assert (rig.scheduler.cache.conversations["a"].attempt_id is None) == (depth == 1)
    rig.mailbox.put(EvictConversation("a", to_host=to_host, query_id=7))
    rig.run()
    answer = next(event for event in rig.sink.events if isinstance(event, Answer))
    assert answer.figures["chunks"] > 0
    assert {location for _, _, location, _ in rig.scheduler.cache.locations("a")} <= (
        {"host"} if to_host else set()
    )


def test_a_turn_replaces_the_warm_of_its_conversation_and_keeps_its_kv() -> None:
    rig = Rig()
    rig.mailbox.put(submit(1, "a", [], list(range(5, 35)), reply=3))
    rig.run()
    log = [*range(5, 35), *rig.sink.reply_of(1)]
    rig.mailbox.put(EvictConversation("a"))
    rig.mailbox.put(SubmitTurn(2, "a", packed(log), len(log), warm=True))
    rig.engine.step()  # recomputes half of the conversation
    rig.mailbox.put(submit(3, "a", log, [9, 9], reply=3))
    rig.run()
    ends = rig.sink.ends()
    assert ends[2].finish is FinishReason.CANCELLED
    assert ends[3].failure is None
    assert rig.sink.reply_of(3) == reply_to([*log, 9, 9], len(log) + 2 + 3)
    assert 0 < ends[3].usage.recomputed_tokens < len(log) - 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (submit(1, "a", [], list(range(44))), "CONTEXT_FULL"),
        (submit(1, "a", [1, 2], []), "NO_TOKENS"),
    ],
)
def test_an_invalid_turn_ends_at_once_and_affects_no_other_turn(
    message: SubmitTurn, reason: str
) -> None:
    rig = Rig()
    rig.mailbox.put(message)
    rig.mailbox.put(submit(2, "b", [], [1, 2, 3]))
    rig.run()
    assert rig.sink.ends()[1].failure == reason
    assert rig.sink.reply_of(2) == reply_to([1, 2, 3], 9)


def test_a_second_turn_of_a_running_conversation_is_refused() -> None:
    rig = Rig()
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3], reply=20))
    rig.mailbox.put(submit(2, "a", [], [4], reply=2))
    rig.run()
    assert rig.sink.ends()[2].failure == "TURN_RUNNING"
    assert rig.sink.ends()[1].failure is None


def test_turns_beyond_the_queue_limit_are_refused_with_queue_full() -> None:
    rig = Rig()
    for attempt_id in range(1, 7):
        rig.mailbox.put(submit(attempt_id, f"c{attempt_id}", [], [attempt_id]))
    rig.run()
    refused = [
        attempt_id for attempt_id, end in rig.sink.ends().items() if end.failure == "QUEUE_FULL"
    ]
    assert refused == [5, 6]


def test_queries_are_answered() -> None:
    rig = Rig()
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3]))
    rig.run()
    rig.mailbox.put(GetStats(7))
    rig.mailbox.put(CheckIntegrity(8))
    rig.run()
    stats, check = (event for event in rig.sink.events if isinstance(event, Answer))
    assert stats.query_id == 7
    assert stats.figures["new_tokens"] == 3
    assert stats.figures["turns_stop"] + stats.figures["turns_length"] == 1
    assert stats.figures["tokens_idle"] == 0
    assert (check.query_id, check.problems) == (8, ())


def test_integrity_problems_are_named() -> None:
    rig = Rig()
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3]))
    rig.run()
    rig.scheduler.cache.device.take()  # leak a page
    rig.mailbox.put(CheckIntegrity(8))
    rig.run()
    answer = rig.sink.events[-1]
    assert isinstance(answer, Answer)
    assert "disagree" in answer.problems[0]


def test_a_failing_executor_ends_every_turn_and_closes_the_mailbox() -> None:
    rig = Rig()

    def launch(iteration: Iteration) -> None:
        raise DeviceError("the device is gone")

    rig.executor.launch = launch  # type: ignore[method-assign]
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3]))
    rig.mailbox.put(submit(2, "b", [], [1, 2, 3]))
    with pytest.raises(DeviceError):
        rig.engine.run()
    assert {end.failure for end in rig.sink.ends().values()} == {"ENGINE_FAILED"}
    assert set(rig.sink.ends()) == {1, 2}
    with pytest.raises(Unavailable):
        rig.mailbox.put(GetStats(1))


def test_the_engine_runs_in_a_thread_until_its_mailbox_closes() -> None:
    rig, outbox = Rig(), Outbox()
    rig.engine.sink = outbox
    thread = threading.Thread(target=rig.engine.run)
    thread.start()
    rig.mailbox.put(submit(1, "a", [], [3, 4]))
    sampled: list[int] = []
    assert outbox.get(60.0) == TurnAdmitted(1, missing_tokens=2)
    while not isinstance(event := outbox.get(60.0), TurnEnded):
        assert isinstance(event, SampledToken)
        sampled.append(event.token_id)
    rig.mailbox.close()
    thread.join(60.0)
    assert not thread.is_alive()
    assert sampled == reply_to([3, 4], 8)
