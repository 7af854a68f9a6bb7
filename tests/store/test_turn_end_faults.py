"""A turn whose end could not be written is not running, and can be ended again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import StoreUnavailable
from pensieve.store import (
    StoredTurnState,
)
from tests.store.faulty import NEVER, FaultyDriver, begin_third_turn, open_copy, writer_of
from tests.store.talk import begin, create, reply
from tests.store.test_disk_faults import FULL, IO_ERROR


def test_a_turn_whose_end_could_not_be_written_can_be_ended_again(
    folder: Path, driver: Any
) -> None:
    faults = FaultyDriver(driver, FULL, False, True)
    with open_copy(folder, "copy", faults) as store:
        turn_id = begin_third_turn(store)
        faults.arm(1)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="the disk is full"):
                store.finish_turn(turn_id, reply("ok", 70), "stop", {})
        faults.heal()
        assert store.finish_turn(turn_id, reply("ok", 70), "stop", {}) == 3


def test_a_turn_whose_end_could_not_be_written_is_not_shown_as_running(
    folder: Path, driver: Any
) -> None:
    """A client that sees a running turn does not write. But only a write would interrupt the dead turn."""
    faults = FaultyDriver(driver, IO_ERROR, False, False)
    with open_copy(folder, "copy", faults) as store:
        turn_id = begin_third_turn(store)
        assert store.get_conversation("tea").running_turn_id == turn_id
        faults.arm(1)
        with pytest.raises(StoreUnavailable):
            store.finish_turn(turn_id, reply("ok", 70), "stop", {})
        listed = {each.conversation_id: each for each in store.list_conversations().conversations}
        for conversation in store.get_conversation("tea"), listed["tea"]:
            assert conversation.running_turn_id is None
        for turn in store.get_turn(turn_id), store.find_turn("tea", "r3"):
            assert turn is not None
            assert turn.state is StoredTurnState.INTERRUPTED
        assert begin_third_turn(store) == turn_id


def test_a_turn_whose_end_could_not_be_written_is_interrupted_by_the_next_write(
    folder: Path, driver: Any
) -> None:
    faults = FaultyDriver(driver, FULL, False, True)
    with open_copy(folder, "copy", faults) as store:
        turn_id = begin_third_turn(store)
        other = begin(store, "cup", "r5", "lives", 5)
        faults.arm(1)
        with pytest.raises(StoreUnavailable):
            store.finish_turn(turn_id, reply("ok", 70), "stop", {})
        faults.heal()
        create(store, "new")
        # Read the row, because `get_turn` reports this state even before the row is written.
        with writer_of(store).reading() as conn:
            row = conn.execute("SELECT state FROM turns WHERE turn_id = ?", (turn_id,)).fetchone()
        assert row == (StoredTurnState.INTERRUPTED,)
        assert store.get_turn(other).state is StoredTurnState.RUNNING
        assert store.finish_turn(other, reply("ok", 71), "stop", {}) == 2


def test_a_turn_end_that_committed_despite_its_error_is_not_stored_twice(
    folder: Path, driver: Any
) -> None:
    class CommitFails(FaultyDriver):
        def _connect(self, *args: Any, **options: Any) -> Any:
            faults = self

            class Connection(self._driver.Connection):  # type: ignore[misc, name-defined]
                def execute(self, sql: str, *rest: Any) -> Any:
                    cursor = super().execute(sql, *rest)
                    if sql == "COMMIT" and faults.countdown != NEVER:
                        raise faults.error()
                    return cursor

            return self._driver.connect(*args, factory=Connection, **options)

    faults = CommitFails(driver, IO_ERROR, True, False)
    with open_copy(folder, "copy", faults) as store:
        turn_id = begin_third_turn(store)
        faults.arm(1)
        with pytest.raises(StoreUnavailable, match="disk I/O error"):
            store.finish_turn(turn_id, reply("ok", 70), "stop", {})
        faults.heal()
        create(store, "new")
        assert store.get_turn(turn_id).state is StoredTurnState.COMPLETED
        assert store.finish_turn(turn_id, reply("ok", 70), "stop", {}) == 3
        assert list(store.log("tea")) == [1, 2, 10, 20, 21, 30, 40, 60, 61, 70]
