"""Fail the Nth statement, for every N, in every operation: all of it happened or none of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import PensieveError, StoreCorrupt, StoreUnavailable
from pensieve.store import (
    ConversationStore,
    NewConversation,
    NewMessage,
    TurnState,
)
from tests.store.talk import DRIVERS, begin, create, reply, say, user

FULL, IO_ERROR = 13, 10
NEVER = 10**9


class FaultyDriver:
    """A real SQLite driver whose Nth statement from now fails: before or after it is carried out,
    once or until healed."""

    def __init__(self, driver: Any, code: int, after: bool, lasting: bool) -> None:
        self.Error = driver.Error
        self.sqlite_version = driver.sqlite_version
        self.sqlite_version_info = driver.sqlite_version_info
        self.connect = self._connect
        self.countdown = NEVER
        self.fired = False
        self._driver = driver
        self._code = code
        self._after = after
        self._lasting = lasting

    def arm(self, countdown: int) -> None:
        self.countdown, self.fired = countdown, False

    def heal(self) -> None:
        self.countdown = NEVER

    def _connect(self, *args: Any, **options: Any) -> Any:
        faults = self

        class FaultyConnection(self._driver.Connection):  # type: ignore[misc, name-defined]
            def execute(self, *args: Any) -> Any:
                faults.countdown -= 1
                fails = faults.countdown == 0 or (faults._lasting and faults.countdown < 0)
                if fails and not faults._after:
                    raise faults._error()
                cursor = super().execute(*args)
                if fails:
                    raise faults._error()
                return cursor

        return self._driver.connect(*args, factory=FaultyConnection, **options)

    def _error(self) -> Any:
        self.fired = True
        error = self._driver.OperationalError("planted")
        error.sqlite_errorcode = self._code
        return error


HEAD = NewMessage("system", "Be brief.", (1, 2))


def world(store: ConversationStore) -> None:
    """tea: two turns; cup: forked from the first; pot: a turn interrupted, one cut."""
    for name in ("tea", "pot"):
        store.create_conversation(NewConversation(name, "f", [HEAD], prefix_id="bot"))
    say(store, "tea", "r1", user("hi", 10), reply("hello", 20, 21))
    say(store, "tea", "r2", user("more" * 500, 30), reply("yes", 40))
    store.fork_conversation("tea", 1, "cup")
    say(store, "pot", "r1", user("a", 3), reply("b", 4))
    store.rewind_conversation("pot", 0)
    store.interrupt_turn(begin(store, "pot", "r2", "hi", 50))


def history(store: ConversationStore) -> Any:
    """All there is to see, but for times and the states of turns."""
    return [
        (
            c.conversation_id,
            c.revision,
            c.fingerprint,
            list(store.log(c.conversation_id)),
            [(m.content, m.revision) for m in store.messages(c.conversation_id)],
        )
        for c in store.list_conversations().conversations
    ]


class Act:
    """One public operation on the world; `prepare` runs before the fault is armed."""

    def __init__(
        self,
        run: Callable[[ConversationStore, int], object],
        prepare: Callable[[ConversationStore], int] = lambda store: 0,
    ) -> None:
        self.run = run
        self.prepare = prepare


def begun(store: ConversationStore) -> int:
    return begin(store, "tea", "r3", "third", 60, 61)


ACTS = {
    "create": Act(
        lambda store, _: store.create_conversation(
            NewConversation("new", "f", [HEAD], prefix_id="bot")
        )
    ),
    "create_with_own_head": Act(
        lambda store, _: store.create_conversation(NewConversation("new", "f", [HEAD, HEAD]))
    ),
    "fork": Act(lambda store, _: store.fork_conversation("tea", 1, "new")),
    "rewind": Act(lambda store, _: store.rewind_conversation("cup", 0)),
    "replace_log": Act(lambda store, _: store.replace_log("cup", "f2", [[9]] * 3)),
    "delete": Act(lambda store, _: store.delete_conversation("tea")),
    "begin": Act(lambda store, _: begun(store)),
    "begin_again": Act(lambda store, _: begin(store, "pot", "r2", "hi", 50)),
    "finish": Act(
        lambda store, turn_id: store.finish_turn(turn_id, reply("ok", 70), "stop", {}), begun
    ),
    "fail": Act(lambda store, turn_id: store.fail_turn(turn_id, "NAN_LOGITS"), begun),
    "interrupt": Act(lambda store, turn_id: store.interrupt_turn(turn_id), begun),
    "read": Act(
        lambda store, _: (store.turn_messages(1), store.find_turn("tea", "r1"), history(store))
    ),
}


@pytest.fixture
def folder(tmp_path: Path, driver: Any) -> Path:
    with ConversationStore.open(tmp_path / "world", "test", driver=driver) as store:
        world(store)
    return tmp_path / "world"


def opened(folder: Path, copy: str, driver: Any) -> ConversationStore:
    target = folder.with_name(copy)
    shutil.copytree(folder, target)
    return ConversationStore.open(target, "test", driver=driver, compact_bytes_min=1)


FAULTS = {
    "error": (IO_ERROR, False, False),
    "error-after": (IO_ERROR, True, False),
    "full-until-healed": (FULL, False, True),
}
ENDS = (
    "create",
    "fork",
    "delete",
    "begin",
    "finish",
    "fail",
)  # where the others have been like them
CASES = [
    *((name, DRIVERS[0], "error") for name in ACTS),
    *((name, DRIVERS[0], fault) for name in ENDS for fault in ("error-after", "full-until-healed")),
    *((name, driver, "error") for name in ("begin", "finish", "delete") for driver in DRIVERS[1:]),
]


@pytest.mark.parametrize(
    ("name", "driver", "code", "after", "lasting"),
    [(name, driver, *FAULTS[fault]) for name, driver, fault in CASES],
    ids=["-".join(case) for case in CASES],
    indirect=["driver"],
)
def test_an_operation_happens_or_does_not(
    folder: Path, driver: Any, name: str, code: int, after: bool, lasting: bool
) -> None:
    act = ACTS[name]
    with opened(folder, "wanted", driver) as store:
        subject = act.prepare(store)
        before = history(store)
        act.run(store, subject)
        wanted = history(store)
    fault_points = 0
    while True:
        fault_points += 1
        faults = FaultyDriver(driver, code, after, lasting)
        with opened(folder, f"copy{fault_points}", faults) as store:
            subject = act.prepare(store)
            faults.arm(fault_points)
            raised = False
            try:
                act.run(store, subject)
            except StoreUnavailable:
                raised = True
            faults.heal()
            if not faults.fired:
                break
            seen = history(store)
            assert seen in ((before, wanted) if raised else (wanted,)), fault_points
            # The store goes on, and no turn is left that would block its conversation.
            if raised or not name.startswith("begin"):
                for conversation_id in {"tea", "pot"} & {entry[0] for entry in seen}:
                    say(store, conversation_id, "r9", user("x", 8), reply("y", 9))
            assert store.verify() == [], fault_points
    assert fault_points > 4


def test_a_store_opens_after_every_failure_to_open(folder: Path, driver: Any) -> None:
    with ConversationStore.open(folder, "test", driver=driver) as store:
        wanted = history(store)
        begun(store)
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
            assert turn.state is TurnState.INTERRUPTED
    assert fault_points > 10


def test_a_turn_whose_end_could_not_be_written_can_be_ended_again(
    folder: Path, driver: Any
) -> None:
    faults = FaultyDriver(driver, FULL, False, True)
    with opened(folder, "copy", faults) as store:
        turn_id = begun(store)
        faults.arm(1)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="the disk is full"):
                store.finish_turn(turn_id, reply("ok", 70), "stop", {})
        faults.heal()
        assert store.finish_turn(turn_id, reply("ok", 70), "stop", {}) == 3


def test_a_turn_whose_end_could_not_be_written_is_not_shown_as_running(
    folder: Path, driver: Any
) -> None:
    """A client that sees a running turn does not write, and only a write would interrupt it."""
    faults = FaultyDriver(driver, IO_ERROR, False, False)
    with opened(folder, "copy", faults) as store:
        turn_id = begun(store)
        assert store.get_conversation("tea").running_turn_id == turn_id
        faults.arm(1)
        with pytest.raises(StoreUnavailable):
            store.finish_turn(turn_id, reply("ok", 70), "stop", {})
        listed = {each.conversation_id: each for each in store.list_conversations().conversations}
        for conversation in store.get_conversation("tea"), listed["tea"]:
            assert conversation.running_turn_id is None
        for turn in store.get_turn(turn_id), store.find_turn("tea", "r3"):
            assert turn is not None
            assert turn.state is TurnState.INTERRUPTED
        assert begun(store) == turn_id


def test_a_turn_whose_end_could_not_be_written_is_interrupted_by_the_next_write(
    folder: Path, driver: Any
) -> None:
    faults = FaultyDriver(driver, FULL, False, True)
    with opened(folder, "copy", faults) as store:
        turn_id = begun(store)
        other = begin(store, "cup", "r5", "lives", 5)
        faults.arm(1)
        with pytest.raises(StoreUnavailable):
            store.finish_turn(turn_id, reply("ok", 70), "stop", {})
        faults.heal()
        create(store, "new")
        assert store.get_turn(turn_id).state is TurnState.INTERRUPTED
        assert store.get_turn(other).state is TurnState.RUNNING
        assert store.finish_turn(other, reply("ok", 71), "stop", {}) == 2


def test_an_end_that_got_through_in_spite_of_its_error_is_not_doubled(
    folder: Path, driver: Any
) -> None:
    class CommitFails(FaultyDriver):
        def _connect(self, *args: Any, **options: Any) -> Any:
            faults = self

            class Connection(self._driver.Connection):  # type: ignore[misc, name-defined]
                def execute(self, sql: str, *rest: Any) -> Any:
                    cursor = super().execute(sql, *rest)
                    if sql == "COMMIT" and faults.countdown != NEVER:
                        raise faults._error()
                    return cursor

            return self._driver.connect(*args, factory=Connection, **options)

    faults = CommitFails(driver, IO_ERROR, True, False)
    with opened(folder, "copy", faults) as store:
        turn_id = begun(store)
        faults.arm(1)
        with pytest.raises(StoreUnavailable, match="disk I/O error"):
            store.finish_turn(turn_id, reply("ok", 70), "stop", {})
        faults.heal()
        create(store, "new")
        assert store.get_turn(turn_id).state is TurnState.COMPLETED
        assert store.finish_turn(turn_id, reply("ok", 70), "stop", {}) == 3
        assert list(store.log("tea")) == [1, 2, 10, 20, 21, 30, 40, 60, 61, 70]


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (5, StoreUnavailable, "another program holds the database"),
        (8, StoreUnavailable, "the database is read-only"),
        (10 | (4 << 8), StoreUnavailable, "disk I/O error"),  # a failed sync
        (11, StoreCorrupt, "the database is damaged"),
        (14, StoreUnavailable, "the database file cannot be opened"),
        (26, StoreCorrupt, "the file is not a database"),
    ],
)
def test_an_error_of_sqlite_is_one_line(
    folder: Path, driver: Any, code: int, error: type[PensieveError], words: str
) -> None:
    faults = FaultyDriver(driver, code, False, False)
    with opened(folder, "copy", faults) as store:
        faults.arm(2)
        with pytest.raises(error) as raised:
            create(store, "new")
        assert str(raised.value) == f"the history {store.folder.database_path}: {words}"
        create(store, "new")


@pytest.mark.parametrize("code", [8, 10, 14])
def test_after_an_io_error_a_new_connection_is_used(folder: Path, driver: Any, code: int) -> None:
    faults = FaultyDriver(driver, code, False, False)
    with opened(folder, "copy", faults) as store:
        used = store._writer._db
        faults.arm(3)
        with pytest.raises(StoreUnavailable):
            create(store, "new")
        assert store._writer._db is None
        with pytest.raises(driver.ProgrammingError):
            used.conn.execute("SELECT 1")
        create(store, "new")


def test_a_mistake_in_the_program_stays_what_it_is(folder: Path, driver: Any) -> None:
    faults = FaultyDriver(driver, 1, False, False)
    with opened(folder, "copy", faults) as store:
        faults.arm(2)
        with pytest.raises(driver.OperationalError, match="planted"):
            create(store, "new")
        create(store, "new")


def test_a_full_disk_refuses_the_turn_and_keeps_the_rest(store: ConversationStore) -> None:
    world(store)
    before = history(store)
    with store._writer.reading() as conn:
        (num_pages,) = conn.execute("PRAGMA page_count").fetchone()
        conn.execute(f"PRAGMA max_page_count = {num_pages + 4}").fetchall()
    turn_id = begun(store)
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        store.finish_turn(turn_id, reply("long" * 9000, *range(9000)), "stop", {})
    assert history(store) == before
    with store._writer.reading() as conn:
        conn.execute(f"PRAGMA max_page_count = {num_pages + 400}").fetchall()
    assert store.finish_turn(turn_id, reply("long" * 9000, *range(9000)), "stop", {}) == 3
    assert store.verify() == []


FILE_LIMIT_CHILD = """
import resource, signal, sys
from pathlib import Path
from pensieve.errors import StoreUnavailable
from pensieve.store import ConversationStore
from tests.store.talk import create, reply, say, user
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = ConversationStore.open(Path(sys.argv[1]), "test")
create(store, "tea")
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
number = 0
try:
    while True:
        say(store, "tea", f"r{number}", user("hi", number), reply("x" * 20_000, number))
        number += 1
