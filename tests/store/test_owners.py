"""Owners of conversations: sessions, claims, and the check that only the owner ends a turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pensieve.errors import StoreCorrupt, StoreUnavailable, Unavailable
from pensieve.store import ConversationStore, NewConversation, NewMessage, NewTurn, StoredTurnState
from pensieve.store.conversation_changes import Pending
from pensieve.store.housekeeper import Housekeeper
from pensieve.store.leases import Leases
from pensieve.store.records import KeyedTurn, NewPrefix
from tests.store.faulty import begin_third_turn, history, write_history, writer_of
from tests.store.older_schemas import POSTGRES_TO_SCHEMA_9, TO_SCHEMA_9
from tests.store.talk import begin, create, reply, say, user

Open = Callable[..., ConversationStore]
OTHER = 17  # the number of another daemon's session


def rows(store: ConversationStore, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with writer_of(store).reading() as conn:
        return [tuple(row) for row in conn.execute(query, values).fetchall()]


def own_elsewhere(store: ConversationStore, name: str) -> None:
    """Claim the conversation for another daemon, directly in the database."""
    running = store.get_conversation(name).running_turn_id
    with writer_of(store).writing() as conn:
        conn.execute(
            "UPDATE owners SET session = ?, epoch = ? WHERE conversation ="
            " (SELECT max(conversation) FROM conversations)",
            (OTHER, OTHER),
        )
        conn.execute("UPDATE turns SET state = 'interrupted' WHERE turn_id = ?", (running or 0,))


def test_each_open_starts_a_session_and_the_previous_session_has_ended(open_store: Open) -> None:
    store = open_store(replica="a")
    create(store, "tea")
    first = store.owners.owner("tea")
    assert first is not None
    assert (first.is_ours, first.is_alive, first.replica) == (True, True, "a")
    store.close()
    store = open_store(replica="b")
    after = store.owners.owner("tea")
    assert after is not None
    assert (after.is_ours, after.is_alive, after.replica) == (False, False, "")
    reader = store.reader()
    assert reader.owner("tea") == after
    assert [each.replica for each in reader.sessions()] == ["b"]
    reader.close()
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    now = store.owners.owner("tea")
    assert now is not None
    assert now.is_ours
    assert now.epoch > first.epoch
    assert now.session > first.session


def test_a_history_of_schema_9_is_complete_and_its_old_owners_block_no_claim(
    open_store: Open, driver: Any
) -> None:
    """In schema 9, only a service that no longer exists wrote sessions and owners."""
    store = open_store()
    write_history(store)
    waits = Pending((NewMessage("user", "waits"),))
    store.changes.change_pending("cup", lambda pending: waits)
    keyed = NewTurn("key", [user("again", 7)], history_digest=b"digest")
    keyed_id = store.begin_turn("pot", keyed).turn.turn_id
    store.finish_turn(keyed_id, reply("so", 8), "stop", {})
    running, before, num_bytes = begin_third_turn(store), history(store), store.stored_bytes()
    turns = [store.get_turn(number) for number in range(1, running)]
    older = POSTGRES_TO_SCHEMA_9 if driver is None else TO_SCHEMA_9
    is_of_pot = f"(SELECT conversation FROM turns WHERE turn_id = {keyed_id})"
    with writer_of(store).writing() as conn:
        for statement in (
            *older,
            "INSERT INTO sessions"
            " (session, replica, address, http_address, metrics_address, last_call, opened_at)"
            f" VALUES ({OTHER}, 'a', 'a:1', '', '', 0, 1.0)",
            f"DELETE FROM owners WHERE conversation = {is_of_pot}",
            f"UPDATE owners SET session = {OTHER}, epoch = {OTHER}",
        ):
            conn.execute(statement)
    store.close()
    with open_store(replica="b") as store:
        assert [each.turn_id for each in store.interrupted_at_open] == [running]
        assert history(store) == before
        assert [store.get_turn(number) for number in range(1, running)] == turns
        assert store.stored_bytes() == num_bytes
        assert store.find_turn_by_key("key") == KeyedTurn("pot", 1)
        again = store.begin_turn("tea", NewTurn("r2", [user("more" * 500, 30)]))
        assert not again.must_run
        assert again.turn.turn_id == turns[1].turn_id
        for name in ("tea", "cup", "pot"):
            say(store, name, "next", user("hi", 1), reply("hello", 2))
            found = store.owners.owner(name)
            assert found is not None
            assert (found.is_ours, found.epoch > OTHER) == (True, True)
        assert store.verify() == store.integrity_check() == []


def test_interrupting_a_turn_of_another_daemon_has_no_effect(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    turn_id = begin(store, "tea", "r1", "hi", 1)
    with writer_of(store).writing() as conn:
        conn.execute("UPDATE owners SET session = ?, epoch = ?", (OTHER, OTHER))
    store.interrupt_turn(turn_id)  # another daemon owns the conversation, so this changes no row
    # A read reports it as interrupted, because the new owner has no live session.
    assert store.get_turn(turn_id).state is StoredTurnState.INTERRUPTED


def test_an_unexpected_error_does_not_end_the_lease_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lives = threading.Event()

    class Transactions:
        calls = 0

        def end_hanging_transactions(self) -> None:
            pass

        def writing(self, is_serializable: bool = False) -> Any:
            self.calls += 1
            if self.calls > 1:
                lives.set()
            raise MemoryError

        def close(self) -> None:
            pass

    class Owners:
        lease_seconds = 0.01

    leases = Leases(Transactions(), Owners(), Housekeeper(is_ours=False), lambda: None)  # type: ignore[arg-type]
    leases._thread.start()
    assert lives.wait(10)
    leases.close()
    assert "unexpected error in the lease thread" in caplog.text


def test_a_lease_is_renewed_even_if_hanging_transactions_cannot_be_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[str] = []
    both = threading.Event()

    class Transactions:
        def end_hanging_transactions(self) -> None:
            done.append("end")
            if len(done) > 8:
                both.set()
            raise StoreUnavailable("another role has them")

        def close(self) -> None:
            pass

    class Owners:
        lease_seconds = 0.01

    leases = Leases(Transactions(), Owners(), Housekeeper(is_ours=False), lambda: None)  # type: ignore[arg-type]
    refused = iter([True])

    def renew() -> None:
        done.append("renew")
        if next(refused, False):
            raise StoreUnavailable("a row is locked")

    leases.renew = renew  # type: ignore[method-assign]
    leases._thread.start()
    assert both.wait(10)
    leases.close()
    assert done[:6] == ["renew", "end"] * 3
    assert [each.getMessage() for each in caplog.records] == [
        "cannot renew this daemon's lease, will retry: a row is locked",
        "this daemon's lease is renewed again",
        "cannot end hanging transactions of other daemons: another role has them",
    ]


def test_the_daemon_that_creates_a_conversation_owns_it(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    store.fork_conversation("tea", 1, "cup")
    store.prefixes.declare(NewPrefix("rules", "f", [NewMessage("system", "Be brief.", (1, 2))]))
    store.prefixes.begin(NewConversation("pot", "f", prefix_id="rules"))
    found = [store.owners.owner(name) for name in ("tea", "cup", "pot")]
    assert all(each is not None and each.is_ours for each in found)
    assert len({each.epoch for each in found if each is not None}) == 3
    assert store.owners.owner("prefix:rules") is None
    assert store.owners.owner("can") is None


def test_a_turn_is_ended_only_by_the_owner_of_its_conversation(store: ConversationStore) -> None:
    for name in ("tea", "cup"):
        create(store, name)
    running = begin(store, "cup", "r1", "hi", 1)
    own_elsewhere(store, "cup")
    with pytest.raises(Unavailable, match="another daemon has taken over"):
        store.finish_turn(running, reply("late", 9), "stop", {}, attempt=1)
    with writer_of(store).writing() as conn:  # as if the other daemon had begun the turn again
        conn.execute(
            "UPDATE turns SET state = 'running', attempts = 2 WHERE turn_id = ?", (running,)
        )
    for attempt in (0, 2):
        with pytest.raises(Unavailable, match="another daemon has taken over"):
            store.finish_turn(running, reply("late", 9), "stop", {}, attempt=attempt)
        with pytest.raises(Unavailable, match="another daemon has taken over"):
            store.fail_turn(running, "NAN_LOGITS", attempt)
        store.interrupt_turn(running, attempt)
    with pytest.raises(Unavailable, match="another daemon has taken over"):  # the client retries
        store.finish_turn(running, reply("late", 9), "stop", {}, attempt=1)
    with pytest.raises(Unavailable, match="another daemon has taken over"):
        store.fail_turn(running, "x", 1)
    store.interrupt_turn(running, 1)
    assert rows(store, "SELECT state FROM turns") == [("running",)]
    assert list(store.log("cup")) == []


def test_a_repeated_finish_returns_the_stored_result_after_another_daemon_claimed_the_conversation(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    running = begin(store, "tea", "r1", "hi", 1)
    assert store.finish_turn(running, reply("hello", 2), "stop", {}, attempt=1) == 1
    own_elsewhere(store, "tea")
    assert store.finish_turn(running, reply("hello", 2), "stop", {}, attempt=1) == 1


def test_recovery_does_not_interrupt_a_turn_of_another_live_session(
    store: ConversationStore,
) -> None:
    """A store that is unsure about its turns interrupts only turns of its own conversations."""
    for name in ("tea", "cup"):
        create(store, name)
    mine, other = begin(store, "tea", "r1", "hi", 1), begin(store, "cup", "r1", "hi", 1)
    clock = "(julianday('now') - 2440587.5) * 86400.0"
    if rows(store, "SELECT 1 FROM turns")[0] and writer_of(store).__class__.__name__[0] == "P":
        clock = "extract(epoch FROM clock_timestamp())"
    with writer_of(store).writing() as conn:
        conn.execute(
            "UPDATE owners SET session = ? WHERE conversation ="
            " (SELECT max(conversation) FROM conversations)",
            (OTHER,),
        )
        conn.execute(
            "INSERT INTO sessions (session, replica, address, http_address, metrics_address,"
            f" opened_at, lease_until) VALUES (?, 'b', 'b:1', '', '', 0, {clock} + 60)",
            (OTHER,),
        )
    transactions = vars(store)["_transactions"]
    transactions._live.clear()
    transactions._note_failure()
    assert store.get_turn(other).state is StoredTurnState.RUNNING
    assert store.get_turn(mine).state is StoredTurnState.INTERRUPTED
    create(store, "pot")
    assert rows(store, "SELECT turn_id, state FROM turns ORDER BY turn_id") == [
        (mine, "interrupted"),
        (other, "running"),
    ]
    reader = store.reader()
    assert reader.get_conversation("cup").running_turn_id == other
    with writer_of(store).writing() as conn:
        conn.execute("UPDATE sessions SET lease_until = 1 WHERE session = ?", (OTHER,))
    assert reader.get_conversation("cup").running_turn_id is None
    assert store.get_turn(other).state is StoredTurnState.INTERRUPTED
    reader.close()
    again = store.begin_turn("cup", NewTurn("r1", [user("hi", 1)]))
    assert again.must_run
    assert (again.turn.turn_id, again.turn.attempts) == (other, 2)


def test_new_epochs_are_greater_than_all_earlier_epochs_also_after_a_restore(
    open_store: Open,
) -> None:
    store = open_store(now=lambda: 1e9)
    create(store, "tea")
    before = store.owners.owner("tea")
    store.close()
    store = open_store(now=lambda: 2e9)
    create(store, "cup")
    after = store.owners.owner("cup")
    assert before is not None
    assert after is not None
    assert before.epoch < 1_000_000_000_001_000
    assert after.epoch > 2_000_000_000_000_000


def test_a_claim_reports_the_conversations_cached_state_as_stale(store: ConversationStore) -> None:
    stale: list[tuple[str, str]] = []
    store.watch(lambda tenant, name: stale.append((tenant, name)))
    create(store, "tea")
    assert stale == [("", "tea")]  # another daemon may have deleted a conversation of this name
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    assert stale == [("", "tea")]
    own_elsewhere(store, "tea")
    store.fork_conversation("tea", 1, "cup")
    assert stale[1:] == [("", "tea"), ("", "cup")]
    store.claim("tea")
    store.claim("tea")
    assert stale[3:] == [("", "tea")]
    store.claim("can")  # does not exist


def test_a_prefix_declared_again_by_another_daemon_is_reported_as_stale(
    store: ConversationStore,
) -> None:
    stale: list[tuple[str, str]] = []
    head = [NewMessage("system", "Be brief.", (1, 2))]
    store.prefixes.declare(NewPrefix("rules", "f", head))
    store.watch(lambda tenant, name: stale.append((tenant, name)))
    store.get_conversation("prefix:rules")
    with writer_of(store).writing() as conn:  # as another daemon would declare it again
        conn.execute("UPDATE conversations SET created_at = 7 WHERE conversation = 1")
    store.get_conversation("prefix:rules")
    assert stale == [("", "prefix:rules")]
    store.get_conversation("prefix:rules")
    assert stale == [("", "prefix:rules")]


@pytest.mark.parametrize("last_values", [(), (1, 2), (None,), ("text",)])
def test_a_history_whose_last_epoch_is_damaged_is_refused(
    open_store: Open, driver: Any, last_values: tuple[object, ...]
) -> None:
    if driver is None:
        pytest.skip("a sequence of PostgreSQL")
    store = open_store()
    with writer_of(store).writing() as conn:
        conn.execute("DROP TABLE epochs")
        conn.execute("CREATE TABLE epochs (last)")
        for last in last_values:
            conn.execute("INSERT INTO epochs (last) VALUES (?)", (last,))
    store.close()
    with pytest.raises(StoreCorrupt, match="last epoch cannot be read"):
        open_store()
