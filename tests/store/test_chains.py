"""Histories are found by digests, after forks, rewinds and deletions, and with other tokenizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pensieve.store import ConversationStore, NewTurn, chains
from pensieve.store.conversation_rows import tenant_key
from pensieve.store.records import ChainMatch, ChainState
from tests.store.faulty import writer_of
from tests.store.talk import create, reply, user

Open = Callable[..., ConversationStore]


def digest(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def say(
    store: ConversationStore, name: str, state: str, session: bytes = b"", tenant: str = ""
) -> int:
    """Run one turn, whose reply ends with this chain state."""
    request = NewTurn(f"r-{state}", [user("hi", 1)])
    turn = store.begin_turn(name, request, tenant=tenant).turn
    chain_state = ChainState(digest(state), session)
    return store.finish_turn(turn.turn_id, reply("hello", 2), "stop", {}, chain_state)


def match(
    store: ConversationStore, *states: str, session: bytes = b"", tenant: str = ""
) -> ChainMatch | None:
    return store.chains.longest([digest(each) for each in states], session, tenant=tenant)


def found(store: ConversationStore, *states: str, session: bytes = b"") -> tuple[str, int, bool]:
    got = match(store, *states, session=session)
    assert got is not None
    return got.conversation_id, got.revision, got.may_append


def num_rows(store: ConversationStore) -> int:
    with writer_of(store).reading() as conn:
        count: int = conn.execute("SELECT count(*) FROM chains").fetchone()[0]
        return count


def test_the_longest_beginning_that_is_known_is_found(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    say(store, "tea", "ab")
    assert match(store, "ab", "a") == ChainMatch(digest("ab"), "tea", 2, 2, True)
    assert match(store, "abc", "a") == ChainMatch(digest("a"), "tea", 1, 2, False)
    assert match(store, "x") is None
    assert match(store) is None
    assert match(store, "ab", tenant="another") is None
    assert store.verify() == store.integrity_check() == []


def test_a_session_of_its_own_is_preferred_and_another_may_not_be_appended_to(
    store: ConversationStore,
) -> None:
    for name, session in (("one", b"1"), ("two", b"2"), ("three", b"1")):
        create(store, name)
        say(store, name, "a", session)
    assert found(store, "a", session=b"2") == ("two", 1, True)
    assert found(store, "a", session=b"1")[0] in ("one", "three")
    assert found(store, "a", session=b"")[2] is False
    assert found(store, "a", session=b"3")[2] is False


def test_where_a_turn_runs_or_something_came_behind_nothing_may_be_appended(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    turn = store.begin_turn("tea", NewTurn("r2", [user("more", 3)])).turn
    assert found(store, "a") == ("tea", 1, False)
    store.interrupt_turn(turn.turn_id)
    assert found(store, "a") == ("tea", 1, True)
    say(store, "tea", "ab")
    assert found(store, "a") == ("tea", 1, False)


def test_a_turn_that_died_with_its_process_does_not_run(open_store: Open) -> None:
    store = open_store()
    create(store, "tea")
    say(store, "tea", "a")
    store.begin_turn("tea", NewTurn("r2", [user("more", 3)]))
    store.close()
    assert found(open_store(), "a") == ("tea", 1, True)


def test_of_conversations_at_the_same_point_one_is_found_that_ends_there(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    store.fork_conversation("tea", 1, "cup")
    assert found(store, "a") == ("tea", 1, True)
    say(store, "tea", "ab")
    assert found(store, "a") == ("cup", 1, True)
    say(store, "cup", "ac")
    assert found(store, "a") == ("tea", 1, False)
    assert found(store, "ac", "a") == ("cup", 2, True)


def test_a_rewind_takes_states_back_and_what_a_fork_has_stays(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    say(store, "tea", "ab")
    store.rewind_conversation("tea", 1)
    assert match(store, "ab", "a") == ChainMatch(digest("a"), "tea", 1, 3, True)
    say(store, "tea", "ac")
    assert found(store, "ac", "a") == ("tea", 4, True)
    store.fork_conversation("tea", 4, "cup")
    store.rewind_conversation("tea", 0)
    assert found(store, "ac", "a") == ("cup", 4, True)


@pytest.mark.sqlite  # reads SQLite's files
def test_deletion_leaves_only_the_rows_of_a_fork(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    say(store, "tea", "ab")
    store.fork_conversation("tea", 1, "cup")
    store.delete_conversation("tea")
    assert num_rows(store) == 1
    assert found(store, "ab", "a") == ("cup", 1, True)
    store.delete_conversation("cup")
    assert num_rows(store) == 0
    raw = store.folder.database_path.read_bytes()
    assert tenant_key("", digest("a")) not in raw
    assert tenant_key("", digest("ab")) not in raw
    assert store.verify() == store.integrity_check() == []


def test_what_a_rewind_has_cut_goes_with_its_request(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    store.rewind_conversation("tea", 0)
    assert num_rows(store) == 1  # kept, because its request may still be repeated
    while store.forgetting.step(1e9):
        pass
    assert num_rows(store) == 0


def test_other_tokens_of_the_same_messages_are_found_as_before(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    store.fork_conversation("tea", 1, "cup")
    store.replace_log("tea", "fingerprint 2", [[5], [6, 7]])
    assert num_rows(store) == 2
    store.delete_conversation("cup")
    assert num_rows(store) == 1
    assert found(store, "a") == ("tea", 1, True)
    assert store.verify() == store.integrity_check() == []


def test_a_turn_that_does_not_end_has_no_state(store: ConversationStore) -> None:
    create(store, "tea")
    turn = store.begin_turn("tea", NewTurn("r1", [user("hi", 1)])).turn
    store.fail_turn(turn.turn_id, "NAN_LOGITS")
    assert num_rows(store) == 0
    assert match(store, "a") is None


def test_ended_twice_it_has_one_state(store: ConversationStore) -> None:
    create(store, "tea")
    turn = store.begin_turn("tea", NewTurn("r1", [user("hi", 1)])).turn
    for _ in range(2):
        chain_state = ChainState(digest("a"), b"")
        assert store.finish_turn(turn.turn_id, reply("x", 2), "stop", {}, chain_state) == 1
    assert num_rows(store) == 1


def test_states_grow_old(store: ConversationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "FORGOTTEN_AT_ONCE", 2)
    create(store, "tea")
    for state in ("a", "ab", "abc"):
        say(store, "tea", state)
    with writer_of(store).reading() as conn:
        times = [at for (at,) in conn.execute("SELECT at FROM chains ORDER BY chain")]
    assert store.chains.forget(times[0]) is False
    assert num_rows(store) == 3  # no row is older than the first
    assert store.chains.forget(times[2]) is True
    assert store.chains.forget(times[2]) is False
    assert num_rows(store) == 1
    assert found(store, "abc", "ab", "a") == ("tea", 3, True)
    assert store.chains.forget(1e9) is False
    assert match(store, "abc", "ab", "a") is None
    assert store.verify() == []


def test_a_great_many_conversations_with_the_same_history_are_not_all_looked_at(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "STATES_MAX", 2)
    monkeypatch.setattr(chains, "HOLDERS_MAX", 2)
    for number in range(5):
        create(store, f"c{number}")
        say(store, f"c{number}", "a")
    assert found(store, "a") == ("c4", 1, True)
    for number in (3, 4):
        say(store, f"c{number}", f"a{number}")
    assert found(store, "a")[2] is False  # a fork also ends the match at the end


def test_a_state_without_a_reply_is_damage(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    with writer_of(store).writing() as conn:
        conn.execute("UPDATE chains SET message = 1")  # a message of the user
    assert store.verify() == ["chain 1: its message is not a reply"]
