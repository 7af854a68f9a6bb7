"""Calls that wait for SQLite share a commit. Each call happens or not, and is answered after the commit."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import (
    AlreadyExists,
    DiskFull,
    InvalidArgument,
    NotFound,
    PensieveError,
    StoreUnavailable,
)
from pensieve.store import ConversationStore, StoredTurnState, shared_commits
from pensieve.store.backend import Conflict
from pensieve.store.connection import preferred_driver
from pensieve.store.shared_commits import SharedCommits
from pensieve.store.transactions import StoreTransactions
from tests.scale import SCALE
from tests.store.faulty import writer_of
from tests.store.talk import begin, create, reply, say, user

LANES = 8
BUSY, IO_ERROR, FULL = 5, 10, 13


class Recorder:
    """A driver that records each statement, and fails the statements that `fails` selects."""

    def __init__(self) -> None:
        self.Error = preferred_driver.Error
        self.sqlite_version = preferred_driver.sqlite_version
        self.sqlite_version_info = preferred_driver.sqlite_version_info
        self.connect = self._connect
        self.statements: list[str] = []
        self.fails: Callable[[str], int] = lambda statement: 0

    def _connect(self, *arguments: Any, **options: Any) -> Any:
        recorder = self

        class Connection(preferred_driver.Connection):  # type: ignore[misc]
            def execute(self, statement: str, *values: Any) -> Any:
                recorder.statements.append(statement)
                if code := recorder.fails(statement):
                    error = preferred_driver.OperationalError("planted")
                    error.sqlite_errorcode = code
                    raise error
                return super().execute(statement, *values)

        return preferred_driver.connect(*arguments, factory=Connection, **options)

    def num_statements(self, word: str) -> int:
        return sum(each.startswith(word) for each in self.statements)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def store(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ConversationStore]:
    monkeypatch.setattr(shared_commits, "GROUP_SECONDS", 60.0)  # enough for a busy machine
    path = tmp_path / "data"
    with ConversationStore.open(path, "test", driver=recorder, num_lanes=LANES) as opened:
        yield opened


def commits(store: ConversationStore) -> SharedCommits:
    writer = writer_of(store)
    assert isinstance(writer, SharedCommits)
    return writer


def num_waiting(store: ConversationStore) -> int:
    turns = vars(commits(store)._queue)
    return len(turns["_joining"]) + len(turns["_alone"])


def call_together(store: ConversationStore, *calls: Callable[[], Any]) -> list[Any]:
    """Make the calls in this order while all wait for the connection. Return the results or errors."""

    def run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        pending: list[Future[Any]] = []
        with commits(store).reading():
            for number, call in enumerate(calls, 1):
                pending.append(pool.submit(run, call))
                while num_waiting(store) < number:
                    time.sleep(0.0005)
        return [each.result() for each in pending]


def begin_turns(store: ConversationStore, *names: str) -> list[int]:
    for name in names:
        create(store, name)
    return [begin(store, name, "r1", "hi", 1) for name in names]


def finish(store: ConversationStore, turn_id: int) -> Callable[[], int]:
    return lambda: store.finish_turn(turn_id, reply("hello", 2), "stop", {})


def transactions(store: ConversationStore) -> StoreTransactions:
    found: StoreTransactions = vars(store)["_transactions"]
    return found


def live(store: ConversationStore) -> set[int]:
    return set(vars(vars(store)["_transactions"])["_live"])


def test_waiting_calls_share_a_commit(store: ConversationStore, recorder: Recorder) -> None:
    names = [f"c{number}" for number in range(5)]
    turns = begin_turns(store, *names)
    before = store.figures.num_commits
    recorder.statements.clear()
    assert call_together(store, *(finish(store, each) for each in turns)) == [1] * 5
    assert store.figures.num_commits == before + 1
    assert (
        recorder.num_statements("BEGIN"),
        recorder.num_statements("SAVEPOINT"),
        recorder.num_statements("COMMIT"),
    ) == (1, 4, 1)
    assert live(store) == set()
    assert [list(store.log(name)) for name in names] == [[1, 2]] * 5
    assert store.verify() == []


def test_a_call_without_other_waiting_calls_uses_no_savepoint(
    store: ConversationStore, recorder: Recorder
) -> None:
    create(store, "tea")
    recorder.statements.clear()
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    assert recorder.num_statements("SAVEPOINT") == recorder.num_statements("RELEASE") == 0


@pytest.mark.parametrize("failing", range(3))
def test_a_failed_call_does_not_affect_the_other_calls(
    store: ConversationStore, recorder: Recorder, failing: int
) -> None:
    turns = begin_turns(store, "tea", "cup")
    calls: list[Callable[[], object]] = [finish(store, each) for each in turns]
    calls.insert(failing, lambda: store.changes.set_metadata("none", {"a": 1}))
    recorder.statements.clear()
    results = call_together(store, *calls)
    assert isinstance(results.pop(failing), NotFound)
    assert results == [1, 1]
    assert recorder.num_statements("ROLLBACK TO") == (failing > 0)
    assert [list(store.log(name)) for name in ("tea", "cup")] == [[1, 2]] * 2
    assert store.verify() == []


def test_the_writes_of_a_failed_call_are_rolled_back(store: ConversationStore) -> None:
    (turn_id,) = begin_turns(store, "tea")

    def fail_half_done() -> None:
        with vars(store)["_transactions"].writing() as conn:
            conn.execute("UPDATE tenants SET stored_bytes = stored_bytes + 1000")
            conn.execute("UPDATE conversations SET revision = 99")
            raise AlreadyExists("half done")

    def violate_constraint() -> None:
        with vars(store)["_transactions"].writing() as conn:
            conn.execute("INSERT INTO owners SELECT * FROM owners")

    results = call_together(
        store,
        lambda: create(store, "pot"),
        fail_half_done,
        violate_constraint,
        finish(store, turn_id),
    )
    assert results[0] is None
    assert isinstance(results[1], AlreadyExists)
    assert isinstance(results[2], preferred_driver.IntegrityError)
    assert results[3] == 1
    assert store.get_conversation("pot").revision == 0
    assert store.verify() == []


@pytest.mark.parametrize("code", [FULL, IO_ERROR, BUSY])
def test_a_failed_commit_fails_all_its_calls_and_leaves_no_live_turn(
    store: ConversationStore, recorder: Recorder, code: int
) -> None:
    names = ("tea", "cup", "pot")
    for name in names:
        create(store, name)
    (ending,) = begin_turns(store, "ends")
    full: list[bool] = []
    store.figures.watch(on_full=lambda: full.append(True))
    recorder.fails = lambda statement: code if statement == "COMMIT" else 0
    begins = [lambda n=name: begin(store, n, "r1", "hi", 1) for name in names]
    results = call_together(store, *begins, finish(store, ending))
    recorder.fails = lambda statement: 0
    kind = DiskFull if code == FULL else StoreUnavailable
    assert [type(each) for each in results] == [kind] * 4
    assert len({str(each) for each in results}) == 1
    assert full == [True] * (code == FULL)
    assert live(store) == set()
    assert all(store.get_conversation(name).running_turn_id is None for name in names)
    assert store.get_turn(ending).state is StoredTurnState.INTERRUPTED
    for name in names:
        say(store, name, "r1", user("hi", 1), reply("hello", 2))
    assert store.verify() == []


@pytest.mark.parametrize("code", [FULL, IO_ERROR, BUSY])
@pytest.mark.parametrize("failing", range(4))
def test_if_the_database_fails_one_call_the_other_calls_are_retried(
    store: ConversationStore, recorder: Recorder, code: int, failing: int
) -> None:
    turns = begin_turns(store, *(f"c{number}" for number in range(4)))
    thread: list[int] = []
    failed: list[str] = []

    def fails(statement: str) -> int:
        if statement.startswith("INSERT INTO history") and thread == [threading.get_ident()]:
            thread.clear()
            failed.append(statement)
            return code
        return 0

    def unlucky() -> int:
        thread.append(threading.get_ident())
        return finish(store, turns[failing])()

    recorder.fails = fails
    calls = [finish(store, each) for each in turns]
    calls[failing] = unlucky
    results = call_together(store, *calls)
    assert len(failed) == 1
    assert isinstance(results.pop(failing), StoreUnavailable)
    assert results == [1] * 3
    assert store.get_turn(turns[failing]).state is StoredTurnState.INTERRUPTED
    assert live(store) == set()
    assert store.verify() == []


def test_if_a_savepoint_cannot_be_rolled_back_the_other_calls_are_retried(
    store: ConversationStore, recorder: Recorder
) -> None:
    turns = begin_turns(store, "tea", "cup")
    planted = [IO_ERROR]

    def fails(statement: str) -> int:
        return planted.pop() if planted and statement.startswith("ROLLBACK TO") else 0

    recorder.fails = fails
    calls: list[Callable[[], object]] = [finish(store, each) for each in turns]
    calls.insert(1, lambda: store.changes.set_metadata("none", {"a": 1}))
    first, second, third = call_together(store, *calls)
    assert isinstance(second, PensieveError)
    assert (first, third) == (1, 1)
    assert store.verify() == []


def test_a_read_sees_the_last_commit_and_runs_before_the_next_group(
    store: ConversationStore, recorder: Recorder
) -> None:
    (turn_id,) = begin_turns(store, "tea")
    create(store, "cup")
    recorder.statements.clear()
    ended, revision, begun_then = call_together(
        store,
        finish(store, turn_id),
        lambda: store.get_conversation("tea").revision,
        lambda: begin(store, "cup", "r1", "hi", 1),
    )
    assert (ended, revision) == (1, 1)
    assert begun_then > turn_id
    assert recorder.num_statements("COMMIT") == 1


def test_a_deletion_shares_its_commit_with_no_other_call(
    store: ConversationStore, recorder: Recorder
) -> None:
    (turn_id,) = begin_turns(store, "tea")
    create(store, "cup")
    recorder.statements.clear()
    results = call_together(
        store, finish(store, turn_id), delete_cup(store), lambda: create(store, "pot")
    )
    assert results == [1, None, None]
    assert recorder.num_statements("COMMIT") == 2
    assert not store.erasure.pending
    assert store.verify() == []


def delete_cup(store: ConversationStore) -> Callable[[], None]:
    return lambda: store.delete_conversation("cup")


def test_a_group_accepts_no_more_calls_after_its_time_limit(
    store: ConversationStore, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_commits, "GROUP_SECONDS", 0.0)
    turns = begin_turns(store, "tea", "cup", "pot")
    recorder.statements.clear()
    assert call_together(store, *(finish(store, each) for each in turns)) == [1] * 3
    assert (recorder.num_statements("SAVEPOINT"), recorder.num_statements("COMMIT")) == (0, 3)


def test_no_call_returns_before_its_commit(store: ConversationStore, recorder: Recorder) -> None:
    turns = begin_turns(store, "tea", "cup", "pot")
    answered: list[int] = []
    at_commit: list[int] = []

    def fails(statement: str) -> int:
        if statement == "COMMIT":
            time.sleep(0.05)
            at_commit.append(len(answered))
        return 0

    def finish_and_note(turn_id: int) -> None:
        finish(store, turn_id)()
        answered.append(turn_id)

    recorder.fails = fails
    call_together(store, *(lambda t=each: finish_and_note(t) for each in turns))
    assert at_commit == [0]
    assert sorted(answered) == sorted(turns)


def test_a_rolled_back_turn_does_not_end_the_turn_that_reuses_its_id(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite reuses a rolled-back id for the next turn before the first call learns of the rollback."""
    for name in ("loses", "wins"):
        create(store, name)
    writing = commits(store).writing
    losers: list[int] = []
    lost_ids: list[int] = []
    has_won = threading.Event()

    @contextlib.contextmanager
    def hears_late(is_serializable: bool = False) -> Iterator[Any]:
        try:
            with writing(is_serializable) as conn:
                yield conn
                lost_ids.extend(live(store))
        except Conflict:
            if losers == [threading.get_ident()]:
                losers.clear()
                assert has_won.wait(60)
            raise

    def loses() -> int:
        losers.append(threading.get_ident())
        return begin(store, "loses", "r1", "hi", 1)

    def wins() -> int:
        turn_id = begin(store, "wins", "r1", "hi", 1)
        has_won.set()
        return turn_id

    def fails() -> None:
        with transactions(store).writing() as conn:
            conn.execute("SELECT * FROM no_such_table")

    monkeypatch.setattr(commits(store), "writing", hears_late)
    _, lost, failure, won = call_together(store, lambda: create(store, "leads"), loses, fails, wins)
    monkeypatch.undo()
    assert isinstance(failure, preferred_driver.OperationalError)
    assert won in lost_ids[:1]
    assert lost != won
    assert live(store) == {lost, won}
    transactions(store)._note_failure()
    create(store, "next")
    assert finish(store, won)() == finish(store, lost)() == 1


