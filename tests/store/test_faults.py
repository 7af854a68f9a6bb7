"""Fail the Nth statement of every operation, for every N: the operation happens completely or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import StoreUnavailable
from pensieve.store import (
    ConversationStore,
    NewConversation,
    StoredTurnState,
)
from tests.store.faulty import HEAD, FaultyDriver, begin_third_turn, history, open_copy
from tests.store.talk import DRIVERS, begin, reply, say, user
from tests.store.test_disk_faults import FULL, IO_ERROR


def delete_last(store: ConversationStore) -> None:
    """Delete the last reply of tea, so that its question becomes pending."""
    seen = store.get_conversation("tea")
    store.changes.delete_last("tea", seen.revision, seen.created_at, ())


class Operation:
    """One public operation on the history of `write_history`. `prepare` runs before the fault is armed."""

    def __init__(
        self,
        run: Callable[[ConversationStore, int], object],
        prepare: Callable[[ConversationStore], int] = lambda store: 0,
    ) -> None:
        self.run = run
        self.prepare = prepare


OPERATIONS = {
    "create": Operation(
        lambda store, _: store.create_conversation(
            NewConversation("new", "f", [HEAD], prefix_id="bot")
        )
    ),
    "create_with_own_head": Operation(
        lambda store, _: store.create_conversation(NewConversation("new", "f", [HEAD, HEAD]))
    ),
    "create_with_pending": Operation(
        lambda store, _: store.create_conversation(NewConversation("new", "f", pending=[HEAD]))
    ),
    "delete_last": Operation(lambda store, _: delete_last(store)),
    "fork": Operation(lambda store, _: store.fork_conversation("tea", 1, "new")),
    "rewind": Operation(lambda store, _: store.rewind_conversation("cup", 0)),
    "replace_log": Operation(lambda store, _: store.replace_log("cup", "f2", [[9]] * 3)),
    "delete": Operation(lambda store, _: store.delete_conversation("tea")),
    "begin": Operation(lambda store, _: begin_third_turn(store)),
    "begin_again": Operation(lambda store, _: begin(store, "pot", "r2", "hi", 50)),
    "finish": Operation(
        lambda store, turn_id: store.finish_turn(turn_id, reply("ok", 70), "stop", {}),
        begin_third_turn,
    ),
    "fail": Operation(
        lambda store, turn_id: store.fail_turn(turn_id, "NAN_LOGITS"), begin_third_turn
    ),
    "interrupt": Operation(lambda store, turn_id: store.interrupt_turn(turn_id), begin_third_turn),
    "read": Operation(
        lambda store, _: (store.turn_messages(1), store.find_turn("tea", "r1"), history(store))
    ),
}


FAULTS = {
    "error": (IO_ERROR, False, False),
    "error-after": (IO_ERROR, True, False),
    "full-until-healed": (FULL, False, True),
}
# The other faults are tested only with these, because the other operations behave alike.
REPRESENTATIVE = ("create", "delete_last", "fork", "delete", "begin", "finish", "fail")
CASES = [
    *((name, DRIVERS[0], "error") for name in OPERATIONS),
    *(
        (name, DRIVERS[0], fault)
        for name in REPRESENTATIVE
        for fault in ("error-after", "full-until-healed")
    ),
    *((name, driver, "error") for name in ("begin", "finish", "delete") for driver in DRIVERS[1:]),
]


@pytest.mark.parametrize(
    ("name", "driver", "code", "after", "lasting"),
    [(name, driver, *FAULTS[fault]) for name, driver, fault in CASES],
    ids=["-".join(case) for case in CASES],
    indirect=["driver"],
)
def test_an_operation_with_a_failed_statement_happens_completely_or_not_at_all(
    folder: Path, driver: Any, name: str, code: int, after: bool, lasting: bool
) -> None:
    operation = OPERATIONS[name]
    with open_copy(folder, "wanted", driver) as store:
        subject = operation.prepare(store)
        before = history(store)
        operation.run(store, subject)
        wanted = history(store)
    fault_points = 0
    while True:
        fault_points += 1
        faults = FaultyDriver(driver, code, after, lasting)
        with open_copy(folder, f"copy{fault_points}", faults) as store:
            subject = operation.prepare(store)
            faults.arm(fault_points)
            raised = False
            try:
                operation.run(store, subject)
            except StoreUnavailable:
                raised = True
            faults.heal()
            if not faults.fired:
                break
            seen = history(store)
            assert seen in ((before, wanted) if raised else (wanted,)), fault_points
            # The store still works, and no dead turn blocks its conversation.
            if raised or not name.startswith("begin"):
                for conversation_id in {"tea", "pot"} & {entry[0] for entry in seen}:
                    say(store, conversation_id, "r9", user("x", 8), reply("y", 9))
            assert store.verify() == [], fault_points
    assert fault_points > 4


def test_a_store_can_be_opened_after_any_statement_of_an_open_has_failed(
    folder: Path, driver: Any
) -> None:
    with ConversationStore.open(folder, "test", driver=driver) as store:
        wanted = history(store)
        begin_third_turn(store)
    fault_points = 0
    while True:
        fault_points += 1
        faults = FaultyDriver(driver, IO_ERROR, False, False)
        faults.arm(fault_points)
        target = folder.with_name(f"copy{fault_points}")
        shutil.copytree(folder, target)
        try:
            ConversationStore.open(target, "test", driver=faults).close()
        except StoreUnavailable:
            assert faults.fired
        if not faults.fired:
            break
        with ConversationStore.open(target, "test", driver=driver) as store:
            assert history(store) == wanted
            assert store.verify() == []
            turn = store.find_turn("tea", "r3")
            assert turn is not None
            assert turn.state is StoredTurnState.INTERRUPTED
    assert fault_points > 10
