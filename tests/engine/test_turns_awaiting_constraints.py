"""A turn whose constraint is not ready is held. Other turns do not wait. Messages can end a held turn."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from pensieve.core.constraint import Constraint, ConstraintKind
from pensieve.core.turn import FinishReason
from pensieve.engine.journal import replay
from pensieve.engine.messages import (
    CancelTurn,
    DeleteConversation,
    ForkConversation,
    LogNeeded,
    RewindConversation,
    SubmitTurn,
)
from pensieve.engine.turns_awaiting_constraints import TurnsAwaitingConstraints
from tests.engine.rig import Rig, packed, submit

CONSTRAINT = Constraint(ConstraintKind.REGEX, "a+")


class Compiling:
    """Constraints that become ready when a test says so."""

    def __init__(self) -> None:
        self.is_quick = False
        self.waiting: dict[int, Callable[[], None]] = {}
        self.ready: set[int] = set()
        self.forgotten: list[int] = []

    def prepare(
        self, attempt_id: int, constraint: Constraint, on_ready: Callable[[], None]
    ) -> bool:
        assert constraint == CONSTRAINT
        if self.is_quick:
            return True
        self.waiting[attempt_id] = on_ready
        return False

    def is_ready(self, attempt_id: int) -> bool:
        return attempt_id in self.ready

    def forget(self, attempt_id: int) -> None:
        self.forgotten.append(attempt_id)

    def finish(self, attempt_id: int) -> None:
        self.ready.add(attempt_id)
        self.waiting.pop(attempt_id)()


class HoldingRig(Rig):
    def __init__(self, journal: io.StringIO | None = None) -> None:
        super().__init__(journal=journal)
        self.compiling = Compiling()
        self.engine.held = TurnsAwaitingConstraints(self.compiling, self.mailbox.wake)

    def put(self, attempt_id: int, name: str, log: list[int] | None = None) -> None:
        self.mailbox.put(constrained(attempt_id, name, log or []))


def constrained(attempt_id: int, name: str, log: list[int]) -> SubmitTurn:
    message = submit(attempt_id, name, log, [1, 2, 3])
    return replace(message, options=replace(message.options, constraint=CONSTRAINT))


def ended(rig: Rig) -> dict[int, str]:
    ends = rig.sink.ends()
    return {
        attempt_id: each.failure or each.finish.name.lower() for attempt_id, each in ends.items()
    }


def test_other_turns_run_while_a_constraint_compiles() -> None:
    rig = HoldingRig()
    rig.put(1, "slow")
    rig.mailbox.put(submit(2, "other", [], [4, 5]))
    rig.run()
    assert ended(rig) == {2: "length"}
    assert len(rig.engine.held.turns) == 1
    rig.compiling.finish(1)
    rig.run()
    assert ended(rig) == {2: "length", 1: "length"}
    assert rig.compiling.forgotten == [1]  # the other turn has no constraint


def test_a_turn_whose_constraint_is_ready_is_not_held() -> None:
    rig = HoldingRig()
    rig.compiling.is_quick = True
    rig.put(1, "quick")
    assert rig.engine.step()
    assert not rig.engine.held.turns
    assert rig.scheduler.turn_of("quick") is not None


def test_held_turns_do_not_wait_for_each_other() -> None:
    rig = HoldingRig()
    for attempt_id, name in ((1, "a"), (2, "b"), (3, "c")):
        rig.put(attempt_id, name)
    rig.run()
    rig.compiling.finish(3)
    rig.run()
    rig.compiling.finish(1)
    rig.compiling.finish(2)
    rig.run()
    assert list(ended(rig)) == [3, 1, 2]


@pytest.mark.parametrize("message", [CancelTurn(1, 0), DeleteConversation("slow")])
def test_a_held_turn_may_be_cancelled_and_its_conversation_deleted(message: object) -> None:
    rig = HoldingRig()
    rig.put(1, "slow")
    rig.run()
    rig.mailbox.put(message)  # type: ignore[arg-type]
    rig.run()
    assert ended(rig) == {1: "cancelled"}
    assert rig.compiling.forgotten == [1]
    rig.compiling.finish(1)
    rig.run()
    assert list(rig.sink.ends()) == [1]
    rig.mailbox.put(submit(2, "slow", [], [4]))
    rig.run()
    assert ended(rig)[2] == "length"


def test_another_turn_of_a_held_turns_conversation_is_refused() -> None:
    rig = HoldingRig()
    rig.put(1, "slow")
    rig.put(2, "slow")
    rig.mailbox.put(submit(3, "slow", [], [4]))
    rig.mailbox.put(replace(submit(4, "slow", [], [4]), warm=True))
    rig.run()
    assert ended(rig) == {2: "TURN_RUNNING", 3: "TURN_RUNNING", 4: "warmed"}


def test_held_turns_count_as_queued() -> None:
    rig = HoldingRig()
    rig.engine.config = replace(rig.engine.config, turns_queued_max=2)
    for attempt_id in (1, 2, 3):
        rig.put(attempt_id, f"c{attempt_id}")
    rig.mailbox.put(submit(4, "c4", [], [4]))
    rig.run()
    assert ended(rig) == {3: "QUEUE_FULL", 4: "QUEUE_FULL"}
    for attempt_id in (1, 2):
        rig.compiling.finish(attempt_id)
    rig.run()
    assert {ended(rig)[1], ended(rig)[2]} == {"length"}


def test_a_fork_and_a_rewind_see_the_conversation_before_the_held_turn() -> None:
    rig = HoldingRig()
    rig.mailbox.put(submit(1, "c", [], [1, 2, 3, 4]))
    rig.run()
    log = list(rig.scheduler.cache.conversations["c"].log)
    message = constrained(2, "c", log)
    rig.mailbox.put(replace(message, first_position=len(log), tokens=packed([7, 8])))
    rig.mailbox.put(ForkConversation("c", 4, "fork"))
    rig.mailbox.put(RewindConversation("c", 2))
    rig.run()
    conversations = rig.scheduler.cache.conversations
    assert list(conversations["fork"].log) == log[:4]
    assert list(conversations["c"].log) == log[:2]
    rig.compiling.finish(2)
    rig.run()
    # the engine asks for the log that comes before the held turn's prompt
    assert LogNeeded(2, "c", len(log)) in rig.sink.events


def test_a_closed_engine_ends_its_held_turns_first() -> None:
    rig = HoldingRig()
    rig.put(1, "slow")
    rig.mailbox.close()
    running = threading.Thread(target=rig.engine.run)
    running.start()
    while not rig.compiling.waiting:
        running.join(0.001)
    rig.compiling.finish(1)
    running.join(60)
    assert not running.is_alive()
    assert ended(rig) == {1: "length"}


def test_an_idle_engine_wakes_when_a_constraint_is_ready() -> None:
    rig = HoldingRig()
    rig.put(1, "slow")
    assert not rig.engine.step()
    rig.compiling.finish(1)
    assert rig.mailbox.wait(0)
    assert not rig.mailbox.wait(0)
    assert rig.engine.step()


def test_an_engine_failure_fails_its_held_turns() -> None:
    rig = HoldingRig()
    rig.put(1, "slow")
    rig.run()
    rig.engine._end_everything()
    assert ended(rig) == {1: "ENGINE_FAILED"}
    assert rig.sink.ends()[1].finish is FinishReason.FAILED


def test_a_journal_records_a_held_turn_without_constraint_when_it_starts() -> None:
    lines = io.StringIO()
    rig = HoldingRig(journal=lines)
    rig.put(1, "slow")
    rig.mailbox.put(submit(2, "other", [], [4, 5]))
    rig.run()
    rig.compiling.finish(1)
    rig.run()
    assert ended(rig) == {2: "length", 1: "length"}
    written = lines.getvalue()
    assert CONSTRAINT.text not in written
    assert replay(written.splitlines()) > 6