def test_only_a_failed_turn_end_makes_the_store_look_for_dead_turns(
    store: ConversationStore, recorder: Recorder
) -> None:
    (turn_id,) = begin_turns(store, "tea")
    for call in (
        lambda: create(store, "tea"),
        lambda: begin(store, "none", "r1", "hi", 1),
        lambda: begin(store, "tea", "r2", "hi", 1),
    ):
        with pytest.raises(PensieveError):
            call()
    recorder.statements.clear()
    create(store, "cup")
    assert recorder.num_statements("COMMIT") == 1
    with pytest.raises(InvalidArgument):  # unlike the calls above, this one tried to end a turn
        store.finish_turn(turn_id, reply("\ud800", 2), "stop", {})
    recorder.statements.clear()
    create(store, "pot")
    assert recorder.num_statements("COMMIT") == 2
    assert store.get_turn(turn_id).state is StoredTurnState.INTERRUPTED


def test_a_refusal_because_of_an_uncommitted_row_is_retried_if_the_commit_fails(
    store: ConversationStore, recorder: Recorder
) -> None:
    planted = [FULL]
    recorder.fails = lambda statement: planted.pop() if planted and statement == "COMMIT" else 0
    leader, made, refused = call_together(
        store, *(lambda n=name: create(store, n) for name in ("pot", "tea", "tea"))
    )
    assert (type(leader), type(made), refused) == (DiskFull, DiskFull, None)
    assert store.get_conversation("tea").revision == 0
    assert store.num_conversations() == 1