except StoreUnavailable as error:
    print(number, error)
print(len(store.log("tea")), store.verify())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(say(store, "tea", f"r{number}", user("hi", number), reply("ok", number)) == number + 1)
store.close()
"""


def test_a_file_that_cannot_grow_refuses_the_turn_and_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILE_LIMIT_CHILD, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stderr == ""
    refused, after, went_on = done.stdout.splitlines()
    number, _, words = refused.partition(" ")
    assert int(number) > 0
    assert words in {
        f"the history {tmp_path}/conversations.db: {reason}"
        for reason in ("the disk is full", "disk I/O error")
    }
    assert after == f"{2 * int(number)} []"
    assert went_on == "True"


def test_two_threads_at_once_are_a_mistake(store: ConversationStore) -> None:
    create(store, "tea")
    raised: list[RuntimeError] = []

    def ask() -> None:
        try:
            store.get_conversation("tea")
        except RuntimeError as error:
            raised.append(error)

    with store._writer.reading():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert [str(error) for error in raised] == ["the history is being used by another thread"]


def test_another_thread_may_use_it_next_and_check_it_meanwhile(store: ConversationStore) -> None:
    create(store, "tea", user("hi", 1))
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(list(store.log("tea"))))
    thread.start()
    thread.join()
    with store._writer.writing():
        thread = threading.Thread(
            target=lambda: found.append((store.verify(), store.integrity_check()))
        )
        thread.start()
        thread.join()
    assert found == [[1], ([], [])]
