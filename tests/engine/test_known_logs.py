"""A turn sends only new tokens. The engine asks for the log if it does not have it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pensieve.core.turn import FinishReason
from pensieve.engine.messages import (
    CancelTurn,
    DeleteConversation,
    EvictConversation,
    ForkConversation,
    LogNeeded,
    ProvideLog,
    RewindConversation,
    SubmitTurn,
    TurnEnded,
)
from tests.engine.rig import ENGINE, Rig, options_of, packed, submit
from tests.fakes import reply_to

PROMPT = [5, 6, 7]


def turn_without_log(attempt_id: int, name: str, log: list[int], prompt: list[int]) -> SubmitTurn:
    """Return a turn that sends only its new tokens, as the service does."""
    length = len(log)
    return SubmitTurn(
        attempt_id, name, packed(prompt), length, options_of(6), first_position=length
    )


def warm(attempt_id: int, name: str, log: list[int]) -> SubmitTurn:
    return SubmitTurn(attempt_id, name, b"", len(log), warm=True, first_position=len(log))


def first_turn(rig: Rig, name: str = "a") -> list[int]:
    """Run a first turn and return the log after it."""
    rig.mailbox.put(submit(1, name, [], PROMPT))
    rig.run()
    return PROMPT + rig.sink.reply_of(1)


def needed(rig: Rig) -> list[LogNeeded]:
    return [event for event in rig.sink.events if isinstance(event, LogNeeded)]


def end_of(rig: Rig, attempt_id: int) -> TurnEnded:
    (end,) = [e for e in rig.sink.events if isinstance(e, TurnEnded) and e.attempt_id == attempt_id]
    return end


def expected(tokens: list[int]) -> list[int]:
    return reply_to(tokens, min(len(tokens) + 6, ENGINE.context_max))


def test_the_next_turn_of_a_conversation_sends_only_its_message() -> None:
    rig = Rig()
    log = first_turn(rig)
    rig.mailbox.put(turn_without_log(2, "a", log, [9]))
    rig.run()
    assert not needed(rig)
    assert rig.sink.reply_of(2) == expected([*log, 9])
    assert end_of(rig, 2).usage.device_tokens == len(log) - 1


def test_a_restarted_engine_asks_for_the_log() -> None:
    rig = Rig()
    log = list(range(20))
    rig.mailbox.put(turn_without_log(7, "a", log, [9]))
    rig.run()
    assert needed(rig) == [LogNeeded(7, "a", 20)]
    assert not rig.sink.reply_of(7)
    rig.mailbox.put(ProvideLog(7, packed(log)))
    rig.run()
    assert rig.sink.reply_of(7) == expected([*log, 9])
    usage = end_of(rig, 7).usage
    assert (usage.new_tokens, usage.recomputed_tokens) == (2, 19)


def test_the_engine_asks_for_the_log_if_both_tiers_dropped_its_kv() -> None:
    rig = Rig()
    log = first_turn(rig)
    rig.mailbox.put(EvictConversation("a"))
    rig.mailbox.put(turn_without_log(2, "a", log, [9]))
    rig.run()
    assert needed(rig) == [LogNeeded(2, "a", len(log))]


def test_a_rewound_conversation_needs_no_log() -> None:
    rig = Rig()
    log = first_turn(rig)
    rig.mailbox.put(RewindConversation("a", 3))
    rig.mailbox.put(turn_without_log(2, "a", log[:3], [9]))
    rig.run()
    assert not needed(rig)
    assert rig.sink.reply_of(2) == expected([*log[:3], 9])


def test_a_turn_after_a_lost_rewind_cuts_the_log_itself() -> None:
    rig = Rig()
    log = first_turn(rig)
    rig.mailbox.put(turn_without_log(2, "a", log[:3], [9]))
    rig.run()
    assert not needed(rig)
    assert rig.sink.reply_of(2) == expected([*log[:3], 9])


def test_a_fork_needs_no_log() -> None:
    rig = Rig()
    log = first_turn(rig)
    rig.mailbox.put(ForkConversation("a", 4, "b"))
    rig.mailbox.put(turn_without_log(2, "b", log[:4], [9]))
    rig.run()
    assert not needed(rig)
    assert rig.sink.reply_of(2) == expected([*log[:4], 9])


def test_the_engine_asks_for_a_log_that_is_longer_than_the_known_one() -> None:
    """This happens if another engine ran the previous turn."""
    rig = Rig()
    log = first_turn(rig)
    rig.mailbox.put(turn_without_log(2, "a", [*log, 1, 2, 3], [9]))
    rig.run()
    assert needed(rig) == [LogNeeded(2, "a", len(log) + 3)]


def test_a_turn_may_be_cancelled_while_it_waits_for_its_log() -> None:
    rig = Rig()
    rig.mailbox.put(turn_without_log(7, "a", [1, 2, 3], [9]))
    rig.mailbox.put(CancelTurn(7, 3))
    rig.mailbox.put(ProvideLog(7, packed([1, 2, 3])))
    rig.run()
    assert end_of(rig, 7).finish is FinishReason.CANCELLED
    assert not rig.sink.reply_of(7)


def test_a_conversation_may_be_deleted_while_its_turn_waits_for_the_log() -> None:
    rig = Rig()
    rig.mailbox.put(turn_without_log(7, "a", [1, 2, 3], [9]))
    rig.mailbox.put(DeleteConversation("a"))
    rig.mailbox.put(ProvideLog(7, packed([1, 2, 3])))
    rig.run()
    assert end_of(rig, 7).finish is FinishReason.CANCELLED
    assert "a" not in rig.scheduler.cache.conversations


def test_a_turn_replaces_a_warm_that_waits_for_the_log() -> None:
    rig = Rig()
    rig.mailbox.put(warm(7, "a", [1, 2, 3]))
    rig.mailbox.put(turn_without_log(8, "a", [1, 2, 3], [9]))
    rig.mailbox.put(ProvideLog(7, packed([1, 2, 3])))
    rig.mailbox.put(ProvideLog(8, packed([1, 2, 3])))
    rig.run()
    assert end_of(rig, 7).finish is FinishReason.WARMED
    assert rig.sink.reply_of(8) == expected([1, 2, 3, 9])


def test_a_waiting_warm_ends_when_its_conversation_is_rewound() -> None:
    """By the time the log arrives, it may have other tokens."""
    rig = Rig()
    rig.mailbox.put(warm(7, "a", [1, 2, 3]))
    rig.mailbox.put(RewindConversation("a", 1))
    rig.mailbox.put(ProvideLog(7, packed([1, 4, 4])))
    rig.run()
    assert end_of(rig, 7).finish is FinishReason.WARMED
    assert "a" not in rig.scheduler.cache.conversations


def test_a_second_turn_is_refused_while_the_first_waits_for_its_log() -> None:
    rig = Rig()
    rig.mailbox.put(turn_without_log(7, "a", [1, 2, 3], [9]))
    rig.mailbox.put(turn_without_log(8, "a", [1, 2, 3], [9]))
    rig.run()
    assert end_of(rig, 8).failure == "TURN_RUNNING"


def test_a_log_of_the_wrong_length_fails_the_turn() -> None:
    rig = Rig()
    rig.mailbox.put(turn_without_log(7, "a", [1, 2, 3], [9]))
    rig.mailbox.put(ProvideLog(7, packed([1, 2])))
    rig.run()
    assert end_of(rig, 7).failure == "LOG_MISSING"
    assert not rig.scheduler.num_turns


@pytest.mark.parametrize("follow_up", ["delete", "rewind"])
def test_a_recreated_conversation_does_not_use_the_log_of_the_deleted_one(
    follow_up: str,
) -> None:
    """A new conversation must not use the tokens of a deleted conversation with the same name.

    If the engine plans one iteration ahead, the deleted conversation stays in the cache until its last slice
    is committed.
    """
    rig = Rig(depth=2, stops=False)
    rig.mailbox.put(SubmitTurn(1, "y", packed(range(100, 112)), 0, options_of(3)))
    rig.run()
    log = [*range(100, 112), *rig.sink.reply_of(1)]
    rig.mailbox.put(SubmitTurn(2, "x", packed(range(300, 310)), 0, options_of(20)))
    for _ in range(6):
        rig.engine.step()
    running = rig.scheduler.turn(2)
    assert running is not None
    assert running.num_uncommitted
    if follow_up == "delete":
        rig.mailbox.put(DeleteConversation("x"))
    else:
        rig.mailbox.put(CancelTurn(2, 12))
        rig.mailbox.put(RewindConversation("x", 0))
    rig.mailbox.put(ForkConversation("y", len(log), "x"))
    rig.mailbox.put(turn_without_log(3, "x", log, [7, 8]))
    rig.engine.step()
    assert needed(rig) == [LogNeeded(3, "x", len(log))]
    rig.mailbox.put(ProvideLog(3, packed(log)))
    rig.run()
    assert rig.sink.reply_of(3) == reply_to([*log, 7, 8], len(log) + 8, stops=False)


def running_with_a_slice_ahead() -> Rig:
    """Return a rig in which turn 2, of conversation x, has an uncommitted slice."""
    rig = Rig(depth=2, stops=False)
    rig.mailbox.put(SubmitTurn(2, "x", packed(range(300, 310)), 0, options_of(20)))
    for _ in range(6):
        rig.engine.step()
    running = rig.scheduler.turn(2)
    assert running is not None
    assert running.num_uncommitted
    return rig


def test_a_fork_of_a_recreated_conversation_takes_no_kv_of_the_deleted_one() -> None:
    """The store has deleted x, created it again, and forked it. The cached KV still belongs to the old x."""
    rig = running_with_a_slice_ahead()
    log = list(range(500, 510))
    rig.mailbox.put(DeleteConversation("x"))
    rig.mailbox.put(ForkConversation("x", len(log), "y"))
    rig.mailbox.put(turn_without_log(3, "y", log, [7, 8]))
    rig.engine.step()
    assert needed(rig) == [LogNeeded(3, "y", len(log))]
    rig.mailbox.put(ProvideLog(3, packed(log)))
    rig.run()
    assert rig.sink.reply_of(3) == reply_to([*log, 7, 8], len(log) + 8, stops=False)
    usage = end_of(rig, 3).usage
    assert usage.device_tokens + usage.host_tokens == 0


def first_turn_under_prefix(
    attempt_id: int, name: str, prefix: list[int], prompt: list[int]
) -> SubmitTurn:
    """Return the first turn of a conversation under a declared prefix."""
    return SubmitTurn(
        *(attempt_id, name, packed([*prefix, *prompt]), len(prefix), options_of(6)), root="r"
    )


PREFIX = list(range(300, 312))


def warm_prefix(rig: Rig, prefix: list[int], attempt_id: int = 1) -> None:
    rig.mailbox.put(replace(warm(attempt_id, "p", prefix), root="r"))
    rig.engine.step()
    rig.mailbox.put(ProvideLog(attempt_id, packed(prefix)))
    rig.run()


def test_a_conversation_under_a_warm_prefix_computes_only_its_own_tokens() -> None:
    rig = Rig()
    warm_prefix(rig, PREFIX)
    before = len(needed(rig))
    for number, name in enumerate(("a", "b"), 2):
        rig.mailbox.put(first_turn_under_prefix(number, name, PREFIX, [number]))
        rig.run()
        assert rig.sink.reply_of(number) == expected([*PREFIX, number])
        usage = end_of(rig, number).usage
        assert usage.shared_tokens == usage.device_tokens == len(PREFIX)
        assert (usage.new_tokens, usage.recomputed_tokens) == (1, 0)
    assert len(needed(rig)) == before


def test_a_dropped_conversation_reuses_its_declared_prefix() -> None:
    rig = Rig()
    warm_prefix(rig, PREFIX)
    rig.mailbox.put(first_turn_under_prefix(2, "a", PREFIX, [2]))
    rig.run()
    log = [*PREFIX, 2, *rig.sink.reply_of(2)]
    rig.mailbox.put(DeleteConversation("a"))  # so that the engine has lost the conversation
    rig.mailbox.put(
        SubmitTurn(
            *(3, "a", packed([9]), len(log), options_of(6)),
            first_position=len(log),
            root="r",
        )
    )
    rig.engine.step()
    rig.mailbox.put(ProvideLog(3, packed(log)))
    rig.run()
    assert rig.sink.reply_of(3) == expected([*log, 9])
    usage = end_of(rig, 3).usage
    assert usage.shared_tokens == len(PREFIX)
    assert usage.recomputed_tokens == len(log) - 1 - len(PREFIX)


def test_a_provided_log_replaces_whatever_is_cached_under_its_name() -> None:
    """A fork of another conversation may be cached under this name, shorter than the real log."""
    rig = Rig()
    log = first_turn(rig)
    other = [*log[:3], *range(500, 520)]
    rig.mailbox.put(turn_without_log(2, "a", other, [9]))
    rig.run()
    assert needed(rig) == [LogNeeded(2, "a", len(other))]
    rig.mailbox.put(ProvideLog(2, packed(other)))
    rig.run()
    assert rig.sink.reply_of(2) == expected([*other, 9])
    assert end_of(rig, 2).usage.device_tokens == 0