def test_the_late_end_of_a_dead_turn_does_not_keep_it_alive(
    store: ConversationStore, recorder: Recorder
) -> None:
    """The commit that this call waits for fails."""
    (turn_id,) = begin_turns(store, "tea")
    store.interrupt_turn(turn_id)
    assert begin(store, "tea", "r1", "hi", 1) == turn_id
    transactions(store)._live.clear()
    planted = [FULL]
    recorder.fails = lambda statement: planted.pop() if planted and statement == "COMMIT" else 0
    _, refused = call_together(
        store,
        lambda: create(store, "pot"),
        lambda: store.finish_turn(turn_id, reply("hello", 2), "stop", {}, attempt=1),
    )
    assert isinstance(refused, NotFound)
    assert live(store) == set()
    create(store, "cup")
    assert store.get_turn(turn_id).state is StoredTurnState.INTERRUPTED


class InterruptedWaiter(shared_commits.Waiter):
    """A Waiter some of whose waits end with KeyboardInterrupt."""

    plans: dict[int, list[str]]  # thread -> what its next waits do

    def wait(self) -> None:
        plan = self.plans.get(threading.get_ident())
        when = plan.pop(0) if plan else ""
        if when != "before it is woken":
            super().wait()
        if when:
            raise KeyboardInterrupt


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    InterruptedWaiter.plans = {}
    monkeypatch.setattr(shared_commits, "Waiter", InterruptedWaiter)
    return InterruptedWaiter.plans


def interrupting(
    plans: dict[int, list[str]], call: Callable[[], object], *moments: str
) -> Callable[[], object]:
    def run() -> object:
        plans[threading.get_ident()] = list(moments)
        try:
            return call()
        except KeyboardInterrupt:
            return "interrupted"

    return run


def test_a_thread_that_is_interrupted_while_it_waits_leaves_the_queue(
    store: ConversationStore, plans: dict[int, list[str]]
) -> None:
    reads = interrupting(plans, lambda: store.num_conversations(), "before it is woken")
    writes = interrupting(plans, lambda: create(store, "none"), "before it is woken")
    with ThreadPoolExecutor(1) as pool:
        with commits(store).reading():
            assert pool.submit(reads).result() == pool.submit(writes).result() == "interrupted"
            assert num_waiting(store) == 0
        create(store, "tea")
        assert store.num_conversations() == 1


@pytest.mark.parametrize("number", range(4))
def test_a_thread_that_is_interrupted_when_it_is_woken_wakes_the_next_thread(
    store: ConversationStore, plans: dict[int, list[str]], number: int
) -> None:
    """The interrupted thread is the first, a middle or the last thread of a group, or waits to read."""
    calls: list[Callable[[], object]] = [
        lambda: create(store, "a"),
        lambda: create(store, "b"),
        lambda: create(store, "c"),
        lambda: store.num_conversations(),
    ]
    calls[number] = interrupting(plans, calls[number], "when it is woken")
    results = call_together(store, *calls)
    assert results.pop(number) == "interrupted"
    assert results == ([None] * 3 if number == 3 else [None, None, 2])
    assert store.num_conversations() == (3 if number == 3 else 2)


@pytest.mark.parametrize("when", ["before it is woken", "when it is woken"])
def test_an_interrupted_leader_hands_the_connection_to_the_waiting_threads(
    store: ConversationStore, plans: dict[int, list[str]], when: str
) -> None:
    leads = interrupting(plans, lambda: create(store, "a"), "", when)
    others = [lambda n=name: create(store, n) for name in ("b", "c")]
    leader, *results = call_together(store, leads, *others)
    assert leader == "interrupted"
    assert {type(each) for each in results} <= {StoreUnavailable, type(None)}
    assert isinstance(results[0], StoreUnavailable)
    create(store, "a")
    assert store.num_conversations() == 1 + results.count(None)
    assert store.verify() == []


def test_a_thread_cannot_use_the_connection_twice_at_once(store: ConversationStore) -> None:
    writer = commits(store)
    for outer in (writer.writing, writer.reading):
        for inner in (writer.writing, writer.reading):
            with (
                outer(),
                pytest.raises(RuntimeError, match="is being used by"),
                contextlib.ExitStack() as stack,
            ):
                stack.enter_context(inner())
    create(store, "tea")


def test_concurrent_turns_and_deletions_are_neither_lost_nor_miscounted(
    tmp_path: Path,
) -> None:
    """Use the timeouts and the driver of a daemon."""
    num_turns = 15 * SCALE
    failures: list[BaseException] = []

    def talk(store: ConversationStore, name: str) -> None:
        try:
            for number in range(num_turns):
                say(store, name, f"r{number}", user("hi", number), reply("hello", number))
                create(store, f"{name}-{number}", user("a secret", 1))
                store.fork_conversation(name, number + 1, f"{name}-fork-{number}")
                for each in (f"{name}-{number}", f"{name}-fork-{number}"):
                    with contextlib.suppress(PensieveError):  # another thread is reading
                        store.delete_conversation(each)
                    with contextlib.suppress(NotFound):
                        store.get_conversation(each)
        except BaseException as error:
            failures.append(error)

    names = [f"c{number}" for number in range(LANES)]
    with ConversationStore.open(tmp_path / "own", "test", num_lanes=LANES) as store:
        for name in names:
            create(store, name)
        threads = [threading.Thread(target=talk, args=(store, name)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        twice = [number for each in range(num_turns) for number in (each, each)]
        assert [list(store.log(name)) for name in names] == [twice] * LANES
        assert store.num_conversations() == LANES
        assert store.verify() == []
        assert live(store) == set()
        store.erasure.finish()
        assert b"a secret" not in (tmp_path / "own" / "conversations.db").read_bytes()
